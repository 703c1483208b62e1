"""Machine checks: what is missing is named, what is there passes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from wan_trainer.preflight import machine
from wan_trainer.preflight.cuda import cuda_devices
from wan_trainer.preflight.machine import (
    check_accelerator,
    check_disk,
    check_scratch,
    check_toolchain,
    check_triton,
    check_triton_cache,
    checkpoint_elements,
    compiler_environment,
    file_system,
    nearest_existing,
)

needs_gpu = pytest.mark.skipif(cuda_devices().count == 0, reason="needs a CUDA device")


def fake_compiler(folder: Path) -> Path:
    compiler = folder / "gcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return compiler


def test_a_cpu_run_says_what_was_skipped():
    (problem,) = check_accelerator("cpu", 64, {}, stated="cpu")
    assert problem.kind == "note" and "were not checked" in problem.message


@pytest.mark.skipif(cuda_devices().count > 0, reason="this machine has a CUDA device")
def test_an_automatic_cpu_run_says_why():
    (problem,) = check_accelerator("cpu", 64, {}, stated="auto")
    assert cuda_devices().reason in problem.message


@pytest.mark.skipif(cuda_devices().count > 0, reason="this machine has a CUDA device")
def test_a_cuda_run_without_a_gpu_is_one_line_with_the_remedy():
    (problem,) = check_accelerator("cuda", 8, {}, stated="cuda")
    assert problem.kind == "error" and "--device cpu" in problem.message


@pytest.mark.gpu
@needs_gpu
def test_too_many_processes_for_the_devices():
    count = cuda_devices().count
    found = check_accelerator("cuda", count + 1, {"WAN_TRAINER_SKIP_TRITON_PREFLIGHT": "1"}, stated="cuda")
    assert f"--nproc {count}" in found[0].message and found[1].kind == "note"


@pytest.mark.gpu
@needs_gpu
def test_a_whole_machine_passes():
    assert check_accelerator("cuda", 1, os.environ, stated="cuda") == []


def test_a_missing_compiler_and_missing_headers_are_both_named(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    found = [problem.message for problem in check_toolchain({"PATH": str(tmp_path)})]
    assert len(found) == 2
    assert "compiler" in found[0] and "Python.h" in found[1]


def test_headers_elsewhere_and_a_compiler_on_path_pass(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "none"))
    (tmp_path / "Python.h").touch()
    fake_compiler(tmp_path)
    assert check_toolchain({"PATH": str(tmp_path), "CPATH": f"/nowhere:{tmp_path}"}) == []
    env = {"PATH": str(tmp_path), "WAN_TRAINER_PYTHON_INCLUDE": str(tmp_path), "CPATH": "/nowhere"}
    assert check_toolchain(env) != []
    assert compiler_environment(env)["CPATH"] == f"{tmp_path}:/nowhere"
    assert check_toolchain(compiler_environment(env)) == []
    assert compiler_environment({"PATH": "/bin"}) == {"PATH": "/bin"}


def test_headers_that_do_not_compile_are_found_by_compiling(tmp_path):
    """With this machine's compiler: headers of the C library may be what is missing."""
    assert check_toolchain(os.environ) == []
    (tmp_path / "stdint.h").write_text("#error no C library here\n")
    (finding,) = check_toolchain({**os.environ, "CPATH": str(tmp_path)})
    assert "no C library here" in finding.message and "WAN_TRAINER_PYTHON_INCLUDE" in finding.message


@pytest.mark.skipif(cuda_devices().count > 0, reason="this machine has a CUDA device")
def test_triton_without_a_driver_gives_its_last_line():
    (problem,) = check_triton(os.environ)
    assert problem.message.startswith("Triton cannot build its driver (")


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    (problem,) = check_scratch("vbvr_reward_tmp_dir", file / "below")
    assert str(file) in problem.message and "--vbvr_reward_tmp_dir" in problem.message
    assert check_scratch("vbvr_reward_tmp_dir", tmp_path / "new" / "deep") == []


def test_nearest_existing_climbs(tmp_path):
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
    assert nearest_existing(tmp_path) == tmp_path


def test_checkpoint_size_counts_what_is_trained(tiny_spec, tiny_a14b):
    both = checkpoint_elements(tiny_spec(tiny_a14b, family="i2v-a14b"))
    high = checkpoint_elements(tiny_spec(tiny_a14b, family="i2v-a14b", train_experts="high"))
    low = checkpoint_elements(tiny_spec(tiny_a14b, family="i2v-a14b", train_experts="low"))
    assert both == high + low > high > 0
    adapters = checkpoint_elements(tiny_spec(tiny_a14b, family="i2v-a14b", lora_rank=2))
    assert 0 < adapters < both


def test_a_full_disk_names_both_sizes(tiny_spec, tiny_ti2v, tmp_path, monkeypatch):
    spec = tiny_spec(tiny_ti2v)
    assert check_disk(tmp_path / "new", spec, ema=False) == []
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    (problem,) = check_disk(tmp_path / "new", spec, ema=False)
    assert "has 1000 bytes free, two checkpoints need" in problem.message
    assert " 0.0 " not in problem.message


def test_an_output_directory_that_is_a_file_is_refused(tiny_spec, tiny_ti2v, tmp_path):
    (tmp_path / "taken").touch()
    (problem,) = check_disk(tmp_path / "taken", tiny_spec(tiny_ti2v), ema=False)
    assert "output_dir" in problem.message


def test_tritons_cache_is_writable_and_local(tmp_path, monkeypatch):
    assert check_triton_cache({"TRITON_CACHE_DIR": str(tmp_path / "new")}) == []
    (tmp_path / "file").touch()
    (finding,) = check_triton_cache({"TRITON_CACHE_DIR": str(tmp_path / "file" / "below")})
    assert finding.kind == "error" and "TRITON_CACHE_DIR" in finding.message
    monkeypatch.setattr(machine, "file_system", lambda path: "nfs4")
    (finding,) = check_triton_cache({"TRITON_CACHE_DIR": str(tmp_path)})
    assert finding.kind == "warning" and "nfs4" in finding.message


def test_the_file_system_of_a_path_is_that_of_its_nearest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path.parent} nfs4 rw 0 0\nbroken\n")
    assert file_system(tmp_path, mounts) == "nfs4"
    assert file_system(tmp_path.parent.parent, mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "none") == ""
