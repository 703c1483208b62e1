"""Which frames of a video the reward model looks at."""

from __future__ import annotations

from wan_trainer.rewards.videoalign.options import FRAME_FACTOR, MAX_FRAMES, MIN_FRAMES
from wan_trainer.types import UserError


def sampled_frames(total: int, video_fps: float, fps: float, num_frames: int | None) -> list[int]:
    """Indices of the sampled frames of a video of `total` frames, spread evenly from the first to the last.

    Their count is `num_frames`, or total / video_fps * fps within 4 to 768 and rounded to an even number, as
    Qwen2-VL's `smart_nframes` does it in the version the model was trained with (ties to the even pair).
    Raises UserError when the video has fewer frames than that.
    """
    if num_frames is None:
        most = min(MAX_FRAMES, total) // FRAME_FACTOR * FRAME_FACTOR
        count = round(min(max(total / video_fps * fps, MIN_FRAMES), most) / FRAME_FACTOR) * FRAME_FACTOR
    else:
        count = num_frames
    if not MIN_FRAMES <= count <= total:
        wanted = MIN_FRAMES if num_frames is None else num_frames
        raise UserError(
            f"videoalign: the videos have {total} frames, the reward model looks at {wanted} or more; train "
            "on longer videos" + ("" if num_frames is None else ", or leave out videoalign.num_frames")
        )
    # Integers: with an even count no index falls between two frames, so rounding never meets a tie.
    last, steps = total - 1, count - 1
    return [(2 * index * last + steps) // (2 * steps) for index in range(count)]
