"""Learning-rate schedules and the guarded AdamW update."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from wan_trainer.config.specs import OptimizerSpec
from wan_trainer.training.ema import Ema
from wan_trainer.training.lr_schedule import learning_rate_schedule
from wan_trainer.training.optimizer import NonFiniteError, Updater, build_optimizer

SPEC = OptimizerSpec(
    learning_rate=1e-2,
    betas=(0.9, 0.99),
    eps=1e-8,
    weight_decay=0.1,
    max_grad_norm=1.0,
    warmup_steps=2,
    lr_schedule="linear_warmup",
    gradient_accumulation_steps=1,
    max_nonfinite_steps=2,
    ema_decay=0.0,
)


def test_schedules_have_their_published_shapes() -> None:
    assert [learning_rate_schedule("constant", 5)(i, 10) for i in (0, 3, 99)] == [1.0, 1.0, 1.0]
    warm = learning_rate_schedule("linear_warmup", 4)
    assert [warm(i, 10) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = [learning_rate_schedule("cosine", 2)(i, 12) for i in range(13)]
    assert cosine[:3] == [0.5, 1.0, 1.0]
    assert cosine[7] == pytest.approx(0.5)
    assert cosine[12] == pytest.approx(0.0)
    assert all(later < earlier for earlier, later in itertools.pairwise(cosine[2:]))


def _one_weight() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1, bias=False)


def test_an_update_equals_adamw_written_out_in_float64() -> None:
    model = _one_weight()
    weight = model.weight.detach().double().clone()
    updater = Updater(build_optimizer(model.parameters(), SPEC), SPEC, horizon=10)
    first, second = torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    for update, lr in enumerate((0.5e-2, 1e-2, 1e-2), start=1):
        gradient = torch.tensor([[3.0, 4.0, 0.0]]) * update
        model.weight.grad = gradient.clone()
        result = updater.step()
        assert result.grad_norm == pytest.approx(5.0 * update)
        assert result.lr == pytest.approx(lr)
        assert not result.skipped
        clipped = gradient.double() / gradient.double().norm()
        first = 0.9 * first + 0.1 * clipped
        second = 0.99 * second + 0.01 * clipped**2
        weight = weight * (1 - lr * 0.1)
        weight -= lr * (first / (1 - 0.9**update)) / ((second / (1 - 0.99**update)).sqrt() + 1e-8)
    assert torch.allclose(model.weight.double(), weight, atol=1e-6)
    assert model.weight.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_gradient_changes_nothing_and_too_many_stop_the_run(bad: float) -> None:
    model = _one_weight()
    before = model.weight.detach().clone()
    updater = Updater(build_optimizer(model.parameters(), SPEC), SPEC, horizon=10)

    def spoil() -> None:
        model.weight.grad = torch.tensor([[1.0, bad, 0.0]])

    spoil()
    result = updater.step()
    assert result.skipped
    assert torch.equal(model.weight, before)
    model.weight.grad = torch.ones(1, 3)
    assert not updater.step().skipped
    spoil()
    assert updater.step().skipped
    # A loss that is not finite counts, whatever gradient it has.
    model.weight.grad = torch.ones(1, 3)
    with pytest.raises(NonFiniteError, match="max_nonfinite_steps"):
        updater.step(finite_loss=False)


def test_the_schedule_continues_from_the_number_of_updates_done() -> None:
    spec = dataclasses.replace(SPEC, lr_schedule="cosine")
    rates = []
    for start in (0, 3):
        model = _one_weight()
        updater = Updater(build_optimizer(model.parameters(), spec), spec, horizon=8, updates=start)
        for _ in range(5 - start):
            model.weight.grad = torch.ones(1, 3)
            rates.append(updater.step().lr)
    assert rates[3:5] == rates[5:7]


def test_an_update_without_any_gradient_changes_nothing_and_is_no_fault() -> None:
    model = _one_weight()
    ema = Ema(model.named_parameters(), 0.5)
    updater = Updater(build_optimizer(model.parameters(), SPEC), SPEC, horizon=10, ema=ema)
    model.weight.grad = torch.ones(1, 3)
    assert not updater.step().skipped
    before, average = model.weight.detach().clone(), ema.averages["weight"].clone()
    for _ in range(SPEC.max_nonfinite_steps + 1):
        result = updater.step()
        assert result.skipped and result.grad_norm == 0
    # Neither weight decay nor the first moment moved it.
    assert torch.equal(model.weight, before) and torch.equal(ema.averages["weight"], average)
    assert updater.updates == SPEC.max_nonfinite_steps + 2


def test_no_tolerance_for_nonfinite_gradients_stops_at_the_first_only() -> None:
    model = _one_weight()
    spec = dataclasses.replace(SPEC, max_nonfinite_steps=0)
    updater = Updater(build_optimizer(model.parameters(), spec), spec, horizon=10)
    model.weight.grad = torch.ones(1, 3)
    assert not updater.step().skipped
    model.weight.grad = torch.full((1, 3), math.nan)
    with pytest.raises(NonFiniteError):
        updater.step()
