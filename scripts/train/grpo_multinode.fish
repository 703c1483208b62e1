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

wan_trainer_begin (status filename) $argv
# The supervisor takes this process's place, so that a signal to the launcher reaches the ranks.
exec $wan_trainer_training
