"""Video files: exact frames in, H.264 out.

Frames are addressed by their index in presentation order and found by decoding from the start: seeking lands
on key frames and trusts the index of the container, which muxers write differently. Frame counts and frame
rates are always passed or measured, never assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError

from wan_trainer.media.atomic import replacing
from wan_trainer.types import UserError


@dataclass(frozen=True)
class VideoInfo:
    """What a video's container says: num_frames is 0 when it does not count them, fps 0.0 when unknown."""

    num_frames: int
    fps: float
    height: int
    width: int
    codec: str


def probe_video(path: Path) -> VideoInfo:
    """The container's description of the first video stream; nothing is decoded.

    Raises UserError when the file is missing or is no video.
    """
    with _open(path) as container:
        stream = container.streams.video[0]
        return VideoInfo(
            num_frames=stream.frames,
            fps=float(stream.average_rate or 0),
            height=stream.height,
            width=stream.width,
            codec=stream.codec_context.name,
        )


def frame_times(path: Path) -> list[int | None]:
    """When each frame that a reader gets is shown, in the stream's time base and in that order.

    From the packets alone; nothing is decoded. Frames that an edit list hides are left out, which the
    container's own number counts. None for a time that the file does not tell. Raises UserError when the file
    is missing, is no video, or ends before its last packet.
    """
    with _open(path) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        times = [packet.pts if packet.pts is not None else packet.dts for packet in packets if _shown(packet)]
        if not times or len(packets) < stream.frames:
            raise _incomplete(path, len(packets), stream.frames)
    return sorted(times, key=lambda time: (time is None, time or 0))


def read_frames(path: Path, indices: Sequence[int] | None = None, *, threads: int = 1) -> np.ndarray:
    """Frames of a video as uint8 (F, H, W, 3) RGB.

    `indices` count frames in presentation order from 0, in any order, with repeats; None reads every frame.
    Decoding stops at the largest index. Raises UserError when the file is unreadable, damaged, or too short.
    """
    wanted = None if indices is None else [int(index) for index in indices]
    if wanted is not None and (not wanted or min(wanted) < 0):
        raise UserError(f"{path}: frame indices {wanted} must be 0 or greater, and at least one is needed")
    last = None if wanted is None else max(wanted)
    needed = None if wanted is None else frozenset(wanted)
    frames: dict[int, np.ndarray] = {}
    count = shown = packets = 0
    with _open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = threads
        for packet in container.demux(stream):
            packets += bool(packet.size)
            shown += bool(packet.size) and _shown(packet)
            for frame in packet.decode():
                assert isinstance(frame, av.VideoFrame)
                if frame.is_corrupt:  # FFmpeg paints over damaged blocks and goes on
                    raise UserError(f"{path}: frame {count} is damaged; replace the file")
                if needed is None or count in needed:
                    frames[count] = frame.to_ndarray(format="rgb24")
                count += 1
            if last is not None and count > last:
                break
        declared = stream.frames
    if last is not None and count <= last:
        raise UserError(f"{path}: has {count} frames, frame {last} is needed; use a longer video")
    # The container's own number counts what an edit list hides, which has its packets all the same.
    if count == 0 or (last is None and (count < shown or packets < declared)):
        raise _incomplete(path, count, max(shown, declared))
    if len({frame.shape for frame in frames.values()}) > 1:
        raise UserError(f"{path}: its frames change size on the way; give a video of one size")
    return np.stack([frames[index] for index in (range(count) if wanted is None else wanted)])


def write_video(
    path: Path,
    frames: np.ndarray,
    fps: float | Fraction,
    *,
    crf: float = 18,
    preset: str = "medium",
    threads: int = 1,
) -> None:
    """Write uint8 (F, H, W, 3) RGB as an H.264 (libx264, yuv420p) MP4 at `fps` frames a second, atomically.

    yuv420p needs even sizes: an odd one raises UserError and is never resized. With threads=1 (the default)
    the same frames give the same bytes with the same libraries; threads=0 lets x264 use every core. No colour
    tag is written: readers that ignore tags (OpenCV) and readers that honour them then agree.
    """
    _check_writable(str(path), frames, fps)
    with replacing(path) as temporary:
        _encode(str(temporary), frames, fps, crf, preset, threads)


def encode_video(
    frames: np.ndarray,
    fps: float | Fraction,
    *,
    crf: float = 18,
    preset: str = "medium",
    threads: int = 1,
) -> bytes:
    """The MP4 that `write_video` would write, as bytes: no file is touched."""
    _check_writable("video", frames, fps)
    target = BytesIO()
    _encode(target, frames, fps, crf, preset, threads)
    return target.getvalue()


def _check_writable(name: str, frames: np.ndarray, fps: float | Fraction) -> None:
    assert frames.dtype == np.uint8 and frames.ndim == 4 and frames.shape[3] == 3, (
        frames.dtype,
        frames.shape,
    )
    count, height, width, _ = frames.shape
    if count == 0 or height == 0 or width == 0:
        raise UserError(f"{name}: cannot write a video of shape {frames.shape}; no axis may be empty")
    if height % 2 or width % 2:
        even = f"{height + height % 2}x{width + width % 2}"
        raise UserError(f"{name}: {height}x{width} (height x width) is odd, yuv420p needs even; use {even}")
    if not fps > 0:
        raise UserError(f"{name}: cannot write a video at {fps} frames a second; use a positive rate")


def _encode(
    target: str | BytesIO, frames: np.ndarray, fps: float | Fraction, crf: float, preset: str, threads: int
) -> None:
    rate = Fraction(fps).limit_denominator(1001)
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": str(crf), "preset": preset})
        _, stream.height, stream.width, _ = frames.shape
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = threads
        stream.codec_context.time_base = 1 / rate
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = index, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _incomplete(path: Path, count: int, declared: int) -> UserError:
    return UserError(f"{path}: only {count} of {declared} frames decode; the file is damaged, replace it")


def _shown(packet: av.Packet) -> bool:
    """Whether the frame of a packet is shown, and not only decoded for others that are."""
    return not packet.is_discard


@contextmanager
def _open(path: Path) -> Iterator[InputContainer]:
    """Open a file that has a video stream; FFmpeg's failures, then and while decoding, become one line."""
    try:
        with av.open(str(path), "r") as container:
            if not container.streams.video:
                raise UserError(f"{path}: holds no video stream; give a video file")
            yield container
    except FileNotFoundError:
        raise UserError(f"{path}: no such video; check the path or unpack the data set again") from None
    except FFmpegError as error:
        reason = " ".join(str(error.strerror).split())
        raise UserError(f"{path}: not a readable video ({reason}); replace the file") from error
