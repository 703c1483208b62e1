"""Weights & Biases. It follows the run, and nothing that happens to it stops the run."""

from __future__ import annotations

import dataclasses
import json
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from rich.console import Console

from wan_trainer.recording.identity import masked
from wan_trainer.recording.jsonl import Json, JsonObject, as_json, encode, write_atomic
from wan_trainer.types import EvaluationRecord, StepRecord

if TYPE_CHECKING:
    import wandb

_STATE_FILE = "wandb.json"
_INIT_TIMEOUT_S = 60
type Mode = Literal["online", "offline", "disabled"]


def wandb_mode(environment: Mapping[str, str]) -> Mode:
    """WANDB_MODE if it says, else online when a key is configured and offline when none is."""
    asked = environment.get("WANDB_MODE", "").lower()
    if asked == "online" or asked == "offline" or asked == "disabled":
        return asked
    if environment.get("WANDB_API_KEY") or _netrc_has_key(environment):
        return "online"
    return "offline"


def _netrc_has_key(environment: Mapping[str, str]) -> bool:
    host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    default = Path(environment.get("HOME", "/")) / ".netrc"
    path = Path(environment.get("NETRC") or default)
    try:
        return host is not None and host in netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return False


def stored_run_id(output_dir: Path) -> str | None:
    """The wandb id of the run in `output_dir`, None when it is not tracked."""
    stored = _read_state(output_dir / _STATE_FILE).get("id")
    return stored if isinstance(stored, str) else None


def _read_state(path: Path) -> JsonObject:
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def tracked_values(record: StepRecord) -> dict[str, float]:
    """A step record as flat numbers: components and experts become `reward/<name>` and `replayed/<name>`."""
    values: dict[str, float] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, bool | int | float):
            values[field.name] = float(value)
    values |= {f"reward/{name}": float(score) for name, score in record.components.items()}
    values |= {f"replayed/{name}": float(count) for name, count in record.replayed_per_expert.items()}
    return values


def evaluation_values(record: EvaluationRecord) -> dict[str, float]:
    """An evaluation as flat numbers under `eval/`."""
    numbers = {
        "batch": record.batch,
        "reward_mean": record.reward_mean,
        "reward_std": record.reward_std,
        "reward_valid_fraction": record.reward_valid_fraction,
        "seconds": record.seconds,
    }
    numbers |= {f"reward/{name}": score for name, score in record.components.items()}
    return {f"eval/{name}": float(value) for name, value in numbers.items()}


class WandbTracker:
    """One wandb run for all starts of a run: its id and last step live in output_dir/wandb.json.

    Steps already logged before a resume are not logged again, so that steps never go back. The first failure
    is one warning and ends tracking, never training; a service out of reach leaves an offline run.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        project: str,
        name: str | None,
        config: Mapping[str, Json],
        mode: Mode,
        console: Console,
        resumed_id: str | None = None,
    ) -> None:
        """resumed_id: the id in the checkpoint that is continued; it serves when wandb.json is lost."""
        self._state_path = output_dir / _STATE_FILE
        self._project = project
        self._console = console
        state = _read_state(self._state_path) or {"id": resumed_id, "project": project}
        if state.get("project") != project:  # in another project it is another wandb run
            state = {}
        stored_id, last = state.get("id"), state.get("last_step")
        self.run_id = stored_id if isinstance(stored_id, str) else os.urandom(8).hex()
        self._last_step = last if isinstance(last, int) else 0
        evaluated = state.get("last_evaluation")
        self._last_evaluation = evaluated if isinstance(evaluated, int) else -1
        self._run: wandb.Run | None = None
        attempts: dict[Mode, tuple[Mode, ...]] = {
            "online": ("online", "offline"),
            "offline": ("offline",),
            "disabled": (),
        }
        for attempt in attempts[mode]:
            try:
                self._run = self._open(output_dir, name, config, attempt)
                self._write_state()
                break
            except Exception as error:  # noqa: BLE001 - a tracking service must not stop training
                self._give_up(error, online=attempt == "online")

    def step(self, record: StepRecord) -> None:
        """Log one update, unless an earlier start already did."""
        if self._run is None or record.step <= self._last_step:
            return
        try:
            self._run.log(tracked_values(record), step=record.step)
            self._last_step = record.step
            self._write_state()
        except Exception as error:  # noqa: BLE001 - a tracking service must not stop training
            self._give_up(error)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Log one evaluation beside the update before it, unless an earlier start already did."""
        if self._run is None or record.batch <= self._last_evaluation:
            return
        try:
            self._run.log(evaluation_values(record), step=max(record.step, self._last_step))
            self._last_evaluation = record.batch
            self._write_state()
        except Exception as error:  # noqa: BLE001 - a tracking service must not stop training
            self._give_up(error)

    def close(self, exit_status: int) -> None:
        """Finish the wandb run; a stop by signal (75) is no failure."""
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            run.finish(exit_code=0 if exit_status in (0, 75) else exit_status)
        except Exception as error:  # noqa: BLE001 - a tracking service must not stop training
            self._give_up(error)

    def _open(self, output_dir: Path, name: str | None, config: Mapping[str, Json], mode: Mode) -> wandb.Run:
        # The import takes a second and starts threads: rank 0 alone pays, and only when it tracks.
        import wandb  # noqa: PLC0415

        # The training process handles its own signals and prints its own progress.
        settings = wandb.Settings(silent=True, console="off", init_timeout=_INIT_TIMEOUT_S, disable_git=True)
        public = masked("", as_json(config))
        assert isinstance(public, dict)
        return wandb.init(
            project=self._project,
            name=name,
            id=self.run_id,
            resume="allow",
            dir=str(output_dir),
            config=public,
            mode=mode,
            settings=settings,
        )

    def _give_up(self, error: Exception, *, online: bool = False) -> None:
        self._run = None
        text = " ".join(str(error).split())[:300]
        rest = "tracking offline instead" if online else "training goes on without it"
        self._console.print(f"warning: wandb failed ({type(error).__name__}: {text}); {rest}")

    def _write_state(self) -> None:
        state: JsonObject = {"id": self.run_id, "project": self._project, "last_step": self._last_step}
        if self._last_evaluation >= 0:
            state["last_evaluation"] = self._last_evaluation
        write_atomic(self._state_path, encode(state))
