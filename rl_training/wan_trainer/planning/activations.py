"""Working memory of the transformer, the VAE and the text encoder, counted tensor by tensor.

What autograd keeps of a Wan block was read off `WanTransformerBlock.forward`: every tensor that some backward
needs, once. Widths that tensor parallelism cuts are divided by its size.
"""

from __future__ import annotations

from dataclasses import dataclass

from wan_trainer.models.wan.architecture import TextEncoderShape, TransformerShape, VaeShape

FLOAT = 4


@dataclass(frozen=True)
class Call:
    """One batched transformer call on one rank.

    rows: samples, doubled by guidance. tokens, text_tokens: of each. latent: elements of each sample's
    latent. element: bytes of an activation in the parameter dtype. token_time: every token has a timestep of
    its own (TI2V-5B). fused_norm: the q/k norms keep their input only (CUDA) instead of two float32 copies.
    """

    rows: int
    tokens: int
    text_tokens: int
    latent: int
    element: int
    tp: int
    token_time: bool
    fused_norm: bool


@dataclass(frozen=True)
class Activations:
    """Bytes of one call.

    Of a block: `saved` until its backward, `given` as its input under checkpointing, `backward` on top when
    its backward begins. stem: what the blocks are given, until their last backward; head: the output layer,
    the transition and the loss, until the blocks' first. inference: a call without gradients, all in all;
    traced: the same where it runs replay's graph.
    """

    saved: int
    given: int
    backward: int
    stem: int
    head: int
    inference: int
    traced: int


def transformer_activations(shape: TransformerShape, call: Call) -> Activations:
    """The working memory of `call`."""
    d, cut, ffn, e = shape.dim, shape.dim // call.tp, shape.ffn_dim // call.tp, call.element
    norm = e if call.fused_norm else 2 * FLOAT
    mixed = e != FLOAT
    # Float32: input and output of norm1 and norm3, input of norm2, feed-forward output; in the parameter
    # dtype: inputs of q/k/v, of cross-attention and feed-forward, and what the self-attention gate
    # multiplies.
    saved = 6 * FLOAT * d + 4 * e * d
    # Inputs of three norms; q, k, v and output of self-attention, q and output of cross-attention; GELU in,
    # out.
    saved += 3 * norm * cut + 6 * e * cut + 2 * e * ffn
    saved += 2 * FLOAT * shape.num_attention_heads // call.tp
    if call.token_time:
        # Shift, scale and gate of both branches for every token, and 1 + scale of each.
        saved += (6 + 2) * FLOAT * d
    text = norm * cut + 2 * e * cut
    backward = 3 * FLOAT * d + e * ffn + (2 * e * d if mixed else 0)
    fewest = max(_inference_in_attention(d, cut, e, call), _inference_in_feed_forward(d, ffn, e, call))
    head = 2 * FLOAT * d + e * d
    stem = e * d
    time = FLOAT * shape.freq_dim + 2 * FLOAT * d + (2 + 6) * e * d
    if call.token_time:
        stem += time
        head += 3 * e * d
        # The gradient of the per-token modulation is summed over the blocks.
        backward += 6 * e * d
    rows, tokens = call.rows, call.rows * call.tokens
    texts = call.rows * call.text_tokens
    once = 0 if call.token_time else rows * time
    embedded = texts * (e * shape.text_dim + 3 * e * d)
    rope = 2 * FLOAT * call.tokens * shape.attention_head_dim
    shared = once + embedded + rope
    latent = rows * call.latent
    held = (e * d + time - FLOAT * shape.freq_dim if call.token_time else e * d) * tokens
    outside = held + shared + latent * (4 * FLOAT + 2 * e)
    return Activations(
        saved=tokens * saved + texts * text,
        given=tokens * e * d,
        backward=tokens * backward,
        stem=tokens * stem + shared + latent * (2 * FLOAT + e),
        head=tokens * head + latent * (8 * FLOAT + e),
        inference=tokens * fewest + outside,
        traced=tokens * max(fewest, saved) + outside,
    )


def _inference_in_attention(d: int, cut: int, e: int, call: Call) -> int:
    """Bytes a token while q and k are rotated: modulation, normed input, q, k, v, and float32 halves."""
    modulation = 6 * FLOAT * d if call.token_time else 0
    return modulation + e * d + 4 * e * cut + FLOAT * cut


def _inference_in_feed_forward(d: int, ffn: int, e: int, call: Call) -> int:
    """Bytes a token at the feed-forward layer, or where the modulation is made."""
    modulation = 6 * FLOAT * d if call.token_time else 0
    return max(modulation + 2 * e * d + 2 * e * ffn, 2 * modulation)


def vae_decode_bytes(vae: VaeShape, element: int, frames: int, height: int, width: int) -> int:
    """Peak of decoding one video, without the weights.

    The decoder goes latent frame by latent frame and keeps the last two input frames of every causal
    convolution; the peak is in the widest residual block. Bytes of an element: `element`.
    """
    stages = len(vae.dim_mult)
    channels = [vae.dim * factor for factor in (vae.dim_mult[-1], *reversed(vae.dim_mult))]
    area = height * width // vae.patch**2
    steps = 1
    cached = work = 0
    for index in range(stages):
        inside, out = channels[index], channels[index + 1]
        if index > 0 and not vae.residual:
            inside //= 2
        size = area >> (2 * (stages - 1 - index))
        # conv_in and the middle block have the size of the first stage; the output layer that of the last.
        extra = 4 * inside if index == 0 else (out if index == stages - 1 else 0)
        cached += 2 * size * (inside + out + 2 * vae.num_res_blocks * out + extra)
        shortcut = out if inside != out else 0
        copy = inside if vae.residual else 0
        # The block's input and a copy, the shortcut, the activated input, and that with two frames before it
        # twice: joined, and padded for the convolution.
        first = size * (steps * (copy + 2 * inside + shortcut) + 2 * (steps + 2) * inside)
        second = size * (steps * (copy + inside + shortcut + out) + 2 * (steps + 2) * out)
        work = max(work, first, second)
        if index < stages - 1:
            if vae.temporal_upsample[index]:
                cached += 2 * size * out
                steps *= 2
            upsampled = 4 * size * steps * out
            narrowed = 4 * size * steps * (out if vae.residual else out // 2)
            twice = (4 * size * steps * out + size * steps * inside) if vae.residual else 0
            work = max(work, upsampled + narrowed + size * steps * out + twice)
    # The video so far beside its continuation; then, in float32, beside its copies scaled and rounded to
    # pixels.
    video = 3 * frames * height * width
    pixels = video * (element + 3 * FLOAT + 1)
    return max(element * (cached + max(work, video) + video), pixels)


def text_encode_bytes(text: TextEncoderShape, element: int, tokens: int) -> int:
    """Peak of encoding one prompt, without the weights: the gated feed-forward layer or the attention
    scores."""
    scores = text.num_heads * tokens * tokens * (2 * FLOAT + 2 * element)
    return 4 * FLOAT * tokens * text.d_model + max(3 * element * tokens * text.d_ff, scores)
