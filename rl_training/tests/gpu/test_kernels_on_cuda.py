"""Kernels on a real GPU: attention backends, Liger, and a policy that uses both."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from rl_training.tests.models.families import FRAMES, HEIGHT, WIDTH, model_spec, random_condition
from wan_trainer.config.attention import HUB_KERNELS
from wan_trainer.models.wan.attention import prove_attention
from wan_trainer.models.wan.hub_kernels import load_hub_kernel
from wan_trainer.models.wan.kernel_cache import check_cached, kernels_cache
from wan_trainer.models.wan.kernel_probe import kernel_problems, prove_liger
from wan_trainer.models.wan.liger import liger_report, use_liger
from wan_trainer.models.wan.load import load_wan
from wan_trainer.models.wan.policy import build_policy
from wan_trainer.preflight.cuda import cuda_devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_devices().count == 0, reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("backend", ["_native_math", "_native_efficient", "_native_flash", "_native_cudnn"])
def test_torchs_own_kernels_train(backend: str) -> None:
    prove_attention(backend, 128, CUDA, torch.bfloat16)


@pytest.mark.parametrize("backend", HUB_KERNELS)
def test_hub_kernels_in_the_cache_train(backend: str) -> None:
    cache = kernels_cache(os.environ)
    missing = check_cached(backend, cache)
    if missing:
        pytest.skip(missing[0])
    if "3" in backend and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashAttention-3 is for compute capability 9.0")
    load_hub_kernel(backend, cache)
    prove_attention(backend, 128, CUDA, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_liger_equals_torch(dtype: torch.dtype) -> None:
    prove_liger(CUDA, dtype)
    assert kernel_problems("native", 128, "bfloat16", True, "cuda") == []


def test_a_policy_with_liger_predicts_and_learns_the_same(tiny_a14b) -> None:
    spec = replace(model_spec(tiny_a14b, "i2v-a14b"), device="cuda")
    results = []
    for liger in (False, True):
        policy = build_policy(load_wan(spec, CUDA), spec, 1.0, seed=0)
        if liger:
            for expert in policy.experts.values():
                use_liger(expert, CUDA)
                assert "norm_q" in liger_report(expert)
        shape = policy.latent_shape(FRAMES, HEIGHT, WIDTH)
        condition = random_condition(policy, 2, shape)
        condition = replace(
            condition,
            text=condition.text.cuda(),
            negative_text=None,
            image_latent=condition.image_latent.cuda(),
        )
        latents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(3)).cuda()
        velocity = policy.velocity(latents, 0.95, condition)
        velocity.square().mean().backward()
        gradients = {name: p.grad for name, p in policy.trainable() if p.grad is not None}
        results.append((velocity.detach(), gradients))
    (plain, expected), (fused, found) = results
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (found[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert difference < 1e-3, name
