"""The gradient of ReFL against plain autograd: one graph, no checkpoint, no second phase, Diffusers' VAE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm
from torch import nn
from torch.nn import functional

from rl_training.tests.algorithms.parts import SAMPLER, Applied, Events, OneRank
from rl_training.tests.models.families import images, model_spec, prompts
from wan_trainer.algorithms.encoding import PromptEncoder
from wan_trainer.algorithms.refl import Refl, ReflParts
from wan_trainer.config.specs import Family, LoraSpec, ReflAlgorithm, ReflSpec, RolesSpec, Target
from wan_trainer.models.wan.conditioning import condition_prompts
from wan_trainer.models.wan.load import WanComponents, load_wan
from wan_trainer.models.wan.policy import WanPolicy, build_policy
from wan_trainer.models.wan.reference import FrozenCopy
from wan_trainer.sampling.differentiable import grad_plan
from wan_trainer.sampling.noise import initial_noise
from wan_trainer.sampling.schedule import sigmas
from wan_trainer.training.assembly import VaePixels
from wan_trainer.types import Condition, DifferentiableScores, PromptBatch, Sample, SampleId

pytestmark = pytest.mark.slow

STEPS, PROMPTS = 4, 2
FRAMES, HEIGHT, WIDTH = 5, 32, 32
REFL = ReflSpec(
    algorithm="truncated",
    first_grad_step=1,
    last_grad_step=3,
    cfg_grad="conditional",
    weight=0.5,
    baseline=0.2,
    scale=0.3,
    kl_coeff=0.7,
    fixed_noise=False,
    sample_batch_size=1,
    reward_max_error_rate=0.0,
    roles=RolesSpec(Target("a.b")),
)
LORA = LoraSpec(rank=2, alpha=4.0, target_modules=("to_q", "ffn.net.0.proj"), module_prefix=None)


class Wavy:
    """A smooth reward that every pixel moves differently."""

    def score(self, videos: torch.Tensor, samples: Sequence[Sample]) -> DifferentiableScores:
        ramp = torch.linspace(0, 3, videos[0].numel(), dtype=videos.dtype).view(videos[0].shape)
        reward = torch.sin(2 * videos + ramp).flatten(1).mean(dim=1) + videos.square().flatten(1).mean(dim=1)
        return DifferentiableScores(reward)


class Kept:
    """An updater that keeps the gradient and changes nothing."""

    def __init__(self, policy: WanPolicy) -> None:
        self.policy, self.updates = policy, 0
        self.gradient: dict[str, torch.Tensor] = {}

    def zero_grad(self) -> None:
        self.policy.zero_grad(set_to_none=True)

    def set_gradient_sync(self, is_last: bool) -> None:
        """One rank."""

    def step(self, *, finite_loss: bool = True) -> Applied:
        assert finite_loss
        self.gradient = {n: p.grad.clone() for n, p in self.policy.trainable() if p.grad is not None}
        self.updates += 1
        self.zero_grad()
        return Applied(0.0, 0.0, False)


@dataclass(frozen=True)
class Setting:
    """A tiny pipeline in one dtype, and the condition of its prompts."""

    components: WanComponents
    policy: WanPolicy
    reference: WanPolicy
    condition: Callable[..., Condition]
    first_frames: dict[int, torch.Tensor]


def setting(path: Path, family: Family, dtype: torch.dtype, cfg_scale: float, **changes: Any) -> Setting:
    spec = model_spec(path, family, **changes)
    components = load_wan(spec, "cpu")
    policy = build_policy(components, spec, cfg_scale, seed=0)
    nn.Module.to(policy, dtype)
    policy.compute_dtype = dtype
    encoders = replace(components, vae=deepcopy(components.vae))
    nn.Module.to(components.vae.requires_grad_(False), dtype)
    reference = deepcopy(policy).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        # Away from the start: adapters there are 0, and so is the divergence.
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(dtype))

    def condition(samples: Sequence[Sample], frames: torch.Tensor | None) -> Condition:
        found = condition_prompts(
            encoders,
            samples,
            frames,
            num_frames=FRAMES,
            guided=cfg_scale > 1,
            negative_prompt="blurred",
        )
        values = {f.name: getattr(found, f.name) for f in fields(found)}
        given: dict[str, Any] = {n: None if v is None else v.to(dtype) for n, v in values.items()}
        return Condition(**given)

    needs = family != "t2v-1.3b"
    return Setting(
        components,
        policy,
        reference,
        condition,
        dict(enumerate(images(PROMPTS)[:, :, :HEIGHT, :WIDTH])) if needs else {},
    )


def trainer_gradient(
    tiny: Setting, refl: ReflSpec, cfg_scale: float, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], Any]:
    events, updater = Events(), Kept(tiny.policy)
    sampler = replace(SAMPLER, num_steps=STEPS, cfg_scale=cfg_scale, flow_shift=5.0)
    parts = ReflParts(
        policy=tiny.policy,
        encode=PromptEncoder(tiny.condition, events),
        decode=VaePixels(tiny.components),
        reward=Wavy(),
        updater=updater,
        communicator=OneRank(),
        clock=events,
        observer=events,
        refl=refl,
        sampler=sampler,
        grid=sigmas(STEPS, 5.0).tolist(),
        latent_shape=tiny.policy.latent_shape(FRAMES, HEIGHT, WIDTH),
        accumulation=1,
        device=torch.device("cpu"),
        reference=FrozenCopy(tiny.reference),
        latent_dtype=dtype,
    )
    algorithm = Refl(parts)
    batch = PromptBatch(7, 0, tuple(prompts(PROMPTS)), tiny.first_frames)
    record = algorithm.update(algorithm.prepare(batch, 7))
    return updater.gradient, record


def plain_gradient(
    tiny: Setting, refl: ReflSpec, cfg_scale: float, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], float, float]:
    """Everything in one graph."""
    policy, levels = tiny.policy, sigmas(STEPS, 5.0).tolist()
    policy.eval().zero_grad(set_to_none=True)
    plan = grad_plan(refl.algorithm, refl.first_grad_step, refl.last_grad_step, SAMPLER.seed, 7)
    ids = [SampleId(7, prompt, 0) for prompt in range(PROMPTS)]
    shape = policy.latent_shape(FRAMES, HEIGHT, WIDTH)
    x = initial_noise(SAMPLER.seed, ids, shape, shared=False).to(dtype)
    frames = torch.stack(list(tiny.first_frames.values())) if tiny.first_frames else None
    condition = tiny.condition(prompts(PROMPTS), frames)
    first = condition.first_frame_latent

    def given(latent: torch.Tensor) -> torch.Tensor:
        return latent if first is None else torch.cat([first, latent[:, :, 1:]], dim=2)

    x, divergences = given(x), []
    for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
        with torch.set_grad_enabled(index in plan.steps):
            inside = x if refl.algorithm != "drtune" else x.detach()
            v_c = v = policy.branch(inside, sigma, condition)
            if cfg_scale > 1:
                v_u = policy.branch(inside, sigma, condition, negative=True)
                v_u = v_u if refl.cfg_grad == "both" else v_u.detach()
                v = v_u + cfg_scale * (v_c - v_u)
        if index in plan.steps:
            with torch.no_grad():
                v_ref = tiny.reference.branch(x, sigma, condition)
            squared = (v_c - v_ref) ** 2 / (2 * sigma**2)
            divergences.append((squared if first is None else squared[:, :, 1:]).flatten(1).mean(1))
        if plan.jump and index in plan.steps:
            x = given(x - sigma * v)
            break
        x = given(x + (sigma_next - sigma) * v)
    vae = tiny.components.vae
    mean, std = (
        torch.tensor(vae.config[name]).to(dtype).view(1, -1, 1, 1, 1)
        for name in ("latents_mean", "latents_std")
    )
    pixels = vae.decode(x / (1.0 / std) + mean, return_dict=False)[0] * 0.5 + 0.5
    reward = Wavy().score(pixels, []).reward
    loss = (-refl.weight * (reward - refl.baseline) / refl.scale).mean()
    kl = refl.kl_coeff * torch.stack(divergences).mean()
    torch.autograd.backward(loss + kl)
    gradient = {n: p.grad.clone() for n, p in policy.trainable() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    return gradient, loss.item(), kl.item()


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Diffusers' blocks round to float32 by `.float()`; here float64 stays what it is."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(
        FP32LayerNorm,
        "forward",
        lambda self, x: functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps),
    )


def compare(tiny: Setting, refl: ReflSpec, cfg_scale: float, dtype: torch.dtype, rtol: float) -> None:
    ours, record = trainer_gradient(tiny, refl, cfg_scale, dtype)
    plain, loss, kl = plain_gradient(tiny, refl, cfg_scale, dtype)
    assert ours.keys() == plain.keys()
    for name, gradient in plain.items():
        scale = gradient.norm() + 1e-12 * max(other.norm() for other in plain.values())
        assert (ours[name] - gradient).norm() <= rtol * scale, name
    assert max(gradient.norm() for gradient in plain.values()) > 1e-4
    assert record.policy_loss == pytest.approx(loss, rel=max(rtol, 1e-6))
    assert record.kl_loss == pytest.approx(kl, rel=max(rtol, 1e-6))
    assert record.kl_loss > 0


@pytest.mark.parametrize("kind", ["last_step", "truncated", "random_k", "x0_jump", "drtune"])
def test_every_algorithm_has_the_gradient_of_one_plain_graph(
    kind: ReflAlgorithm, tiny_t2v: Path, exact_norms: None
) -> None:
    window = (3, 3) if kind == "last_step" else (1, 3)
    refl = replace(REFL, algorithm=kind, first_grad_step=window[0], last_grad_step=window[1])
    tiny = setting(tiny_t2v, "t2v-1.3b", torch.float64, 3.0)
    compare(tiny, refl, 3.0, torch.float64, 1e-8)


def test_a_window_that_ends_early_passes_the_gradient_straight_on(tiny_t2v: Path, exact_norms: None) -> None:
    refl = replace(REFL, first_grad_step=1, last_grad_step=2)
    tiny = setting(tiny_t2v, "t2v-1.3b", torch.float64, 1.0)
    compare(tiny, refl, 1.0, torch.float64, 1e-8)


@pytest.mark.parametrize(
    ("kind", "cfg_grad"), [("last_step", "conditional"), ("truncated", "conditional"), ("truncated", "both")]
)
def test_a_pinned_first_frame_has_no_gradient(
    kind: ReflAlgorithm, cfg_grad: Any, tiny_ti2v: Path, exact_norms: None
) -> None:
    tiny = setting(tiny_ti2v, "ti2v-5b", torch.float64, 2.0, lora=LORA)
    window = (3, 3) if kind == "last_step" else (1, 3)
    refl = replace(REFL, algorithm=kind, first_grad_step=window[0], last_grad_step=window[1])
    compare(tiny, replace(refl, cfg_grad=cfg_grad, sample_batch_size=2), 2.0, torch.float64, 1e-8)


@pytest.mark.parametrize("kind", ["last_step", "truncated"])
def test_a_window_over_two_experts(kind: ReflAlgorithm, tiny_a14b: Path, exact_norms: None) -> None:
    # Shift 5 and 4 steps: the first two are the high-noise expert's.
    tiny = setting(tiny_a14b, "i2v-a14b", torch.float64, 2.0)
    window = (3, 3) if kind == "last_step" else (1, 3)
    refl = replace(REFL, algorithm=kind, first_grad_step=window[0], last_grad_step=window[1])
    compare(tiny, refl, 2.0, torch.float64, 1e-8)


def test_checkpointed_float32_agrees_too(tiny_t2v: Path) -> None:
    tiny = setting(tiny_t2v, "t2v-1.3b", torch.float32, 3.0)
    compare(tiny, REFL, 3.0, torch.float32, 1e-4)
