"""What is exported: a verified checkpoint, the adapters it holds, and the model it was trained from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wan_trainer.config.paths import trainer_path
from wan_trainer.models.wan.adapter_files import AdapterConfig, read_adapter_config
from wan_trainer.models.wan.base_lora_files import SHA256_KEY, base_lora_sha256
from wan_trainer.models.wan.directory import EXPERTS, WanDirectory, read_directory
from wan_trainer.recording.identity import model_identity
from wan_trainer.recording.jsonl import Json
from wan_trainer.recording.manifest import Manifest, checkpoint_at, verify_checkpoint
from wan_trainer.recording.run_dir import RunFiles
from wan_trainer.recording.run_record import read_run_record
from wan_trainer.training.checkpoint_state import read_train_state
from wan_trainer.training.stored_state import ADAPTERS, StoredState
from wan_trainer.types import UserError

Section = Literal["model", "ema"]


@dataclass(frozen=True)
class Source:
    """A checkpoint to export from.

    section: the trained weights, or their averages. experts: those that were trained. adapters: their
    configuration by expert, empty after full fine-tuning. started_from: weights that took the place of the
    model directory's before training. base_lora: the adapter that was merged into what the run started with,
    and its digest.
    """

    checkpoint: Path
    manifest: Manifest
    state: StoredState
    section: Section
    experts: tuple[str, ...]
    adapters: Mapping[str, AdapterConfig]
    started_from: Path | None
    base_lora: Path | None = None
    base_lora_sha256: str | None = None

    def checked_base_lora(self, experts: Sequence[str]) -> Path | None:
        """`base_lora`, once it is what the run merged. Raises UserError when it is gone or another one."""
        if self.base_lora is None:
            return None
        if base_lora_sha256(self.base_lora, experts) != self.base_lora_sha256:
            raise UserError(
                f"base_lora: {self.base_lora} is no longer what {self.checkpoint} was trained on: put the "
                "adapter of that run back there"
            )
        return self.base_lora


def open_source(path: Path, *, ema: bool) -> Source:
    """Verify a checkpoint, given by its path or by its run's, and find what it holds.

    Raises UserError when it is damaged, or keeps no averages and `ema` asks for them.
    """
    checkpoint = checkpoint_at(path)
    manifest = verify_checkpoint(checkpoint)
    state = StoredState(checkpoint)
    section: Section = "ema" if ema else "model"
    if ema and not state.shapes(section):
        raise UserError(
            f"{checkpoint} holds no averages (ema_decay was 0): leave --ema out to export the weights as "
            "they are"
        )
    experts = tuple(name for name in EXPERTS if state.shapes(section, f"{name}."))
    if not experts:
        raise UserError(f"{checkpoint} holds no weights of a Wan transformer: name a checkpoint of a run")
    position = read_train_state(checkpoint)
    started_from, model = position.started_from, position.contract.get("model", {})
    return Source(
        checkpoint=checkpoint,
        manifest=manifest,
        state=state,
        section=section,
        experts=experts,
        adapters={
            name: read_adapter_config(checkpoint / ADAPTERS / name)
            for name in experts
            if any(".lora_A." in key for key in state.shapes(section, f"{name}."))
        },
        started_from=None if started_from is None else Path(started_from),
        base_lora=trainer_path(model["base_lora"]) if model.get("base_lora") else None,
        base_lora_sha256=model.get(SHA256_KEY),
    )


def base_model(source: Source, given: Path | None) -> WanDirectory:
    """The model directory that the run started from: `given`, else the one in the run's record.

    Raises UserError when it cannot be found, is incomplete, or holds other files than the record says:
    adapters fit the weights they were trained on only.
    """
    record_path = RunFiles(source.checkpoint.resolve().parent).record
    record = read_run_record(record_path) or {}
    recorded = record.get("model")
    recorded = recorded if isinstance(recorded, Mapping) else {}
    path = given
    if path is None:
        if not isinstance(recorded.get("path"), str):
            raise UserError(
                f"{record_path} does not say which model the run started from: name its directory with "
                "--model"
            )
        path = Path(str(recorded["path"]))
        if not path.is_dir():
            raise UserError(
                f"{path}, the model the run started from, is not there: name its directory with --model"
            )
    directory = read_directory(path)
    changed = _changed_files(directory, recorded)
    if changed:
        listed = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
        raise UserError(
            f"{path} is not the model that the run started from ({record_path}): {listed} differ; name the "
            "right directory with --model"
        )
    return directory


def _changed_files(directory: WanDirectory, recorded: Mapping[str, Json]) -> list[str]:
    """Files the record names that are no longer the same: configurations by content, weights by size."""
    if not recorded:
        return []
    now = model_identity(directory.path, directory.family)
    changed: list[str] = []
    for before, found in ((recorded.get("configs"), now.configs), (recorded.get("weights"), now.weights)):
        if isinstance(before, Mapping):
            changed += [name for name, value in before.items() if found.get(name) != value]
    return changed
