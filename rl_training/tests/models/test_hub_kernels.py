"""Hub kernels: fetched once where there is a network, loaded from the cache and proven without one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from diffusers.models import attention_dispatch as dispatch

from rl_training.tests.models.families import FRAMES, HEIGHT, WIDTH, random_condition
from rl_training.tests.models.kernel_repository import (
    COMMIT,
    FOREIGN,
    FORWARD_ONLY,
    REPOSITORY,
    VARIANT,
    WRONG,
    FakeHub,
    forget_kernels,
    write_snapshot,
)
from wan_trainer.cli import main as cli
from wan_trainer.config.attention import ATTENTION_BACKENDS, HUB_KERNELS, SIXTEEN_BIT, WITHOUT_BACKWARD
from wan_trainer.models.wan import hub_kernels
from wan_trainer.models.wan.attention import prove_attention
from wan_trainer.models.wan.hub_kernels import fetch_hub_kernel, load_hub_kernel
from wan_trainer.models.wan.kernel_cache import (
    attention_identity,
    check_cached,
    kernels_cache,
    read_receipt,
)
from wan_trainer.recording.identity import AttentionIdentity
from wan_trainer.types import UserError

BACKEND = "_flash_3_hub"
KERNEL = HUB_KERNELS[BACKEND]
CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of this test; Diffusers' table is empty before and after, and the network is cut."""
    monkeypatch.setenv("WAN_TRAINER_KERNELS_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "ambient"))

    def refuse(*address: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    forget_kernels(monkeypatch)
    yield tmp_path / "kernels"
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


def test_the_tables_say_what_diffusers_says() -> None:
    asked = dispatch._HUB_KERNELS_REGISTRY
    for backend, kernel in HUB_KERNELS.items():
        entry = asked[dispatch.AttentionBackendName(backend)]
        assert (entry.repo_id, entry.version, entry.revision) == (kernel.repo_id, kernel.version, None)
    names = {name.value for name in dispatch.AttentionBackendName}
    elsewhere = {"aiter_fa2_hub", "_native_npu", "_native_xla"}
    assert set(ATTENTION_BACKENDS) | set(WITHOUT_BACKWARD) | elsewhere == names
    assert {name.value for name in asked} - set(HUB_KERNELS) <= set(WITHOUT_BACKWARD) | elsewhere
    for name, checks in dispatch._AttentionBackendRegistry._constraints.items():
        if name.value in ATTENTION_BACKENDS:
            halves = dispatch._check_qkv_dtype_bf16_or_fp16 in checks
            assert halves == (name.value in SIXTEEN_BIT), name


def test_flash_3_has_no_backward_pass_in_diffusers() -> None:
    operator = torch.ops._diffusers_flash_attn_3._flash_attn_forward.default
    q = torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out, _ = operator(q, q, q)
    with pytest.raises(RuntimeError, match="autograd"):
        out.sum().backward()


def test_a_policy_attends_with_the_kernel_of_the_cache(load, cache: Path) -> None:
    write_snapshot(cache)
    native = load("ti2v-5b", param_dtype="bfloat16").policy.to(torch.bfloat16)
    policy = load("ti2v-5b", param_dtype="bfloat16", attention_backend=BACKEND).policy.to(torch.bfloat16)
    for model in (native, policy):
        model.transformer.condition_embedder.time_embedder.float()
    shape = policy.latent_shape(FRAMES, HEIGHT, WIDTH)
    condition = random_condition(policy, 1, shape)
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
    counter = dispatch._HUB_KERNELS_REGISTRY[dispatch.AttentionBackendName(BACKEND)].kernel_fn.__globals__
    before = counter["calls"]
    velocity = policy.velocity(latents, 0.7, condition)
    velocity.square().mean().backward()
    attentions = 2 * len(policy.transformer.blocks)
    assert counter["calls"] - before == attentions
    assert policy.transformer.blocks[0].attn1.to_q.weight.grad.any()
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)
    torch.testing.assert_close(velocity, native.velocity(latents, 0.7, condition), rtol=0.05, atol=0.05)


def test_an_empty_cache_is_one_line_with_the_command(load, cache: Path) -> None:
    with pytest.raises(UserError) as caught:
        load("ti2v-5b", param_dtype="bfloat16", attention_backend=BACKEND)
    (line,) = caught.value.problems
    assert f"wan-trainer prefetch-attention-kernel --attention_backend {BACKEND}" in line
    assert str(cache) in line and "\n" not in line
    assert check_cached(BACKEND, cache)[0].count("prefetch-attention-kernel") == 1
    assert check_cached("native", cache) == []


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        ({"variant": FOREIGN}, "build variant"),
        ({"kernel": "def flash_attn_func():\n    ..."}, "flash_attn_interface"),
        ({"kernel": "raise OSError('libcudart.so.99: cannot open')"}, "libcudart.so.99"),
        ({"depends": (("kernels-community/other", 2),)}, "kernels-community/other version 2 is not in"),
    ],
)
def test_a_kernel_that_does_not_load_says_why(cache: Path, build, reason: str) -> None:
    write_snapshot(cache, **build)
    with pytest.raises(UserError, match=reason) as caught:
        load_hub_kernel(BACKEND, cache)
    assert "\n" not in caught.value.problems[0]


@pytest.mark.parametrize(
    ("kernel", "reason"), [(FORWARD_ONLY, "does not require grad"), (WRONG, "away from exact")]
)
def test_a_kernel_that_cannot_train_is_refused(cache: Path, kernel: str, reason: str) -> None:
    write_snapshot(cache, kernel=kernel)
    load_hub_kernel(BACKEND, cache)
    with pytest.raises(UserError, match=reason):
        prove_attention(BACKEND, 32, CPU, torch.bfloat16)


def test_the_dtype_is_proven_too(cache: Path) -> None:
    write_snapshot(cache)
    load_hub_kernel(BACKEND, cache)
    prove_attention(BACKEND, 32, CPU, torch.bfloat16)
    with pytest.raises(UserError, match="in float32"):
        prove_attention(BACKEND, 32, CPU, torch.float32)


def test_prefetch_fills_the_cache_and_prints_the_digest(cache: Path, monkeypatch, capsys) -> None:
    hub = FakeHub()
    monkeypatch.setattr(hub_kernels, "HuggingFaceHub", lambda: hub)
    monkeypatch.setattr(hub_kernels.constants, "HF_HUB_OFFLINE", False)
    assert cli.main(["prefetch-attention-kernel"]) == 0
    receipt = read_receipt(cache, KERNEL)
    assert receipt is not None and (receipt.commit, receipt.variant) == (COMMIT, VARIANT)
    printed = capsys.readouterr().out
    assert receipt.sha256 in printed and COMMIT in printed and str(cache) in printed
    assert check_cached(BACKEND, cache) == []
    recorded = attention_identity(BACKEND, cache)
    assert (recorded.commit, recorded.build, recorded.sha256) == (COMMIT, VARIANT, receipt.sha256)
    assert attention_identity("native", cache) == AttentionIdentity("native")
    load_hub_kernel(BACKEND, cache)
    assert check_cached(BACKEND, cache) == [], "importing leaves bytecode, which is no damage"

    build = next((cache / "kernels--kernels-community--flash-attn3" / "snapshots").glob("*/build/*"))
    (build / "flash_attn_interface.py").write_text("")
    (line,) = check_cached(BACKEND, cache)
    assert "differs from what was fetched" in line and "prefetch-attention-kernel" in line


def test_prefetch_fetches_what_the_kernel_depends_on(tmp_path: Path) -> None:
    other = "kernels-community/other"
    hub = FakeHub(builds={REPOSITORY: (VARIANT,), other: (VARIANT,)}, depends=((other, 2),))
    receipts = fetch_hub_kernel(BACKEND, tmp_path, hub)
    assert [(receipt.repo_id, receipt.version) for receipt in receipts] == [(other, 2), (REPOSITORY, 1)]
    assert hub.downloads == [REPOSITORY, other]


@pytest.mark.parametrize(
    ("backend", "hub", "reason"),
    [
        ("native", FakeHub(), "needs no kernel of the Hub"),
        (BACKEND, FakeHub(builds={REPOSITORY: (FOREIGN,)}), f"it has {FOREIGN}"),
        (BACKEND, FakeHub(builds={}), "the network is down"),
        (BACKEND, FakeHub(trusted=False), "not from a trusted publisher"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(tmp_path: Path, backend, hub, reason) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        fetch_hub_kernel(backend, tmp_path, hub)
    assert "\n" not in caught.value.problems[0]
    assert not list(tmp_path.glob("*.json"))


def test_cudnn_attention_is_switched_by_its_key(load) -> None:
    try:
        for disabled in (True, False):
            load("t2v-1.3b", disable_cudnn_sdp=disabled)
            assert torch.backends.cuda.cudnn_sdp_enabled() != disabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_an_ambient_kernels_cache_is_ignored() -> None:
    assert kernels_cache({"KERNELS_CACHE": "/ambient"}) == kernels_cache({})
    assert kernels_cache({"WAN_TRAINER_KERNELS_CACHE": "/mine"}) == Path("/mine")
