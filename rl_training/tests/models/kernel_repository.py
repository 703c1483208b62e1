"""A kernel repository that stands in for FlashAttention's on the Hub: real attention in plain torch."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from diffusers.models import attention_dispatch as dispatch

REPOSITORY = "kernels-community/flash-attn3"
# Builds without a version fit every torch; this one is for the CUDA builds of torch.
VARIANT = "torch-cuda"
FOREIGN = "torch28-cxx11-cu126-aarch64-linux"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

KERNEL = """
    import torch

    from . import flash_attn_interface

    calls = 0


    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, **options):
        global calls
        calls += 1
        assert q.dtype in (torch.bfloat16, torch.float16), "FlashAttention computes in 16 bits"
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=softmax_scale)
        return out.transpose(1, 2)
"""
INTERFACE = "def _flash_attn_forward():\n    ...\n\n\ndef _flash_attn_backward():\n    ...\n"
FORWARD_ONLY = KERNEL.replace("return out.transpose(1, 2)", "return out.transpose(1, 2).detach()")
WRONG = KERNEL.replace("scale=softmax_scale", "scale=1.0")


def write_build(variant: Path, kernel: str = KERNEL, depends: tuple[tuple[str, int], ...] = ()) -> None:
    """One build directory, as the kernels package expects it."""
    variant.mkdir(parents=True)
    metadata = {
        "id": f"_flash_attn3_{abs(hash(str(variant))):x}",
        "name": "flash-attn3",
        "version": 1,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "kernel-depends": [{"repo-id": name, "version": version} for name, version in depends],
        "backend": {"type": "cuda"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata))
    (variant / "__init__.py").write_text(textwrap.dedent(kernel))
    (variant / "flash_attn_interface.py").write_text(INTERFACE)


def write_snapshot(
    cache: Path, repository: str = REPOSITORY, version: int = 1, variant: str = VARIANT, **build: object
) -> Path:
    """A repository in the cache, in the layout of the Hub's client; its snapshot."""
    root = cache / f"kernels--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / f"v{version}").write_text(COMMIT)
    write_build(root / "snapshots" / COMMIT / "build" / variant, **build)  # pyright: ignore[reportArgumentType]
    return root / "snapshots" / COMMIT


def forget_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Diffusers' table of loaded kernels is empty, and is put back after the test."""
    for entry in dispatch._HUB_KERNELS_REGISTRY.values():
        for name in ("kernel_fn", "wrapped_forward_fn", "wrapped_backward_fn"):
            monkeypatch.setattr(entry, name, None)


@dataclass
class FakeHub:
    """The Hub behind the download seam: repositories that exist, publishers that are trusted."""

    builds: dict[str, tuple[str, ...]] = field(default_factory=lambda: {REPOSITORY: (FOREIGN, VARIANT)})
    depends: tuple[tuple[str, int], ...] = ()
    trusted: bool = True
    downloads: list[str] = field(default_factory=list)

    def check_publisher(self, repo_id: str) -> None:
        if not self.trusted:
            raise ValueError(f"Kernel repository '{repo_id}' is not from a trusted publisher.\nSet more.")

    def variants(self, repo_id: str, revision: str) -> list[str]:
        assert revision.startswith("v"), "only a branch's name leaves its commit in the cache"
        if repo_id not in self.builds:
            raise OSError("the network is down")
        return list(self.builds[repo_id])

    def download(self, repo_id: str, revision: str, variant: str, cache: Path) -> Path:
        self.downloads.append(repo_id)
        depends = self.depends if repo_id == REPOSITORY else ()
        return write_snapshot(cache, repo_id, int(revision[1:]), variant, depends=depends)
