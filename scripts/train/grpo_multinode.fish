#!/usr/bin/env fish
# One machine of a GRPO run: environment, preflight, torchrun.
#
#   fish scripts/train/grpo_multinode.fish --nproc 8 --config configs/train_rl_5b_cps.yaml [--field value ...]
#
# Several machines: set MASTER_ADDR, WORLD_SIZE (machines) and RANK (this machine) on each, MASTER_PORT if 29500 is
# taken, and run the same command everywhere. Exit status: 0 done, 1 failure, 2 bad input, 75 stopped by a signal
# after saving (the same command goes on from there).

source (path dirname (path resolve (status filename)))/../lib/env.fish
or exit 2

wan_trainer_help (status filename) $argv; and exit 0
wan_trainer_locate (status filename); or exit 2
wan_trainer_arguments $argv; or exit 2
wan_trainer_rendezvous; or exit 2
wan_trainer_environment
wan_trainer_preflight; or exit $status
test "$WAN_TRAINER_TRITON_PREFLIGHT_ONLY" = 1; and rm -f $wan_trainer_facts; and exit 0

set -l output_dir (wan_trainer_fact output_dir)
set -l timeout_s (wan_trainer_fact rendezvous_timeout_s)
rm -f $wan_trainer_facts

# The supervisor takes this process's place, so that a signal to the launcher reaches the ranks.
exec $wan_trainer_python -m wan_trainer.preflight.supervise --output-dir $output_dir -- \
    $wan_trainer_python -m wan_trainer.preflight.agent \
    --nnodes $WORLD_SIZE --node-rank $RANK --nproc-per-node $wan_trainer_nproc \
    --master-addr $MASTER_ADDR --master-port $MASTER_PORT --rdzv-conf timeout=$timeout_s --max-restarts 0 \
    --module wan_trainer.cli.train --config $wan_trainer_config $wan_trainer_overrides
