"""The launcher that serves a judge beside training, with a stand-in for the service's command."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_training.tests.launcher.conftest import REPOSITORY, Launch
from wan_trainer.preflight import cohost
from wan_trainer.preflight.network import free_port

LAUNCHER = REPOSITORY / "scripts" / "train" / "grpo_vlm_eval_multinode.fish"
CONFIG = ("--config", "configs/train_rl_5b_vlm.yaml")
OVERRIDES = ("--seed", "7", "--wandb_run_name", "a b")
ARGUMENTS = ("--nproc", "8", *CONFIG, *OVERRIDES)

# A service with workers in its process group, in a group and a session of their own, and one without parent.
SERVICE = """#!{python} -SE
import json, os, socket, subprocess, sys, time
out, mode = {out!r}, os.environ.get("STAND_IN", "serves")
sleep = ["sleep", "300"]
leave = "setsid sleep 300 >/dev/null & echo $!"
orphan = subprocess.run(["sh", "-c", leave], stdout=subprocess.PIPE, text=True).stdout
places = {{}}, dict(process_group=0), dict(start_new_session=True)
workers = [subprocess.Popen(sleep, **place).pid for place in places]
record = dict(argv=sys.argv[1:], env=dict(os.environ), pids=[os.getpid(), int(orphan), *workers])
with open(f"{{out}}/service-{{os.getpid()}}.new", "w") as file:
    json.dump(record, file)
os.rename(file.name, f"{{out}}/service-{{os.getpid()}}.json")
for shard in range(100):
    print(f"loading shard {{shard}}", flush=True)
if mode == "dies":
    print("out of memory: tried to allocate 54 GB", flush=True)
    sys.exit(3)
if mode == "hangs":
    time.sleep(300)

listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
while True:
    asked, _ = listener.accept()
    with asked:
        words = asked.recv(4096).split()
        if words[1:2] == [b"/die"]:
            print("engine core died", flush=True)
            os._exit(9)
        status = b"200 OK" if words[1:2] == [b"/health"] else b"404 Not Found"
        asked.sendall(b"HTTP/1.0 " + status + b"\\r\\n\\r\\n")
"""

# A rank that is asked to stop still needs the judge: rollouts in flight await their verdicts.
RANK = """
import json, os, pathlib, signal, sys, time, urllib.request
out = pathlib.Path(sys.argv[1])
url = f"http://127.0.0.1:{os.environ['WAN_TRAINER_VLM_PORT']}"
def stop(number, frame):
    served = urllib.request.urlopen(url + "/health", timeout=5).status == 200
    (out / "served").write_text(str(served))
    (out.parent / "a run" / "run.json").write_text(json.dumps({"starts": [{"exit_status": 75}]}))
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
(out / "ready").touch()
time.sleep(60)
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline and process.poll() is None, path
        time.sleep(0.05)


@dataclass(frozen=True)
class Beside:
    """The launcher with a recording Python and a stand-in service on a free port."""

    launch: Launch
    port: int
    environment: dict[str, str]

    def run(self, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the launcher to its end."""
        return self.launch.run(*ARGUMENTS, launcher=LAUNCHER, **{**self.environment, **env})

    def start(self, **env: str) -> subprocess.Popen[str]:
        """Start the launcher and return at once."""
        return self.launch.start(*ARGUMENTS, launcher=LAUNCHER, **{**self.environment, **env})

    def services(self) -> list[dict[str, Any]]:
        """What was started: argv, env, pids of the service and its workers."""
        return [json.loads(path.read_text()) for path in self.launch.out.glob("service-*.json")]

    def the_service_is_gone(self) -> bool:
        """Whether one service was started and none of its processes is left."""
        (service,) = self.services()
        assert len(service["pids"]) == 5
        left = [pid for pid in service["pids"] if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return not left


@pytest.fixture
def beside(launch: Launch, tmp_path: Path) -> Beside:
    """A config whose judge the launcher serves."""
    port = free_port()
    with (launch.out / "facts").open("a") as facts:
        facts.write(f"judge_url=http://127.0.0.1:{port}/v1\njudge_model=judge of ours\n")
    command = tmp_path / "vllm"
    command.write_text(SERVICE.format(python=sys.executable, out=str(launch.out)))
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    environment = {
        "WAN_TRAINER_VLM_BIN": str(command),
        "WAN_TRAINER_VLM_PORT": str(port),
        "WAN_TRAINER_VLM_MODEL_PATH": "/models/the judge",
    }
    return Beside(launch, port, environment)


def test_a_run_starts_one_service_probes_it_trains_and_stops_it(beside, tmp_path):
    done = beside.run(
        WAN_TRAINER_VLM_API_KEY="secret-key",
        WAN_TRAINER_VLM_TENSOR_PARALLEL_SIZE="4",
        GPU_MEMORY_UTILIZATION="0.45",
        WAN_TRAINER_VLM_LOG_DIR=str(tmp_path / "the logs"),
    )
    assert done.returncode == 0, done.stderr
    assert beside.the_service_is_gone()
    (service,) = beside.services()
    argv = service["argv"]
    assert argv[:2] == ["serve", "/models/the judge"]
    for option, value in {
        "--served-model-name": "judge of ours",
        "--host": "127.0.0.1",
        "--port": str(beside.port),
        "--tensor-parallel-size": "4",
        "--data-parallel-size": "2",
        "--data-parallel-size-local": "2",
        "--gpu-memory-utilization": "0.45",
    }.items():
        assert argv[argv.index(option) + 1] == value, option
    # Arguments are readable by every user of the machine.
    assert service["env"]["VLLM_API_KEY"] == "secret-key" and "secret-key" not in " ".join(argv)
    # vLLM would take the trainer's rendezvous for its own, and cannot use expandable segments.
    assert not {"MASTER_ADDR", "WORLD_SIZE", "RANK", "PYTORCH_CUDA_ALLOC_CONF"} & service["env"].keys()
    validate, probe, torchrun = (beside.launch.record(name) for name in ("validate", "probe", "torchrun"))
    for record in (validate, probe, torchrun):
        assert record["env"]["WAN_TRAINER_VLM_BASE_URL"] == f"http://127.0.0.1:{beside.port}/v1"
        assert record["argv"][-4:] == list(OVERRIDES)
        assert CONFIG[1] in record["argv"]
    # Preflight comes before the service and must not look for it.
    assert validate["env"]["WAN_TRAINER_VLM_START_SERVICE"] == "1"
    assert torchrun["env"]["PYTORCH_CUDA_ALLOC_CONF"] and torchrun["argv"][1] == "wan_trainer.preflight.agent"
    log = (tmp_path / "the logs" / "service-node-0.log").read_text()
    assert "loading shard 99" in log


@pytest.mark.parametrize(
    ("stub", "expected", "trained"),
    [
        ({"STUB_TORCHRUN_STATUS": "1"}, 1, True),
        ({"STUB_PROBE_STATUS": "1"}, 1, False),
        ({"STUB_PROBE_STATUS": "2"}, 2, False),
    ],
)
def test_a_failure_of_probe_or_training_stops_the_service(beside, stub, expected, trained):
    done = beside.run(**stub)
    assert done.returncode == expected, done.stderr
    assert beside.the_service_is_gone()
    assert beside.launch.called("torchrun") == trained
    assert ("loading shard 99" in done.stderr) == (not trained)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_training_lets_the_ranks_save_before_the_service_stops(beside, number):
    launcher = beside.start(STUB_RANK=RANK)
    wait_for(beside.launch.out / "ready", launcher)
    launcher.send_signal(number)
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 75, stderr
    assert (beside.launch.out / "served").read_text() == "True"
    assert beside.the_service_is_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_service_is_up_stops_it(beside, number):
    launcher = beside.start(STAND_IN="hangs")
    log = beside.launch.output_dir / "judge" / "service-node-0.log"
    wait_for(log, launcher)
    while not beside.services():
        time.sleep(0.05)
    launcher.send_signal(number)
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 130, stderr
    assert beside.the_service_is_gone()
    assert not beside.launch.called("probe") and not beside.launch.called("torchrun")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"STAND_IN": "dies"}, "out of memory: tried to allocate 54 GB"),
        ({"STAND_IN": "hangs", "WAN_TRAINER_VLM_START_TIMEOUT_S": "1"}, "WAN_TRAINER_VLM_START_TIMEOUT_S"),
    ],
)
def test_a_service_that_does_not_come_up_is_reported_with_the_end_of_its_log(beside, env, said):
    done = beside.run(**env)
    assert done.returncode == 1, done.stderr
    assert said in done.stderr and "loading shard 99" in done.stderr
    assert "loading shard 5\n" not in done.stderr
    assert beside.the_service_is_gone()
    assert not beside.launch.called("probe") and not beside.launch.called("torchrun")


@pytest.mark.parametrize(
    ("name", "value"),
    [("DATA_PARALLEL_SIZE", "0"), ("GPU_MEMORY_UTILIZATION", "50"), ("WAN_TRAINER_VLM_BIN", "/nothing/here")],
)
def test_a_bad_setting_of_the_service_is_named(beside, name, value):
    done = beside.run(**{name: value})
    assert done.returncode != 0
    assert name in done.stderr and value in done.stderr
    assert beside.services() == [] and not beside.launch.called("torchrun")


def test_a_service_that_dies_under_training_stops_the_run(beside):
    rank = RANK.replace('url + "/health"', "url").replace("served = ", "served = True or ")
    ask = "try: urllib.request.urlopen(url + '/die', timeout=5)\nexcept OSError: pass\n"
    # The port is that of the config's endpoint unless it is set.
    del beside.environment["WAN_TRAINER_VLM_PORT"]
    done = beside.run(STUB_RANK=rank.replace("time.sleep(60)", ask + "time.sleep(60)"))
    # Every later verdict would be missing: training saves, and the failure is said.
    assert done.returncode == 1, done.stderr
    assert (beside.launch.out / "served").exists()
    assert "status 9" in done.stderr and "engine core died" in done.stderr
    assert beside.the_service_is_gone()


def test_an_endpoint_that_is_already_there_is_used(beside):
    endpoint = "http://10.0.0.9:8000/v1"
    done = beside.run(WAN_TRAINER_VLM_START_SERVICE="0", WAN_TRAINER_VLM_BASE_URL=endpoint)
    assert done.returncode == 0, done.stderr
    assert beside.services() == []
    for name in ("validate", "probe", "torchrun"):
        env = beside.launch.record(name)["env"]
        assert (env["WAN_TRAINER_VLM_START_SERVICE"], env["WAN_TRAINER_VLM_BASE_URL"]) == ("0", endpoint)
    failed = beside.run(WAN_TRAINER_VLM_START_SERVICE="0", STUB_PROBE_STATUS="1", STUB_TORCHRUN_STATUS="75")
    assert failed.returncode == 1, failed.stderr


def test_nothing_is_served_where_nothing_is_trained(beside):
    assert beside.run(WAN_TRAINER_TRITON_PREFLIGHT_ONLY="1").returncode == 0
    assert beside.run(STUB_VALIDATE_STATUS="2").returncode == 2
    for env in (
        {"WAN_TRAINER_VLM_START_SERVICE": "no"},
        {"WAN_TRAINER_VLM_PORT": "65536"},
        {"WAN_TRAINER_VLM_BASE_URL": "http://elsewhere/v1"},
    ):
        refused = beside.run(**env)
        assert refused.returncode == 2 and next(iter(env)) in refused.stderr
    other = {"STUB_VALIDATE_STATUS": "0"}
    facts = beside.launch.out / "facts"
    text = facts.read_text()
    for url in ("http://10.0.0.9:18080/v1", "http://127.0.0.1:1/v1"):
        facts.write_text(text.replace(f"http://127.0.0.1:{beside.port}/v1", url))
        elsewhere = beside.run(**other)
        assert elsewhere.returncode == 2 and "WAN_TRAINER_VLM_START_SERVICE=0" in elsewhere.stderr
    facts.write_text("".join(line for line in text.splitlines(keepends=True) if "judge" not in line))
    no_judge = beside.run(**other)
    assert no_judge.returncode == 2 and "grpo_multinode.fish" in no_judge.stderr
    facts.write_text(text)
    with socket.create_server(("127.0.0.1", beside.port)):
        # Whatever answers there would pass for the judge.
        taken = beside.run(**other)
    assert taken.returncode == 2 and "WAN_TRAINER_VLM_PORT" in taken.stderr
    assert beside.services() == [] and not beside.launch.called("torchrun")


def test_a_worker_that_ignores_the_request_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(cohost, "_GRACE_S", 0.3)
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    deaf = ignore + "print('up', flush=True); time.sleep(300)"
    log = tmp_path / "logs" / "service.log"
    service = cohost.Service([sys.executable, "-SEc", deaf], log)
    deadline = time.monotonic() + 20
    while not log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    service.stop()
    assert service.ended == -signal.SIGKILL


def test_what_an_earlier_start_left_in_the_log_stays_and_is_not_shown_as_this_ones(tmp_path, capfd):
    log = tmp_path / "service.log"
    log.write_text("out of memory, yesterday\n")
    service = cohost.Service(["echo", "no such model"], log)
    while service.ended is None:
        time.sleep(0.01)
    service.show_tail()
    said = capfd.readouterr().err
    assert "no such model" in said and "yesterday" not in said
    assert log.read_text() == "out of memory, yesterday\nno such model\n"


# The judge of the tests under the arguments of vLLM.
JUDGE = """#!{python}
import sys
sys.path.insert(0, {repository!r})
from rl_training.tests.rewards.judge_server import JudgeServer

class Service(JudgeServer):
    def server_bind(self):
        self.server_address = ("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))
        super().server_bind()

server = Service(model=sys.argv[sys.argv.index("--served-model-name") + 1])
server.ended.wait()
"""


@pytest.mark.slow
def test_a_policy_trains_beside_its_judge(tmp_path, tiny_ti2v, tiny_dataset):
    port, out = free_port(), tmp_path / "run"
    command = tmp_path / "vllm"
    command.write_text(JUDGE.format(python=sys.executable, repository=str(REPOSITORY)))
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    values = {
        "device": "cpu",
        "model_path": str(tiny_ti2v),
        "dataset_json": str(tiny_dataset),
        "output_dir": str(out),
        "num_frames": 9,
        "height": 64,
        "width": 64,
        "fps": 16,
        "num_workers": 0,
        "batch_size": 1,
        "grpo_group_size": 2,
        "grpo_num_sampling_steps": 2,
        "max_steps": 1,
        "save_steps": 0,
        "grpo_reward_fn": "vbvr_vlm",
        "vlm_reward_prompt_mode": "custom",
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    environment = {
        "WAN_TRAINER_VLM_BIN": str(command),
        "WAN_TRAINER_VLM_PORT": str(port),
        "WAN_TRAINER_VLM_MODEL": "a judge",
        "MASTER_PORT": str(free_port()),
    }
    inherited = Launch(tmp_path, out, Path(sys.executable)).environment(**environment)
    done = subprocess.run(
        ["fish", str(LAUNCHER), "--nproc", "1", "--config", str(config)],
        env=inherited,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every clip has a verdict" in done.stdout
    rows = [json.loads(line) for line in (out / "rewards.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["error"] is None and 0 <= row["reward"] <= 1 for row in rows)
    assert {"score", "instruction", "quality"} <= rows[0]["components"].keys()
    assert (out / "judge" / "service-node-0.log").is_file()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
