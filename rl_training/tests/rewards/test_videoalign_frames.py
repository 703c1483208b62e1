"""Which frames VideoAlign looks at, and how it resizes and cuts them: against transformers' processor."""

from __future__ import annotations

import pytest
import torch
from torchvision.transforms.functional import InterpolationMode, resize
from transformers import Qwen2VLVideoProcessor

from wan_trainer.rewards.videoalign.frames import sampled_frames
from wan_trainer.rewards.videoalign.pixels import frame_size, preprocess
from wan_trainer.types import UserError


def test_two_frames_a_second_of_16_24_and_30_fps() -> None:
    # 81/16, 121/24 and 150/30 seconds are about 5: 10 frames, the first and the last among them.
    assert sampled_frames(81, 16, 2.0, None) == [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]
    assert sampled_frames(121, 24, 2.0, None) == [0, 13, 27, 40, 53, 67, 80, 93, 107, 120]
    assert sampled_frames(150, 30, 2.0, None) == [0, 17, 33, 50, 66, 83, 99, 116, 132, 149]
    # 49/24 s: 4.08; 161/16 s: 20.125; 93/16 s: 11.6, nearer to 12; 33/30 s: 2.2, but never under 4.
    assert sampled_frames(49, 24, 2.0, None) == [0, 16, 32, 48]
    assert len(sampled_frames(161, 16, 2.0, None)) == 20
    assert len(sampled_frames(93, 16, 2.0, None)) == 12
    assert sampled_frames(33, 30, 2.0, None) == [0, 11, 21, 32]
    # A clip of few frames: as many of them as are even.
    assert sampled_frames(5, 16, 2.0, None) == [0, 1, 3, 4]
    # The parity option.
    assert sampled_frames(81, 16, 2.0, 36)[:5] == [0, 2, 5, 7, 9]


def test_frames_are_those_of_an_even_grid_and_their_count_is_even() -> None:
    for fps in (16, 24, 30):
        for total in range(4, 500, 7):
            frames = sampled_frames(total, fps, 2.0, None)
            assert len(frames) % 2 == 0
            assert 4 <= len(frames) <= total
            grid = torch.linspace(0, total - 1, len(frames), dtype=torch.float64).round()
            assert frames == grid.long().tolist()


def test_videos_that_are_too_short_are_refused_in_one_line() -> None:
    for total, count in ((3, None), (30, 36)):
        with pytest.raises(UserError, match=f"the videos have {total} frames") as caught:
            sampled_frames(total, 16, 2.0, count)
        assert len(caught.value.problems) == 1


def _smooth(frames: int, height: int, width: int) -> torch.Tensor:
    """Waves of all directions and a few hard edges, (1, 3, F, H, W) in [0, 1]."""
    t = torch.arange(frames).view(-1, 1, 1)
    y, x = torch.arange(height).view(-1, 1) / 9, torch.arange(width) / 7
    waves = [torch.sin(x + channel * y + 0.7 * t) * torch.cos(y - 0.3 * t) for channel in range(3)]
    video = 0.5 + 0.5 * torch.stack(waves)
    video[:, :, : height // 4, : width // 4] = 1.0
    video[:, :, : height // 8, : width // 8] = 0.0
    return video.unsqueeze(0)


def _processor(max_pixels: int = 200704) -> Qwen2VLVideoProcessor:
    size = {"shortest_edge": 128 * 28 * 28, "longest_edge": max_pixels}
    return Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=False, do_sample_frames=False)


# Reduced, enlarged, of another shape, kept.
@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(480, 832, (336, 588)), (64, 96, (280, 392)), (500, 300, (504, 308)), (336, 588, (336, 588))],
)
def test_patches_equal_the_processors(height: int, width: int, size: tuple[int, int]) -> None:
    assert frame_size(height, width, 200704) == size
    eight_bit = (255 * _smooth(7, height, width)).round().byte()
    chosen = [0, 2, 5, 6]
    expected = _processor()([eight_bit[0].transpose(0, 1)[chosen]], return_tensors="pt")
    video = (eight_bit.float() / 255).requires_grad_()
    patches, grid = preprocess(torch.cat([video, 1 - video]), chosen, size)
    rows = len(patches) // 2
    resized = size != (height, width)
    assert expected["video_grid_thw"].tolist() == grid[:1].tolist()
    assert patches.shape[1] == 3 * 2 * 14 * 14
    # The processor rounds to 8 bits after each pass of its resize. A level is 1/255 over CLIP's standard
    # deviation; where both passes overshoot, at the corners of hard edges, it clamps twice.
    level = 1 / 255 / 0.26
    off = (patches[:rows] - expected["pixel_values_videos"]).abs()
    assert off.gt(2 * level if resized else 1e-5).float().mean() < (1e-3 if resized else 1e-9)
    # The authors' code resizes in float and rounds once, then the processor has nothing to resize.
    frames = resize(
        eight_bit[0].transpose(0, 1)[chosen], list(size), InterpolationMode.BICUBIC, antialias=True
    )
    once = _processor()([frames], return_tensors="pt")["pixel_values_videos"]
    torch.testing.assert_close(patches[:rows], once, rtol=0, atol=0.501 * level if resized else 1e-5)
    # On float frames it does not round, and does not clamp either: equal wherever nothing overshoots.
    exact = _processor()([video.detach()[0].transpose(0, 1)[chosen]], do_rescale=False, return_tensors="pt")[
        "pixel_values_videos"
    ]
    low, high = (preprocess(torch.full((1, 3, 4, *size), value), range(4), size)[0] for value in (0.0, 1.0))
    torch.testing.assert_close(patches[:rows], exact.clamp(low, high), rtol=0, atol=1e-5)
    patches[:rows].square().sum().backward()
    assert video.grad is not None
    unused = [frame for frame in range(7) if frame not in chosen]
    assert video.grad[:, :, unused].abs().max() == 0
    assert video.grad[:, :, chosen].abs().amax((0, 1, 3, 4)).min() > 0


def test_gradient_of_the_resize_is_that_of_finite_differences() -> None:
    video = (0.3 + 0.4 * _smooth(2, 40, 60)).double().requires_grad_()
    weights = torch.randn(4 * 2, 1176, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def total(pixels: torch.Tensor) -> torch.Tensor:
        return (preprocess(pixels, [0, 1], (28, 56))[0] * weights).sum()

    (gradient,) = torch.autograd.grad(total(video), video)
    direction = torch.randn(video.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        slope = (total(video + 1e-5 * direction) - total(video - 1e-5 * direction)) / 2e-5
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-7, atol=0)
