"""Still images, and the two ways a frame changes size: scale to fill and crop, or scale to fit and pad.

Both keep the aspect ratio. Neither is ever applied silently: readers and writers leave the size alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from wan_trainer.media.atomic import replacing
from wan_trainer.types import UserError


def read_image(path: Path) -> np.ndarray:
    """The image at `path` as uint8 (H, W, 3) RGB; transparent pixels are laid on white.

    Raises UserError when the file is missing, truncated or no image.
    """
    try:
        with Image.open(path) as image:
            if image.has_transparency_data:
                rgba = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
            return np.array(image.convert("RGB"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such image; check the path or unpack the data set again") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a readable image ({reason}); replace the file") from error


def write_image(path: Path, image: np.ndarray) -> None:
    """Write uint8 (H, W, 3) RGB in the format of the file's suffix, atomically."""
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3, (image.dtype, image.shape)
    file_format = Image.registered_extensions()[path.suffix.lower()]
    with replacing(path) as temporary:
        Image.fromarray(image).save(temporary, format=file_format)


def fill_and_crop(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scale uint8 (..., H, W, 3) until it covers height x width, and cut the centre out of it.

    The cut is made in source coordinates with sub-pixel edges and resampled once, so that both axes are
    scaled by exactly the same factor: rounding the scaled size first would stretch a frame by up to a pixel.
    """
    source_height, source_width = _frame_size(frames)
    if (source_height, source_width) == (height, width):
        return frames
    scale = max(height / source_height, width / source_width)
    cut_height, cut_width = height / scale, width / scale
    top, left = (source_height - cut_height) / 2, (source_width - cut_width) / 2
    # Rounding in the divisions may put an edge 1e-13 outside the image, which Pillow refuses.
    box = (
        max(left, 0.0),
        max(top, 0.0),
        min(left + cut_width, float(source_width)),
        min(top + cut_height, float(source_height)),
    )
    return _resample(frames, height, width, Image.Resampling.LANCZOS, box)


def fit_and_pad(frames: np.ndarray, height: int, width: int, fill: int = 0) -> np.ndarray:
    """Scale uint8 (..., H, W, 3) until it just fits into height x width, and pad it evenly with `fill`.

    The scaled size is rounded to whole pixels; an odd remainder of padding goes to the bottom or the right.
    """
    source_height, source_width = _frame_size(frames)
    if (source_height, source_width) == (height, width):
        return frames
    scale = min(height / source_height, width / source_width)
    inner_height = min(height, max(1, round(source_height * scale)))
    inner_width = min(width, max(1, round(source_width * scale)))
    inner = _resample(frames, inner_height, inner_width, Image.Resampling.BICUBIC, None)
    if (inner_height, inner_width) == (height, width):
        return inner
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    padded = np.full((*frames.shape[:-3], height, width, 3), fill, dtype=np.uint8)
    padded[..., top : top + inner_height, left : left + inner_width, :] = inner
    return padded


def _frame_size(frames: np.ndarray) -> tuple[int, int]:
    assert frames.dtype == np.uint8 and frames.ndim >= 3 and frames.shape[-1] == 3, (
        frames.dtype,
        frames.shape,
    )
    return frames.shape[-3], frames.shape[-2]


def _resample(
    frames: np.ndarray,
    height: int,
    width: int,
    filter_: Image.Resampling,
    box: tuple[float, float, float, float] | None,
) -> np.ndarray:
    source = frames.reshape(-1, *frames.shape[-3:])
    result = np.empty((len(source), height, width, 3), dtype=np.uint8)
    for index, frame in enumerate(source):
        image = Image.fromarray(np.ascontiguousarray(frame))
        result[index] = np.asarray(image.resize((width, height), filter_, box=box))
    return result.reshape(*frames.shape[:-3], height, width, 3)
