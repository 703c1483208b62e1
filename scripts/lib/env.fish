# Shared by the launchers: where things are, the environment of a run, the rendezvous, the arguments.
# Source it; every function reports an error in one line and returns 2.

function wan_trainer_error
    echo "error: $argv" >&2
    return 2
end

function wan_trainer_locate --argument-names launcher --description 'Find the repository from a launcher, through links'
    set -gx WAN_TRAINER_CALLER_DIR (pwd -P)
    set -g wan_trainer_repository (path dirname (path dirname (path dirname (path resolve $launcher))))
    set -g wan_trainer_root $wan_trainer_repository/rl_training
    # WAN_TRAINER_PYTHON names another interpreter that has the package, for example in a container.
    set -g wan_trainer_python $wan_trainer_repository/.venv/bin/python
    set -q WAN_TRAINER_PYTHON; and set wan_trainer_python $WAN_TRAINER_PYTHON
    if not command -q -- $wan_trainer_python
        wan_trainer_error "$wan_trainer_python is not there: run $wan_trainer_repository/scripts/setup first"
        return 2
    end
    cd $wan_trainer_root
end

function wan_trainer_help --argument-names launcher --description 'Print the comment at the top of a launcher when asked for help'
    contains -- -h $argv[2..]; or contains -- --help $argv[2..]; or return 1
    while read -l line
        string match -q '#*' -- $line; or break
        string match -q '#!*' -- $line; or string replace -r '^# ?' '' -- $line
    end <(path resolve $launcher)
end

function wan_trainer_arguments --description 'Split --nproc and --config from what is forwarded'
    # Each argument stays one list element: spaces, quotes and empty strings reach the trainer as they were typed.
    set -g wan_trainer_nproc 8
    set -g wan_trainer_config
    set -g wan_trainer_overrides
    set -l wanted
    for argument in $argv
        if test -n "$wanted"
            set -g $wanted $argument
            set wanted
            continue
        end
        switch $argument
            case --
            case --nproc
                set wanted wan_trainer_nproc
            case '--nproc=*'
                set -g wan_trainer_nproc (string replace -- --nproc= '' $argument)
            case --config
                set wanted wan_trainer_config
            case '--config=*'
                set -g wan_trainer_config (string replace -- --config= '' $argument)
            case --nodes '--nodes=*' --node-rank '--node-rank=*' --join --facts '--facts=*'
                # Forwarded, they would replace what the launcher itself tells preflight.
                wan_trainer_error (string replace -r '=.*' '' -- $argument)" is not an argument of the launcher: machines are WORLD_SIZE and RANK of the environment"
                return 2
            case '*'
                set -a wan_trainer_overrides $argument
        end
    end
    if test -n "$wanted"
        wan_trainer_error --(string replace wan_trainer_ '' $wanted) "needs a value"
        return 2
    end
    if not string match -qr '^[1-9][0-9]{0,3}$' -- $wan_trainer_nproc
        wan_trainer_error "--nproc is '$wan_trainer_nproc', the number of processes on this machine; give a positive integer"
        return 2
    end
    if test -z "$wan_trainer_config"
        wan_trainer_error "--config is missing; give a recipe, for example --config configs/quickstart.yaml"
        return 2
    end
end

function wan_trainer_rendezvous --description 'MASTER_ADDR, MASTER_PORT, WORLD_SIZE (machines) and RANK (this machine)'
    set -l missing
    for name in MASTER_ADDR WORLD_SIZE RANK
        test -n "$$name"; or set -a missing $name
    end
    if test (count $missing) -eq 3
        set -gx MASTER_ADDR 127.0.0.1
        set -gx WORLD_SIZE 1
        set -gx RANK 0
    else if test (count $missing) -gt 0
        wan_trainer_error "the rendezvous is partly set, missing:" (string join ', ' $missing)"; set MASTER_ADDR, WORLD_SIZE and RANK together, or none of them for one machine"
        return 2
    end
    test -n "$MASTER_PORT"; or set -gx MASTER_PORT 29500
    if not string match -qr '^[1-9][0-9]{0,5}$' -- $WORLD_SIZE
        wan_trainer_error "WORLD_SIZE is '$WORLD_SIZE', the number of machines; set a positive integer"
        return 2
    end
    if not string match -qr '^[0-9]{1,6}$' -- $RANK; or test $RANK -ge $WORLD_SIZE
        wan_trainer_error "RANK is '$RANK', the number of this machine; set it in 0.."(math $WORLD_SIZE - 1)" (WORLD_SIZE is $WORLD_SIZE)"
        return 2
    end
    if not string match -qr '^[0-9]{1,5}$' -- $MASTER_PORT; or test $MASTER_PORT -lt 1 -o $MASTER_PORT -gt 65535
        wan_trainer_error "MASTER_PORT is '$MASTER_PORT'; set a port in 1..65535"
        return 2
    end
    # All processes share this machine: keep gloo on the loopback device, also where the host name does not resolve.
    if string match -qr '^(127\.|localhost$)' -- $MASTER_ADDR
        set -q GLOO_SOCKET_IFNAME; or set -gx GLOO_SOCKET_IFNAME lo
    end
    return 0 # a successful set keeps the status of the command before it
end

function wan_trainer_environment --description 'Caches, allocator, headers'
    set -l user (id -un 2>/dev/null; or id -u)
    # Node-local: ranks on different machines that share one Triton cache overwrite each other's kernels.
    set -q TRITON_CACHE_DIR; or set -gx TRITON_CACHE_DIR /tmp/wan-trainer-$user/triton
    # An ambient KERNELS_CACHE is ignored: it may name a cache that was never checked for this project.
    set -gx KERNELS_CACHE $HOME/.cache/wan-trainer/kernels
    set -q WAN_TRAINER_KERNELS_CACHE; and set -gx KERNELS_CACHE $WAN_TRAINER_KERNELS_CACHE
    set -q PYTORCH_CUDA_ALLOC_CONF; or set -gx PYTORCH_CUDA_ALLOC_CONF expandable_segments:True
    if set -q WAN_TRAINER_PYTHON_INCLUDE
        set -l paths $WAN_TRAINER_PYTHON_INCLUDE
        test -n "$CPATH"; and set -a paths $CPATH
        set -gx CPATH (string join : $paths)
    end
    set -gx TOKENIZERS_PARALLELISM false
end

function wan_trainer_fact --argument-names key --description 'One value that preflight wrote down'
    string match -r "^$key=.*" <$wan_trainer_facts | string replace -- "$key=" ''
end

function wan_trainer_preflight --description 'wan-trainer validate; on several machines also the roll call of the nodes'
    set -g wan_trainer_facts (mktemp -t wan-trainer-facts.XXXXXX)
    set -l join
    set -q WAN_TRAINER_TRITON_PREFLIGHT_ONLY; and test "$WAN_TRAINER_TRITON_PREFLIGHT_ONLY" = 1; or set join --join
    $wan_trainer_python -m wan_trainer.cli.main validate --config $wan_trainer_config \
        --nodes $WORLD_SIZE --nproc $wan_trainer_nproc --node-rank $RANK \
        --facts $wan_trainer_facts $join $wan_trainer_overrides
    set -l code $status
    if test $code -ne 0
        rm -f $wan_trainer_facts
        return $code
    end
    if test (wan_trainer_fact device) = cpu
        # Two threads a rank and a busy neighbour stall OpenMP barriers by a factor of 10 to 100.
        set -q OMP_NUM_THREADS; or set -gx OMP_NUM_THREADS 1
    end
    return 0
end

function wan_trainer_begin --argument-names launcher --description 'All that comes before torchrun; ends the launcher where it must end'
    wan_trainer_help $argv; and exit 0
    wan_trainer_locate $launcher; or exit 2
    wan_trainer_arguments $argv[2..]; or exit 2
    wan_trainer_rendezvous; or exit 2
    wan_trainer_environment
    wan_trainer_preflight; or exit $status
    test "$WAN_TRAINER_TRITON_PREFLIGHT_ONLY" = 1; and rm -f $wan_trainer_facts; and exit 0
    set -g wan_trainer_output_dir (wan_trainer_fact output_dir)
    set -g wan_trainer_algorithm (wan_trainer_fact algorithm)
    set -g wan_trainer_judge_url (wan_trainer_fact judge_url)
    set -g wan_trainer_judge_model (wan_trainer_fact judge_model)
    set -l timeout_s (wan_trainer_fact rendezvous_timeout_s)
    rm -f $wan_trainer_facts
    # What trains on this machine. A launcher execs it: a signal to the launcher must reach the ranks.
    set -g wan_trainer_training $wan_trainer_python -m wan_trainer.preflight.supervise \
        --output-dir $wan_trainer_output_dir -- $wan_trainer_python -m wan_trainer.preflight.agent \
        --nnodes $WORLD_SIZE --node-rank $RANK --nproc-per-node $wan_trainer_nproc \
        --master-addr $MASTER_ADDR --master-port $MASTER_PORT --rdzv-conf timeout=$timeout_s --max-restarts 0 \
        --module wan_trainer.cli.train --config $wan_trainer_config $wan_trainer_overrides
    return 0
end

function wan_trainer_number --argument-names name fallback pattern rule --description 'A number from the environment, or a default'
    set -l value $fallback
    test -n "$$name"; and set value $$name
    if not string match -qr "^$pattern\$" -- $value
        wan_trainer_error "$name is '$value'; set $rule"
        return 2
    end
    echo $value
end

function wan_trainer_judge_port --description 'WAN_TRAINER_VLM_PORT, 18080 by default'
    set -l port '([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])'
    wan_trainer_number WAN_TRAINER_VLM_PORT 18080 $port 'a port in 1..65535'
end
