"""The reference is the starting policy to the bit, and stays it whatever happens to the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rl_training.tests.models.families import FRAMES, HEIGHT, WIDTH, Loaded, model_spec, random_condition
from rl_training.tests.ranks import run_ranks
from wan_trainer.config.specs import Family, LoraSpec
from wan_trainer.distributed.mesh import Mesh, init_mesh
from wan_trainer.models.wan.load import load_wan
from wan_trainer.models.wan.parallelize import parallelize
from wan_trainer.models.wan.policy import WanPolicy, build_policy
from wan_trainer.models.wan.reference import WithoutAdapters, adapters_off, build_reference, frozen_copy

LORA = LoraSpec(rank=4, alpha=8.0, target_modules=("to_q", "to_v", "net.0.proj"), module_prefix=None)
SIGMAS = {"transformer": 0.95, "transformer_2": 0.5}


def velocities(policy: WanPolicy, velocity: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """At one sigma of every expert that is trained."""
    shape = policy.latent_shape(FRAMES, HEIGHT, WIDTH)
    x_t = torch.randn(2, *shape, generator=torch.Generator().manual_seed(4))
    condition = random_condition(policy, 2, shape)
    return [velocity(x_t, s, condition) for s in SIGMAS.values() if policy.trains_at(s)]


def move(policy: WanPolicy) -> None:
    """Change every trained parameter; lora_B starts at zero."""
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.mul_(1.05).add_(0.01)


def largest_difference(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def compare(mesh: Mesh, path: Path, family: Family, changes: dict[str, Any]) -> dict[str, Any]:
    spec = model_spec(path, family, gradient_checkpointing=True, **changes)
    components = load_wan(spec, "cpu", materialize=False)
    policy = parallelize(build_policy(components, spec, 1.0, seed=3), spec, mesh, seed=3)
    policy.train()
    reference = build_reference(components, policy, spec, mesh, seed=3)
    flags = [parameter.requires_grad for parameter in policy.parameters()]
    with torch.no_grad():
        # The reference first: it is what FSDP gathers first in a run whose rollouts come from elsewhere.
        started = velocities(policy, reference)
    result = {"at the start": largest_difference(velocities(policy, policy.velocity), started)}
    move(policy)
    with torch.no_grad():
        result["reference"] = largest_difference(velocities(policy, reference), started)
    moved = velocities(policy, policy.velocity)
    result["policy"] = largest_difference([velocity.detach() for velocity in moved], started)
    for velocity in moved:
        velocity.square().mean().backward()
    gradients = [parameter.grad for _, parameter in policy.trainable()]
    result["silent"] = sum(
        grad is None or not (grad.full_tensor() if isinstance(grad, DTensor) else grad).any()
        for grad in gradients
    )
    assert [parameter.requires_grad for parameter in policy.parameters()] == flags
    return result


CASES: list[tuple[Family, dict[str, Any]]] = [
    ("i2v-a14b", {"train_experts": "low"}),
    ("i2v-a14b", {"lora": LORA}),
    ("i2v-a14b", {"param_dtype": "bfloat16"}),
    ("ti2v-5b", {"lora": LORA, "load_dtype": "bfloat16", "param_dtype": "bfloat16"}),
]


def compare_all(
    directories: dict[Family, Path], cases: list[Any], sizes: Sequence[int]
) -> list[list[dict[str, Any]]]:
    """The results of all cases for each size of tensor-parallel groups, one run of this process each."""
    found = []
    for tp in sizes:
        mesh = init_mesh("cpu", 60.0, tp=tp)
        found.append([compare(mesh, directories[family], family, changes) for family, changes in cases])
        torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize(("world", "sizes", "cases"), [(1, (1,), CASES), (2, (1, 2), CASES[:2])])
def test_an_unchanged_policy_equals_its_reference_and_a_changed_one_leaves_it_alone(
    world: int, sizes: Sequence[int], cases: list[Any], directories: dict[Family, Path]
) -> None:
    for of_rank in run_ranks(world, compare_all, directories, cases, sizes):
        for results in of_rank:
            for case, result in zip(cases, results, strict=True):
                assert result["at the start"] == 0.0, case
                assert result["reference"] == 0.0, case
                assert result["policy"] > 1e-3, case
                assert result["silent"] == 0, case


def copy_facts(directories: dict[Family, Path]) -> dict[str, Any]:
    """What a frozen copy holds, and what FSDP remembers of a forward that no backward follows."""
    mesh = init_mesh("cpu", 60.0)
    spec = model_spec(directories["i2v-a14b"], "i2v-a14b", train_experts="low", param_dtype="bfloat16")
    components = load_wan(spec, "cpu", materialize=False)
    policy = parallelize(build_policy(components, spec, 1.0, seed=3), spec, mesh, seed=3)
    copy = frozen_copy(components, spec, mesh, 1.0, seed=3)
    remembered = []
    with torch.no_grad():
        for frozen, sigma in ((copy, 0.5), (policy, 0.95)):
            shape = policy.latent_shape(FRAMES, HEIGHT, WIDTH)
            frozen.velocity(torch.zeros(1, *shape), sigma, random_condition(policy, 1, shape))
            expert = frozen.experts[frozen.expert_for(sigma)]
            assert isinstance(expert, FSDPModule)
            remembered.append(len(expert._get_fsdp_state()._comm_ctx.post_forward_order))
    dtypes: dict[str, set[str]] = {}
    for name, parameter in copy.named_parameters():
        dtypes.setdefault(str(parameter.dtype), set()).add(name.split(".")[1])
    return {
        "experts": list(copy.experts),
        "trained": sum(parameter.requires_grad for parameter in copy.parameters()),
        "local": sum(p.to_local().numel() for p in copy.parameters() if isinstance(p, DTensor)),
        "whole": sum(parameter.numel() for parameter in copy.parameters()),
        "of the policy": sum(p.numel() for _, p in policy.trainable()),
        "bf16": sorted(dtypes["torch.bfloat16"]),
        "shared": any(a is b for a in copy.parameters() for b in policy.parameters()),
        "remembered": remembered,
    }


def test_a_frozen_copy_holds_the_trained_expert_only_in_the_compute_dtype_and_sharded(
    directories: dict[Family, Path],
) -> None:
    first, second = run_ranks(2, copy_facts, directories)
    for facts in (first, second):
        assert facts["experts"] == ["transformer_2"]
        assert facts["trained"] == 0 and not facts["shared"]
        assert facts["whole"] == facts["of the policy"]
        assert {"blocks", "proj_out", "patch_embedding"} <= set(facts["bf16"])
        assert facts["remembered"] == [0, 0], "FSDP's list of forwards would grow for the whole run"
    assert first["local"] + second["local"] == first["whole"]


def test_adapters_come_back_after_an_error_and_a_gradient_is_refused(load: Callable[..., Loaded]) -> None:
    policy = load("t2v-1.3b", lora=LORA).policy
    move(policy)
    reference = WithoutAdapters(policy)
    with torch.no_grad():
        before = velocities(policy, policy.velocity)[0]
        with pytest.raises(ZeroDivisionError), adapters_off(policy.transformer):
            assert not torch.equal(velocities(policy, policy.velocity)[0], before)
            raise ZeroDivisionError
        assert torch.equal(velocities(policy, policy.velocity)[0], before)
        plain = load("t2v-1.3b").policy
        assert torch.equal(velocities(plain, plain.velocity)[0], velocities(policy, reference)[0])
    with pytest.raises(AssertionError, match="adapters on"):
        velocities(policy, reference)
