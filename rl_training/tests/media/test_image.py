"""Reading images, and the two ways a frame changes size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wan_trainer.media import fill_and_crop, fit_and_pad, read_image, write_image
from wan_trainer.types import UserError


def disc(height: int, width: int, radius: float) -> np.ndarray:
    """A white disc in the middle of a black frame."""
    y, x = np.mgrid[:height, :width]
    inside = (y - (height - 1) / 2) ** 2 + (x - (width - 1) / 2) ** 2 < radius**2
    return np.repeat((inside * 255).astype(np.uint8)[..., None], 3, axis=2)


def extent(frame: np.ndarray) -> tuple[float, float]:
    """Height and width of what is white, in (fractional) pixels, through the middle."""
    middle_row, middle_column = frame.shape[0] // 2, frame.shape[1] // 2
    return frame[:, middle_column, 0].sum() / 255, frame[middle_row, :, 0].sum() / 255


@pytest.mark.parametrize(
    ("source", "target"),
    [((100, 300), (64, 64)), ((300, 100), (64, 64)), ((37, 53), (96, 64)), ((1000, 1024), (512, 480))],
)
def test_filling_never_stretches_and_keeps_the_centre(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    scale = max(target[0] / source[0], target[1] / source[1])
    radius = 0.3 * min(target) / scale
    result = fill_and_crop(disc(*source, radius), *target)
    assert result.shape == (*target, 3)
    tall, wide = extent(result)
    assert tall == pytest.approx(wide, abs=max(1.0, 1.2 * scale))
    assert tall == pytest.approx(2 * radius * scale, abs=max(1.5, 2 * scale))
    y, x = np.nonzero(result[..., 0] > 127)
    assert y.mean() == pytest.approx((target[0] - 1) / 2, abs=0.6 * max(1, scale))
    assert x.mean() == pytest.approx((target[1] - 1) / 2, abs=0.6 * max(1, scale))


def test_filling_cuts_equal_margins() -> None:
    stripes = np.zeros((40, 80, 3), dtype=np.uint8)
    stripes[:, :20, 0] = 255  # the left margin of a square cut
    stripes[:, 20:60, 1] = 255
    stripes[:, 60:, 2] = 255  # the right one
    result = fill_and_crop(stripes, 40, 40)
    assert (result[..., 1] == 255).all() and not result[..., [0, 2]].any()


def test_sizes_that_fit_already_are_untouched() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (2, 16, 24, 3), dtype=np.uint8)
    assert np.array_equal(fill_and_crop(frames, 16, 24), frames)
    assert np.array_equal(fit_and_pad(frames, 16, 24), frames)


def test_awkward_ratios_never_leave_the_image() -> None:
    for height in range(7, 60, 4):
        for width in range(7, 60, 5):
            frame = np.full((height, width, 3), 77, dtype=np.uint8)
            assert (fill_and_crop(frame, 32, 48) == 77).all()
            assert fit_and_pad(frame, 32, 48).shape == (32, 48, 3)


def test_fitting_pads_evenly_and_shows_everything() -> None:
    frames = np.full((3, 20, 80, 3), 200, dtype=np.uint8)
    result = fit_and_pad(frames, 40, 40, fill=9)
    assert result.shape == (3, 40, 40, 3)
    assert (result[:, 15:25] == 200).all()
    assert (result[:, :15] == 9).all() and (result[:, 25:] == 9).all()


def test_fitting_an_upright_frame_pads_left_and_right() -> None:
    result = fit_and_pad(np.full((80, 20, 3), 200, dtype=np.uint8), 40, 40)
    assert (result[:, 15:25] == 200).all() and not result[:, :15].any() and not result[:, 25:].any()


def test_fitting_without_padding_equals_a_plain_resize() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(frame).resize((64, 64), Image.Resampling.BICUBIC))
    assert np.array_equal(fit_and_pad(frame, 64, 64), expected)


def test_frames_of_any_leading_shape() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (2, 3, 20, 30, 3), dtype=np.uint8)
    result = fill_and_crop(frames, 16, 16)
    assert result.shape == (2, 3, 16, 16, 3)
    assert np.array_equal(result[1, 2], fill_and_crop(frames[1, 2], 16, 16))


def test_reading_gives_rgb_whatever_the_file_holds(tmp_path: Path) -> None:
    rgb = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    write_image(tmp_path / "rgb.png", rgb)
    assert np.array_equal(read_image(tmp_path / "rgb.png"), rgb)
    Image.fromarray(rgb[..., 0]).save(tmp_path / "grey.png")
    assert np.array_equal(read_image(tmp_path / "grey.png"), np.repeat(rgb[..., :1], 3, axis=2))
    Image.fromarray(rgb).convert("P").save(tmp_path / "palette.png")
    assert read_image(tmp_path / "palette.png").shape == (6, 8, 3)
    clear = np.dstack([rgb, np.zeros((6, 8), np.uint8)])
    Image.fromarray(clear, "RGBA").save(tmp_path / "clear.png")
    assert (read_image(tmp_path / "clear.png") == 255).all()


def test_unreadable_images_are_one_line(tmp_path: Path) -> None:
    whole = tmp_path / "whole.png"
    write_image(whole, np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    cut = tmp_path / "cut.png"
    cut.write_bytes(whole.read_bytes()[:2000])
    text = tmp_path / "text.png"
    text.write_text("no image")
    for path, what in ((cut, "not a readable"), (text, "not a readable"), (tmp_path / "none.png", "no such")):
        with pytest.raises(UserError) as caught:
            read_image(path)
        (line,) = caught.value.problems
        assert str(path) in line and what in line and "\n" not in line


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        write_image(tmp_path / "x.unknown", np.zeros((2, 2, 3), np.uint8))
    assert list(tmp_path.iterdir()) == []
