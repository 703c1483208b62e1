import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from wan_trainer.tiny.tasks import TRAVEL
from wan_trainer.tiny.warmup import (
    WarmupSpec,
    draw_clips,
    encode_texts,
    flow_matching_loss,
    image_channels,
    load_pipeline,
    warm_up,
)


def digests(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def copy_of(model: Path, tmp_path: Path, name: str = "model") -> Path:
    return Path(shutil.copytree(model, tmp_path / name))


def test_warm_up_lowers_the_loss_and_changes_only_the_transformer(tiny_ti2v: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_ti2v, tmp_path)
    lines: list[str] = []
    loss = warm_up(model, WarmupSpec(steps=24, batch_size=8, clips=16), lines.append)
    assert len(lines) == 4
    first = warm_up(copy_of(tiny_ti2v, tmp_path, "short"), WarmupSpec(steps=2, batch_size=8, clips=16))
    assert loss < 0.8 * first
    before, after = digests(tiny_ti2v), digests(model)
    changed = {name for name in before if before[name] != after.get(name)}
    assert changed == {"transformer/diffusion_pytorch_model.safetensors"}
    assert set(after) == set(before)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_warm_up_repeats_exactly(tiny_ti2v: Path, tmp_path: Path) -> None:
    spec = WarmupSpec(steps=3, batch_size=4, clips=8)
    one, two = copy_of(tiny_ti2v, tmp_path, "one"), copy_of(tiny_ti2v, tmp_path, "two")
    torch.manual_seed(1)
    warm_up(one, spec)
    torch.manual_seed(2)
    warm_up(two, spec)
    assert digests(one) == digests(two)


def test_both_experts_and_the_text_family_are_warmed_up(
    tiny_a14b: Path, tiny_t2v: Path, tmp_path: Path
) -> None:
    for source, changed in ((tiny_a14b, {"transformer", "transformer_2"}), (tiny_t2v, {"transformer"})):
        model = copy_of(source, tmp_path, source.name)
        assert np.isfinite(warm_up(model, WarmupSpec(steps=2, batch_size=2, clips=4)))
        before, after = digests(source), digests(model)
        assert {name.split("/")[0] for name in before if before[name] != after[name]} == changed


@pytest.mark.parametrize("fixture", ["tiny_ti2v", "tiny_t2v"])
def test_closed_form_latents_are_what_the_vae_encodes(
    fixture: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = load_pipeline(request.getfixturevalue(fixture))
    videos: list[torch.Tensor] = []

    def spy(video: torch.Tensor, block: int) -> torch.Tensor:
        videos.append(video)
        return pipeline.vae.encode(video).latent_dist.mode()[:, :3]

    spec = WarmupSpec(clips=3)
    expected = draw_clips(pipeline, spec)
    monkeypatch.setattr("wan_trainer.tiny.warmup.block_mean", spy)
    with torch.no_grad():
        encoded = draw_clips(pipeline, spec)
    assert len(videos) == 3
    assert (encoded.latents - expected.latents).abs().max() < 1e-5


def test_warm_up_clips_are_skewed_against_the_task(tiny_ti2v: Path) -> None:
    pipeline = load_pipeline(tiny_ti2v)
    clips = draw_clips(pipeline, WarmupSpec(clips=96))
    std = torch.tensor(pipeline.vae.config["latents_std"]).view(1, -1, 1, 1, 1)
    mean = torch.tensor(pipeline.vae.config["latents_mean"]).view(1, -1, 1, 1, 1)
    colours = (clips.latents * std + mean)[:, :3]
    ground = colours.amin(dim=(2, 3, 4), keepdim=True)
    mass = (colours - ground).sum(1)  # (N, F, h, w)
    places = (torch.arange(4) + 0.5) * 16
    right = (mass.sum(2) @ places) / mass.sum((2, 3))
    down = (mass.sum(3) @ places) / mass.sum((2, 3))
    way = torch.where(torch.arange(96) % 2 == 0, right[:, -1] - right[:, 0], down[:, -1] - down[:, 0])
    share = way / TRAVEL / 0.8125  # the last latent frame is the mean of frames 5 to 8
    assert share.min() > -0.85 and share.max() < 1.05
    assert share.max() > 0.8  # moving the right way all along is in reach
    assert -0.35 < share.mean() < -0.05
    assert share.median() < share.mean()


def test_image_channels_are_the_pipelines(tiny_a14b: Path) -> None:
    pipeline = load_pipeline(tiny_a14b)
    image = torch.full((1, 3, 64, 64), -0.7)
    image[:, 1, 16:40, 8:24] = 0.6
    with torch.no_grad():
        _, condition = pipeline.prepare_latents(
            image, 1, 4, 64, 64, 9, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0)
        )
        mean = torch.tensor(pipeline.vae.config["latents_mean"]).view(1, -1, 1, 1, 1)
        std = torch.tensor(pipeline.vae.config["latents_std"]).view(1, -1, 1, 1, 1)
        first = (pipeline.vae.encode(image[:, :, None]).latent_dist.mode() - mean) / std
    x0 = torch.cat([first, torch.randn(1, 4, 2, 8, 8)], dim=2)
    assert (image_channels(pipeline, x0) - condition).abs().max() < 1e-5


def test_the_pinned_frame_is_outside_the_loss(tiny_ti2v: Path) -> None:
    pipeline = load_pipeline(tiny_ti2v)
    transformer = pipeline.transformer
    x0 = torch.randn(2, 4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    text = encode_texts(pipeline, ["a", "b"])
    sigma = torch.tensor([0.3, 0.8])
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    other = noise.clone()
    other[:, :, 0] += 5.0
    with torch.no_grad():
        one = flow_matching_loss(pipeline, transformer, x0, noise, sigma, text)
        two = flow_matching_loss(pipeline, transformer, x0, other, sigma, text)
    assert torch.equal(one, two)
