"""The kernels of a CUDA run: attention from the offline cache, Liger, and whether the GPU runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from wan_trainer.config.specs import ModelSpec
from wan_trainer.models.wan.kernel_cache import check_cached, kernels_cache
from wan_trainer.preflight.cuda import cuda_devices
from wan_trainer.preflight.finding import Finding

_PROBE_TIMEOUT_S = 300.0
_PROBE = (
    "import json, sys; from wan_trainer.models.wan.kernel_probe import kernel_problems; "
    "print(json.dumps(kernel_problems(*json.loads(sys.argv[1]))))"
)


def check_kernels(model: ModelSpec, head_dim: int, env: Mapping[str, str]) -> list[Finding]:
    """What keeps the attention backend and Liger from training here; nothing for a CPU run.

    The cache is looked at on any machine. With a GPU the kernels are also run, forward and backward, in a
    process of its own: preflight holds no GPU memory, and a kernel that ends its process is reported.
    """
    if model.device == "cpu":
        return []
    lines = check_cached(model.attention_backend, kernels_cache(env))
    if not lines and cuda_devices().count and (model.attention_backend != "native" or model.use_liger_kernel):
        lines = run_kernels(model, head_dim, "cuda", env)
    return [Finding(line) for line in lines]


def run_kernels(model: ModelSpec, head_dim: int, device: str, env: Mapping[str, str]) -> list[str]:
    """Run the kernels of `model` in a process of their own; what failed, a line each."""
    skipped = env.get("WAN_TRAINER_SKIP_TRITON_PREFLIGHT") == "1"
    question = [
        model.attention_backend,
        head_dim,
        model.param_dtype,
        model.use_liger_kernel and not skipped,
        device,
    ]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, json.dumps(question)],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            env=dict(env),
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_PROBE_TIMEOUT_S:g} s"
    else:
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return [
        f"attention_backend {model.attention_backend}, use_liger_kernel "
        f"{str(model.use_liger_kernel).lower()}: the kernels do not run here ({reason}): use "
        "--attention_backend native and --no-use_liger_kernel"
    ]
