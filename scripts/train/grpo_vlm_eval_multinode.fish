#!/usr/bin/env fish
# One machine of a GRPO run whose judge is served beside it: preflight, the judge's service, a probe, torchrun.
#
#   fish scripts/train/grpo_vlm_eval_multinode.fish --nproc 8 --config configs/train_rl_5b_vlm.yaml [--field value ...]
#
# Each machine starts a service of its own (scripts/serve/vllm.fish shows its variables) and stops it, with all of its
# processes, when training ends, fails or is stopped. Environment:
#   WAN_TRAINER_VLM_START_SERVICE    1 (default); 0 uses the endpoint that the config names, which must answer
#   WAN_TRAINER_VLM_PORT             where the service listens; default the port of the config's endpoint
#   WAN_TRAINER_VLM_LOG_DIR          where the service's log goes; default <output_dir>/judge
#   WAN_TRAINER_VLM_START_TIMEOUT_S  seconds until the service must answer; default 1800
# Machines, ports and the exit status are those of grpo_multinode.fish; 130 is a signal before training began.

source (path dirname (path resolve (status filename)))/../lib/env.fish
or exit 2

# Preflight must know whether to look for the service.
test -n "$WAN_TRAINER_VLM_START_SERVICE"; or set -gx WAN_TRAINER_VLM_START_SERVICE 1
if not contains -- $WAN_TRAINER_VLM_START_SERVICE 0 1
    wan_trainer_error "WAN_TRAINER_VLM_START_SERVICE is '$WAN_TRAINER_VLM_START_SERVICE'; set 1, or 0 to use a service that is there"
    exit 2
end
if test $WAN_TRAINER_VLM_START_SERVICE = 1; and test -n "$WAN_TRAINER_VLM_PORT"
    set -l here http://127.0.0.1:(wan_trainer_judge_port)/v1; or exit 2
    if test -n "$WAN_TRAINER_VLM_BASE_URL"; and test "$WAN_TRAINER_VLM_BASE_URL" != $here
        wan_trainer_error "WAN_TRAINER_VLM_BASE_URL is not $here, which WAN_TRAINER_VLM_PORT asks for: unset one of them, or set WAN_TRAINER_VLM_START_SERVICE=0"
        exit 2
    end
    set -gx WAN_TRAINER_VLM_BASE_URL $here
end

wan_trainer_begin (status filename) $argv

if test -z "$wan_trainer_judge_url"
    wan_trainer_error "the config names no judge: set grpo_reward_fn: vbvr_vlm, or use grpo_multinode.fish"
    exit 2
end
set -l probe $wan_trainer_python -m wan_trainer.cli.main probe-judge --samples 1 --config $wan_trainer_config \
    $wan_trainer_overrides
if test $WAN_TRAINER_VLM_START_SERVICE = 0
    $probe; or exit $status
    exec $wan_trainer_training
end

set -l port (string match -r --groups-only '^http://127\.0\.0\.1:([0-9]+)/v1/?$' -- $wan_trainer_judge_url)
if test -z "$port"; or test -n "$WAN_TRAINER_VLM_PORT" -a "$port" != "$WAN_TRAINER_VLM_PORT"
    set -l asked $WAN_TRAINER_VLM_PORT PORT
    wan_trainer_error "vlm_reward_base_url is $wan_trainer_judge_url, where no service of this launcher listens: name http://127.0.0.1:$asked[1]/v1, or set WAN_TRAINER_VLM_START_SERVICE=0"
    exit 2
end
set -gx WAN_TRAINER_VLM_PORT $port
set -l timeout_s (wan_trainer_number WAN_TRAINER_VLM_START_TIMEOUT_S 1800 '[1-9][0-9]{0,5}' 'whole seconds'); or exit 2
set -l log_dir $wan_trainer_output_dir/judge
test -n "$WAN_TRAINER_VLM_LOG_DIR"; and set log_dir $WAN_TRAINER_VLM_LOG_DIR
# The name that requests use is the name that is served.
set -gx WAN_TRAINER_VLM_MODEL $wan_trainer_judge_model
set -gx WAN_TRAINER_VLM_NPROC $wan_trainer_nproc

exec $wan_trainer_python -m wan_trainer.preflight.cohost --log $log_dir/service-node-$RANK.log \
    --health http://127.0.0.1:$WAN_TRAINER_VLM_PORT/health --start-timeout $timeout_s \
    --service-command fish $wan_trainer_repository/scripts/serve/vllm.fish \
    --probe-command $probe --train-command $wan_trainer_training
