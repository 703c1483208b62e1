"""The one transformer call: timesteps, routing, pinning, guidance, and what is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rl_training.tests.models.families import FAMILIES, FRAMES, HEIGHT, WIDTH, Loaded, random_condition
from wan_trainer.config.specs import Experts, Family
from wan_trainer.models.wan.policy import WanPolicy, model_timestep
from wan_trainer.types import Condition


def latents(policy: WanPolicy, n: int, seed: int = 1) -> torch.Tensor:
    shape = policy.latent_shape(FRAMES, HEIGHT, WIDTH)
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def calls_of(expert: nn.Module) -> list[dict[str, Any]]:
    """A list that fills with the keyword arguments of every call of `expert`."""
    calls: list[dict[str, Any]] = []
    expert.register_forward_pre_hook(lambda _m, _a, kwargs: calls.append(kwargs), with_kwargs=True)
    return calls


def unguided(condition: Condition) -> Condition:
    return Condition(condition.text, None, condition.image_latent, condition.first_frame_latent)


@pytest.mark.parametrize("family", FAMILIES)
def test_latent_shapes_match_what_the_vae_makes(family: Family, load: Callable[..., Loaded]) -> None:
    loaded = load(family)
    shape = loaded.policy.latent_shape(FRAMES, HEIGHT, WIDTH)
    with torch.no_grad():
        encoded = loaded.components.vae.encode(torch.zeros(1, 3, FRAMES, HEIGHT, WIDTH)).latent_dist.mode()
    assert shape == encoded.shape[1:]
    assert loaded.policy.flow_shift == 5.0


def test_a_sigma_on_the_boundary_goes_where_diffusers_sends_it(load: Callable[..., Loaded]) -> None:
    policy = load("i2v-a14b").policy
    on = torch.tensor(0.9, dtype=torch.float32)
    grid = torch.stack([torch.nextafter(on, on + 1), on, torch.nextafter(on, on - 1), on - 1e-6, on + 1e-6])
    boundary = 0.9 * 1000
    expected = [
        "transformer" if t >= boundary else "transformer_2" for t in grid * 1000
    ]  # the pipeline's line
    assert [policy.expert_for(float(sigma)) for sigma in grid] == expected
    assert len(set(expected)) == 2
    assert policy.expert_for(1.0) == "transformer" and policy.expert_for(0.0) == "transformer_2"


def test_only_the_routed_expert_is_called(load: Callable[..., Loaded]) -> None:
    policy = load("i2v-a14b").policy
    high, low = calls_of(policy.experts["transformer"]), calls_of(policy.experts["transformer_2"])
    condition = unguided(random_condition(policy, 1, policy.latent_shape(FRAMES, HEIGHT, WIDTH)))
    x_t = latents(policy, 1)
    with torch.no_grad():
        above, below = policy.velocity(x_t, 0.95, condition), policy.velocity(x_t, 0.5, condition)
    assert (len(high), len(low)) == (1, 1)
    assert not torch.equal(above, below)
    hidden = high[0]["hidden_states"]
    assert torch.equal(hidden[:, :4], x_t)
    assert torch.equal(hidden[:, 4:], condition.image_latent)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_timestep_stays_float32_up_to_the_sinusoid(
    family: Family, dtype: str, load: Callable[..., Loaded]
) -> None:
    sigma = 0.9984  # 998.4: bfloat16 holds 996 and 1000, an integer 998
    policy = load(family, param_dtype=dtype).policy
    expert = policy.experts["transformer"]
    nn.Module.to(expert, policy.compute_dtype)
    seen: list[torch.Tensor] = []
    sinusoid = expert.condition_embedder.timesteps_proj
    sinusoid.register_forward_hook(lambda _m, inputs, output: seen.extend([inputs[0], output]))
    condition = unguided(random_condition(policy, 2, policy.latent_shape(FRAMES, HEIGHT, WIDTH)))
    with torch.no_grad():
        velocity = policy.velocity(latents(policy, 2), sigma, condition)
    timestep, embedding = seen
    assert velocity.dtype == torch.float32
    assert timestep.dtype == torch.float32 and embedding.dtype == torch.float32
    assert timestep.unique().tolist()[-1] == float(torch.tensor(sigma) * 1000)
    # Against the closed form in float64: cos then sin of t / 10000^(k / half).
    half = embedding.shape[1] // 2
    phase = timestep.double()[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    expected = torch.cat([phase.cos(), phase.sin()], dim=1)
    assert (embedding - expected).abs().max() < 2e-4  # float32 phases near 1000; bfloat16 would err by 1


def test_ti2v_gives_the_pinned_frame_timestep_zero_per_token(load: Callable[..., Loaded]) -> None:
    policy = load("ti2v-5b").policy
    calls = calls_of(policy.experts["transformer"])
    condition = unguided(random_condition(policy, 2, policy.latent_shape(FRAMES, HEIGHT, WIDTH)))
    x_t = latents(policy, 2)
    with torch.no_grad():
        policy.velocity(x_t, 0.7, condition)
        policy.velocity(x_t, 0.7, Condition(condition.text))
    pinned, free = calls[0]["timestep"], calls[1]["timestep"]
    per_frame = (x_t.shape[3] // 2) * (x_t.shape[4] // 2)
    assert pinned.shape == (2, x_t.shape[2] * per_frame)
    assert (pinned[:, :per_frame] == 0).all()
    assert (pinned[:, per_frame:] == model_timestep(0.7)).all()
    assert (free == model_timestep(0.7)).all(), "without a first frame no token is pinned"


def test_the_pinned_frame_replaces_whatever_the_latent_holds_there(load: Callable[..., Loaded]) -> None:
    policy = load("ti2v-5b").policy
    condition = unguided(random_condition(policy, 2, policy.latent_shape(FRAMES, HEIGHT, WIDTH)))
    assert condition.first_frame_latent is not None
    x_t = latents(policy, 2)
    garbled = x_t.clone()
    garbled[:, :, 0] = 1e3
    pinned = torch.cat([condition.first_frame_latent, x_t[:, :, 1:]], dim=2)
    with torch.no_grad():
        results = [policy.velocity(x, 0.7, condition) for x in (x_t, garbled, pinned)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert (garbled[:, :, 0] == 1e3).all(), "the caller's latent is not written to"


@pytest.mark.parametrize("family", FAMILIES)
def test_guidance_is_one_call_of_both_branches(family: Family, load: Callable[..., Loaded]) -> None:
    loaded = load(family, cfg_scale=3.0)
    policy = loaded.policy
    condition = random_condition(policy, 2, policy.latent_shape(FRAMES, HEIGHT, WIDTH))
    assert condition.negative_text is not None
    x_t = latents(policy, 2)
    calls = calls_of(policy.experts["transformer"])
    with torch.no_grad():
        guided = policy.velocity(x_t, 0.95, condition)
        assert len(calls) == 1
        assert calls[0]["hidden_states"].shape[0] == 4
        policy.cfg_scale = 1.0
        conditional = policy.velocity(x_t, 0.95, unguided(condition))
        negative = Condition(
            condition.negative_text, None, condition.image_latent, condition.first_frame_latent
        )
        unconditional = policy.velocity(x_t, 0.95, negative)
    expected = unconditional + 3.0 * (conditional - unconditional)
    assert (guided - expected).abs().max() < 1e-5
    assert (guided - conditional).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("experts", "trained"),
    [
        ("both", {"transformer", "transformer_2"}),
        ("high", {"transformer"}),
        ("low", {"transformer_2"}),
    ],
)
def test_full_training_trains_the_named_experts(
    experts: Experts, trained: set[str], load: Callable[..., Loaded]
) -> None:
    policy = load("i2v-a14b", train_experts=experts).policy
    assert {name.split(".")[0] for name, _ in policy.trainable()} == trained
    assert {count.expert for count in policy.trainable_report() if count.trained} == trained
    total = sum(parameter.numel() for parameter in policy.parameters())
    assert sum(count.elements for count in policy.trainable_report()) == total

    condition = unguided(random_condition(policy, 1, policy.latent_shape(FRAMES, HEIGHT, WIDTH)))
    for sigma in (0.95, 0.5):
        loss = policy.velocity(latents(policy, 1), sigma, condition).square().mean()
        assert loss.requires_grad == policy.trains_at(sigma) == (policy.expert_for(sigma) in trained)
        if policy.trains_at(sigma):
            loss.backward()
    reached = {
        name.split(".")[0] for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()
    }
    assert reached == trained
    silent = [name for name, p in policy.trainable() if p.grad is None or not p.grad.any()]
    assert not silent, "every trained tensor has a gradient"


def test_an_attention_backend_that_is_not_there_is_one_line(load: Callable[..., Loaded]) -> None:
    for backend in ("no_such_kernel", "flash"):
        with pytest.raises(Exception, match=f"attention_backend {backend} is not available"):
            load("t2v-1.3b", attention_backend=backend)
