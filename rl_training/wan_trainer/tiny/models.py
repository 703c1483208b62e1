"""Tiny Wan pipelines in the Diffusers directory format: real structure, a few hundred kilobytes, no download.

Every class, configuration key and weight name is the one of the published checkpoints; only the widths are
small. The VAE is a real autoencoder (`wan_trainer.tiny.analytic_vae`), so that decoded rollouts show
something.
"""

from __future__ import annotations

import json
import shutil
import string
import uuid
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from diffusers.pipelines.wan.pipeline_wan_i2v import WanImageToVideoPipeline
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from diffusers.utils import logging as diffusers_logging
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel
from transformers.utils import logging as transformers_logging

from wan_trainer.tiny.analytic_vae import CHANNELS, set_block_mean_weights
from wan_trainer.types import UserError

TINY_FAMILIES = ("ti2v-5b", "i2v-a14b", "t2v-1.3b")
TINY_MARKER = "tiny.json"
TEXT_DIM = 32
# `model_max_length` of the tokenizer, 512 in the published checkpoints. Cross-attention to 512 padded
# tokens would take nine tenths of a tiny model's time; whoever encodes text asks the tokenizer for its
# length.
TEXT_LENGTH = 32
LATENT_CHANNELS = 4
# Not 0 and 1, as a tiny VAE could have them: a forgotten or doubled normalisation must change the picture.
LATENTS_MEAN = (-0.2, -0.15, -0.25, 0.05)
LATENTS_STD = (0.6, 0.7, 0.65, 0.8)
_BOUNDARY_RATIO = 0.9
# Whole-word pieces beside the single characters, so that a prompt is a handful of tokens as with the real
# one.
_WORDS = (
    "a an and at background ball black blue bottom color dark down edge every fixed for frame from goal gray "
    "green ground in into is it its keep left lie move not of on orange over place plain purple red right "
    "scene shape show size slide speed square stay steady still stop straight that the then to top until up "
    "video view while white with yellow ing ed er es ly s tion"
)


def make_tiny(family: str, out: Path, seed: int = 0) -> Path:
    """Write a tiny `family` pipeline to the directory `out` and return it.

    The directory appears whole or not at all. A tiny directory already there is replaced; anything else
    there is a `UserError`. The same family and seed give the same bytes.
    """
    if family not in TINY_FAMILIES:
        raise UserError(f"family {family!r} has no tiny model: choose one of {', '.join(TINY_FAMILIES)}")
    refuse_foreign(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex}.partial")
    quieten()
    try:
        build_pipeline(family, seed).save_pretrained(partial)
        (partial / TINY_MARKER).write_text(json.dumps({"family": family, "seed": seed}) + "\n")
        replace_directory(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def quieten() -> None:
    """Diffusers and transformers draw progress bars for files of a megabyte, also where nobody watches."""
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


def refuse_foreign(out: Path) -> None:
    """Raise a `UserError` when `out` exists and was not written by this module."""
    if out.exists() and not (out / TINY_MARKER).is_file():
        raise UserError(
            f"{out} exists and is not a tiny model: choose another directory, or remove it yourself"
        )


def replace_directory(partial: Path, out: Path) -> None:
    """Rename `partial` to `out`, moving a previous `out` aside first: a rename cannot replace a full
    directory."""
    if out.exists():
        previous = out.with_name(f".{out.name}.{uuid.uuid4().hex}.previous")
        out.rename(previous)
        partial.rename(out)
        shutil.rmtree(previous)
    else:
        partial.rename(out)


def build_pipeline(family: str, seed: int = 0) -> WanPipeline | WanImageToVideoPipeline:
    """The tiny pipeline of `family` in memory, float32 on the CPU. It does not touch the global random
    state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = build_tokenizer()
        vae = build_vae("2.2" if family == "ti2v-5b" else "2.1")
        text_encoder = build_text_encoder(len(tokenizer))
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0, num_train_timesteps=1000
        )
        shared: dict[str, Any] = {
            "tokenizer": tokenizer,
            "text_encoder": text_encoder,
            "vae": vae,
            "scheduler": scheduler,
        }
        # Named without a value, as model_index.json of the published image-to-video checkpoints does.
        absent: dict[str, Any] = {"image_encoder": None, "image_processor": None}
        if family == "t2v-1.3b":
            return WanPipeline(**shared, transformer=build_transformer(LATENT_CHANNELS))
        if family == "ti2v-5b":
            return WanImageToVideoPipeline(
                **shared,
                transformer=build_transformer(LATENT_CHANNELS),
                **absent,
                expand_timesteps=True,
            )
        # Input: noisy latent, 4 mask channels (one per frame of a latent frame), latent of the first frame.
        conditioned = 2 * LATENT_CHANNELS + 4
        return WanImageToVideoPipeline(
            **shared,
            transformer=build_transformer(conditioned),
            transformer_2=build_transformer(conditioned),
            **absent,
            boundary_ratio=_BOUNDARY_RATIO,
        )


def build_transformer(in_channels: int) -> WanTransformer3DModel:
    """A two-layer Wan transformer of width 64, initialised from the current random state."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=in_channels,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=64,
        ffn_dim=128,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        eps=1e-6,
        image_dim=None,
        added_kv_proj_dim=None,
        rope_max_seq_len=1024,
        pos_embed_seq_len=None,
    )


def build_vae(layout: str) -> AutoencoderKLWan:
    """The block-mean VAE: layout "2.2" (blocks of 16x16 pixels) or "2.1" (8x8), both of 4 frames after the
    first."""
    shared: dict[str, Any] = {
        "base_dim": CHANNELS,
        "decoder_base_dim": CHANNELS,
        "z_dim": LATENT_CHANNELS,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 0,
        "temperal_downsample": [False, True, True],
        "latents_mean": list(LATENTS_MEAN),
        "latents_std": list(LATENTS_STD),
        "scale_factor_temporal": 4,
    }
    if layout == "2.2":
        vae = AutoencoderKLWan(
            **shared, is_residual=True, in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=16
        )
    else:
        vae = AutoencoderKLWan(
            **shared,
            is_residual=False,
            in_channels=3,
            out_channels=3,
            patch_size=None,
            scale_factor_spatial=8,
        )
    set_block_mean_weights(vae)
    return vae.eval()


def build_text_encoder(vocab_size: int) -> UMT5EncoderModel:
    """A two-layer UMT5 encoder, initialised from the current random state."""
    config = UMT5Config(
        vocab_size=vocab_size,
        d_model=TEXT_DIM,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0,
        feed_forward_proj="gated-gelu",
    )
    return UMT5EncoderModel(config).eval()


def build_tokenizer(words: str = _WORDS) -> PreTrainedTokenizerFast:
    """A Unigram tokenizer with the special tokens of UMT5 (pad 0, end 1, unknown 2), built without a
    download.

    It knows every printable ASCII character, the given (space-separated) words, and the 256 bytes for
    everything else, so that no text of any language becomes unknown.
    """
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
    pieces: dict[str, float] = {"▁": -4.0}
    for word in words.split():
        pieces[f"▁{word}"] = -5.0
        pieces[f"▁{word.capitalize()}"] = -5.5
        if len(word) > 1:
            pieces[word] = -6.0
    for character in string.ascii_letters + string.digits + string.punctuation:
        pieces.setdefault(character, -8.0)
    bytes_ = [(f"<0x{value:02X}>", -12.0) for value in range(256)]
    tokenizer = Tokenizer(Unigram([*specials, *pieces.items(), *bytes_], unk_id=2, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    # Named as the fast base class in model_index.json: loaded as T5Tokenizer the ids would silently differ.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=TEXT_LENGTH,
        padding_side="right",
    )
