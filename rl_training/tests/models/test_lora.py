"""Adapters: where they go, that they learn, and the lines for targets that match nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rl_training.tests.models.families import FRAMES, HEIGHT, WIDTH, Loaded, model_spec, random_condition
from wan_trainer.config.specs import Family, LoraSpec
from wan_trainer.models.wan import load as wan_loading
from wan_trainer.models.wan.parallelize import checkpoint_activations
from wan_trainer.models.wan.policy import WanPolicy, build_policy
from wan_trainer.models.wan.trained_modules import describe_trained, trained_modules
from wan_trainer.types import UserError


def lora(*targets: str, prefix: str | None = None, rank: int = 4) -> LoraSpec:
    return LoraSpec(rank=rank, alpha=8.0, target_modules=targets, module_prefix=prefix)


def loss_of(policy: WanPolicy, sigma: float) -> torch.Tensor:
    shape = policy.latent_shape(FRAMES, HEIGHT, WIDTH)
    x_t = torch.randn(2, *shape, generator=torch.Generator().manual_seed(4))
    return policy.velocity(x_t, sigma, random_condition(policy, 2, shape)).square().mean()


def test_targets_are_matched_by_suffix_and_only_adapters_train(load: Callable[..., Loaded]) -> None:
    policy = load("t2v-1.3b", lora=lora("to_q", "ffn.net.2")).policy
    names = sorted(name for name, _ in policy.trainable())
    layers = ["attn1.to_q", "attn2.to_q", "ffn.net.2"]
    assert names == sorted(
        f"transformer.blocks.{block}.{layer}.lora_{side}.default.weight"
        for block in range(2)
        for layer in layers
        for side in "AB"
    )
    report = {(count.kind, count.trained): count.tensors for count in policy.trainable_report()}
    assert report == {("adapter", True): 12, ("base", False): 69}


def test_a_fresh_adapter_changes_nothing_and_is_off_when_disabled(load: Callable[..., Loaded]) -> None:
    plain = load("t2v-1.3b").policy
    adapted = load("t2v-1.3b", lora=lora("to_q", "to_v")).policy
    with torch.no_grad():
        reference = loss_of(plain, 0.5)
        assert torch.equal(loss_of(adapted, 0.5), reference)
        for name, parameter in adapted.trainable():
            if "lora_B" in name:
                parameter.fill_(0.1)
        assert not torch.equal(loss_of(adapted, 0.5), reference)
        adapted.transformer.disable_adapters()
        assert torch.equal(loss_of(adapted, 0.5), reference)


@pytest.mark.parametrize(
    ("prefix", "start"),
    [
        ("high_noise", "transformer."),
        ("low_noise", "transformer_2."),
        ("transformer_2", "transformer_2."),
        ("transformer.blocks.1", "transformer.blocks.1."),
        ("transformer_2.blocks.1", "transformer_2.blocks.1."),
    ],
)
def test_a_prefix_restricts_the_adapters(prefix: str, start: str, load: Callable[..., Loaded]) -> None:
    policy = load("i2v-a14b", lora=lora("to_q", prefix=prefix)).policy
    names = [name for name, _ in policy.trainable()]
    assert names and all(name.startswith(start) for name in names)


def test_a_prefix_within_an_expert_serves_both(load: Callable[..., Loaded]) -> None:
    policy = load("i2v-a14b", lora=lora("to_q", prefix="blocks.1")).policy
    starts = {name.split(".attn")[0] for name, _ in policy.trainable()}
    assert starts == {"transformer.blocks.1", "transformer_2.blocks.1"}


def test_train_experts_restricts_the_adapters(load: Callable[..., Loaded]) -> None:
    policy = load("i2v-a14b", lora=lora("to_q"), train_experts="low").policy
    assert {name.split(".")[0] for name, _ in policy.trainable()} == {"transformer_2"}


@pytest.mark.parametrize(
    ("spec", "changes", "line"),
    [
        (lora("to_query"), {}, "lora_target_modules to_query match no linear layer"),
        (lora("to_q", "to_query"), {}, "lora_target_modules to_query match"),
        (lora("o_q"), {}, "lora_target_modules o_q match"),
        (lora("norm_q"), {}, "lora_target_modules norm_q match"),
        (lora(), {}, "is empty"),
        (lora("to_q", prefix="transformer_3"), {}, "under lora_module_prefix transformer_3"),
        (lora("to_q", prefix="low_noise"), {"train_experts": "high"}, r"trained experts \(transformer\)"),
    ],
)
def test_targets_that_match_nothing_are_one_line(
    spec: LoraSpec, changes: dict[str, Any], line: str, load: Callable[..., Loaded]
) -> None:
    with pytest.raises(UserError, match=line) as caught:
        load("i2v-a14b", lora=spec, **changes)
    assert "\n" not in str(caught.value)
    assert "available suffixes are linear_1, linear_2, net.2, proj, proj_out, time_proj, to_k" in str(
        caught.value
    )


def test_targets_are_looked_for_before_anything_is_read(
    directories: dict[Family, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for reads in ("fill", "_load_text_encoder", "_load_vae"):
        monkeypatch.setattr(wan_loading, reads, None)
    spec = model_spec(directories["i2v-a14b"], "i2v-a14b", lora=lora("to_q", prefix="transformer_3"))
    with pytest.raises(UserError, match="under lora_module_prefix transformer_3"):
        wan_loading.load_wan(spec, "cpu")


def test_what_is_trained_is_counted_by_module(load: Callable[..., Loaded]) -> None:
    adapted = load("i2v-a14b", lora=lora("to_q", "ffn.net.2", prefix="low_noise")).policy
    # Two blocks, self- and cross-attention: 64 -> 64 at rank 4; the feed-forward layer 128 -> 64.
    assert describe_trained(trained_modules(adapted.trainable())) == [
        "transformer_2 trains to_q x 4 (lora_A 1,024 + lora_B 1,024), "
        "ffn.net.2 x 2 (lora_A 1,024 + lora_B 512)"
    ]
    whole = load("i2v-a14b").policy
    counts = trained_modules(whole.trainable())
    for name, expert in whole.experts.items():
        own = [count for count in counts if count.expert == name]
        assert sum(count.elements for count in own) == sum(p.numel() for p in expert.parameters())
        layers = {count.module: count.layers for count in own}
        assert layers["to_out.0"] == 4 and layers["ffn.net.0.proj"] == 2 and layers["proj_out"] == 1
        assert len(layers) < 16, "one for each kind, not one for each layer"


def test_adapters_learn_under_gradient_checkpointing(load: Callable[..., Loaded]) -> None:
    policy = load("i2v-a14b", lora=lora("to_q", "to_v", "to_out.0")).policy
    for expert in policy.experts.values():
        checkpoint_activations(expert)
    optimizer = torch.optim.AdamW([parameter for _, parameter in policy.trainable()], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        (loss_of(policy, 0.95) + loss_of(policy, 0.5)).backward()
        optimizer.step()
    # lora_A's gradient is zero at the first step, while lora_B is; after one step all must have moved.
    still = [name for name, p in policy.trainable() if p.grad is None or not p.grad.any() or not p.any()]
    assert not still
    assert all(p.grad is None for name, p in policy.named_parameters() if "lora_" not in name)


def test_checkpointing_changes_no_name_and_no_gradient(load: Callable[..., Loaded]) -> None:
    kept, recomputed = load("t2v-1.3b").policy, load("t2v-1.3b").policy
    names = list(recomputed.state_dict())
    checkpoint_activations(recomputed.transformer)
    assert list(recomputed.state_dict()) == names
    runs: list[int] = []
    recomputed.transformer.blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    for policy in (kept, recomputed):
        loss_of(policy, 0.5).backward()
    assert len(runs) == 2, "the block ran again in the backward pass"
    for (name, a), (_, b) in zip(kept.named_parameters(), recomputed.named_parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, b.grad), name


def test_adapters_are_float32_on_a_half_precision_base_and_keyed_by_seed(
    load: Callable[..., Loaded],
) -> None:
    loaded = load("t2v-1.3b", lora=lora("to_q"), load_dtype="bfloat16", param_dtype="bfloat16")
    policy = loaded.policy
    assert {p.dtype for _, p in policy.trainable()} == {torch.float32}
    assert policy.transformer.blocks[0].attn1.to_q.base_layer.weight.dtype == torch.bfloat16
    loss_of(policy, 0.5).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for _, p in policy.trainable())

    first = {name: p.detach().clone() for name, p in policy.trainable()}
    torch.manual_seed(123)  # the global stream plays no part
    again = load("t2v-1.3b", lora=lora("to_q"))
    assert all(torch.equal(first[name], p) for name, p in again.policy.trainable())
    other = load("t2v-1.3b").components
    reseeded = build_policy(other, loaded.spec, 1.0, seed=1)
    downs = [(first[name], p) for name, p in reseeded.trainable() if "lora_A" in name]
    assert not any(torch.equal(a, b) for a, b in downs)
    bound = 1.0 / 64**0.5
    assert all(bound / 2 < b.abs().max() <= bound for _, b in downs), "Kaiming bound of 64 inputs"
    assert all(isinstance(p, nn.Parameter) for _, p in reseeded.trainable())
