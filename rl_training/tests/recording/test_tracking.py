import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from wan_trainer.recording.tracking import WandbTracker, stored_run_id, tracked_values, wandb_mode
from wan_trainer.types import EvaluationRecord, StepRecord

MakeRecord = Callable[..., StepRecord]


def test_mode_is_offline_without_a_key(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert wandb_mode(home) == "offline"
    assert wandb_mode(home | {"WANDB_API_KEY": "k"}) == "online"
    assert wandb_mode(home | {"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}) == "disabled"
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password k\n")
    assert wandb_mode(home) == "online"
    assert wandb_mode(home | {"WANDB_BASE_URL": "https://wandb.example"}) == "offline"
    netrc.write_text("machine\n")
    assert wandb_mode(home) == "offline"
    other = tmp_path / "elsewhere"
    other.write_text("machine wandb.example login user password k\n")
    assert wandb_mode(home | {"NETRC": str(other), "WANDB_BASE_URL": "https://wandb.example"}) == "online"


def test_values_are_flat(step_record: MakeRecord) -> None:
    values = tracked_values(step_record(replayed_per_expert={"transformer": 4}))
    assert values["reward_mean"] == 0.5
    assert values["reward/task_specific"] == 0.5
    assert values["replayed/transformer"] == 4.0
    assert "components" not in values


# wandb starts a service process for its caller, so each offline run has an interpreter of its own.
_OFFLINE = """
import sys
from pathlib import Path
from rich.console import Console
from tests_record import record
from wan_trainer.recording.tracking import WandbTracker
first, last = int(sys.argv[2]), int(sys.argv[3])
config = {"learning_rate": 1e-5, "api_key": "hunter2"}
tracker = WandbTracker(Path(sys.argv[1]), project="p", name="n", config=config, mode="offline",
                       console=Console(stderr=True))
for step in range(first, last + 1):
    tracker.step(record(step))
tracker.close(75)
print(tracker.run_id)
"""


def run_offline(directory: Path, first: int, last: int, record: StepRecord) -> str:
    helper = directory.parent / "tests_record.py"
    helper.write_text(
        "from dataclasses import replace\nfrom wan_trainer.types import StepRecord\n"
        f"BASE = {record!r}\ndef record(step): return replace(BASE, step=step, batch=step - 1)\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(helper.parent), *sys.path])}
    words = [sys.executable, "-c", _OFFLINE, str(directory), str(first), str(last)]
    done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True, timeout=240)
    assert done.stderr == ""
    assert len(done.stdout.split()) == 1, "wandb must not chatter"
    return done.stdout.strip()


# Records of a .wandb file lie in blocks of 32 KiB after a header of 7 bytes: crc (4), length (2), type (1).
_READ_LOG = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2
data, at, parts, steps = open(sys.argv[1], "rb").read(), 7, b"", []
while at + 7 <= len(data):
    left = 32768 - at % 32768
    if left < 7:
        at += left
        continue
    _, length, kind = struct.unpack_from("<IHB", data, at)
    if kind == 0:
        break
    parts += data[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4):
        record = wandb_internal_pb2.Record.FromString(parts)
        parts = b""
        assert "hunter2" not in str(record)
        if record.WhichOneof("record_type") == "history":
            steps.append(record.history.step.num)
print(json.dumps(steps))
"""


def logged_steps(directory: Path) -> list[int]:
    """Steps in the files that wandb wrote, oldest file first."""
    files = sorted((directory / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime)
    steps: list[int] = []
    for file in files:
        words = [sys.executable, "-c", _READ_LOG, str(file)]
        steps += json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return steps


def test_an_offline_run_is_written_and_a_resume_continues_it(tmp_path: Path, step_record: MakeRecord) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    first = run_offline(directory, 1, 3, step_record())
    assert logged_steps(directory) == [1, 2, 3]
    # Resumed from a checkpoint of step 1: steps 2 and 3 come again and are not logged twice.
    second = run_offline(directory, 2, 5, step_record())
    assert second == first
    assert json.loads((directory / "wandb.json").read_text()) == {"id": first, "project": "p", "last_step": 5}
    assert logged_steps(directory) == [1, 2, 3, 4, 5]
    left = [path.name for path in (directory / "wandb").glob("offline-run-*")]
    assert len(left) == 2 and all(name.endswith(f"-{first}") for name in left), "one run for `wandb sync`"


class Listening:
    """Stands for a wandb run, keeping what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[dict[str, float], int]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.told.append((values, step))


def test_evaluations_are_logged_once_beside_their_update(
    tmp_path: Path,
    step_record: MakeRecord,
    evaluation_record: EvaluationRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listening = Listening()
    monkeypatch.setattr(WandbTracker, "_open", lambda *_: listening)
    for _ in range(2):  # the second start goes on from before
        tracker = tracker_for(tmp_path, io.StringIO())
        tracker.evaluation(replace(evaluation_record, batch=0, step=0))
        tracker.step(step_record(step=3))
        tracker.evaluation(evaluation_record)
    assert [step for _, step in listening.told] == [0, 3, 3]
    values = listening.told[-1][0]
    assert (values["eval/reward_mean"], values["eval/reward/look"], values["eval/batch"]) == (0.5, 0.25, 4.0)


class Broken:
    """Stands for a wandb whose service is gone."""

    def log(self, values: dict[str, float], step: int) -> None:
        raise ConnectionError("service\nis gone")

    def finish(self, exit_code: int) -> None:
        raise ConnectionError("still gone")


def tracker_for(directory: Path, text: io.StringIO, mode: str = "offline") -> WandbTracker:
    console = Console(file=text, width=1000)
    return WandbTracker(directory, project="p", name=None, config={}, mode=mode, console=console)


def test_failures_are_one_warning_and_training_goes_on(
    tmp_path: Path, step_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WandbTracker, "_open", lambda *_: Broken())
    text = io.StringIO()
    tracker = tracker_for(tmp_path, text)
    for step in (1, 2, 3):
        tracker.step(step_record(step=step))
    tracker.close(0)
    assert text.getvalue().splitlines() == [
        "warning: wandb failed (ConnectionError: service is gone); training goes on without it"
    ]


def test_a_service_out_of_reach_leaves_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []

    def refuse_online(
        self: WandbTracker, directory: Path, name: str | None, config: object, mode: str
    ) -> Broken:
        modes.append(mode)
        if mode == "online":
            raise TimeoutError("no route")
        return Broken()

    monkeypatch.setattr(WandbTracker, "_open", refuse_online)
    text = io.StringIO()
    tracker_for(tmp_path, text, mode="online")
    assert modes == ["online", "offline"]
    assert "tracking offline instead" in text.getvalue()


def test_disabled_tracks_nothing(tmp_path: Path, step_record: MakeRecord) -> None:
    tracker = tracker_for(tmp_path, io.StringIO(), mode="disabled")
    tracker.step(step_record())
    tracker.close(0)
    assert list(tmp_path.iterdir()) == []


def test_the_wandb_run_is_found_again_and_another_project_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WandbTracker, "_open", lambda *_: Broken())
    first = tracker_for(tmp_path, io.StringIO())
    assert tracker_for(tmp_path, io.StringIO()).run_id == first.run_id
    state = json.loads((tmp_path / "wandb.json").read_text())
    # Lost with everything but a checkpoint, which knows the id too.
    (tmp_path / "wandb.json").unlink()
    console = Console(file=io.StringIO())
    kept = WandbTracker(
        tmp_path, project="p", name=None, config={}, mode="offline", console=console, resumed_id=first.run_id
    )
    assert kept.run_id == first.run_id == stored_run_id(tmp_path)
    (tmp_path / "wandb.json").write_text(json.dumps(state | {"project": "other"}))
    assert tracker_for(tmp_path, io.StringIO()).run_id != first.run_id
