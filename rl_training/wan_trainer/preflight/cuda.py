"""What torch finds of CUDA here; torch is not imported where there is no driver, which takes seconds."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

DRIVER = "libcuda.so.1"
_PROBE_TIMEOUT_S = 120.0
_PROBE = (
    "import json, torch; usable = torch.cuda.is_available(); "
    "print(json.dumps([torch.cuda.device_count() if usable else 0, torch.__version__]))"
)


@dataclass(frozen=True)
class CudaDevices:
    """Number of devices that torch can use, and why there is none."""

    count: int
    reason: str = ""


@cache
def cuda_devices() -> CudaDevices:
    """The CUDA devices of this process's environment (CUDA_VISIBLE_DEVICES counts).

    torch is asked in a process of its own: only it knows whether it suits the driver, and preflight should
    hold no GPU memory while the ranks start.
    """
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return CudaDevices(0, f"there is no NVIDIA driver ({DRIVER})")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CudaDevices(0, f"torch did not answer within {_PROBE_TIMEOUT_S:g} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return CudaDevices(0, f"torch cannot be imported ({last})")
    count, version = json.loads(done.stdout.splitlines()[-1])
    return CudaDevices(count, "" if count else f"torch {version} finds no usable device")
