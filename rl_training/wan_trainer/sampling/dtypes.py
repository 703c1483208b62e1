"""Configuration's dtype names in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from wan_trainer.config.specs import Dtype

DTYPES: Mapping[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
