"""What the tests of the models share: a specification per tiny family, conditions, prompts and images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from wan_trainer.config.specs import Family, ModelSpec
from wan_trainer.models.wan.load import WanComponents
from wan_trainer.models.wan.policy import WanPolicy
from wan_trainer.types import Condition, Sample

FAMILIES: tuple[Family, ...] = ("ti2v-5b", "i2v-a14b", "t2v-1.3b")
FRAMES, HEIGHT, WIDTH = 9, 64, 64


@dataclass(frozen=True)
class Loaded:
    """A loaded tiny pipeline and its policy."""

    spec: ModelSpec
    components: WanComponents
    policy: WanPolicy


def model_spec(path: Path, family: Family, **changes: Any) -> ModelSpec:
    """The specification of a tiny directory on the CPU, in float32."""
    spec = ModelSpec(
        path=path,
        family=family,
        device="cpu",
        load_dtype="auto",
        param_dtype="float32",
        reduce_dtype="float32",
        train_experts="both",
        lora=None,
        negative_prompt="",
        gradient_checkpointing=False,
        attention_backend="native",
        disable_cudnn_sdp=True,
        use_liger_kernel=False,
        compile_backend=None,
        compile_mode=None,
        offload_inference_models=False,
        fsdp=True,
    )
    return replace(spec, **changes)


def random_condition(policy: WanPolicy, n: int, shape: tuple[int, ...], seed: int = 0) -> Condition:
    """A condition of the policy's family with random entries, negative text included."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    z, frames, height, width = shape
    family = policy.directory.family
    return Condition(
        text=draw(n, 7, 32),
        negative_text=draw(n, 7, 32),
        image_latent=draw(n, 4 + z, frames, height, width) if family == "i2v-a14b" else None,
        first_frame_latent=draw(n, z, 1, height, width) if family == "ti2v-5b" else None,
    )


def prompts(count: int) -> list[Sample]:
    """Samples that differ in text, one with a prompt that needs cleaning."""
    texts = ["a red square moves right", "  the &amp;quot;blue&amp;quot; ball\n\n stays  still ", "stop"]
    return [Sample(sample_id=f"task/{i}", task="task", prompt=texts[i]) for i in range(count)]


def images(count: int) -> torch.Tensor:
    """uint8 (P, 3, H, W) pictures that differ."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (count, 3, HEIGHT, WIDTH), generator=generator, dtype=torch.uint8)
