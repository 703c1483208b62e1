"""Model directories between tiny and real: large enough that the transformer, not Python, takes the time."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from wan_trainer.tiny.models import LATENT_CHANNELS, TEXT_DIM, build_pipeline


def write_model(out: Path, *, heads: int, layers: int) -> Path:
    """The tiny TI2V-5B-like pipeline with a transformer of width 64 x `heads`, randomly initialised."""
    pipeline = build_pipeline("ti2v-5b")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline.transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=heads,
            attention_head_dim=64,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_DIM,
            freq_dim=256,
            ffn_dim=256 * heads,
            num_layers=layers,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=1024,
        )
    pipeline.save_pretrained(out)
    return out
