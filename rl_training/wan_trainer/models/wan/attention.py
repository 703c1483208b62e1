"""The attention kernel: the one seam through which it is chosen."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from wan_trainer.types import UserError


def configure_attention(
    experts: Iterable[WanTransformer3DModel], backend: str, *, disable_cudnn_sdp: bool
) -> None:
    """Use `backend` (a Diffusers attention backend name) in every expert.

    disable_cudnn_sdp keeps torch's SDPA from choosing cuDNN's kernel. Raises UserError when the backend is
    unknown, needs a package that is not installed, or a kernel that is not in the offline cache.
    """
    torch.backends.cuda.enable_cudnn_sdp(not disable_cudnn_sdp)
    log = logging.getLogger("diffusers.models.modeling_utils")
    level = log.level
    # Diffusers warns once per expert that backends are experimental; the pinned version makes it no news.
    log.setLevel(logging.ERROR)
    try:
        for expert in experts:
            expert.set_attention_backend(backend)
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise UserError(
            f"attention_backend {backend} is not available ({reason}): "
            "use native, or fetch the kernel beforehand"
        ) from None
    finally:
        log.setLevel(level)
