"""GRPO on real tiny Wan models of every family, under FSDP2, at one rank and at two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from rl_training.tests.algorithms.parts import GRPO, SAMPLER, Applied, Events, Scores
from rl_training.tests.models.families import FRAMES, HEIGHT, WIDTH, images, model_spec, prompts
from rl_training.tests.ranks import run_ranks
from wan_trainer.algorithms.colocated import ColocatedRollouts
from wan_trainer.algorithms.grpo import Grpo
from wan_trainer.config.specs import Family, GrpoSpec, LoraSpec, SamplerSpec
from wan_trainer.distributed.collectives import all_reduce, gather_objects
from wan_trainer.distributed.mesh import Mesh, init_mesh
from wan_trainer.models.wan.conditioning import condition_prompts
from wan_trainer.models.wan.load import WanComponents, load_wan
from wan_trainer.models.wan.parallelize import parallelize
from wan_trainer.models.wan.policy import WanPolicy, build_policy
from wan_trainer.models.wan.reference import build_reference
from wan_trainer.models.wan.vae import decode
from wan_trainer.sampling.schedule import sigmas
from wan_trainer.types import Condition, PromptBatch, Sample, StepRecord

pytestmark = pytest.mark.slow

# One step of each expert is replayed; the last one never is.
WAN_SAMPLER = replace(SAMPLER, num_steps=3, replay_ratio=1.0)
LORA = LoraSpec(rank=4, alpha=8.0, target_modules=("to_q", "to_v"), module_prefix=None)
WAN_GRPO = replace(GRPO, group_size=4, sample_batch_size=2, train_sample_batch_size=2)


@dataclass(frozen=True)
class Ranks:
    """The data-parallel ranks of a mesh."""

    mesh: Mesh

    @property
    def dp_rank(self) -> int:
        return self.mesh.dp_rank

    @property
    def dp_size(self) -> int:
        return self.mesh.dp_size

    def gather_objects[T](self, value: T) -> list[T]:
        return gather_objects(self.mesh, value)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return all_reduce(self.mesh, tensor, op)


class Collect:
    """An updater that keeps the full gradient and changes nothing; `always` reduces at every backward."""

    def __init__(self, policy: WanPolicy, always: bool) -> None:
        self.policy, self.always, self.updates = policy, always, 0
        self.gradient: dict[str, torch.Tensor] = {}

    def zero_grad(self) -> None:
        self.policy.zero_grad(set_to_none=True)

    def set_gradient_sync(self, is_last: bool) -> None:
        for expert in self.policy.experts.values():
            expert.set_requires_gradient_sync(is_last or self.always)
            expert.set_is_last_backward(is_last)

    def step(self, *, finite_loss: bool = True) -> Applied:
        self.gradient = {
            name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
            for name, p in self.policy.trainable()
            if p.grad is not None
        }
        self.updates += 1
        self.zero_grad()
        total = sum(float(g.square().sum()) for g in self.gradient.values())
        return Applied(grad_norm=total**0.5, lr=0.0, skipped=False)


def build(
    path: Path, family: Family, mesh: Mesh, sampler: SamplerSpec, grpo: GrpoSpec, count: int, **changes: Any
) -> tuple[Grpo, Collect]:
    always, moved = bool(changes.pop("always", False)), bool(changes.pop("moved", False))
    grpo = replace(grpo, kl_coeff=changes.pop("kl_coeff", 0.0))
    spec = model_spec(path, family, **changes)
    components = load_wan(spec, "cpu")
    policy = parallelize(build_policy(components, spec, sampler.cfg_scale, seed=0), spec, mesh, seed=0)
    reference = build_reference(components, policy, spec, mesh, seed=0) if grpo.kl_coeff else None
    if moved:
        with torch.no_grad():
            for name, parameter in policy.trainable():
                parameter.mul_(1.02).add_(0.1 if "lora_" in name else 1e-3)
    updater, events, ranks = Collect(policy, always), Events(), Ranks(mesh)
    rollouts = ColocatedRollouts(
        policy=policy,
        condition=_conditioner(components, sampler.cfg_scale > 1),
        decode=lambda x0: decode(components, x0, batch_size=2),
        reward=Scores(),
        sampler=sampler,
        grid=sigmas(sampler.num_steps, sampler.flow_shift),
        latent_shape=policy.latent_shape(FRAMES, HEIGHT, WIDTH),
        group_size=grpo.group_size,
        chunk_size=grpo.sample_batch_size,
        prompts_per_wave=count,
        communicator=ranks,
        device="cpu",
        clock=events,
        observer=events,
    )
    algorithm = Grpo(
        policy=policy,
        rollouts=rollouts,
        updater=updater,
        communicator=ranks,
        clock=events,
        observer=events,
        grpo=grpo,
        sampler=sampler,
        accumulation=1,
        device=torch.device("cpu"),
        reference=reference,
    )
    return algorithm, updater


def _conditioner(components: WanComponents, guided: bool):
    def condition(samples: Sequence[Sample], first_frames: torch.Tensor | None) -> Condition:
        return condition_prompts(
            components, samples, first_frames, num_frames=FRAMES, guided=guided, negative_prompt="blurred"
        )

    return condition


def one_step(
    path: Path, family: Family, mesh: Mesh, count: int, sampler: SamplerSpec, grpo: GrpoSpec, **changes: Any
) -> tuple[StepRecord, dict[str, torch.Tensor]]:
    algorithm, updater = build(path, family, mesh, sampler, grpo, count, **changes)
    frames = {} if family == "t2v-1.3b" else dict(enumerate(images(count)))
    batch = PromptBatch(step=1, epoch=0, samples=tuple(prompts(count)), first_frames=frames)
    rollout = algorithm.prepare(batch, 1)
    forwards: list[int] = []
    hooks = [
        expert.register_forward_pre_hook(lambda *_: forwards.append(1))
        for name, expert in updater.policy.experts.items()
        if name not in {trained.split(".")[0] for trained, _ in updater.policy.trainable()}
    ]
    record = algorithm.update(rollout)
    for hook in hooks:
        hook.remove()
    assert record is not None and not forwards, "a frozen expert computed in the replay"
    return record, updater.gradient


def train_cases(cases: list[Any], out: Path) -> dict[str, dict[str, Any]]:
    """Run each case on this rank; rank 0 saves the gradients to `out`."""
    mesh = init_mesh("cpu", 60.0)
    records = {}
    for name, path, family, count, sampler, grpo, changes in cases:
        record, gradient = one_step(path, family, mesh, count, sampler, grpo, **changes)
        records[name] = asdict(record)
        if mesh.rank == 0:
            np.savez(out / f"{name}-{mesh.world}.npz", **{n: g.numpy() for n, g in gradient.items()})
    return records


@pytest.fixture(scope="module")
def directories(tiny_ti2v: Path, tiny_a14b: Path, tiny_t2v: Path) -> dict[Family, Path]:
    return {"ti2v-5b": tiny_ti2v, "i2v-a14b": tiny_a14b, "t2v-1.3b": tiny_t2v}


@dataclass(frozen=True)
class Trained:
    """Records of every case, by name: alone on one rank, and on each of two; and where the gradients are."""

    alone: dict[str, dict[str, Any]]
    pair: dict[str, list[dict[str, Any]]]
    out: Path

    def gradient(self, case: str, world: int) -> dict[str, np.ndarray]:
        return dict(np.load(self.out / f"{case}-{world}.npz"))


@pytest.fixture(scope="module")
def trained(directories: dict[Family, Path], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All cases in one start of one rank and one of two: imports take longer than training."""
    narrow = replace(WAN_SAMPLER, eta=0.3, trajectory_dtype="bfloat16", cfg_scale=2.0)
    sde, grpo_sde = replace(narrow, kind="dancegrpo"), replace(narrow, kind="flowgrpo")
    bf16 = {"param_dtype": "bfloat16"}
    both = {
        "one prompt a rank": ("ti2v-5b", 2, WAN_SAMPLER, {"always": True}),
        "shared prompt": ("ti2v-5b", 1, WAN_SAMPLER, {"gradient_checkpointing": True}),
        "kl": ("i2v-a14b", 1, WAN_SAMPLER, {"kl_coeff": 50.0, "moved": True}),
        "kl of adapters": ("ti2v-5b", 1, WAN_SAMPLER, {"kl_coeff": 50.0, "moved": True, "lora": LORA}),
    }
    only_alone = {
        "bf16 flowcps": ("ti2v-5b", 1, narrow, bf16),
        "bf16 dancegrpo": ("i2v-a14b", 1, sde, {**bf16, "kl_coeff": 50.0}),
        "bf16 flowgrpo": ("t2v-1.3b", 1, grpo_sde, bf16),
        "frozen expert": ("i2v-a14b", 1, WAN_SAMPLER, {"train_experts": "low"}),
    }
    out = tmp_path_factory.mktemp("gradients")

    def cases(table: dict[str, Any]) -> list[Any]:
        return [
            (name, directories[family], family, count, sampler, WAN_GRPO, changes)
            for name, (family, count, sampler, changes) in table.items()
        ]

    (alone,) = run_ranks(1, train_cases, cases({**both, **only_alone}), out)
    pair = run_ranks(2, train_cases, cases(both), out)
    return Trained(alone, {name: [records[name] for records in pair] for name in both}, out)


@pytest.mark.parametrize("case", ["one prompt a rank", "shared prompt", "kl", "kl of adapters"])
def test_one_rank_and_two_agree_in_rewards_and_gradients(trained: Trained, case: str) -> None:
    keys = ("reward_mean", "reward_std", "advantage_abs_mean", "replayed_per_expert", "zero_std_groups")
    for record in (trained.alone[case], *trained.pair[case]):
        assert record["ratio_max_dev"] == 0 and record["ratio_mean"] == 1
        assert record["advantage_abs_mean"] > 0.3
        assert [record[key] for key in keys] == [trained.alone[case][key] for key in keys]
    one, two = trained.gradient(case, 1), trained.gradient(case, 2)
    assert one.keys() == two.keys()
    for name, gradient in one.items():
        norm = np.linalg.norm(gradient)
        assert np.linalg.norm(gradient - two[name]) <= 1e-5 * norm + 1e-12, name


def test_both_experts_are_replayed_and_get_a_reduced_gradient(trained: Trained) -> None:
    assert trained.alone["kl"]["replayed_per_expert"] == {"transformer": 1, "transformer_2": 1}
    gradient = trained.gradient("kl", 2)
    for expert in ("transformer.", "transformer_2."):
        assert any(np.linalg.norm(g) > 0 for name, g in gradient.items() if name.startswith(expert))


@pytest.mark.parametrize("kind", ["flowcps", "dancegrpo", "flowgrpo"])
def test_replay_in_bfloat16_keeps_the_ratio_within_a_millionth(trained: Trained, kind: str) -> None:
    record = trained.alone[f"bf16 {kind}"]
    assert record["ratio_max_dev"] < 1e-6 and record["grad_norm"] > 0


@pytest.mark.parametrize("case", ["kl", "kl of adapters"])
def test_the_divergence_from_the_start_is_the_same_on_two_ranks(trained: Trained, case: str) -> None:
    record = trained.alone[case]
    assert record["kl_loss"] > 1e-5
    assert [other["kl_loss"] for other in trained.pair[case]] == pytest.approx(
        [record["kl_loss"]] * 2, rel=1e-5
    )


def test_the_start_does_not_diverge_from_itself(trained: Trained) -> None:
    record = trained.alone["bf16 dancegrpo"]
    assert record["kl_loss"] == 0.0 and record["grad_norm"] > 0


def test_a_frozen_expert_is_not_replayed(trained: Trained) -> None:
    record = trained.alone["frozen expert"]
    assert record["replayed_per_expert"] == {"transformer": 1, "transformer_2": 1}
    assert record["frozen_steps"] == 1 and record["replayed_samples"] == 4
    assert record["ratio_max_dev"] == 0 and record["grad_norm"] > 0
    assert {name.split(".")[0] for name in trained.gradient("frozen expert", 1)} == {"transformer_2"}
