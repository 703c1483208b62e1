"""What `device: cpu` settles, and what is refused because it is not built."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wan_trainer.config.schema import GrpoConfig

CPU_SOURCE = "device: cpu"
CPU_ATTENTION = ("native", "_native_math")


def cpu_changes(config: GrpoConfig) -> dict[str, object]:
    """The values that a CPU run has instead of those of `config`: a declared resolution, often empty.

    GPU kernels give way to what exists on a CPU. param_dtype is replaced only where the user left it open:
    bfloat16 does run on a CPU.
    """
    changes: dict[str, object] = {}
    if config.attention_backend not in CPU_ATTENTION:
        changes["attention_backend"] = "native"
    if config.use_liger_kernel:
        changes["use_liger_kernel"] = False
    if config.grpo_offload_inference_models:
        # There is no device memory to free.
        changes["grpo_offload_inference_models"] = False
    if config.torch_compile_backend == "inductor":
        changes["torch_compile_backend"] = "aot_eager"
        if config.torch_compile_mode is not None:
            changes["torch_compile_mode"] = None
    if "param_dtype" not in config.model_fields_set and config.param_dtype != "float32":
        changes["param_dtype"] = "float32"
    return changes


def resolve_device(config: GrpoConfig, *, cuda_available: bool) -> GrpoConfig:
    """`config` with `device: auto` settled, and with what a CPU run changes when it is settled to cpu."""
    device = config.device
    if device == "auto":
        device = "cuda" if cuda_available else "cpu"
    if device == "cuda":
        return config.model_copy(update={"device": "cuda"})
    return config.model_copy(update={**cpu_changes(config), "device": "cpu"})


def unbuilt(config: GrpoConfig) -> list[str]:
    """What `config` asks for and is not built, one line each with the remedy.

    Ask after `resolve_device`: on a CPU the kernels in question are already replaced. Commands that train or
    validate refuse these; commands that only show a configuration do not.
    """
    lines: list[str] = []

    def refuse(condition: bool, line: str) -> None:
        if condition:
            lines.append(line)

    refuse(
        config.eval_steps > 0,
        f"eval_steps: {config.eval_steps}: evaluation in training is not built; use --eval_steps 0",
    )
    return lines
