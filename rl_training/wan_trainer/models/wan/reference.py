"""The frozen policy that the KL term of the objective measures from: the one the run started with.

It depends on the starting weights alone (the model directory's, or those that `resume_from` put in their
place), never on what is trained or restored, so that a resumed run keeps the reference of its first start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from peft.tuners.tuners_utils import BaseTunerLayer

from wan_trainer.config.specs import ModelSpec
from wan_trainer.distributed.mesh import Mesh
from wan_trainer.models.wan.directory import trained_experts
from wan_trainer.models.wan.load import WanComponents, meta_expert
from wan_trainer.models.wan.parallelize import parallelize
from wan_trainer.models.wan.policy import WanPolicy, build_policy
from wan_trainer.models.wan.weights import expert_weights
from wan_trainer.sampling.dtypes import DTYPES
from wan_trainer.types import Condition


@dataclass(frozen=True)
class WithoutAdapters:
    """The `Velocity` of a LoRA policy's base weights: the same experts with their adapters switched off.

    It costs no memory. Call it without gradients.
    """

    policy: WanPolicy

    def __call__(self, x_t: torch.Tensor, sigma: float, condition: Condition) -> torch.Tensor:
        assert not torch.is_grad_enabled(), "a backward would recompute the blocks with the adapters on"
        with adapters_off(self.policy.experts[self.policy.expert_for(sigma)]):
            return self.policy.velocity(x_t, sigma, condition)

    def branch(
        self, x_t: torch.Tensor, sigma: float, condition: Condition, *, negative: bool = False
    ) -> torch.Tensor:
        """`WanPolicy.branch` of the base weights."""
        assert not torch.is_grad_enabled(), "a backward would recompute the blocks with the adapters on"
        with adapters_off(self.policy.experts[self.policy.expert_for(sigma)]):
            return self.policy.branch(x_t, sigma, condition, negative=negative)


@dataclass(frozen=True)
class FrozenCopy:
    """The `Velocity` of a policy that is never trained."""

    policy: WanPolicy

    def __call__(self, x_t: torch.Tensor, sigma: float, condition: Condition) -> torch.Tensor:
        return self.policy.velocity(x_t, sigma, condition)

    def branch(
        self, x_t: torch.Tensor, sigma: float, condition: Condition, *, negative: bool = False
    ) -> torch.Tensor:
        """`WanPolicy.branch` of the copy."""
        return self.policy.branch(x_t, sigma, condition, negative=negative)


Reference = WithoutAdapters | FrozenCopy


@contextmanager
def adapters_off(expert: WanTransformer3DModel) -> Iterator[None]:
    """Within, the expert computes with its base weights alone.

    Not peft's `enable_adapters`: that also switches `requires_grad`, which FSDP reads when it first gathers a
    parameter, so that adapters first used while off would never get a gradient.
    """
    layers = [module for module in expert.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def build_reference(
    components: WanComponents,
    policy: WanPolicy,
    spec: ModelSpec,
    mesh: Mesh,
    seed: int,
    start: Callable[[WanPolicy], None] | None = None,
) -> Reference:
    """The starting policy of `spec` as a velocity that needs no gradient.

    With LoRA, `policy` itself without its adapters. Otherwise a frozen copy of the experts that are trained,
    read from the model directory and distributed like the policy; replay asks no other expert. The copy is
    stored in param_dtype, the dtype it computes in (the time embedder in float32, as everywhere): rounding
    when it is read gives the bits that the policy's float32 weights have when they are gathered, so that an
    unchanged policy diverges by exactly 0 (with inductor, whose graphs without a backward round otherwise, by
    about 0).

    start: puts weights that are in no model directory, those of a checkpoint, in place of the read ones.
    """
    if spec.lora is not None:
        return WithoutAdapters(policy)
    copy = frozen_copy(components, spec, mesh, policy.cfg_scale, seed)
    if start is not None:
        start(copy)
    return FrozenCopy(copy)


def frozen_copy(
    components: WanComponents, spec: ModelSpec, mesh: Mesh, cfg_scale: float, seed: int
) -> WanPolicy:
    """A policy that holds the starting weights of the trained experts and no others, all frozen."""
    dtype = DTYPES[spec.param_dtype]
    copies = {
        name: meta_expert(spec.path / name, expert_weights(spec, name), dtype) for name in components.experts
    }
    without_policy = replace(
        components, transformer=copies["transformer"], transformer_2=copies.get("transformer_2")
    )
    reference = build_policy(without_policy, spec, cfg_scale, seed)
    reference.requires_grad_(False)
    for name in set(copies) - set(trained_experts(spec, components.directory.experts)):
        reference.add_module(name, None)
    # Nothing is ever recomputed for it.
    parallelize(reference, replace(spec, gradient_checkpointing=False), mesh, seed)
    reference.eval()
    return reference
