"""Closed-form sizes against Diffusers' and transformers' own modules on the meta device."""

import json

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from peft import LoraConfig
from transformers import UMT5Config, UMT5EncoderModel

from wan_trainer.config.specs import LoraSpec
from wan_trainer.models.wan.architecture import (
    TRANSFORMERS,
    UMT5_XXL,
    VAE_21,
    VAE_22,
    check_heads,
    model_shape,
    published_shape,
    transformer_shape,
    vae_shape,
)
from wan_trainer.models.wan.lora import matching_layers

VAE_22_CONFIG = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}


def count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def on_meta(shape) -> WanTransformer3DModel:
    with torch.device("meta"):
        return WanTransformer3DModel(
            num_layers=shape.num_layers,
            num_attention_heads=shape.num_attention_heads,
            attention_head_dim=shape.attention_head_dim,
            ffn_dim=shape.ffn_dim,
            in_channels=shape.in_channels,
            out_channels=shape.out_channels,
            text_dim=shape.text_dim,
            freq_dim=shape.freq_dim,
            cross_attn_norm=shape.cross_attn_norm,
        )


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_the_parameters_of_every_family_are_exact(family):
    shape = TRANSFORMERS[family]
    model = on_meta(shape)
    assert shape.elements == count(model)
    assert shape.block_elements == count(model.blocks[0])
    assert shape.time_embedder_elements == count(model.condition_embedder.time_embedder)
    linears = {
        name: layer for name, layer in model.blocks[0].named_modules() if isinstance(layer, torch.nn.Linear)
    }
    assert {layer.name: (layer.inputs, layer.outputs) for layer in shape.block_linears()} == {
        name: (layer.in_features, layer.out_features) for name, layer in linears.items()
    }
    assert transformer_shape(dict(model.config)) == shape
    assert shape.local_elements(1) == shape.elements


def test_the_published_sizes_are_those_of_the_model_cards():
    assert [round(shape.elements / 1e9, 1) for shape in TRANSFORMERS.values()] == [5.0, 14.3, 1.4, 14.3]
    assert published_shape("i2v-a14b").experts == 2 and published_shape("ti2v-5b").vae is VAE_22


@pytest.mark.parametrize(
    "targets", [("to_q", "to_k", "to_v", "to_out.0"), ("ffn.net.2", "time_proj", "proj_out")]
)
def test_adapters_are_counted_where_peft_puts_them(targets):
    shape = TRANSFORMERS["t2v-1.3b"]
    model = on_meta(shape)
    spec = LoraSpec(rank=16, alpha=32.0, target_modules=targets, module_prefix=None)
    layers = matching_layers("transformer", model, spec)
    model.add_adapter(LoraConfig(r=16, target_modules=layers))
    added = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert shape.adapter_elements(16, targets, None) == added


def test_text_encoder_and_vaes_are_exact():
    with torch.device("meta"):
        text = UMT5EncoderModel(
            UMT5Config(
                vocab_size=256_384,
                d_model=4096,
                d_kv=64,
                d_ff=10_240,
                num_layers=24,
                num_heads=64,
                feed_forward_proj="gated-gelu",
            )
        )
        older, newer = AutoencoderKLWan(), AutoencoderKLWan(**VAE_22_CONFIG)
    assert UMT5_XXL.elements == count(text)
    assert VAE_21.elements == count(older) and VAE_22.elements == count(newer)
    assert vae_shape(dict(older.config), VAE_21.elements) == VAE_21
    assert vae_shape(dict(newer.config), VAE_22.elements) == VAE_22


def test_a_directory_wins_over_the_published_sizes(directories, tmp_path):
    for family, path in directories.items():
        found = model_shape(path, family)
        tiny = WanTransformer3DModel.from_pretrained(path, subfolder="transformer")
        text = UMT5EncoderModel.from_pretrained(path / "text_encoder")
        vae = AutoencoderKLWan.from_pretrained(path, subfolder="vae")
        assert found.found and found.experts == published_shape(family).experts
        assert found.transformer.elements == count(tiny)
        assert found.text_encoder.elements == count(text)
        assert found.vae.elements == count(vae)
        assert (found.text_element_bytes, found.vae_element_bytes, found.checkpoint_bytes) == (4, 4, 4)
        assert found.text_length == 32
    assert model_shape(tmp_path, "ti2v-5b") == published_shape("ti2v-5b")
    (tmp_path / "model_index.json").write_text(json.dumps({}))
    assert model_shape(tmp_path, "ti2v-5b") == published_shape("ti2v-5b")


@pytest.mark.parametrize(
    ("family", "tp", "offered"),
    [
        ("ti2v-5b", 5, "use 4 or 8"),
        ("ti2v-5b", 3, "feed-forward columns"),
        ("t2v-1.3b", 8, "use 4"),
        ("i2v-a14b", 2, None),
    ],
)
def test_heads_that_cannot_be_cut_are_refused_with_numbers_that_can(family, tp, offered):
    line = check_heads(TRANSFORMERS[family], tp)
    if offered is None:
        assert line is None
        return
    assert line is not None and line.startswith(f"tensor_parallel_size: {tp}") and offered in line
    for word in line.rpartition("use ")[2].split(" or "):
        assert check_heads(TRANSFORMERS[family], int(word)) is None
