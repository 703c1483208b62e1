"""Sizes of the Wan models and what follows from them in closed form: no weights, no model directory, no
torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wan_trainer.config.family import names_component, read_json_object
from wan_trainer.config.specs import Family, LoraSpec, ModelSpec
from wan_trainer.models.wan.directory import EXPERTS, trained_experts
from wan_trainer.models.wan.weight_files import count_elements, damage, weight_files
from wan_trainer.topology import divisors

PATCH_VOLUME = 4
"""Latent elements of one channel in a token: every Wan model patches 1 x 2 x 2."""


@dataclass(frozen=True)
class Linear:
    """One linear layer of a block. split: the dim tensor parallelism cuts, "out" or "in"."""

    name: str
    inputs: int
    outputs: int
    split: str

    @property
    def elements(self) -> int:
        """Weight and bias."""
        return self.inputs * self.outputs + self.outputs


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of one `WanTransformer3DModel`, under the names of its config.json."""

    num_layers: int
    num_attention_heads: int
    ffn_dim: int
    in_channels: int
    out_channels: int
    attention_head_dim: int = 128
    text_dim: int = 4096
    freq_dim: int = 256
    cross_attn_norm: bool = True

    @property
    def dim(self) -> int:
        """Width of a token."""
        return self.num_attention_heads * self.attention_head_dim

    def block_linears(self) -> tuple[Linear, ...]:
        """The linear layers of one block by their names within it."""
        d, f = self.dim, self.ffn_dim
        attention = [
            Linear(f"{attention}.{name}", d, d, "in" if name == "to_out.0" else "out")
            for attention in ("attn1", "attn2")
            for name in ("to_q", "to_k", "to_v", "to_out.0")
        ]
        return (*attention, Linear("ffn.net.0.proj", d, f, "out"), Linear("ffn.net.2", f, d, "in"))

    def root_linears(self) -> tuple[Linear, ...]:
        """The linear layers outside the blocks; tensor parallelism leaves them whole."""
        d, embedder = self.dim, "condition_embedder"
        return (
            Linear(f"{embedder}.time_embedder.linear_1", self.freq_dim, d, ""),
            Linear(f"{embedder}.time_embedder.linear_2", d, d, ""),
            Linear(f"{embedder}.time_proj", d, 6 * d, ""),
            Linear(f"{embedder}.text_embedder.linear_1", self.text_dim, d, ""),
            Linear(f"{embedder}.text_embedder.linear_2", d, d, ""),
            Linear("proj_out", d, self.out_channels * PATCH_VOLUME, ""),
        )

    @property
    def block_elements(self) -> int:
        """Parameters of one block: linear layers, four q/k norms, the modulation table, the affine norm."""
        norms = 4 * self.dim + (2 * self.dim if self.cross_attn_norm else 0)
        return sum(layer.elements for layer in self.block_linears()) + norms + 6 * self.dim

    @property
    def root_elements(self) -> int:
        """Parameters outside the blocks: patch embedding, embedders, output layer, output modulation."""
        patch = self.in_channels * PATCH_VOLUME * self.dim + self.dim
        return patch + sum(layer.elements for layer in self.root_linears()) + 2 * self.dim

    @property
    def time_embedder_elements(self) -> int:
        """Those of the root that compute in float32."""
        return sum(layer.elements for layer in self.root_linears() if ".time_embedder." in layer.name)

    @property
    def elements(self) -> int:
        """All parameters."""
        return self.num_layers * self.block_elements + self.root_elements

    def local_block_elements(self, tp: int) -> int:
        """Parameters of one block on one of `tp` tensor-parallel ranks.

        q, k, v and the first feed-forward layer are cut with their biases, q/k norms too; the layers after
        them keep whole biases; the rest is on every rank.
        """
        cut = 4 * self.dim
        for layer in self.block_linears():
            cut += layer.inputs * layer.outputs + (layer.outputs if layer.split == "out" else 0)
        return self.block_elements - cut + cut // tp

    def local_elements(self, tp: int) -> int:
        """Parameters of the transformer on one of `tp` tensor-parallel ranks."""
        return self.num_layers * self.local_block_elements(tp) + self.root_elements

    def adapter_elements(
        self,
        rank: int,
        targets: Collection[str],
        prefix: str | None,
        tp: int = 1,
        expert: str = "transformer",
    ) -> int:
        """Parameters of LoRA adapters on every linear layer whose name ends with a target suffix.

        prefix: restricts them to names that start so, within the transformer or with `expert`, its name, in
        front. tp: on one of `tp` tensor-parallel ranks, where the factor beside the cut dim is cut with it.
        """
        start = "" if prefix is None else prefix.rstrip(".") + "."
        layers = [
            replace(layer, name=f"blocks.{index}.{layer.name}")
            for index in range(self.num_layers)
            for layer in self.block_linears()
        ]
        total = 0
        for layer in (*layers, *self.root_linears()):
            matches = any(layer.name == target or layer.name.endswith(f".{target}") for target in targets)
            if matches and (layer.name.startswith(start) or f"{expert}.{layer.name}".startswith(start)):
                total += rank * layer.inputs // (tp if layer.split == "in" else 1)
                total += rank * layer.outputs // (tp if layer.split == "out" else 1)
        return total


@dataclass(frozen=True)
class TextEncoderShape:
    """Sizes of a `UMT5EncoderModel`, under the names of its config.json. Every layer has its own position
    bias."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    relative_attention_num_buckets: int = 32

    @property
    def elements(self) -> int:
        """All parameters: embedding, per layer q, k, v, o, gated feed-forward, two norms and bias, one
        norm."""
        attention = 4 * self.d_model * self.num_heads * self.d_kv
        feed_forward = 3 * self.d_model * self.d_ff
        bias = self.relative_attention_num_buckets * self.num_heads
        layer = attention + feed_forward + bias + 2 * self.d_model
        return self.vocab_size * self.d_model + self.num_layers * layer + self.d_model


@dataclass(frozen=True)
class VaeShape:
    """Sizes of an `AutoencoderKLWan`'s decoder.

    dim: channels of its last stage, times dim_mult those of the stages, last to first. temporal_upsample: of
    each stage but the last, first to last. residual: the layout of VAE 2.2. patch: pixels a side that the
    output layer unfolds. elements: all parameters, of the encoder too.
    """

    elements: int
    dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    temporal_upsample: tuple[bool, ...]
    residual: bool
    patch: int


@dataclass(frozen=True)
class ModelShape:
    """A whole pipeline: sizes, and bytes of its frozen parts as they are stored.

    text_length: tokens of an encoded prompt. checkpoint_bytes: of one stored transformer element. found: the
    sizes are those of a directory, not of the published checkpoint.
    """

    transformer: TransformerShape
    experts: int
    text_encoder: TextEncoderShape
    vae: VaeShape
    text_encoder_bytes: int
    vae_bytes: int
    checkpoint_bytes: int
    text_length: int = 512
    found: bool = False

    @property
    def text_element_bytes(self) -> int:
        """Of one element of an encoded prompt."""
        return max(1, round(self.text_encoder_bytes / self.text_encoder.elements))

    @property
    def vae_element_bytes(self) -> int:
        """Of one element of the VAE's weights and activations."""
        return max(1, round(self.vae_bytes / self.vae.elements))


UMT5_XXL = TextEncoderShape(
    vocab_size=256_384, d_model=4096, d_kv=64, d_ff=10_240, num_layers=24, num_heads=64
)
VAE_21 = VaeShape(
    elements=126_892_531,
    dim=96,
    dim_mult=(1, 2, 4, 4),
    num_res_blocks=2,
    temporal_upsample=(True, True, False),
    residual=False,
    patch=1,
)
VAE_22 = replace(VAE_21, elements=704_688_668, dim=256, residual=True, patch=2)

_14B = TransformerShape(
    num_layers=40, num_attention_heads=40, ffn_dim=13_824, in_channels=16, out_channels=16
)
TRANSFORMERS: Mapping[Family, TransformerShape] = {
    "ti2v-5b": TransformerShape(
        num_layers=30, num_attention_heads=24, ffn_dim=14_336, in_channels=48, out_channels=48
    ),
    # Noise, a mask channel for each of the four pixel frames of a latent frame, and the first frame's latent.
    "i2v-a14b": replace(_14B, in_channels=36),
    "t2v-1.3b": TransformerShape(
        num_layers=30, num_attention_heads=12, ffn_dim=8960, in_channels=16, out_channels=16
    ),
    "t2v-a14b": _14B,
}
"""The published checkpoints: dim is heads x 128."""

# What a published text encoder and VAE are taken to be stored in; a directory's own files win.
_TEXT_BYTES, _VAE_BYTES, _CHECKPOINT_BYTES = 2, 4, 2


def published_shape(family: Family) -> ModelShape:
    """The published checkpoint of `family`."""
    vae = VAE_22 if family == "ti2v-5b" else VAE_21
    return ModelShape(
        transformer=TRANSFORMERS[family],
        experts=2 if family in ("i2v-a14b", "t2v-a14b") else 1,
        text_encoder=UMT5_XXL,
        vae=vae,
        text_encoder_bytes=_TEXT_BYTES * UMT5_XXL.elements,
        vae_bytes=_VAE_BYTES * vae.elements,
        checkpoint_bytes=_CHECKPOINT_BYTES,
    )


def model_shape(path: Path, family: Family) -> ModelShape:
    """The model at `path`, from its own configurations, or the published `family` where nothing is there.

    Frozen parts are counted by the size of their weight files, where these are present.
    """
    published = published_shape(family)
    try:
        index = read_json_object(path / "model_index.json")
        transformer = transformer_shape(read_json_object(path / "transformer" / "config.json"))
        text = text_encoder_shape(read_json_object(path / "text_encoder" / "config.json"))
        vae = vae_shape(read_json_object(path / "vae" / "config.json"), _elements(path / "vae"))
        tokenizer = read_json_object(path / "tokenizer" / "tokenizer_config.json")
    except ValueError:
        return published
    stored = _stored(path / "transformer")
    return ModelShape(
        transformer=transformer,
        experts=1 + names_component(index, "transformer_2"),
        text_encoder=text,
        vae=vae,
        text_encoder_bytes=_stored(path / "text_encoder") or _TEXT_BYTES * text.elements,
        vae_bytes=_stored(path / "vae") or _VAE_BYTES * vae.elements,
        checkpoint_bytes=max(1, round(stored / transformer.elements)) if stored else _CHECKPOINT_BYTES,
        text_length=min(published.text_length, int(tokenizer.get("model_max_length", published.text_length))),
        found=True,
    )


def transformer_shape(config: Mapping[str, Any]) -> TransformerShape:
    """The sizes that a transformer's config.json states; the defaults are Diffusers'."""
    channels = int(config.get("in_channels", 16))
    return TransformerShape(
        num_layers=int(config.get("num_layers", 40)),
        num_attention_heads=int(config.get("num_attention_heads", 40)),
        ffn_dim=int(config.get("ffn_dim", 13_824)),
        in_channels=channels,
        out_channels=int(config.get("out_channels", 16) or channels),
        attention_head_dim=int(config.get("attention_head_dim", 128)),
        text_dim=int(config.get("text_dim", 4096)),
        freq_dim=int(config.get("freq_dim", 256)),
        cross_attn_norm=bool(config.get("cross_attn_norm", True)),
    )


def text_encoder_shape(config: Mapping[str, Any]) -> TextEncoderShape:
    """The sizes that a text encoder's config.json states; the defaults are those of UMT5."""
    return TextEncoderShape(
        vocab_size=int(config.get("vocab_size", 250_112)),
        d_model=int(config.get("d_model", 512)),
        d_kv=int(config.get("d_kv", 64)),
        d_ff=int(config.get("d_ff", 1024)),
        num_layers=int(config.get("num_layers", 8)),
        num_heads=int(config.get("num_heads", 6)),
        relative_attention_num_buckets=int(config.get("relative_attention_num_buckets", 32)),
    )


def vae_shape(config: Mapping[str, Any], elements: int) -> VaeShape:
    """The sizes that a VAE's config.json states; the defaults are Diffusers'. elements: as counted."""
    downsample = config.get("temperal_downsample", [False, True, True])
    return VaeShape(
        elements=elements,
        dim=int(config.get("decoder_base_dim") or config.get("base_dim", 96)),
        dim_mult=tuple(int(factor) for factor in config.get("dim_mult", (1, 2, 4, 4))),
        num_res_blocks=int(config.get("num_res_blocks", 2)),
        temporal_upsample=tuple(bool(step) for step in reversed(downsample)),
        residual=bool(config.get("is_residual", False)),
        patch=int(config.get("patch_size") or 1),
    )


def check_adapters(model: ModelShape, spec: ModelSpec) -> str | None:
    """What is wrong with the adapters of `spec`: a target suffix that names no layer of a trained expert."""
    lora = spec.lora
    if lora is None:
        return None
    trained = trained_experts(spec, EXPERTS[: model.experts])
    prefix = adapter_prefix(lora)
    unmatched = [
        target
        for target in lora.target_modules
        if not any(model.transformer.adapter_elements(1, [target], prefix, expert=name) for name in trained)
    ]
    if not unmatched:
        return None
    if lora.module_prefix and len(unmatched) == len(lora.target_modules):
        shown = f"{lora.module_prefix} (here {prefix})" if prefix != lora.module_prefix else prefix
        return (
            f"lora_module_prefix: {shown} is the beginning of no target layer's name in the trained experts "
            f"({', '.join(trained)}); use high_noise, low_noise, the name of an expert that is trained, or a "
            "part of it such as blocks.0, or null for all"
        )
    under = f" under lora_module_prefix {lora.module_prefix}" if lora.module_prefix else ""
    return (
        f"lora_target_modules: {', '.join(unmatched)} match no linear layer{under} of the trained experts "
        f"({', '.join(trained)}); use suffixes of theirs, such as to_q and ffn.net.2"
    )


def adapter_prefix(lora: LoraSpec) -> str | None:
    """`lora.module_prefix` with the expert's own name for high_noise and low_noise."""
    aliases: dict[str, str] = dict(zip(("high_noise", "low_noise"), EXPERTS, strict=True))
    return aliases.get(lora.module_prefix or "", lora.module_prefix)


def check_heads(shape: TransformerShape, tp: int) -> str | None:
    """What is wrong with cutting the transformer into `tp` parts: a head lives on one rank, and so do whole
    columns of the feed-forward layer."""
    heads, ffn = shape.num_attention_heads, shape.ffn_dim
    if heads % tp == 0 and ffn % tp == 0:
        return None
    valid = [n for n in divisors(heads) if ffn % n == 0]
    near = [*[n for n in valid if n < tp][-1:], *[n for n in valid if n > tp][:1]]
    what = f"the {heads} attention heads" if heads % tp else f"the {ffn:,} feed-forward columns"
    return (
        f"tensor_parallel_size: {tp} does not divide {what} of the transformer; use "
        f"{' or '.join(str(n) for n in near)}"
    )


def _stored(component: Path) -> int:
    """Bytes of a component's weight files, 0 where some are missing."""
    try:
        return sum(file.stat().st_size for file in weight_files(component))
    except (OSError, ValueError):
        return 0


def _elements(component: Path) -> int:
    """Parameters in a component's weight files. Raises ValueError where some are missing or damaged."""
    files = weight_files(component)
    for file in files:
        problem = damage(file) if file.is_file() else f"{file} is missing"
        if problem:
            raise ValueError(problem)
    return count_elements(component)
