#!/usr/bin/env fish
# Serves the judge of a run on this machine with vLLM, which lives in an environment of its own (docs/rewards.md).
#
#   fish scripts/serve/vllm.fish [argument of `vllm serve` ...]
#
# Relative paths start at rl_training/. Environment (the four names without the prefix WAN_TRAINER_VLM_ may carry it
# too, and then win):
#   WAN_TRAINER_VLM_MODEL_PATH   directory of the judge's weights; default storage/models/<WAN_TRAINER_VLM_MODEL>
#   WAN_TRAINER_VLM_MODEL        the name that requests use; default qwen3.6-27b
#   WAN_TRAINER_VLM_API_KEY      key that requests must carry; none by default
#   WAN_TRAINER_VLM_PORT         default 18080, on the loopback address
#   TENSOR_PARALLEL_SIZE         GPUs a copy of the model is spread over; default 2, or 1 on one GPU
#   DATA_PARALLEL_SIZE           copies of the model; default as many as the machine's GPUs hold
#   DATA_PARALLEL_SIZE_LOCAL     of those, on this machine; default all
#   GPU_MEMORY_UTILIZATION       share of each GPU's memory; default 0.50, the rest is the trainer's
#   WAN_TRAINER_VLM_BIN          the vllm command; default .venv-vllm/bin/vllm

source (path dirname (path resolve (status filename)))/../lib/env.fish
or exit 2

wan_trainer_help (status filename) $argv; and exit 0

set -l repository (path dirname (path dirname (path dirname (path resolve (status filename)))))
cd $repository/rl_training; or exit 2
set -l vllm $repository/.venv-vllm/bin/vllm
test -n "$WAN_TRAINER_VLM_BIN"; and set vllm $WAN_TRAINER_VLM_BIN
if not command -q -- $vllm
    wan_trainer_error "$vllm is not there: make its environment as docs/rewards.md shows, or set WAN_TRAINER_VLM_BIN"
    exit 2
end

for name in DATA_PARALLEL_SIZE DATA_PARALLEL_SIZE_LOCAL TENSOR_PARALLEL_SIZE GPU_MEMORY_UTILIZATION
    set -l prefixed WAN_TRAINER_VLM_$name
    test -n "$$prefixed"; and set -gx $name $$prefixed
end
set -l gpus 8
test -n "$WAN_TRAINER_VLM_NPROC"; and set gpus $WAN_TRAINER_VLM_NPROC
# 27 billion parameters in bfloat16 are 54 GB: more than half of an 80 GB GPU, less than half of two.
set -l positive '[1-9][0-9]{0,3}'
set -l whole 'a positive whole number'
set -l tp (wan_trainer_number TENSOR_PARALLEL_SIZE (math "min(2, 2 - $gpus % 2)") $positive $whole); or exit 2
set -l dp (wan_trainer_number DATA_PARALLEL_SIZE (math "max(1, floor($gpus / $tp))") $positive $whole); or exit 2
set -l dp_local (wan_trainer_number DATA_PARALLEL_SIZE_LOCAL $dp $positive $whole); or exit 2
set -l share (wan_trainer_number GPU_MEMORY_UTILIZATION 0.50 '(0?\.[0-9]*[1-9][0-9]*|1(\.0*)?)' 'a share above 0, at most 1'); or exit 2
set -l port (wan_trainer_judge_port); or exit 2

set -l name qwen3.6-27b
test -n "$WAN_TRAINER_VLM_MODEL"; and set name $WAN_TRAINER_VLM_MODEL
set -l model $repository/rl_training/storage/models/$name
test -n "$WAN_TRAINER_VLM_MODEL_PATH"; and set model $WAN_TRAINER_VLM_MODEL_PATH
# In the environment and not among the arguments, which every user of the machine can read.
test -n "$WAN_TRAINER_VLM_API_KEY"; and test "$WAN_TRAINER_VLM_API_KEY" != EMPTY
and set -gx VLLM_API_KEY $WAN_TRAINER_VLM_API_KEY

# The trainer's rendezvous, allocator and packages are not the service's.
set -e MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK PYTORCH_CUDA_ALLOC_CONF CPATH PYTHONPATH PYTHONHOME VIRTUAL_ENV
set -gx HF_HUB_OFFLINE 1

# Requests say how many frames of a video are read, and that thinking would cost the tokens of an answer is a default.
exec $vllm serve $model --served-model-name $name --host 127.0.0.1 --port $port \
    --tensor-parallel-size $tp --data-parallel-size $dp --data-parallel-size-local $dp_local \
    --gpu-memory-utilization $share --limit-mm-per-prompt '{"image": 1, "video": 1}' --trust-request-mm-kwargs \
    --default-chat-template-kwargs '{"enable_thinking": false}' $argv
