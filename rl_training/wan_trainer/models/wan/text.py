"""Prompt encoding exactly as Diffusers' Wan pipelines do it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from wan_trainer.models.wan.load import WanComponents

# Tokens per prompt: what Wan was trained with and what its pipelines pass by default. A tokenizer that
# declares a smaller model_max_length (a tiny model's) lowers it.
MAX_TOKENS = 512

# Encodings kept for the next step or group: 4 MiB each at UMT5-XXL width in bfloat16.
CACHED_PROMPTS = 64


@torch.no_grad()
def encode_prompts(components: WanComponents, prompts: Sequence[str]) -> torch.Tensor:
    """Encode prompts to (N, L, D) in the text encoder's dtype, on the components' device.

    Cleaned (ftfy, HTML entities, white space), truncated or padded to L = 512 tokens, encoded under the
    attention mask; positions beyond the prompt are zero afterwards (`WanPipeline._get_t5_prompt_embeds`).
    Each distinct prompt is encoded alone: a prompt's encoding then never depends on its neighbours in the
    batch or on what the cache held, which keeps a resumed run equal to an uninterrupted one to the bit.
    """
    cache = components.text_cache
    cleaned = [prompt_clean(prompt) for prompt in prompts]
    missing = [prompt for prompt in dict.fromkeys(cleaned) if prompt not in cache]
    encoded: dict[str, torch.Tensor] = {}
    if missing:
        with components.resident(components.text_encoder):
            encoded = {prompt: _encode(components, prompt) for prompt in missing}
    rows = [encoded[prompt] if prompt in encoded else cache[prompt] for prompt in cleaned]
    for prompt, row in zip(cleaned, rows, strict=True):
        cache[prompt] = row
        cache.move_to_end(prompt)
    while len(cache) > CACHED_PROMPTS:
        cache.popitem(last=False)
    return torch.stack(rows)


def _encode(components: WanComponents, prompt: str) -> torch.Tensor:
    """(L, D) encoding of one cleaned prompt."""
    tokens = components.tokenizer(
        [prompt],
        padding="max_length",
        max_length=min(MAX_TOKENS, components.tokenizer.model_max_length),
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    mask = tokens.attention_mask.to(components.device)
    hidden = components.text_encoder(tokens.input_ids.to(components.device), mask).last_hidden_state
    # Zeroed, not multiplied: what the encoder computes for padding is arbitrary and may be non-finite.
    return hidden[0].masked_fill(mask[0, :, None] == 0, 0.0)
