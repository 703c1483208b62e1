"""The attention kernel: the one seam through which it is chosen."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from wan_trainer.config.attention import HUB_KERNELS
from wan_trainer.models.wan.hub_kernels import load_hub_kernel
from wan_trainer.models.wan.kernel_cache import kernels_cache
from wan_trainer.types import UserError, first_line

# bfloat16 keeps 8 bits: a correct kernel's output and gradients are within 1% of float32's; another
# kernel's are not within 5%.
TOLERANCE = 0.05


def configure_attention(
    experts: Iterable[WanTransformer3DModel],
    backend: str,
    *,
    disable_cudnn_sdp: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Use `backend` (a Diffusers attention backend name) in every expert, after proving it on `device`.

    disable_cudnn_sdp keeps torch's SDPA from choosing cuDNN's kernel. dtype: what queries are computed in.
    Hub kernels come from the offline cache; nothing goes to the network. Raises UserError when the backend is
    unknown, needs a package that is not installed, a kernel that is not in the cache, or cannot train here.
    """
    torch.backends.cuda.enable_cudnn_sdp(not disable_cudnn_sdp)
    if backend in HUB_KERNELS:
        load_hub_kernel(backend, kernels_cache(os.environ))
    log = logging.getLogger("diffusers.models.modeling_utils")
    level = log.level
    # Diffusers warns once per expert that backends are experimental; the pinned version makes it no news.
    log.setLevel(logging.ERROR)
    head_dims: set[int] = set()
    try:
        for expert in experts:
            expert.set_attention_backend(backend)
            head_dims.add(expert.config["attention_head_dim"])
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        raise UserError(
            f"attention_backend {backend} is not available ({first_line(error)}): use "
            "--attention_backend native, or install what it needs"
        ) from None
    finally:
        log.setLevel(level)
    # torch chooses among its own kernels by what they can do; a named kernel has to show it.
    if backend != "native":
        for head_dim in sorted(head_dims):
            prove_attention(backend, head_dim, device, dtype)


def prove_attention(backend: str, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
    """Run forward and backward once and compare both with float32 attention.

    Queries (1, 64, 2, head_dim), keys and values (1, 96, 2, head_dim). Raises UserError when the kernel
    fails on this device, has no backward pass, or computes something else.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = (64, 96, 96)
    exact = [torch.randn(1, length, 2, head_dim, generator=generator) for length in lengths]
    given = [tensor.to(device, dtype).requires_grad_() for tensor in exact]
    # The reference sees the rounded inputs, so that only the kernel's own error is judged.
    wanted = [tensor.detach().float().requires_grad_() for tensor in given]
    query, key, value = (tensor.transpose(1, 2) for tensor in wanted)
    scores = torch.softmax(query @ key.transpose(-1, -2) / head_dim**0.5, dim=-1)
    reference = (scores @ value).transpose(1, 2)
    reference.square().sum().backward()
    try:
        with warnings.catch_warnings():
            # flex_attention warns that it is not compiled; the blocks are, this one call is not.
            warnings.simplefilter("ignore")
            output = dispatch_attention_fn(
                given[0], given[1], given[2], backend=AttentionBackendName(backend)
            )
            output.float().square().sum().backward()
    except Exception as error:  # noqa: BLE001 - every kernel has its own exceptions
        raise UserError(
            f"attention_backend {backend} cannot train on {_name(device)} in {str(dtype)[6:]} "
            f"({first_line(error)}): use --attention_backend native"
        ) from None
    pairs = [("output", output, reference)]
    pairs += [
        (f"gradient of the {name}", tensor.grad, target.grad)
        for name, tensor, target in zip(("query", "key", "value"), given, wanted, strict=True)
    ]
    for what, found, target in pairs:
        assert target is not None
        error = float("nan") if found is None else ((found.float() - target).norm() / target.norm()).item()
        if not error <= TOLERANCE:
            raise UserError(
                f"attention_backend {backend} on {_name(device)} in {str(dtype)[6:]}: its {what} is "
                f"{'missing' if found is None else f'{error:.2g} away from exact attention'}: use "
                "--attention_backend native"
            )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
