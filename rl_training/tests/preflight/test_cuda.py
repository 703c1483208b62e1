"""The CUDA probe: what is said when there is no driver, and when torch does not answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from wan_trainer.preflight import cuda


@pytest.fixture(autouse=True)
def fresh_answer():
    cuda.cuda_devices.cache_clear()
    yield
    cuda.cuda_devices.cache_clear()


def test_without_a_driver_torch_is_not_asked(monkeypatch):
    monkeypatch.setattr(cuda, "DRIVER", "libno-such-driver.so.1")
    monkeypatch.setattr(cuda, "_PROBE", "raise SystemExit('asked')")
    found = cuda.cuda_devices()
    assert found.count == 0 and "libno-such-driver.so.1" in found.reason


@pytest.mark.parametrize(
    ("probe", "count", "reason"),
    [
        ("print('noise'); print('[3, \"2.13\"]')", 3, ""),
        ("print('[0, \"2.13\"]')", 0, "torch 2.13 finds no usable device"),
        ("raise ImportError('libcudart missing')", 0, "libcudart missing"),
    ],
)
def test_torchs_answer_counts(monkeypatch, probe, count, reason):
    monkeypatch.setattr(cuda, "DRIVER", "libc.so.6")
    monkeypatch.setattr(cuda, "_PROBE", probe)
    found = cuda.cuda_devices()
    assert found.count == count
    assert reason in found.reason and bool(reason) == bool(found.reason)


def test_a_probe_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(cuda, "DRIVER", "libc.so.6")
    monkeypatch.setattr(cuda, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(cuda, "_PROBE_TIMEOUT_S", 0.5)
    assert "did not answer within 0.5 s" in cuda.cuda_devices().reason


def test_preflight_imports_without_torch():
    check = "import sys; import wan_trainer.cli.validate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0
