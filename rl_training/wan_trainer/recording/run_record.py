"""run.json: what a run was, so that it can be repeated, compared, resumed and audited.

Each start of the run is an entry of `starts`; the fields at the top describe the newest start that got as
far as training. The file is always replaced as a whole, so a reader never sees half a record.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wan_trainer.recording.identity import (
    AttentionIdentity,
    CodeIdentity,
    DatasetIdentity,
    EvaluatorIdentity,
    ModelIdentity,
    WeightsIdentity,
    launcher_environment,
    masked,
    masked_arguments,
    package_versions,
)
from wan_trainer.recording.jsonl import Json, JsonObject, as_json, encode, write_atomic
from wan_trainer.types import UserError

FORMAT = 1
RUNNING = "running"
# Exit statuses of every command. The launcher hands on the recorded one: torchrun turns every failure into 1.
_STATUS_WORDS = {0: "finished", 1: "failed", 2: "refused", 75: "stopped"}


@dataclass(frozen=True)
class SamplerRecord:
    """How rollouts are drawn. sigmas: the grid as used, num_steps + 1 values from 1 down to 0."""

    kind: str
    sigmas: tuple[float, ...]
    eta: float
    eta_range: tuple[float, float] | None
    cfg_scale: float
    flow_shift: float
    replay_ratio: float
    share_group_init_noise: bool
    seed: int


@dataclass(frozen=True)
class RunFacts:
    """Everything run.json says about one start, gathered before step 0.

    config, sources: the resolved public config and where each value came from. contract_digests and
    contract_values: per group, what a resumed run must agree with. topology: any dataclass of plain values.
    device: in words. algorithm: "grpo", say. start_batch: batches already done when this start began.
    initial_weights: what took the place of the model directory's. targets: parts of the user's own by
    configuration key: their import path and a digest of their source. trained: what is trained, by expert and
    kind of module. base_lora_sha256: of the adapter merged into the weights, as the contract has it.
    """

    algorithm: str
    device: str
    config_path: Path
    config: Mapping[str, Json]
    sources: Mapping[str, str]
    overrides: Sequence[str]
    contract_digests: Mapping[str, str]
    contract_values: Mapping[str, Mapping[str, Json]]
    topology: object
    sampler: SamplerRecord
    model: ModelIdentity
    dataset: DatasetIdentity
    evaluator: EvaluatorIdentity | None
    attention: AttentionIdentity
    code: CodeIdentity
    start_batch: int = 0
    initial_weights: WeightsIdentity | None = None
    targets: Mapping[str, Json] = field(default_factory=dict[str, Json])
    trained: Sequence[Mapping[str, Json]] = ()
    base_lora_sha256: str | None = None


@dataclass(frozen=True)
class FinalCheckpoint:
    """The checkpoint a run ended with, and whether its manifest verified."""

    path: Path
    step: int
    verified: bool


def read_run_record(path: Path) -> JsonObject | None:
    """The content of run.json, or None when there is none. Raises UserError when it is not a JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): restore it, or move it away") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a run record: restore it, or move it away")
    return value


def _starts(record: JsonObject | None) -> list[JsonObject]:
    starts = (record or {}).get("starts")
    return [dict(item) for item in starts if isinstance(item, Mapping)] if isinstance(starts, list) else []


class RunRecord:
    """The record of the run in one output directory, written by rank 0 of a start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._id = uuid.uuid4().hex

    def start(self, facts: RunFacts, environment: Mapping[str, str] | None = None) -> None:
        """Write the record with status "running". Earlier starts are kept; one without an end was killed."""
        environment = os.environ if environment is None else environment
        now = time.time()
        previous = read_run_record(self.path)
        entry = self._entry(now)
        entry["overrides"] = masked_arguments(facts.overrides)
        entry["environment"] = launcher_environment(environment)
        entry["start_batch"] = facts.start_batch
        entry["commit"] = facts.code.commit
        first_start = (previous or {}).get("start", now)
        record: JsonObject = {
            "format": FORMAT,
            "status": RUNNING,
            "exit_status": None,
            "reason": None,
            "start": first_start,
            "end": None,
            "algorithm": facts.algorithm,
            "device": facts.device,
            "config_path": str(facts.config_path),
            "overrides": entry["overrides"],
            "environment": entry["environment"],
            "config": masked("", as_json(facts.config)),
            "sources": as_json(facts.sources),
            "contract": {
                "digests": as_json(facts.contract_digests),
                "values": masked("", as_json(facts.contract_values)),
            },
            "topology": as_json(facts.topology),
            "sampler": as_json(facts.sampler),
            "model": as_json(facts.model),
            "initial_weights": as_json(facts.initial_weights),
            "base_lora": {"sha256": facts.base_lora_sha256},
            "trained": as_json(facts.trained),
            "dataset": as_json(facts.dataset),
            "evaluator": as_json(facts.evaluator),
            "attention": as_json(facts.attention),
            "code": as_json(facts.code),
            "targets": as_json(facts.targets),
            "packages": package_versions(),
            "final_checkpoint": None,
            "starts": [*_starts(previous), entry],
        }
        self._write(record)

    def finish(
        self, exit_status: int, reason: str = "", final_checkpoint: FinalCheckpoint | None = None
    ) -> None:
        """Write how this start ended. Without a `start` before it (a refused start), only `starts` tells.

        A refusal says nothing about the run that is already there, so its status stays as it was.
        """
        record = read_run_record(self.path) or {"format": FORMAT}
        starts = _starts(record)
        mine = next((entry for entry in starts if entry.get("id") == self._id), None)
        outcome: JsonObject = {
            "status": _STATUS_WORDS.get(exit_status, "failed"),
            "exit_status": exit_status,
            "reason": reason or None,
            "end": time.time(),
        }
        trained = mine is not None
        if mine is None:
            mine = self._entry(time.time())
            starts.append(mine)
        mine.update(outcome)
        if trained or "status" not in record:
            record.update(outcome)
        if trained and final_checkpoint is not None:
            record["final_checkpoint"] = as_json(final_checkpoint)
        record["starts"] = starts
        self._write(record)

    def _entry(self, now: float) -> JsonObject:
        host = socket.gethostname()
        times: JsonObject = {
            "start": now,
            "end": None,
            "status": RUNNING,
            "exit_status": None,
            "reason": None,
        }
        return {"id": self._id, "host": host, "pid": os.getpid(), **times}

    def _write(self, record: JsonObject) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, encode(record, indent=1) + b"\n")
