"""A whole GRPO update of a tiny two-expert policy on any layout of the ranks, and what it leaves behind."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_training.tests.algorithms.parts import GRPO, SAMPLER, Events
from rl_training.tests.models.families import FRAMES, HEIGHT, WIDTH, images, model_spec, prompts
from wan_trainer.algorithms.colocated import ColocatedRollouts
from wan_trainer.algorithms.grpo import Grpo
from wan_trainer.config.specs import LoraSpec, OptimizerSpec
from wan_trainer.distributed.collectives import DataParallel, TensorParallelPeers
from wan_trainer.distributed.mesh import AXES, Mesh
from wan_trainer.models.wan.conditioning import condition_prompts
from wan_trainer.models.wan.load import WanComponents, load_wan
from wan_trainer.models.wan.parallelize import parallelize
from wan_trainer.models.wan.policy import WanPolicy, build_policy
from wan_trainer.models.wan.vae import decode
from wan_trainer.sampling.schedule import sigmas
from wan_trainer.training.optimizer import Updater, UpdateResult, build_optimizer
from wan_trainer.types import PromptBatch, RewardRequest, RewardResult

PROMPTS = 2
GROUP = 4
LAYOUTS: dict[str, tuple[int, int, int]] = {
    "alone": (1, 1, 1),
    "fsdp2": (1, 2, 1),
    "replicas2": (2, 1, 1),
    "tp2": (1, 1, 2),
    "fsdp4": (1, 4, 1),
    "hsdp2x2": (2, 2, 1),
    "tp2 x fsdp2": (1, 2, 2),
}
"""dp_replicate, dp_shard, tp."""

LORA = LoraSpec(
    rank=4,
    alpha=8.0,
    target_modules=("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "time_proj"),
    module_prefix=None,
)
OPTIMIZER = OptimizerSpec(
    learning_rate=1e-3,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.01,
    max_grad_norm=1e-4,
    warmup_steps=0,
    lr_schedule="constant",
    gradient_accumulation_steps=1,
    max_nonfinite_steps=1,
    ema_decay=0.0,
)


@dataclass(frozen=True)
class Case:
    """How an update is computed; none of it but `lora` may change a gradient.

    wave: prompts whose rewards are gathered together. chunk: samples per backward. sync: reduce gradients at
    every backward. changes: of the model's specification.
    """

    wave: int = PROMPTS
    chunk: int = 2
    sync: bool = False
    changes: dict[str, Any] = field(default_factory=dict[str, Any])


CASES: dict[str, Case] = {
    "whole": Case(),
    "in waves": Case(wave=1, chunk=1, sync=True, changes={"gradient_checkpointing": True}),
    "compiled": Case(sync=True, changes={"compile_backend": "aot_eager", "gradient_checkpointing": True}),
    "lora": Case(changes={"lora": LORA}),
    "low expert": Case(changes={"train_experts": "low"}),
}


def lay_out(mesh: Mesh, layout: str) -> Mesh:
    """The ranks of `mesh` arranged anew, as `init_mesh` arranges them."""
    shape = LAYOUTS[layout]
    replicate, shard, tp = shape
    assert mesh.world == replicate * shard * tp
    return replace(
        mesh,
        device_mesh=init_device_mesh("cpu", shape, mesh_dim_names=AXES),
        dp_rank=mesh.rank // tp,
        dp_size=mesh.world // tp,
        tp_rank=mesh.rank % tp,
        tp_size=tp,
    )


@dataclass
class ById:
    """A reward by sample: a number that layouts cannot change in the last bit, as decoded pixels could.

    calls: submissions seen on this rank.
    """

    calls: int = 0

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> Verdicts:
        assert len(videos) == len(requests)
        self.calls += 1
        scores = (zlib.crc32(repr(tuple(request.id)).encode()) / 2**32 for request in requests)
        return Verdicts([RewardResult(r.id, score) for r, score in zip(requests, scores, strict=True)])

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class Verdicts:
    """Verdicts that are there at once."""

    results: list[RewardResult]

    def result(self) -> list[RewardResult]:
        return self.results


class Keeping(Updater):
    """The real updater, which keeps the whole gradient as it was before clipping."""

    gradient: dict[str, torch.Tensor]
    policy: WanPolicy

    def step(self, *, finite_loss: bool = True) -> UpdateResult:
        self.gradient = {name: whole(p.grad) for name, p in self.policy.trainable() if p.grad is not None}
        return super().step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor behind a shard."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@dataclass
class Setup:
    """GRPO on one layout, and its parts."""

    mesh: Mesh
    policy: WanPolicy
    updater: Keeping
    algorithm: Grpo
    reward: ById
    decoded: list[int]

    def update(self) -> dict[str, Any]:
        """One whole optimizer update; its record."""
        frames = dict(enumerate(images(PROMPTS)))
        batch = PromptBatch(step=1, epoch=0, samples=tuple(prompts(PROMPTS)), first_frames=frames)
        record = self.algorithm.update(self.algorithm.prepare(batch, 1))
        assert record is not None
        return asdict(record)


def build(path: Path, mesh: Mesh, case: Case) -> Setup:
    """Everything real but the reward, the experts read shard by shard from the meta device."""
    spec = model_spec(path, "i2v-a14b", **case.changes)
    components = load_wan(spec, "cpu", materialize=False)
    policy = parallelize(build_policy(components, spec, 1.0, seed=0), spec, mesh, seed=0)
    stir(policy)
    updater = Keeping(
        build_optimizer((p for _, p in policy.trainable()), OPTIMIZER),
        OPTIMIZER,
        horizon=4,
        sharded=list(policy.experts.values()),  # type: ignore[arg-type]
        sync_each_backward=case.sync,
    )
    updater.policy = policy
    events, ranks, reward, decoded = Events(), DataParallel(mesh), ById(), []
    # One step of each expert is replayed; the last one never is.
    sampler = replace(SAMPLER, num_steps=3, replay_ratio=1.0)
    grpo = replace(GRPO, group_size=GROUP, sample_batch_size=2, train_sample_batch_size=case.chunk)
    rollouts = ColocatedRollouts(
        policy=policy,
        condition=partial(condition_prompts, components, num_frames=FRAMES, guided=False, negative_prompt=""),
        decode=partial(_decode, components, decoded),
        reward=reward if mesh.tp_rank == 0 else None,
        sampler=sampler,
        grid=sigmas(sampler.num_steps, sampler.flow_shift),
        latent_shape=policy.latent_shape(FRAMES, HEIGHT, WIDTH),
        group_size=GROUP,
        chunk_size=min(2, case.wave * GROUP // mesh.dp_size),
        prompts_per_wave=case.wave,
        communicator=ranks,
        device="cpu",
        clock=events,
        observer=events,
        peers=TensorParallelPeers(mesh) if mesh.tp_size > 1 else None,
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
    )
    return Setup(mesh, policy, updater, algorithm, reward, decoded)


@torch.no_grad()
def stir(policy: WanPolicy) -> None:
    """Give lora_B values, or its zeros would hide every mistake in lora_A.

    Different in every channel: norms swallow what is added to all channels alike.
    """
    for name, parameter in policy.named_parameters():
        if "lora_B" not in name:
            continue
        assert isinstance(parameter, DTensor)
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        block = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        parameter.to_local().copy_(0.05 * values[block])


def _decode(components: WanComponents, decoded: list[int], x0: torch.Tensor) -> np.ndarray:
    decoded.append(len(x0))
    return decode(components, x0, batch_size=2)
