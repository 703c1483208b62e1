"""What a run starts from, beside its model directory."""

from __future__ import annotations

from wan_trainer.config.specs import ModelSpec, RunSpec
from wan_trainer.models.wan.base_lora_files import check_base_lora
from wan_trainer.models.wan.directory import EXPERTS
from wan_trainer.models.wan.starting_weights import check_starting_weights
from wan_trainer.preflight.finding import Finding
from wan_trainer.recording.manifest import (
    checkpoint_at,
    holds_checkpoint,
    latest_checkpoint,
    read_manifest,
)
from wan_trainer.types import UserError


def check_start(spec: RunSpec) -> list[Finding]:
    """`resume_from`, unless the run has a checkpoint of its own to continue.

    Of a checkpoint, the files and their sizes: the run compares their content, which takes minutes.
    """
    path = spec.resume.resume_from
    if path is None or latest_checkpoint(spec.output.output_dir) is not None:
        return []
    if not holds_checkpoint(path) and spec.resume.weights_only:
        experts = [name for name in EXPERTS if (spec.model.path / name).is_dir()]
        return [Finding(line) for line in check_starting_weights(path, experts)]
    try:
        checkpoint = checkpoint_at(path)
        manifest = read_manifest(checkpoint)
    except UserError as error:
        return [Finding(f"resume_from: {line}") for line in error.problems]
    short = [
        name
        for name, entry in manifest.files.items()
        if not (checkpoint / name).is_file() or (checkpoint / name).stat().st_size != entry.size
    ]
    if not short:
        return []
    return [
        Finding(
            f"resume_from: {checkpoint}: {len(short)} files are missing or not as large as its manifest says "
            f"(first: {short[0]}): copy it again, or set another --resume_from"
        )
    ]


def check_base(model: ModelSpec, *, readable: bool) -> list[Finding]:
    """The files of `base_lora` and, where the model directory is `readable`, whether they fit its weights."""
    if model.base_lora is None:
        return []
    experts = [name for name in EXPERTS if (model.path / name).is_dir()]
    lines = check_base_lora(model.base_lora, experts or EXPERTS[:1])
    if lines or not readable:
        return [Finding(line) for line in lines]
    # Needs PyTorch and Diffusers, which take seconds to import; a run without a base LoRA is checked without.
    from wan_trainer.models.wan.weights import expert_weights  # noqa: PLC0415

    for name in experts:
        try:
            expert_weights(model, name)
        except UserError as error:
            lines += error.problems
    return [Finding(line) for line in dict.fromkeys(lines)]
