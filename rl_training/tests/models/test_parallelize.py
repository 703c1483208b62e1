"""FSDP2 changes neither values, nor gradients, nor names, at one rank and at two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rl_training.tests.models.families import (
    FAMILIES,
    FRAMES,
    HEIGHT,
    WIDTH,
    model_spec,
    random_condition,
)
from rl_training.tests.ranks import run_ranks
from wan_trainer.config.specs import Family, LoraSpec, OptimizerSpec
from wan_trainer.distributed.mesh import AXES, Mesh, init_mesh
from wan_trainer.models.wan.load import load_wan
from wan_trainer.models.wan.parallelize import dp_mesh, parallelize
from wan_trainer.models.wan.policy import WanPolicy, build_policy
from wan_trainer.training.optimizer import Updater, build_optimizer

pytestmark = pytest.mark.slow

LORA = LoraSpec(rank=4, alpha=8.0, target_modules=("to_q", "to_v"), module_prefix=None)
SAMPLES = 4


def build(path: Path, family: Family, materialize: bool, **changes: Any) -> WanPolicy:
    spec = model_spec(path, family, **changes)
    return build_policy(load_wan(spec, "cpu", materialize=materialize), spec, cfg_scale=1.0, seed=3)


def stir(policy: WanPolicy) -> None:
    """Give lora_B values, or its zeros would hide every mistake in lora_A."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)


def run(policy: WanPolicy, rows: slice, scale: float) -> list[torch.Tensor]:
    """Velocities of the rows at a sigma per expert; gradients are left in the parameters."""
    shape = policy.latent_shape(FRAMES, HEIGHT, WIDTH)
    x_t = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(4))
    everyone = random_condition(policy, SAMPLES, shape)
    condition = everyone.select(range(SAMPLES)[rows])
    results: list[torch.Tensor] = []
    for sigma in (0.95, 0.5):
        velocity = policy.velocity(x_t[rows], sigma, condition)
        if policy.trains_at(sigma):
            (velocity.square().sum() * scale).backward()
        results.append(velocity.detach())
    return results


def full(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare(
    mesh: Mesh, path: Path, family: Family, materialize: bool, changes: dict[str, Any]
) -> dict[str, float]:
    """This rank's share of the batch through the distributed policy, all of it through a plain one."""
    plain = build(path, family, True, **{**changes, "gradient_checkpointing": False})
    policy = build(path, family, materialize, **changes)
    names = list(plain.state_dict())
    policy = parallelize(policy, model_spec(path, family, **changes), mesh, seed=3)
    assert list(policy.state_dict()) == names
    assert [name for name, _ in policy.trainable()] == [name for name, _ in plain.trainable()]
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
    assert all(parameter.dtype == torch.float32 for _, parameter in policy.trainable())
    stir(plain)
    stir(policy)

    expected = run(plain, slice(None), 1.0)
    share = SAMPLES // mesh.dp_size
    rows = slice(mesh.dp_rank * share, (mesh.dp_rank + 1) * share)
    # FSDP averages over ranks; a loss summed over all samples is restored by the number of ranks.
    results = run(policy, rows, float(mesh.dp_size))
    velocity = max(
        float((a - b[rows]).abs().max() / b.abs().max()) for a, b in zip(results, expected, strict=True)
    )
    weights = gradients = 0.0
    for (name, a), (_, b) in zip(policy.named_parameters(), plain.named_parameters(), strict=True):
        weights = max(weights, float((full(a) - b).detach().abs().max()))
        if b.requires_grad:
            reference = full(b.grad)
            assert reference.any(), name
            gradients = max(gradients, float((full(a.grad) - reference).norm() / reference.norm()))
        else:
            assert a.grad is None, name
    state = get_model_state_dict(policy)
    assert list(state) == names
    return {"velocity": velocity, "weights": weights, "gradients": gradients}


def forward_update_forward(path: Path) -> float:
    """Largest difference between the updated policy and a plain one with its weights, the low-noise expert
    having last been used without a gradient."""
    mesh = init_mesh("cpu", 60.0)
    policy = parallelize(build(path, "i2v-a14b", False), model_spec(path, "i2v-a14b"), mesh, seed=3)
    spec = OptimizerSpec(
        learning_rate=0.1,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=0.0,
        warmup_steps=0,
        lr_schedule="constant",
        gradient_accumulation_steps=1,
        max_nonfinite_steps=1,
        ema_decay=0.0,
    )
    optimizer = build_optimizer((parameter for _, parameter in policy.trainable()), spec)
    sharded = [expert for expert in policy.experts.values() if isinstance(expert, FSDPModule)]
    updater = Updater(optimizer, spec, horizon=1, sharded=sharded)
    run(policy, slice(None), 1.0)
    with torch.no_grad():
        condition = random_condition(policy, SAMPLES, policy.latent_shape(FRAMES, HEIGHT, WIDTH))
        x_t = torch.randn(SAMPLES, *policy.latent_shape(FRAMES, HEIGHT, WIDTH))
        before = policy.velocity(x_t, 0.5, condition)
        updater.step()
        after = policy.velocity(x_t, 0.5, condition)
        plain = build(path, "i2v-a14b", True)
        plain.load_state_dict({name: full(value) for name, value in policy.state_dict().items()})
        assert not torch.allclose(before, after, rtol=0.1)
        return float((plain.velocity(x_t, 0.5, condition) - after).abs().max() / after.abs().max())


def test_a_forward_before_an_update_leaves_no_old_weights_behind(tiny_a14b: Path) -> None:
    assert run_ranks(1, forward_update_forward, tiny_a14b)[0] < 1e-5


CASES = [
    *((family, False, {"gradient_checkpointing": True}) for family in FAMILIES),
    ("ti2v-5b", True, {}),
    ("i2v-a14b", False, {"gradient_checkpointing": True, "lora": LORA}),
    ("i2v-a14b", True, {"lora": LORA, "train_experts": "low"}),
    ("i2v-a14b", False, {"train_experts": "high"}),
]


def compare_all(directories: dict[Family, Path], cases: list[Any]) -> list[dict[str, float]]:
    mesh = init_mesh("cpu", 60.0)
    results = [compare(mesh, directories[family], family, *rest) for family, *rest in cases]
    if mesh.world > 1:  # the same with every rank a replica of the other
        axes = init_device_mesh("cpu", (mesh.world, 1, 1), mesh_dim_names=AXES)
        replicated = replace(mesh, device_mesh=axes)
        assert dp_mesh(replicated).ndim == 2 and dp_mesh(mesh).ndim == 1
        family, *rest = cases[0]
        results.append(compare(replicated, directories[family], family, *rest))
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_fsdp_equals_the_plain_policy(world: int, directories: dict[Family, Path]) -> None:
    cases = CASES if world == 1 else CASES[:2] + CASES[4:5]
    for results in run_ranks(world, compare_all, directories, cases):
        assert len(results) == len(cases) + (world > 1)
        for case, result in zip([*cases, cases[0]], results, strict=False):
            assert result["weights"] == 0.0, case
            assert result["velocity"] < 1e-6, (case, result)
            assert result["gradients"] < 1e-5, (case, result)


def half_precision(mesh: Mesh, path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """What the modules compute in, and are fed with, under a bfloat16 parameter dtype."""
    spec = model_spec(path, "ti2v-5b", param_dtype="bfloat16", gradient_checkpointing=True, **changes)
    policy = build_policy(load_wan(spec, "cpu", materialize=False), spec, cfg_scale=1.0, seed=3)
    policy = parallelize(policy, spec, mesh, seed=3)
    embedder = policy.transformer.condition_embedder
    seen: dict[str, torch.dtype] = {}
    embedder.timesteps_proj.register_forward_pre_hook(lambda _m, a: seen.update(timestep=a[0].dtype))
    embedder.time_embedder.linear_1.register_forward_pre_hook(
        lambda m, a: seen.update(sinusoid=a[0].dtype, embedder=m.weight.dtype)
    )
    query = policy.transformer.blocks[0].attn1.to_q
    query.register_forward_pre_hook(lambda _m, a: seen.update(hidden=a[0].dtype))
    base = query.base_layer if spec.lora else query
    base.register_forward_pre_hook(lambda m, _a: seen.update(weight=m.weight.dtype))
    stir(policy)
    results = run(policy, slice(None), 1.0)
    return {
        **{name: str(dtype) for name, dtype in seen.items()},
        "velocity": str(results[0].dtype),
        "master": sorted({str(p.dtype) for _, p in policy.trainable()}),
        "gradient": sorted({str(p.grad.dtype) for _, p in policy.trainable() if p.grad is not None}),
        "silent": [n for n, p in policy.trainable() if p.grad is None or not full(p.grad).any()],
    }


def half_precision_all(path: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    mesh = init_mesh("cpu", 60.0)
    return [half_precision(mesh, path, changes) for changes in cases]


def test_half_precision_compute_keeps_float32_masters_gradients_and_timesteps(
    directories: dict[Family, Path],
) -> None:
    cases: list[dict[str, Any]] = [{}, {"lora": LORA, "load_dtype": "bfloat16"}, {"lora": LORA}]
    (reports,) = run_ranks(1, half_precision_all, directories["ti2v-5b"], cases)
    for case, report in zip(cases, reports, strict=True):
        assert report == {
            "timestep": "torch.float32",
            "sinusoid": "torch.float32",
            "embedder": "torch.float32",
            "hidden": "torch.bfloat16",
            "weight": "torch.bfloat16",
            "velocity": "torch.float32",
            "master": ["torch.float32"],
            "gradient": ["torch.float32"],
            "silent": [],
        }, case
