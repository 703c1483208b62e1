"""From a resolved specification to the parts of a run, wired together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from wan_trainer.algorithms.base import Algorithm, AlgorithmParts
from wan_trainer.algorithms.build import build_algorithm
from wan_trainer.algorithms.colocated import ColocatedRollouts
from wan_trainer.algorithms.encoding import PromptEncoder
from wan_trainer.algorithms.protocols import Conditioner
from wan_trainer.algorithms.refl import Refl, ReflParts
from wan_trainer.config.specs import ReflSpec, RunSpec, VaeTiling
from wan_trainer.distributed.collectives import DataParallel, TensorParallelPeers
from wan_trainer.distributed.mesh import Mesh
from wan_trainer.models.wan.conditioning import condition_prompts
from wan_trainer.models.wan.directory import DEFAULT_FLOW_SHIFT
from wan_trainer.models.wan.load import WanComponents, load_wan
from wan_trainer.models.wan.parallelize import parallelize
from wan_trainer.models.wan.policy import WanPolicy, build_policy
from wan_trainer.models.wan.reference import Reference, build_reference
from wan_trainer.models.wan.vae import decode, decode_differentiable, differentiate_decoded
from wan_trainer.recording.clock import Clock
from wan_trainer.sampling.differentiable import Guidance
from wan_trainer.sampling.schedule import sigmas
from wan_trainer.topology import Topology
from wan_trainer.training.ema import Ema
from wan_trainer.training.evaluation import DirectScores, Evaluation, Held, Scorer, SubmittedScores
from wan_trainer.training.expert_coverage import check_reach
from wan_trainer.training.observer import RunObserver
from wan_trainer.training.optimizer import Updater, build_optimizer
from wan_trainer.types import DifferentiableReward, Reward


@dataclass(frozen=True)
class Model:
    """The frozen components, the policy that is trained, and its optimizer.

    reference: the starting policy, None without a KL term. ema: averages of the trained weights, if kept.
    """

    components: WanComponents
    policy: WanPolicy
    optimizer: torch.optim.AdamW
    reference: Reference | None = None
    ema: Ema | None = None


def build_model(spec: RunSpec, mesh: Mesh, start: Callable[[WanPolicy], None] | None = None) -> Model:
    """Load the pipeline, distribute the policy over the mesh, and give it an optimizer.

    The experts stay on the meta device until they are sharded: no rank needs room for a whole one. start:
    puts the weights of a checkpoint in place of those read, in the policy and in the reference of a KL term;
    averages begin there.
    """
    components = load_wan(spec.model, mesh.device, materialize=False)
    policy = build_policy(components, spec.model, spec.sampler.cfg_scale, spec.seed)
    if spec.refl is None:
        check_reach(policy, sigma_grid(spec, policy))
    parallelize(policy, spec.model, mesh, spec.seed)
    if start is not None:
        start(policy)
    parameters = (parameter for _, parameter in policy.trainable())
    decay = spec.optimizer.ema_decay
    return Model(
        components,
        policy,
        build_optimizer(parameters, spec.optimizer),
        reference=(
            build_reference(components, policy, spec.model, mesh, spec.seed, start)
            if spec.grpo.kl_coeff > 0
            else None
        ),
        ema=Ema(policy.trainable(), decay) if decay > 0 else None,
    )


def sigma_grid(spec: RunSpec, policy: WanPolicy) -> torch.Tensor:
    """(T+1,) sigmas; the shift is the configured one, else the model scheduler's, else 5."""
    return sigmas(spec.sampler.num_steps, flow_shift(spec, policy))


def flow_shift(spec: RunSpec, policy: WanPolicy) -> float:
    """The shift of the sigma grid."""
    if spec.sampler.flow_shift is not None:
        return spec.sampler.flow_shift
    return DEFAULT_FLOW_SHIFT if policy.flow_shift is None else policy.flow_shift


def build_updater(spec: RunSpec, model: Model, total_batches: int, updates: int) -> Updater:
    """The optimizer step, `updates` updates into the run."""
    rounds = total_batches // spec.optimizer.gradient_accumulation_steps
    return Updater(
        model.optimizer,
        spec.optimizer,
        horizon=rounds * spec.grpo.updates_per_rollout,
        updates=updates,
        sharded=[module for module in model.policy.experts.values() if isinstance(module, FSDPModule)],
        sync_each_backward=spec.grpo.sync_each_backward,
        ema=model.ema,
    )


def build_grpo(
    spec: RunSpec,
    topology: Topology,
    mesh: Mesh,
    model: Model,
    *,
    reward: Reward | None,
    updater: Updater,
    clock: Clock,
    observer: RunObserver,
    policy_version: int,
) -> Algorithm[Any]:
    """The algorithm (GRPO unless `trainer` names another) with rollouts drawn by the training ranks.

    reward: None on a rank whose rollouts a tensor-parallel peer submits.
    """
    policy, data = model.policy, spec.data
    communicator = DataParallel(mesh)
    rollouts = ColocatedRollouts(
        policy=policy,
        condition=conditioner(spec, model),
        decode=partial(decode, model.components, batch_size=spec.decode_batch_size),
        reward=reward,
        sampler=spec.sampler,
        grid=sigma_grid(spec, policy),
        latent_shape=policy.latent_shape(data.num_frames, data.height, data.width),
        group_size=spec.grpo.group_size,
        chunk_size=spec.grpo.sample_batch_size,
        prompts_per_wave=topology.wave,
        communicator=communicator,
        device=mesh.device,
        clock=clock,
        observer=observer,
        peers=TensorParallelPeers(mesh) if mesh.tp_size > 1 else None,
    )
    parts = AlgorithmParts(
        policy=policy,
        rollouts=rollouts,
        updater=updater,
        communicator=communicator,
        clock=clock,
        observer=observer,
        grpo=spec.grpo,
        sampler=spec.sampler,
        accumulation=spec.optimizer.gradient_accumulation_steps,
        device=mesh.device,
        policy_version=policy_version,
        reference=model.reference,
    )
    return build_algorithm(spec.algorithm, parts)


@dataclass(frozen=True)
class VaePixels:
    """The pipeline's VAE as an `algorithms.protocols.PixelDecoder`.

    tiling None: exact. group: the ranks that share the tiles when `tiling.parallel`.
    """

    components: WanComponents
    tiling: VaeTiling | None = None
    group: dist.ProcessGroup | None = None

    @torch.no_grad()
    def __call__(self, x0: torch.Tensor) -> torch.Tensor:
        """Pixels without a graph."""
        with self.components.resident(self.components.vae):
            return decode_differentiable(self.components, x0, self.tiling, self.group)

    def gradient[T](
        self, x0: torch.Tensor, objective: Callable[[torch.Tensor], tuple[torch.Tensor, T]]
    ) -> tuple[T, torch.Tensor]:
        """Two phases: the graphs of the objective and of the VAE never coexist."""
        return differentiate_decoded(self.components, x0, objective, self.tiling, self.group)


def _pixels(refl: ReflSpec, mesh: Mesh, model: Model) -> VaePixels:
    return VaePixels(model.components, refl.tiling, mesh.device_mesh.get_group("tp"))


def build_refl(
    spec: RunSpec,
    refl: ReflSpec,
    mesh: Mesh,
    model: Model,
    *,
    reward: DifferentiableReward,
    monitor: DifferentiableReward | None,
    updater: Updater,
    clock: Clock,
    observer: RunObserver,
    policy_version: int,
) -> Refl:
    """ReFL on the ranks of `mesh`."""
    policy, data = model.policy, spec.data
    return Refl(
        ReflParts(
            policy=policy,
            encode=PromptEncoder(
                conditioner(spec, model), clock, TensorParallelPeers(mesh) if mesh.tp_size > 1 else None
            ),
            decode=_pixels(refl, mesh, model),
            reward=reward,
            monitor=monitor,
            updater=updater,
            communicator=DataParallel(mesh),
            clock=clock,
            observer=observer,
            refl=refl,
            sampler=spec.sampler,
            grid=sigma_grid(spec, policy).tolist(),
            latent_shape=policy.latent_shape(data.num_frames, data.height, data.width),
            accumulation=spec.optimizer.gradient_accumulation_steps,
            device=mesh.device,
            reference=model.reference,
            policy_version=policy_version,
        )
    )


def build_evaluation(
    spec: RunSpec,
    topology: Topology,
    mesh: Mesh,
    model: Model,
    held: Held,
    score: Scorer | None,
    clock: Clock,
    observer: RunObserver,
) -> Evaluation:
    """Evaluation on the ranks of `mesh`; score: what `evaluation_scorer` gives."""
    policy, data = model.policy, spec.data
    return Evaluation(
        policy=policy,
        condition=conditioner(spec, model),
        score=score,
        held=held,
        sampler=spec.sampler,
        # As training draws: rollouts evaluate both branches of guidance in one call.
        guidance=Guidance(spec.sampler.cfg_scale, "both" if spec.refl is None else spec.refl.cfg_grad),
        grid=sigma_grid(spec, policy).tolist(),
        latent_shape=policy.latent_shape(data.num_frames, data.height, data.width),
        # A reward's queue has room for the rollouts of one batch beside those that wait for replay.
        chunk_size=min(spec.grpo.sample_batch_size, topology.rollouts_per_rank),
        communicator=DataParallel(mesh),
        clock=clock,
        keep=observer.evaluation,
        device=mesh.device,
        peers=TensorParallelPeers(mesh) if mesh.tp_size > 1 else None,
    )


def evaluation_scorer(
    spec: RunSpec,
    mesh: Mesh,
    model: Model,
    reward: Reward | None,
    differentiable: DifferentiableReward | None,
    monitor: DifferentiableReward | None,
) -> Scorer | None:
    """What scores held prompts: the rewards of training; None where a tensor-parallel peer submits."""
    if differentiable is not None:
        assert spec.refl is not None
        return DirectScores(_pixels(spec.refl, mesh, model), differentiable, monitor)
    if reward is None:
        return None
    return SubmittedScores(partial(decode, model.components, batch_size=spec.decode_batch_size), reward)


def conditioner(spec: RunSpec, model: Model) -> Conditioner:
    """Encodes prompts and first frames with the frozen components."""
    return partial(
        condition_prompts,
        model.components,
        num_frames=spec.data.num_frames,
        guided=spec.sampler.cfg_scale > 1.0,
        negative_prompt=spec.model.negative_prompt,
    )
