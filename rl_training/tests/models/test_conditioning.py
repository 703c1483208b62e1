"""Text, images and decoding against Diffusers' own functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from diffusers.video_processor import VideoProcessor
from PIL import Image

from rl_training.tests.models.families import FAMILIES, FRAMES, HEIGHT, WIDTH, Loaded, images, prompts
from wan_trainer.config.specs import Family
from wan_trainer.models.wan import text, vae
from wan_trainer.models.wan.conditioning import condition_prompts, first_frame_latents, image_latents
from wan_trainer.models.wan.text import encode_prompts
from wan_trainer.types import Sample, UserError

PROMPTS = [
    "a red square moves right",
    "  spaces \n\t and\u00a0more ",
    "&amp;lt;b&amp;gt; &quot;quoted&quot;",
    "broken â€œencodingâ€\x9d and ﬁ ligature",
    "",
    "日本語の説明 🎬 ünïcode",
    "word " * 2000,
]


@pytest.mark.parametrize("length", [64, 512])
def test_prompts_are_encoded_as_diffusers_does(
    length: int, load: Callable[..., Loaded], directories: dict[Family, Path]
) -> None:
    components = load("t2v-1.3b").components
    components.tokenizer.model_max_length = length
    pipeline = WanPipeline.from_pretrained(directories["t2v-1.3b"], local_files_only=True)
    expected, negative = pipeline.encode_prompt(
        PROMPTS, "", True, max_sequence_length=length, device=torch.device("cpu")
    )
    ours = encode_prompts(components, PROMPTS)
    assert ours.shape == expected.shape == (len(PROMPTS), length, 32)
    assert (ours - expected).abs().max() < 1e-5
    assert (ours[4] - negative[0]).abs().max() < 1e-5, "the default negative prompt is the empty one"
    assert (ours[0, 20:] == 0).all(), "positions beyond the prompt are zero"


def test_an_undeclared_tokenizer_length_means_512(load: Callable[..., Loaded]) -> None:
    components = load("t2v-1.3b").components
    components.tokenizer.model_max_length = 10**30
    assert encode_prompts(components, ["stop"]).shape[1] == text.MAX_TOKENS == 512


def test_an_encoding_depends_neither_on_neighbours_nor_on_the_cache(load: Callable[..., Loaded]) -> None:
    components = load("t2v-1.3b").components
    alone = encode_prompts(components, [PROMPTS[1]])
    cached = encode_prompts(components, [PROMPTS[0], PROMPTS[1], PROMPTS[1]])
    components.text_cache.clear()
    together = encode_prompts(components, [PROMPTS[1], PROMPTS[0]])
    assert torch.equal(cached[1], alone[0]) and torch.equal(cached[2], alone[0])
    assert torch.equal(together[0], alone[0]) and torch.equal(together[1], cached[0])


def test_a_cached_prompt_is_not_encoded_again_and_the_cache_is_bounded(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    components = load("t2v-1.3b").components
    calls: list[int] = []
    components.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    encode_prompts(components, ["stop", " stop\n", "stop"])
    encode_prompts(components, ["stop"])
    assert len(calls) == 1, "one encoding for all spellings of one prompt"
    monkeypatch.setattr(text, "CACHED_PROMPTS", 3)
    batch = [f"square {i}" for i in range(5)]
    encoded = encode_prompts(components, batch)
    assert len(components.text_cache) == 3
    assert torch.equal(encode_prompts(components, batch), encoded)


def test_pixels_are_scaled_as_by_the_video_processor() -> None:
    every_value = torch.arange(256, dtype=torch.uint8).repeat(3, 1).view(3, 16, 16)
    image = Image.fromarray(every_value.permute(1, 2, 0).numpy())
    expected = VideoProcessor(vae_scale_factor=8).preprocess(image, height=16, width=16)[0]
    assert torch.equal(vae.to_unit_range(every_value), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_rounds_like_diffusers_and_does_not_depend_on_the_batch(
    family: Family, load: Callable[..., Loaded]
) -> None:
    loaded = load(family)
    shape = loaded.policy.latent_shape(FRAMES, HEIGHT, WIDTH)
    x0 = torch.randn(3, *shape, generator=torch.Generator().manual_seed(2))
    video = vae.decode(loaded.components, x0, batch_size=3)
    assert video.dtype == np.uint8 and video.shape == (3, FRAMES, HEIGHT, WIDTH, 3)

    module = loaded.components.vae
    mean = torch.tensor(module.config["latents_mean"]).view(1, -1, 1, 1, 1)
    std = torch.tensor(module.config["latents_std"]).view(1, -1, 1, 1, 1)
    with torch.no_grad():
        pixels = module.decode(x0 / (1.0 / std) + mean).sample
    frames = VideoProcessor(vae_scale_factor=8).postprocess_video(pixels, output_type="pil")
    assert np.array_equal(video, np.stack([[np.asarray(frame) for frame in clip] for clip in frames]))

    singly = vae.decode(loaded.components, x0, batch_size=1)
    assert np.abs(singly.astype(int) - video).max() <= 1


def test_encode_and_decode_are_inverse_up_to_the_block_mean(load: Callable[..., Loaded]) -> None:
    components = load("ti2v-5b").components
    flat = torch.tensor([200, 40, 90], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, HEIGHT, WIDTH)
    latent = first_frame_latents(components, flat.contiguous())
    assert latent.shape == (1, 4, 1, 4, 4)
    video = vae.decode(components, latent, batch_size=1)
    assert np.abs(video[0, 0].astype(int) - [200, 40, 90]).max() <= 2


def test_i2v_a14b_masks_the_first_latent_frame(load: Callable[..., Loaded]) -> None:
    components = load("i2v-a14b").components
    latents = image_latents(components, images(2), FRAMES)
    assert latents.shape == (2, 4 + 4, 3, 8, 8)
    assert (latents[:, :4, 0] == 1).all() and (latents[:, :4, 1:] == 0).all()
    assert not torch.equal(latents[0, 4:], latents[1, 4:])


@pytest.mark.parametrize(("family", "encodes"), [("ti2v-5b", 1), ("i2v-a14b", FRAMES), ("t2v-1.3b", None)])
def test_only_what_a_step_needs_is_encoded(
    family: Family, encodes: int | None, load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    components = load(family).components
    frames: list[int] = []
    real = components.vae.encode

    def counting(video: torch.Tensor, **arguments: bool) -> object:
        frames.append(video.shape[2])
        return real(video, **arguments)

    monkeypatch.setattr(components.vae, "encode", counting)
    target = Path("/no/such/video.mp4")  # never opened
    samples = [Sample("t/0", "t", "stop", ground_truth_video=target, final_frame=target)]
    condition = condition_prompts(
        components, samples, images(1), num_frames=FRAMES, guided=False, negative_prompt=""
    )
    assert frames == ([] if encodes is None else [encodes])
    assert condition.negative_text is None
    assert (condition.first_frame_latent is not None) == (family == "ti2v-5b")
    assert (condition.image_latent is not None) == (family == "i2v-a14b")


def test_a_samples_own_negative_prompt_wins(load: Callable[..., Loaded]) -> None:
    components = load("t2v-1.3b").components
    samples = [*prompts(1), Sample("t/1", "t", "stop", negative_prompt="static")]
    condition = condition_prompts(
        components, samples, None, num_frames=FRAMES, guided=True, negative_prompt="blurred"
    )
    assert torch.equal(condition.negative_text, encode_prompts(components, ["blurred", "static"]))  # type: ignore[arg-type]


def test_ti2v_without_first_frames_is_text_to_video(load: Callable[..., Loaded]) -> None:
    condition = condition_prompts(
        load("ti2v-5b").components, prompts(1), None, num_frames=FRAMES, guided=False, negative_prompt=""
    )
    assert condition.first_frame_latent is None


def test_image_to_video_without_an_image_is_one_line(load: Callable[..., Loaded]) -> None:
    with pytest.raises(UserError, match=re.escape("sample task/0 has no first frame and i2v-a14b")):
        condition_prompts(
            load("i2v-a14b").components, prompts(1), None, num_frames=9, guided=False, negative_prompt=""
        )
