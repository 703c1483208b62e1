"""Kernel checks: the cache on any machine, the kernels themselves behind the process that runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from rl_training.tests.models.kernel_repository import WRONG, forget_kernels, write_snapshot
from rl_training.tests.preflight.test_validate import errors
from wan_trainer.preflight import kernels
from wan_trainer.preflight.cuda import CudaDevices, cuda_devices
from wan_trainer.preflight.kernels import check_kernels, run_kernels

FLASH = "_flash_3_hub"


@pytest.fixture
def flash(tiny_spec, tiny_ti2v):
    """A model specification of a CUDA run with FlashAttention-3 and without Liger."""
    spec = tiny_spec(tiny_ti2v)
    return replace(spec, device="cuda", attention_backend=FLASH, param_dtype="bfloat16")


def test_the_cache_is_looked_at_without_a_gpu(flash, tmp_path):
    env = {"WAN_TRAINER_KERNELS_CACHE": str(tmp_path), "KERNELS_CACHE": "/ambient"}
    (finding,) = check_kernels(flash, 128, env)
    assert finding.kind == "error"
    assert f"wan-trainer prefetch-attention-kernel --attention_backend {FLASH}" in finding.message
    assert str(tmp_path) in finding.message
    assert check_kernels(replace(flash, device="cpu"), 128, env) == []
    assert check_kernels(replace(flash, attention_backend="native"), 128, env) == []
    write_snapshot(tmp_path)
    if not cuda_devices().count:
        assert check_kernels(flash, 128, env) == []


@pytest.mark.skipif(cuda_devices().count > 0, reason="this machine has a CUDA device")
def test_validate_names_gpu_and_kernel_each_in_a_line(world, tmp_path, monkeypatch):
    monkeypatch.setenv("WAN_TRAINER_KERNELS_CACHE", str(tmp_path / "none"))
    world.set(device="cuda", attention_backend=FLASH, use_liger_kernel=True)
    lines = errors(world)
    assert [("--device cpu" in line, "prefetch-attention-kernel" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]


def test_what_the_kernels_say_is_passed_on(flash, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "cuda_devices", lambda: CudaDevices(8))
    write_snapshot(tmp_path)
    env = {"WAN_TRAINER_KERNELS_CACHE": str(tmp_path)}
    model = replace(flash, use_liger_kernel=True)
    asked = (
        "import sys, json; _, *rest = json.loads(sys.argv[1]); print('noise'); print(json.dumps([str(rest)]))"
    )
    monkeypatch.setattr(kernels, "_PROBE", asked)
    (finding,) = check_kernels(model, 96, env)
    assert finding.message == "[96, 'bfloat16', True, 'cuda']"
    (finding,) = check_kernels(model, 96, {**env, "WAN_TRAINER_SKIP_TRITON_PREFLIGHT": "1"})
    assert finding.message == "[96, 'bfloat16', False, 'cuda']"
    assert check_kernels(replace(flash, attention_backend="native"), 96, env) == []


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("raise ImportError('libtorch is not there')", "libtorch is not there"),
        ("import os; os.abort()", "exit status -6"),
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
    ],
)
def test_a_kernel_that_ends_its_process_is_reported(flash, monkeypatch, probe, reason):
    monkeypatch.setattr(kernels, "_PROBE", probe)
    monkeypatch.setattr(kernels, "_PROBE_TIMEOUT_S", 0.5 if "sleep" in probe else 60)
    (line,) = run_kernels(flash, 96, "cuda", {})
    assert reason in line and "--attention_backend native" in line


def test_the_process_runs_the_kernel_of_the_cache(tmp_path, monkeypatch, capsys):
    """On the CPU, where the stand-in kernel runs too; that Liger needs CUDA is the other line.

    The process's program runs here: in a new one its imports would take seconds.
    """
    forget_kernels(monkeypatch)
    write_snapshot(tmp_path, kernel=WRONG)
    monkeypatch.setenv("WAN_TRAINER_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["-c", json.dumps([FLASH, 32, "bfloat16", True, "cpu"])])
    exec(kernels._PROBE, {})
    wrong, liger = json.loads(capsys.readouterr().out)
    assert "away from exact attention" in wrong
    assert "use_liger_kernel: true needs a CUDA device" in liger


def test_a_run_asks_no_network_for_files():
    """The libraries read it when they are imported, so it is set before the first of them is."""
    check = """
        import argparse, os, sys
        from wan_trainer.cli import train

        class Watch:
            def find_spec(self, name, *rest):
                if name in ("torch", "huggingface_hub", "diffusers"):
                    print(os.environ["HF_HUB_OFFLINE"], os.environ["TRANSFORMERS_OFFLINE"])
                    raise SystemExit

        sys.meta_path.insert(0, Watch())
        train.run(argparse.Namespace(config="none", allow_changed=[]), [])
    """
    env = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(check)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "1 1\n"
