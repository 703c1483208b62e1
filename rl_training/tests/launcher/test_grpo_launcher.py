"""The fish launcher as a process: arguments, rendezvous, directories, environment, exit status."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
LAUNCHER = REPOSITORY / "scripts" / "train" / "grpo_multinode.fish"
CONFIG = ("--config", "configs/quickstart.yaml")


def trainer_arguments(record: dict) -> list[str]:
    """What torchrun hands to each rank."""
    argv = record["argv"]
    return argv[argv.index("wan_trainer.cli.train") + 1 :]


def one_line(text: str) -> str:
    """The only line of an error output."""
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    return lines[0]


def test_unknown_arguments_reach_every_rank_as_typed(launch):
    odd = [
        "--negative_prompt",
        "",
        "--a",
        "two words",
        '--b=it\'s "quoted" $HOME *',
        "--flag",
        "--no-shuffle",
    ]
    done = launch.run("--nproc", "3", *CONFIG, "--", *odd, "--adam_betas", "0.1", "0.9")
    assert done.returncode == 0, done.stderr
    expected = [*CONFIG, *odd, "--adam_betas", "0.1", "0.9"]
    assert trainer_arguments(launch.record("torchrun")) == expected
    validate = launch.record("validate")["argv"]
    assert validate[-len(expected) + 2 :] == expected[2:]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], [*CONFIG, "--nproc", "2", "--help"]])
def test_help_is_the_usage_and_starts_nothing(launch, arguments):
    done = launch.run(*arguments)
    assert done.returncode == 0
    assert "--nproc 8 --config" in done.stdout and "75 stopped by a signal" in done.stdout
    assert "supervisor" not in done.stdout and done.stderr == ""
    assert not launch.called("validate") and not launch.called("torchrun")


@pytest.mark.parametrize("spelling", [["--nproc", "2"], ["--nproc=2"]])
def test_nproc_is_the_processes_of_this_machine(launch, spelling):
    assert launch.run(*spelling, *CONFIG).returncode == 0
    argv = launch.record("torchrun")["argv"]
    assert argv[argv.index("--nproc-per-node") + 1] == "2"
    assert "--nproc" not in trainer_arguments(launch.record("torchrun"))
    assert launch.record("validate")["argv"][launch.record("validate")["argv"].index("--nproc") + 1] == "2"


def test_defaults_are_one_machine_and_eight_processes(launch):
    assert launch.run("--config=configs/quickstart.yaml").returncode == 0
    argv = launch.record("torchrun")["argv"]
    for option, value in {
        "--nnodes": "1",
        "--node-rank": "0",
        "--nproc-per-node": "8",
        "--master-addr": "127.0.0.1",
        "--master-port": "29500",
        "--max-restarts": "0",
        "--rdzv-conf": "timeout=30",
    }.items():
        assert argv[argv.index(option) + 1] == value, option


@pytest.mark.parametrize("bad", [["--nproc", "0"], ["--nproc", "two"], ["--nproc=-1"], ["--nproc"]])
def test_a_bad_nproc_is_one_line(launch, bad):
    done = launch.run(*CONFIG, *bad)
    assert done.returncode == 2
    assert "--nproc" in one_line(done.stderr)
    assert not launch.called("validate")


@pytest.mark.parametrize("typed", [["--nodes", "4"], ["--nodes=4"], ["--node-rank=1"], ["--join"]])
def test_what_preflight_is_told_by_the_launcher_cannot_be_typed(launch, typed):
    done = launch.run(*CONFIG, "--nproc", "1", *typed)
    assert done.returncode == 2
    line = one_line(done.stderr)
    assert typed[0].partition("=")[0] in line and "WORLD_SIZE and RANK" in line
    assert not launch.called("validate")


def test_a_missing_config_is_one_line(launch):
    done = launch.run("--nproc", "1")
    assert done.returncode == 2
    assert "--config" in one_line(done.stderr)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"MASTER_ADDR": "10.0.0.1"}, ["WORLD_SIZE", "RANK"]),
        ({"WORLD_SIZE": "2", "RANK": "1"}, ["MASTER_ADDR"]),
        ({"MASTER_ADDR": "10.0.0.1", "RANK": "0"}, ["WORLD_SIZE"]),
    ],
)
def test_a_partly_set_rendezvous_names_what_is_missing(launch, given, missing):
    done = launch.run("--nproc", "1", *CONFIG, **given)
    assert done.returncode == 2
    line = one_line(done.stderr)
    named = line.split("missing:")[1].split(";")[0]
    assert [name.strip() for name in named.split(",")] == missing
    assert not launch.called("validate")


@pytest.mark.parametrize(
    ("rendezvous", "named"),
    [
        ({"WORLD_SIZE": "2", "RANK": "2"}, "0..1"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "one"}, "RANK"),
        ({"WORLD_SIZE": "none", "RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "99999"}, "MASTER_PORT"),
        ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "http"}, "MASTER_PORT"),
    ],
)
def test_a_bad_rendezvous_value_is_one_line(launch, rendezvous, named):
    done = launch.run("--nproc", "1", *CONFIG, MASTER_ADDR="127.0.0.1", **rendezvous)
    assert done.returncode == 2
    assert named in one_line(done.stderr)
    assert not launch.called("validate")


def test_a_full_rendezvous_reaches_torchrun(launch):
    done = launch.run(
        "--nproc", "4", *CONFIG, MASTER_ADDR="10.1.2.3", MASTER_PORT="1234", WORLD_SIZE="3", RANK="2"
    )
    assert done.returncode == 0
    argv = launch.record("torchrun")["argv"]
    assert [
        argv[argv.index(o) + 1] for o in ("--nnodes", "--node-rank", "--master-addr", "--master-port")
    ] == [
        "3",
        "2",
        "10.1.2.3",
        "1234",
    ]
    assert "--join" in launch.record("validate")["argv"]


def test_it_finds_itself_from_anywhere_and_through_links(launch, tmp_path):
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    link = elsewhere / "train"
    link.symlink_to(LAUNCHER)
    chained = elsewhere / "again"
    chained.symlink_to("train")
    for launcher in (LAUNCHER, link, chained):
        done = launch.run("--nproc", "1", *CONFIG, cwd=elsewhere, launcher=launcher)
        assert done.returncode == 0, done.stderr
        record = launch.record("torchrun")
        assert record["cwd"] == str(REPOSITORY / "rl_training")
        assert record["env"]["WAN_TRAINER_CALLER_DIR"] == str(elsewhere)


def test_a_relative_call_from_the_repository_works(launch):
    done = launch.run(
        "--nproc", "1", *CONFIG, cwd=REPOSITORY, launcher=Path("scripts/train/grpo_multinode.fish")
    )
    assert done.returncode == 0, done.stderr


def test_the_environment_of_the_ranks(launch):
    assert launch.run("--nproc", "1", *CONFIG, KERNELS_CACHE="/ambient").returncode == 0
    env = launch.record("torchrun")["env"]
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert env["KERNELS_CACHE"].endswith("/.cache/wan-trainer/kernels")
    assert env["TRITON_CACHE_DIR"].startswith("/tmp/wan-trainer-")
    assert env["GLOO_SOCKET_IFNAME"] == "lo"


def test_values_of_the_user_win(launch):
    set_by_user = {
        "OMP_NUM_THREADS": "3",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
        "TRITON_CACHE_DIR": "/tmp/mine",
        "GLOO_SOCKET_IFNAME": "eth7",
    }
    extra = {"WAN_TRAINER_KERNELS_CACHE": "/kernels", "WAN_TRAINER_PYTHON_INCLUDE": "/inc", "CPATH": "/other"}
    assert launch.run("--nproc", "1", *CONFIG, **set_by_user, **extra).returncode == 0
    env = launch.record("torchrun")["env"]
    assert {name: env[name] for name in set_by_user} == set_by_user
    assert env["KERNELS_CACHE"] == "/kernels"
    assert env["CPATH"] == "/inc:/other"


def test_threads_are_left_alone_on_a_gpu(launch):
    (launch.out / "facts").write_text(
        f"device=cuda\noutput_dir={launch.output_dir}\nrendezvous_timeout_s=5\n"
    )
    assert launch.run("--nproc", "1", *CONFIG).returncode == 0
    assert "OMP_NUM_THREADS" not in launch.record("torchrun")["env"]


def test_a_failed_preflight_stops_before_torchrun(launch):
    done = launch.run("--nproc", "1", *CONFIG, STUB_VALIDATE_STATUS="2")
    assert done.returncode == 2
    assert not launch.called("torchrun")


def test_preflight_only_stops_before_torchrun_and_waits_for_nobody(launch):
    done = launch.run("--nproc", "1", *CONFIG, WAN_TRAINER_TRITON_PREFLIGHT_ONLY="1")
    assert done.returncode == 0
    assert not launch.called("torchrun")
    assert "--join" not in launch.record("validate")["argv"]


def test_no_facts_file_is_left_behind(launch, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for status in ("0", "2"):
        launch.run("--nproc", "1", *CONFIG, STUB_VALIDATE_STATUS=status, TMPDIR=str(scratch))
    launch.run("--nproc", "1", *CONFIG, WAN_TRAINER_TRITON_PREFLIGHT_ONLY="1", TMPDIR=str(scratch))
    assert list(scratch.iterdir()) == []


def test_a_record_of_an_earlier_run_does_not_become_the_status(launch):
    (launch.output_dir / "run.json").write_text(json.dumps({"starts": [{"exit_status": 75}]}))
    assert launch.run("--nproc", "1", *CONFIG, STUB_TORCHRUN_STATUS="1").returncode == 1


# A rank that saves when it is asked to stop, as the trainer does: run.json says so, and it exits 75.
RANK = """
import json, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
def stop(number, frame):
    (out.parent / "a run" / "run.json").write_text(json.dumps({"starts": [{"exit_status": 75}]}))
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
(out / "ready").touch()
time.sleep(30)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_in_75(launch, number):
    launcher = launch.start("--nproc", "1", *CONFIG, STUB_RANK=RANK)
    deadline = time.monotonic() + 30
    while not (launch.out / "ready").exists():
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(number)
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 75, stderr


@pytest.mark.parametrize(("recorded", "expected"), [(2, 2), (75, 75), (1, 1), (0, 1)])
def test_what_rank_zero_recorded_is_the_status(launch, recorded, expected):
    write = "import json, pathlib, sys; path = pathlib.Path(sys.argv[1]).parent / 'a run' / 'run.json'; "
    write += f"path.write_text(json.dumps({{'starts': [{{'exit_status': {recorded}}}]}})); sys.exit(3)"
    assert launch.run("--nproc", "1", *CONFIG, STUB_RANK=write).returncode == expected


def test_a_missing_environment_names_the_setup(launch, tmp_path):
    done = launch.run("--nproc", "1", *CONFIG, WAN_TRAINER_PYTHON=str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert "scripts/setup" in one_line(done.stderr)
