"""Images and videos as uint8 RGB arrays. NumPy, PyAV and Pillow only: spawned scorer processes import it."""

from wan_trainer.media.evaluation import kept_frames, prepare_for_evaluation
from wan_trainer.media.image import fill_and_crop, fit_and_pad, read_image, write_image
from wan_trainer.media.video import (
    VideoInfo,
    encode_video,
    frame_times,
    probe_video,
    read_frames,
    write_video,
)

__all__ = [
    "VideoInfo",
    "encode_video",
    "fill_and_crop",
    "fit_and_pad",
    "frame_times",
    "kept_frames",
    "prepare_for_evaluation",
    "probe_video",
    "read_frames",
    "read_image",
    "write_image",
    "write_video",
]
