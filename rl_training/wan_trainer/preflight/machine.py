"""This machine: CUDA devices, compiler, Python headers, Triton's driver, disk space."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from wan_trainer.config.specs import Device, ModelSpec
from wan_trainer.models.wan.directory import EXPERTS, trained_experts
from wan_trainer.models.wan.weight_files import count_adapter_elements, count_elements
from wan_trainer.preflight.cuda import cuda_devices
from wan_trainer.preflight.finding import Finding

_TOOL_TIMEOUT_S = 120.0
_TRITON_PROBE = "from triton.runtime import driver; print(driver.active.get_current_target())"
# Where files are shared by machines; what each of them compiles must not meet there.
_NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "9p", "fuse.")


def check_accelerator(device: Device, nproc: int, env: Mapping[str, str], *, stated: str) -> list[Finding]:
    """GPU checks for a CUDA run; on the CPU one note that there are none. `stated`: the config's device."""
    if device == "cpu":
        why = "" if stated == "cpu" else f" ({cuda_devices().reason})"
        return [Finding(f"device is cpu{why}: CUDA devices, compiler and Triton were not checked", "note")]
    found = cuda_devices()
    if not found.count:
        line = (
            f"device is cuda, but {found.reason}: run where there are GPUs and a driver that suits torch, or "
            "pass --device cpu (gloo; meant for tiny models)"
        )
        return [Finding(line)]
    problems: list[Finding] = []
    count = found.count
    if count < nproc:
        visible = env.get("CUDA_VISIBLE_DEVICES")
        which = f"CUDA_VISIBLE_DEVICES={visible} leaves" if visible is not None else "this machine has"
        problems.append(Finding(f"--nproc {nproc}, but {which} {count} CUDA devices: pass --nproc {count}"))
    if env.get("WAN_TRAINER_SKIP_TRITON_PREFLIGHT") == "1":
        problems.append(
            Finding("WAN_TRAINER_SKIP_TRITON_PREFLIGHT=1: compiler and Triton were not checked", "note")
        )
        return problems
    env = compiler_environment(env)
    toolchain = check_toolchain(env) + check_triton_cache(env)
    problems += toolchain
    return problems if any(finding.kind == "error" for finding in toolchain) else problems + check_triton(env)


def compiler_environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with WAN_TRAINER_PYTHON_INCLUDE on the compiler's path, as the launcher puts it there."""
    include = env.get("WAN_TRAINER_PYTHON_INCLUDE")
    known = env.get("CPATH", "").split(os.pathsep)
    if not include or include in known:
        return dict(env)
    return {**env, "CPATH": os.pathsep.join([include, *filter(None, known)])}


def check_toolchain(env: Mapping[str, str]) -> list[Finding]:
    """Triton compiles a C extension against Python.h when it starts: compile as much of one here."""
    findings: list[Finding] = []
    names = [env["CC"]] if env.get("CC") else ["gcc", "cc", "clang"]
    compiler = next(filter(None, (shutil.which(name, path=env.get("PATH")) for name in names)), None)
    if compiler is None:
        line = f"no C compiler ({', '.join(names)}) on PATH, Triton needs one: install gcc, or set CC"
        findings.append(Finding(line))
    folders = [sysconfig.get_path("include")]
    for name in ("CPATH", "C_INCLUDE_PATH"):
        folders += [folder for folder in env.get(name, "").split(os.pathsep) if folder]
    if not any(Path(folder, "Python.h").is_file() for folder in folders):
        line = (
            f"Python.h is not in {folders[0]}, Triton needs it: install the headers of Python 3.12 "
            "(python3.12-dev), or set WAN_TRAINER_PYTHON_INCLUDE to their directory"
        )
        findings.append(Finding(line))
    if compiler is not None and not findings:
        command = [compiler, "-fsyntax-only", f"-I{folders[0]}", "-x", "c", "-"]
        reason = _failure(command, env, source="#include <stdint.h>\n#include <Python.h>\n", last=False)
        if reason:
            line = (
                f"{compiler} does not compile Python.h ({reason}), Triton needs it: install the C library's "
                "headers (libc6-dev) and those of this Python, or set CC and WAN_TRAINER_PYTHON_INCLUDE"
            )
            findings.append(Finding(line))
    return findings


def check_triton(env: Mapping[str, str]) -> list[Finding]:
    """Build and load Triton's driver in a process of its own, so that preflight holds no GPU memory."""
    reason = _failure([sys.executable, "-c", _TRITON_PROBE], env)
    if not reason:
        return []
    line = (
        f"Triton cannot build its driver ({reason}): check TRITON_CACHE_DIR, the compiler and libcuda.so.1, "
        "or set WAN_TRAINER_SKIP_TRITON_PREFLIGHT=1 when nothing compiled is used"
    )
    return [Finding(line)]


def check_triton_cache(env: Mapping[str, str]) -> list[Finding]:
    """TRITON_CACHE_DIR can be written, and is this machine's own."""
    folder = Path(env.get("TRITON_CACHE_DIR") or "~/.triton/cache").expanduser()
    existing = nearest_existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return [
            Finding(
                f"TRITON_CACHE_DIR {folder}: {existing} is not a writable directory: set it to a local one"
            )
        ]
    kind = file_system(existing)
    if kind.startswith(_NETWORK_FILE_SYSTEMS):
        return [
            Finding(
                f"TRITON_CACHE_DIR {folder} is on a shared file system ({kind}), where machines overwrite "
                "each other's kernels: set it to a local directory",
                "warning",
            )
        ]
    return []


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that holds `path`; empty where it cannot be told."""
    try:
        lines = mounts.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    target, best, kind = path.resolve(), -1, ""
    for line in lines:
        fields = line.split()
        if len(fields) > 2:
            # Blanks in a mount point are written as \040.
            point = Path(fields[1].replace("\\040", " "))
            if target.is_relative_to(point) and len(point.parts) >= best:
                best, kind = len(point.parts), fields[2]
    return kind


def _failure(command: list[str], env: Mapping[str, str], *, source: str = "", last: bool = True) -> str:
    """Why `command` fails, by the last line that it wrote to stderr or the first; empty when it does not."""
    try:
        done = subprocess.run(
            command,
            input=source,
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=_TOOL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_TOOL_TIMEOUT_S:g} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return lines[-1] if last else next((line for line in lines if "error" in line), lines[0])


def check_disk(output_dir: Path, model: ModelSpec, ema: bool) -> list[Finding]:
    """Writable, and room for two checkpoints: fp32 parameters, two Adam moments, and EMA if there is one."""
    folder = nearest_existing(output_dir)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return [
            Finding(
                f"output_dir {output_dir}: {folder} is not a writable directory: set another --output_dir"
            )
        ]
    needed = 2 * 4 * (3 + int(ema)) * checkpoint_elements(model)
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return []
    line = (
        f"output_dir {output_dir} has {_size(free)} free, two checkpoints need {_size(needed)}: free some "
        "space or set another --output_dir"
    )
    return [Finding(line)]


def checkpoint_elements(model: ModelSpec) -> int:
    """Number of trained parameters, from the headers of the weight files."""
    present = [name for name in EXPERTS if (model.path / name).is_dir()]
    components = [model.path / name for name in trained_experts(model, present)]
    if model.lora is None:
        return sum(map(count_elements, components))
    lora = model.lora
    return sum(count_adapter_elements(path, lora.rank, lora.target_modules) for path in components)


def _size(count: int) -> str:
    """A number of bytes in the unit in which it has digits."""
    unit, name = next(
        (
            (1 << shift, name)
            for shift, name in ((30, "GiB"), (20, "MiB"), (10, "KiB"))
            if count >= 1 << shift
        ),
        (1, "bytes"),
    )
    return f"{count / unit:.1f} {name}" if unit > 1 else f"{count} {name}"


def check_scratch(name: str, folder: Path) -> list[Finding]:
    """A directory for temporary files can be made and written."""
    existing = nearest_existing(folder)
    if existing.is_dir() and os.access(existing, os.W_OK):
        return []
    return [Finding(f"{name} {folder}: {existing} is not a writable directory: set another --{name}")]


def nearest_existing(path: Path) -> Path:
    """`path`, or its nearest ancestor that exists."""
    for candidate in (path, *path.parents):
        if candidate.exists():
            return candidate
    return path
