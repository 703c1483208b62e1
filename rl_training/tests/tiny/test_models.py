import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanPipeline
from PIL import Image

from wan_trainer.tiny.models import TEXT_LENGTH, TINY_MARKER, build_tokenizer, build_vae, make_tiny
from wan_trainer.types import UserError

PROMPT = "Slide the red square to the right edge of the view."


def block_mean(video: torch.Tensor, block: int) -> torch.Tensor:
    """Reference latent: means over `block`-pixel squares, the first frame alone, then groups of four
    frames."""
    spatial = torch.nn.functional.avg_pool3d(video, (1, block, block))
    return torch.cat([spatial[:, :, :1], torch.nn.functional.avg_pool3d(spatial[:, :, 1:], (4, 1, 1))], dim=2)


def paint(latent: torch.Tensor, block: int) -> torch.Tensor:
    """Reference decoding: every value repeated over its block."""
    spatial = latent.repeat_interleave(block, 3).repeat_interleave(block, 4)
    return torch.cat([spatial[:, :, :1], spatial[:, :, 1:].repeat_interleave(4, 2)], dim=2)


def moving_square(block: int = 16, frames: int = 9, size: int = 64) -> tuple[torch.Tensor, np.ndarray]:
    """A white square on black moving right by 3.5 px a frame, drawn with fractional edges, and its
    centres."""
    columns = np.arange(size)
    left = 10.0 + 3.5 * np.arange(frames)
    cover = np.clip(np.minimum(columns + 1, left[:, None] + block) - np.maximum(columns, left[:, None]), 0, 1)
    rows = ((columns >= 24) & (columns < 24 + block)).astype(float)
    video = rows[None, :, None] * cover[:, None, :] * 2 - 1
    return torch.tensor(video, dtype=torch.float32).expand(1, 3, -1, -1, -1), left + block / 2


@pytest.mark.parametrize(("layout", "block"), [("2.2", 16), ("2.1", 8)])
def test_vae_is_an_exact_block_mean_autoencoder(layout: str, block: int) -> None:
    vae = build_vae(layout)
    video = torch.rand(2, 3, 9, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        posterior = vae.encode(video).latent_dist
        decoded = vae.decode(posterior.mode()).sample
    expected = block_mean(video, block)
    assert posterior.mode().shape == (2, 4, 3, 64 // block, 96 // block)
    assert (posterior.mode()[:, :3] - expected).abs().max() < 1e-6
    assert posterior.std.max() < 1e-6
    assert (decoded - paint(expected, block)).abs().max() < 1e-6


@pytest.mark.parametrize("layout", ["2.2", "2.1"])
def test_vae_keeps_plain_and_extreme_colours(layout: str) -> None:
    vae = build_vae(layout)
    colours = torch.tensor([[-1.0, -1, -1], [1, 1, 1], [1, -1, 0.5], [0, 0, 0]])
    video = colours[:, :, None, None, None].expand(-1, -1, 5, 32, 32).contiguous()
    with torch.no_grad():
        decoded = vae.decode(vae.encode(video).latent_dist.mode()).sample
    assert (decoded - video).abs().max() < 1e-6


@pytest.mark.parametrize("layout", ["2.2", "2.1"])
def test_moving_square_survives_the_vae(layout: str) -> None:
    video, centres = moving_square()
    vae = build_vae(layout)
    with torch.no_grad():
        decoded = vae.decode(vae.encode(video).latent_dist.mode()).sample
    mass = (decoded[0].mean(0) + 1) / 2
    seen = (mass.sum(1) * (torch.arange(64) + 0.5)).sum(1) / mass.sum((1, 2))
    # The first frame keeps its centre exactly; later frames share the mean centre of their group of four.
    groups = np.concatenate([centres[:1], np.repeat([centres[1:5].mean(), centres[5:].mean()], 4)])
    assert np.abs(seen.numpy() - groups).max() < 0.02
    assert mass.sum((1, 2)).std() / mass.sum((1, 2)).mean() < 1e-4


def run_pipeline(directory: Path) -> np.ndarray:
    image_to_video = json.loads((directory / "model_index.json").read_text())["_class_name"] != "WanPipeline"
    pipeline = (WanImageToVideoPipeline if image_to_video else WanPipeline).from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    image = {"image": Image.new("RGB", (64, 64), (200, 30, 30))} if image_to_video else {}
    result = pipeline(
        prompt=PROMPT,
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=2,
        max_sequence_length=TEXT_LENGTH,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **image,
    )
    return result.frames


@pytest.mark.parametrize(
    ("fixture", "index", "in_channels"),
    [
        ("tiny_ti2v", {"_class_name": "WanImageToVideoPipeline", "expand_timesteps": True}, 4),
        ("tiny_a14b", {"_class_name": "WanImageToVideoPipeline", "boundary_ratio": 0.9}, 12),
        ("tiny_t2v", {"_class_name": "WanPipeline", "expand_timesteps": False}, 4),
    ],
)
def test_diffusers_loads_and_runs_each_family(
    fixture: str, index: dict[str, object], in_channels: int, request: pytest.FixtureRequest
) -> None:
    directory: Path = request.getfixturevalue(fixture)
    written = json.loads((directory / "model_index.json").read_text())
    assert {key: written[key] for key in index} == index
    assert json.loads((directory / "transformer" / "config.json").read_text())["in_channels"] == in_channels
    frames = run_pipeline(directory)
    assert frames.shape == (1, 5, 64, 64, 3)
    assert np.isfinite(frames).all()
    assert frames.std() > 0
    if written.get("expand_timesteps") and fixture == "tiny_ti2v":
        # The first frame is pinned: a plain image comes back as it went in.
        assert np.abs(frames[0, 0] - np.array([200, 30, 30]) / 255).max() < 1e-4


def file_digests(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_same_seed_same_bytes_and_the_global_random_state_is_untouched(
    tiny_a14b: Path, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = make_tiny("i2v-a14b", tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), before)
    assert file_digests(again) == file_digests(tiny_a14b)
    other = make_tiny("i2v-a14b", tmp_path / "other", seed=1)
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert file_digests(other)[weights] != file_digests(again)[weights]


def test_the_two_experts_differ(tiny_a14b: Path) -> None:
    digests = file_digests(tiny_a14b)
    name = "diffusion_pytorch_model.safetensors"
    assert digests[f"transformer/{name}"] != digests[f"transformer_2/{name}"]


def test_tokenizer_covers_any_text_and_reads_prompts_as_words(tiny_ti2v: Path) -> None:
    pipeline = WanImageToVideoPipeline.from_pretrained(tiny_ti2v)
    tokenizer = pipeline.tokenizer
    for text in (PROMPT, "~!@#$%^&*()_+{}|:<>?`1234567890-=[];',./ \\\"", "Ünïcode 漢字 🙂"):
        ids = tokenizer(text).input_ids
        assert tokenizer.unk_token_id not in ids
        assert ids[-1] == tokenizer.eos_token_id == 1
        assert ids == build_tokenizer()(text).input_ids  # reloaded from disk with the same ids
    assert len(tokenizer(PROMPT).input_ids) <= 14
    assert tokenizer.decode(tokenizer(PROMPT).input_ids, skip_special_tokens=True).strip() == PROMPT
    padded = tokenizer("a", padding="max_length", max_length=8)
    assert padded.input_ids[-1] == 0
    assert sum(padded.attention_mask) < 8


def test_make_tiny_refuses_what_it_did_not_write(tmp_path: Path) -> None:
    precious = tmp_path / "model"
    precious.mkdir()
    (precious / "weights.bin").write_text("mine")
    with pytest.raises(UserError, match="is not a tiny model"):
        make_tiny("t2v-1.3b", precious)
    assert (precious / "weights.bin").read_text() == "mine"
    with pytest.raises(UserError, match="t2v-14b"):
        make_tiny("t2v-14b", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_make_tiny_replaces_its_own_directory_whole(tmp_path: Path) -> None:
    out = make_tiny("t2v-1.3b", tmp_path / "model")
    (out / "leftover").write_text("x")
    make_tiny("t2v-1.3b", out, seed=3)
    assert json.loads((out / TINY_MARKER).read_text()) == {"family": "t2v-1.3b", "seed": 3}
    assert not (out / "leftover").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("layout", ["2.2", "2.1"])
def test_block_mean_weights_keep_the_wan_key_structure(layout: str) -> None:
    vae = build_vae(layout)
    fresh = AutoencoderKLWan.from_config(vae.config)
    assert {k: v.shape for k, v in vae.state_dict().items()} == {
        k: v.shape for k, v in fresh.state_dict().items()
    }
