"""What a start reads from its environment, and what it says first."""

from __future__ import annotations

import pytest

from wan_trainer.config import load_with_sources
from wan_trainer.config.specs import OptimizerSpec
from wan_trainer.training.start import device_lines, native_threads, unfinished_warmup
from wan_trainer.types import UserError


@pytest.mark.parametrize(
    ("text", "threads"), [("", 1), ("1", 1), ("4,2", 4), (" 3 ", 3), ("2, 1", 2), (" ", 1)]
)
def test_threads_are_the_first_number_of_the_openmp_form(text: str, threads: int) -> None:
    assert native_threads(text) == threads


@pytest.mark.parametrize("text", ["all", "0", "-1", "2.5", "x,2"])
def test_threads_that_are_no_number_are_one_line(text: str) -> None:
    with pytest.raises(UserError) as caught:
        native_threads(text)
    (line,) = caught.value.problems
    assert line.startswith(f"OMP_NUM_THREADS: '{text}' is not a number of threads;")


@pytest.mark.parametrize("compiled", [True, False])
def test_a_cpu_run_names_the_settings_it_changes_and_uses(compiled: bool) -> None:
    switch = "--torch_compile" if compiled else "--no-torch_compile"
    lines = device_lines(load_with_sources("configs/train_rl_5b_cps.yaml", ["--device", "cpu", switch]))
    assert "device: cpu sets attention_backend to native" in lines
    assert "device: cpu sets use_liger_kernel to False" in lines
    assert ("device: cpu sets torch_compile_backend to aot_eager" in lines) == compiled
    assert not any("torch_compile_mode" in line for line in lines)


def test_a_run_that_ends_in_its_warm_up_is_warned_about() -> None:
    spec = OptimizerSpec(
        learning_rate=5e-6,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.01,
        max_grad_norm=1.0,
        warmup_steps=5,
        lr_schedule="cosine",
        gradient_accumulation_steps=1,
        max_nonfinite_steps=3,
        ema_decay=0.0,
    )
    assert unfinished_warmup(spec, 5) is None
    warning = unfinished_warmup(spec, 4)
    assert warning is not None and "warmup_steps 5" in warning and "4 updates" in warning and "80%" in warning
