"""Diffusers' attention backends, as far as a configuration and its preflight must know them."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION_BACKENDS = (
    "native",
    "_native_cudnn",
    "_native_efficient",
    "_native_flash",
    "_native_math",
    "flash",
    "flash_hub",
    "flash_varlen",
    "flash_varlen_hub",
    "flash_4_hub",
    "_flash_varlen_3",
    "_flash_3_hub",
    "_flash_3_varlen_hub",
    "flex",
    "xformers",
)
"""Diffusers' names for attention that has a backward pass."""

WITHOUT_BACKWARD = {
    "_flash_3": "_flash_3_hub",
    "sage": "native",
    "sage_hub": "native",
    "sage_blackwell_hub": "native",
    "sage_varlen": "native",
    "_sage_qk_int8_pv_fp8_cuda": "native",
    "_sage_qk_int8_pv_fp8_cuda_sm90": "native",
    "_sage_qk_int8_pv_fp16_cuda": "native",
    "_sage_qk_int8_pv_fp16_triton": "native",
}
"""Backends that only infer, and what to train with instead. Sage quantises without a derivative; Diffusers
hides FlashAttention-3 (`_flash_3`) in an operator for which it registers none, the Hub's build has its own.
"""

SIXTEEN_BIT = frozenset(
    (
        "_native_cudnn",
        "_native_flash",
        "flash",
        "flash_hub",
        "flash_varlen",
        "flash_varlen_hub",
        "flash_4_hub",
        "_flash_varlen_3",
        "_flash_3_hub",
        "_flash_3_varlen_hub",
    )
)
"""Backends that compute in bfloat16 or float16 only."""


@dataclass(frozen=True)
class HubKernel:
    """A kernel repository of the Hugging Face Hub, and the version (its branch v<version>) that is used."""

    repo_id: str
    version: int


HUB_KERNELS = {
    "flash_hub": HubKernel("kernels-community/flash-attn2", 3),
    "flash_varlen_hub": HubKernel("kernels-community/flash-attn2", 3),
    "flash_4_hub": HubKernel("kernels-community/flash-attn4", 0),
    "_flash_3_hub": HubKernel("kernels-community/flash-attn3", 1),
    "_flash_3_varlen_hub": HubKernel("kernels-community/flash-attn3", 1),
}
"""What Diffusers asks the Hub for, by backend; a test compares it with Diffusers' own table."""
