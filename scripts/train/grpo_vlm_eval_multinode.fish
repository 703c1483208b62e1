#!/usr/bin/env fish
# One machine of a GRPO run whose judge is served beside it: preflight, the judge's service, a probe, torchrun.
#
#   fish scripts/train/grpo_vlm_eval_multinode.fish --nproc 8 --config configs/train_rl_5b_vlm.yaml [--field value ...]
#
# Each machine starts a service of its own (scripts/serve/vllm.fish shows its variables) and stops it, with all of its
# processes, when training ends, fails or is stopped. Environment:
#   WAN_TRAINER_VLM_START_SERVICE    1 (default); 0 uses the endpoint that the config names, which must answer
#   WAN_TRAINER_VLM_LOG_DIR          where the service's log goes; default <output_dir>/judge
#   WAN_TRAINER_VLM_START_TIMEOUT_S  seconds until the service must answer; default 1800
# Machines, ports and the exit status are those of grpo_multinode.fish; 130 is a signal before training began.

source (path dirname (path resolve (status filename)))/../lib/env.fish
or exit 2

# Preflight must know whether to look for the service. Unless it is 0, it is 1: the checks compare words.
test "$WAN_TRAINER_VLM_START_SERVICE" = 0; or set -gx WAN_TRAINER_VLM_START_SERVICE 1
if test $WAN_TRAINER_VLM_START_SERVICE = 1
    set -gx WAN_TRAINER_VLM_PORT (wan_trainer_number WAN_TRAINER_VLM_PORT 18080 '[1-9][0-9]{0,4}' 'a port in 1..65535')
    or exit 2
    set -gx WAN_TRAINER_VLM_BASE_URL http://127.0.0.1:$WAN_TRAINER_VLM_PORT/v1
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

if test "$wan_trainer_judge_url" != "$WAN_TRAINER_VLM_BASE_URL"
    wan_trainer_error "--vlm_reward_base_url is $wan_trainer_judge_url, and the service of this machine is at $WAN_TRAINER_VLM_BASE_URL: remove the override, or set WAN_TRAINER_VLM_START_SERVICE=0"
    exit 2
end
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
