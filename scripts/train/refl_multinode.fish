#!/usr/bin/env fish
# One machine of a ReFL run: environment, preflight, torchrun.
#
#   fish scripts/train/refl_multinode.fish --nproc 8 --config configs/refl_wan21_t2v_videoalign.yaml [--field value ...]
#
# The rewards' packages are not part of the environment: requirements/reward-*.txt list them. Machines, ports, the
# variables of the environment and the exit status are those of grpo_multinode.fish.

source (path dirname (path resolve (status filename)))/../lib/env.fish
or exit 2

wan_trainer_begin (status filename) $argv
if test "$wan_trainer_algorithm" != refl
    wan_trainer_error "the config does not set trainer: refl: set it, or use grpo_multinode.fish"
    exit 2
end
# The supervisor takes this process's place, so that a signal to the launcher reaches the ranks.
exec $wan_trainer_training
