"""The weights a run starts with when they are not its model directory's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from wan_trainer.config.specs import RunSpec
from wan_trainer.models.wan.base_lora_files import SHA256_KEY, base_lora_identity
from wan_trainer.models.wan.directory import read_directory
from wan_trainer.models.wan.policy import WanPolicy
from wan_trainer.models.wan.starting_weights import check_starting_weights
from wan_trainer.recording.manifest import verify_checkpoint
from wan_trainer.training.checkpoint import load_weights, read_train_state
from wan_trainer.training.resume import ResumePoint, starting_checkpoint
from wan_trainer.training.stored_state import StoredState
from wan_trainer.types import UserError


@dataclass(frozen=True)
class StartingPoint:
    """Weights in place of those of the model directory: of a checkpoint, or of safetensors files.

    path: as it goes into checkpoints, so that later starts read frozen weights and the reference of a KL term
    from it again.
    """

    path: Path
    checkpoint: Path | None

    def applied(self, spec: RunSpec) -> RunSpec:
        """`spec` with the experts read from here."""
        if self.checkpoint is not None:
            return spec
        return replace(spec, model=replace(spec.model, weights_from=self.path))

    def loader(self) -> Callable[[WanPolicy], None] | None:
        """Puts a checkpoint's weights into a policy that was read from the model directory."""
        checkpoint = self.checkpoint
        if checkpoint is None:
            return None

        def load(policy: WanPolicy) -> None:
            load_weights(checkpoint, policy)

        return load


def find_starting_point(spec: RunSpec, resume: ResumePoint | None) -> StartingPoint | None:
    """What the run's weights started from: `resume_from`, or, in a run that goes on, what its first start
    used; None for the model directory. Raises UserError when it is missing or damaged.
    """
    if resume is None:
        path = spec.resume.resume_from
    else:
        started_from = resume.state.started_from
        path = None if started_from is None or not _still_needed(spec) else Path(started_from)
        if path is not None and not path.exists():
            raise UserError(
                f"{resume.checkpoint}: its run started from the weights in {path}, which holds what it does "
                "not train and the reference of its KL term, and is gone: put it back there"
            )
    if path is None:
        return None
    checkpoint = starting_checkpoint(path)
    if checkpoint is None:
        directory = read_directory(spec.model.path, spec.model.family)
        problems = check_starting_weights(path, directory.experts)
        if problems:
            raise UserError(*problems)
        return StartingPoint(path.resolve(), None)
    verify_checkpoint(checkpoint)
    _check_base_lora(spec, checkpoint)
    if any(".lora_A." in name for name in StoredState(checkpoint).shapes("model")):
        _check_adapters_start(spec, checkpoint)
    return StartingPoint(checkpoint.resolve(), checkpoint)


def _still_needed(spec: RunSpec) -> bool:
    """Whether a run that goes on reads its starting weights again: all it trains is in its checkpoint."""
    return spec.model.lora is not None or spec.model.train_experts != "both" or spec.grpo.kl_coeff > 0


def _check_base_lora(spec: RunSpec, checkpoint: Path) -> None:
    """The weights of a checkpoint have its run's base LoRA in them, or are adapters to a base that has."""
    before = read_train_state(checkpoint).contract.get("model", {})
    ours = base_lora_identity(spec.model.path, spec.model.base_lora)
    if before.get(SHA256_KEY) != ours.get(SHA256_KEY):
        raise UserError(
            f"base_lora: {spec.model.base_lora or 'null'} is not what {checkpoint} was trained on "
            f"({before.get('base_lora') or 'null'}): set that one; or export the checkpoint (wan-trainer "
            "export --to diffusers) and start from the result, which needs none"
        )


def _check_adapters_start(spec: RunSpec, checkpoint: Path) -> None:
    merged = "merge them (wan-trainer export --to diffusers) and start from the result"
    if spec.model.lora is None:
        raise UserError(
            f"lora_rank: {checkpoint} holds adapters and this run trains whole weights: {merged}, or set "
            "--lora_rank to train on"
        )
    before = read_train_state(checkpoint).started_from
    if before is not None:
        raise UserError(
            f"resume_from: {checkpoint} holds adapters to the weights of {before}, not to model_path's: "
            f"{merged}"
        )
    if spec.grpo.kl_coeff > 0:
        raise UserError(
            f"grpo_kl_coeff: {spec.grpo.kl_coeff:g} measures from the weights without adapters, and "
            f"{checkpoint} starts with some: {merged}, or set --grpo_kl_coeff 0"
        )
