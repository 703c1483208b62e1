"""What `device: cpu` settles."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wan_trainer.config.schema import TrainConfig

CPU_SOURCE = "device: cpu"
CPU_ATTENTION = ("native", "_native_math")


def cpu_changes(config: TrainConfig) -> dict[str, object]:
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


def resolve_device(config: TrainConfig, *, cuda_available: bool) -> TrainConfig:
    """`config` with `device: auto` settled, and with what a CPU run changes when it is settled to cpu."""
    device = config.device
    if device == "auto":
        device = "cuda" if cuda_available else "cpu"
    if device == "cuda":
        return config.model_copy(update={"device": "cuda"})
    return config.model_copy(update={**cpu_changes(config), "device": "cpu"})
