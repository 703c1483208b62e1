"""The planned memory against every storage that a real step allocates, at sizes the counting never saw."""

from dataclasses import replace

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

from benchmarks.plan_memory import TOLERANCE, UNSEEN, LiveStorages, run_cases
from rl_training.tests.ranks import run_ranks
from wan_trainer.distributed.mesh import init_mesh
from wan_trainer.models.wan.architecture import vae_shape
from wan_trainer.planning.activations import vae_decode_bytes

# Depth, width, tokens, chunk, dtype and checkpointing differ; the benchmark runs the other sizes too, and the
# first of these with more frames and rollouts.
CASES = {
    "deep, kept activations": replace(UNSEEN["deep, kept activations"], frames=9, chunk=3),
    "broad, bfloat16": UNSEEN["broad, bfloat16"],
}


def measure_unseen():
    return run_cases(CASES, init_mesh("cpu", 60.0))


@pytest.fixture(scope="module")
def measured():
    first, second = run_ranks(2, measure_unseen)
    assert first.keys() == second.keys() == CASES.keys()
    return first


@pytest.mark.parametrize("name", CASES)
def test_every_phase_is_within_a_fifth_of_what_was_measured(measured, name):
    ratios = measured[name]["ratios"]
    assert ratios.keys() == {"rollout", "decode", "replay", "optimizer", "peak"}
    for phase, ratio in ratios.items():
        assert 1 - TOLERANCE <= ratio <= 1 + TOLERANCE, (phase, measured[name])


@pytest.mark.parametrize(
    ("layout", "frames", "size", "dim"),
    [("2.2", 9, 64, 16), ("2.1", 9, 64, 16)],
)
def test_decoding_with_the_published_structure_is_within_a_fifth(layout, frames, size, dim):
    """The stages, residual blocks and caches of the published VAEs; only their widths are small."""
    new = layout == "2.2"
    channels, stride = (12, 16) if new else (3, 8)
    vae = AutoencoderKLWan(
        base_dim=dim,
        decoder_base_dim=dim,
        z_dim=4,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        temperal_downsample=[False, True, True],
        is_residual=new,
        in_channels=channels,
        out_channels=channels,
        patch_size=2 if new else None,
        scale_factor_spatial=stride,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    latent = torch.randn(1, 4, (frames - 1) // 4 + 1, size // stride, size // stride)
    with torch.no_grad(), LiveStorages() as tracker:
        vae.decode(latent)
    measured = max(tracker.peaks.values())
    planned = vae_decode_bytes(vae_shape(dict(vae.config), 1), 4, frames, size, size)
    assert 1 - TOLERANCE <= planned / measured <= 1 + TOLERANCE, (planned, measured, planned / measured)
