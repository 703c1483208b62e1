"""A Wan VAE whose weights are set, not trained: an exact linear block-mean autoencoder.

A random VAE shows nothing a reward could judge, and a trained one costs minutes. Both Wan layouts (2.1,
and the residual 2.2) become exact with seven channels: `+rgb`, `-rgb` and a constant. The residual
branches and the attention projections are zeroed, so that only the shortcuts remain. The closing RMS norm
would distort the picture; beside a constant much larger than the picture it divides by that constant, and
the SiLU behind it is undone by `silu(y) - silu(-y) = y`. A latent is then the mean colour of its block of
pixels and frames, and decoding paints the block in that colour.
"""

from __future__ import annotations

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    AutoencoderKLWan,
    WanAttentionBlock,
    WanResample,
    WanResidualBlock,
    WanResidualDownBlock,
    WanResidualUpBlock,
    WanRMS_norm,
    WanUpBlock,
)
from torch import nn
from torch.nn import functional

CHANNELS = 7
# The norm's relative error is about (PICTURE / CONSTANT)^2 * 3: 2e-7, below float32 rounding of the picture.
_CONSTANT = 64.0
_PICTURE = 1.0 / 64.0
# DiagonalGaussianDistribution clamps the log-variance at -30: the encoder is deterministic to 3e-7.
_LOG_VARIANCE = -30.0


def set_block_mean_weights(vae: AutoencoderKLWan) -> None:
    """Overwrite the weights of `vae` in place with the block-mean autoencoder.

    `vae` needs seven channels at every level (`base_dim=7`, `dim_mult=[1, 1, 1, 1]`) and `z_dim >= 3`. Latent
    channels beyond the third encode to zero and are ignored by the decoder. The channel statistics in
    `latents_mean` and `latents_std` belong to the caller of encode and decode, and are not used here.
    """
    assert vae.config["base_dim"] == CHANNELS, "the block-mean weights need seven channels"
    assert set(vae.config["dim_mult"]) == {1}, "the block-mean weights need seven channels at every level"
    assert vae.z_dim >= 3, "red, green and blue need a latent channel each"
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, WanResidualBlock):
                _close_residual(module)
            elif isinstance(module, WanAttentionBlock):
                _zero(module.proj)
            elif isinstance(module, WanRMS_norm):
                module.gamma.fill_(1.0)
        _set_encoder(vae)
        _set_decoder(vae)


def block_mean(video: torch.Tensor, block: int) -> torch.Tensor:
    """What the encoder computes, in closed form: mean colours of `block`-pixel squares and of groups of
    frames.

    video: (N, 3, 1 + 4k, H, W). Returns (N, 3, 1 + k, H / block, W / block): the first frame alone, then
    the means of four frames each. A hundred times cheaper than the network, for preparing many clips.
    """
    spatial = functional.avg_pool3d(video, (1, block, block))
    if spatial.shape[2] == 1:
        return spatial
    return torch.cat([spatial[:, :, :1], functional.avg_pool3d(spatial[:, :, 1:], (4, 1, 1))], dim=2)


def _zero(conv: nn.Module) -> None:
    for parameter in conv.parameters():
        parameter.zero_()


def _close_residual(block: WanResidualBlock) -> None:
    """Leave only the shortcut. Where the 2.1 decoder halves 7 channels to 3 (rgb), the shortcut restores
    all 7."""
    _zero(block.conv2)
    shortcut = block.conv_shortcut
    if isinstance(shortcut, nn.Conv3d):
        _zero(shortcut)
        assert shortcut.in_channels == 3, "only a bottleneck of red, green and blue can be widened"
        _signed_picture(shortcut, torch.eye(3), constant=_CONSTANT)


def _signed_picture(conv: nn.Conv3d, mix: torch.Tensor, constant: float) -> None:
    """Make `conv` emit (+mix x, -mix x, constant), pointwise at the newest frame. `mix` is (3,
    in_channels)."""
    assert conv.bias is not None
    _zero(conv)
    tap = _newest_tap(conv)
    conv.weight[:3, : mix.shape[1], *tap] = mix
    conv.weight[3:6, : mix.shape[1], *tap] = -mix
    conv.bias[6] = constant


def _newest_tap(conv: nn.Conv3d) -> tuple[int, int, int]:
    """The tap on the current frame and pixel: causal in time, centred in space."""
    frames, rows, columns = conv.kernel_size
    return frames - 1, rows // 2, columns // 2


def _picture_out(conv: nn.Conv3d, copies: int, outputs: int) -> None:
    """Make `conv` undo the closing norm and SiLU: output o = channel o // copies of the picture, in its
    own units.

    The norm turns (x, constant) into sqrt(7) * (x, constant) / constant, whatever common factor both carried.
    """
    _zero(conv)
    tap = _newest_tap(conv)
    gain = _CONSTANT / (_PICTURE * CHANNELS**0.5)
    for output in range(outputs):
        conv.weight[output, output // copies, *tap] = gain
        conv.weight[output, output // copies + 3, *tap] = -gain


def _set_encoder(vae: AutoencoderKLWan) -> None:
    encoder = vae.encoder
    inputs = vae.config["in_channels"]
    copies = inputs // 3  # patchify lays the pixels of a patch side by side: r r r r g g g g b b b b
    mix = torch.zeros(3, inputs)
    for channel in range(3):
        mix[channel, channel * copies : (channel + 1) * copies] = _PICTURE / copies
    _signed_picture(encoder.conv_in, mix, constant=_CONSTANT)
    for block in encoder.down_blocks:
        if isinstance(block, WanResidualDownBlock):
            _set_residual_down(block)
        elif isinstance(block, WanResample):
            _set_down(block)
    _picture_out(encoder.conv_out, copies=1, outputs=3)
    assert encoder.conv_out.bias is not None
    encoder.conv_out.bias[vae.z_dim :] = _LOG_VARIANCE
    _identity(vae.quant_conv)
    _identity(vae.post_quant_conv)


def _identity(conv: nn.Conv3d) -> None:
    """A pointwise identity, on as many channels as both sides have."""
    _zero(conv)
    for channel in range(min(conv.in_channels, conv.out_channels)):
        conv.weight[channel, channel, *_newest_tap(conv)] = 1.0


def _block_mean(conv: nn.Conv2d, scale: float) -> None:
    """`scale` times the mean of each 2x2 block. The stride-2 kernel of 3 is padded on the right and below
    only."""
    _zero(conv)
    for channel in range(conv.out_channels):
        conv.weight[channel, channel, :2, :2] = scale / 4.0


def _set_down(resample: WanResample) -> None:
    """2.1 layout: mean over space by the stride-2 convolution, and over pairs of frames by the time
    convolution."""
    _block_mean(_conv2d(resample), 1.0)
    if resample.mode == "downsample3d":
        _zero(resample.time_conv)
        for channel in range(CHANNELS):
            resample.time_conv.weight[channel, channel, 1:, 0, 0] = 0.5  # tap 0 is the frame before the pair


def _set_residual_down(block: WanResidualDownBlock) -> None:
    """2.2 layout: the shortcut already takes the mean. It pads the lone first frame with a black one,
    which halves it; the main path adds the other half there, and nothing later, because its time
    convolution is zero."""
    if block.downsampler is None:
        return
    if block.downsampler.mode == "downsample3d":
        _block_mean(_conv2d(block.downsampler), 0.5)
        _zero(block.downsampler.time_conv)
    else:
        _zero(_conv2d(block.downsampler))


def _conv2d(resample: WanResample) -> nn.Conv2d:
    sequence = resample.resample
    assert isinstance(sequence, nn.Sequential)
    conv = sequence[1]
    assert isinstance(conv, nn.Conv2d)
    return conv


def _set_decoder(vae: AutoencoderKLWan) -> None:
    decoder = vae.decoder
    mix = torch.zeros(3, vae.z_dim)
    mix[:, :3] = torch.eye(3) * _PICTURE
    _signed_picture(decoder.conv_in, mix, constant=_CONSTANT)
    for block in decoder.up_blocks:
        if isinstance(block, WanResidualUpBlock):
            if block.upsampler is not None:  # the shortcut already repeats every value in space and time
                _zero(block.upsampler)
        elif isinstance(block, WanUpBlock) and block.upsamplers is not None:
            _set_up(block.upsamplers[0])
    outputs = vae.config["out_channels"]
    _picture_out(decoder.conv_out, copies=outputs // 3, outputs=outputs)


def _set_up(resample: nn.Module) -> None:
    """2.1 layout: repeat in space by the nearest upsampling, in time by giving both new frames the same
    values."""
    assert isinstance(resample, WanResample)
    conv = _conv2d(resample)
    _zero(conv)
    for channel in range(conv.out_channels):
        conv.weight[channel, channel, 1, 1] = 1.0
    if resample.mode == "upsample3d":
        _zero(resample.time_conv)
        for half in range(2):
            for channel in range(CHANNELS):
                resample.time_conv.weight[half * CHANNELS + channel, channel, 2, 0, 0] = 1.0
