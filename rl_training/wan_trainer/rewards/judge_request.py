"""What a judge is sent about one rollout: rubric, instruction, first frame and the whole clip."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from wan_trainer.config.specs import VlmRewardSpec
from wan_trainer.media import encode_video, read_image
from wan_trainer.rewards.judge_rubric import Rubric
from wan_trainer.rewards.judge_verdict import answer_form, answer_schema
from wan_trainer.types import Sample

CRF = 18
"""H.264 quality of the clip; no visible loss, and 81 frames of 512 x 512 stay near a megabyte."""

_ECHO = 4000
"""Characters of an unusable answer that are sent back with the repair request."""

Message = dict[str, Any]


def rollout_messages(spec: VlmRewardSpec, rubric: Rubric, video: np.ndarray, sample: Sample) -> list[Message]:
    """The conversation that asks for a verdict on `video`, uint8 (F, H, W, 3) RGB.

    Everything travels in the request: the judge needs no access to files. The ground truth's final frame is
    never part of it: a judge that sees the answer grades likeness. Raises UserError for an unreadable image.
    """
    first_frame = sample.first_frame if spec.include_gt_first_frame else None
    parts: list[Message] = [_text(_question(spec, rubric, sample.prompt, with_image=first_frame is not None))]
    if first_frame is not None:
        image = first_frame_jpeg(first_frame, spec.image_max_edge, spec.jpeg_quality)
        parts.append({"type": "image_url", "image_url": {"url": data_url("image/jpeg", image)}})
    clip = encode_video(video, spec.video_fps, crf=CRF, preset="veryfast")
    parts.append({"type": "video_url", "video_url": {"url": data_url("video/mp4", clip)}})
    return [{"role": "user", "content": parts}]


def repair_messages(answer: str, reason: str) -> list[Message]:
    """What follows an unusable answer in its conversation."""
    ask = (
        f"That answer cannot be used: {reason}. Look at the video again and answer once more, with the JSON "
        "object only."
    )
    said = [{"role": "assistant", "content": answer[:_ECHO]}] if answer.strip() else []
    return [*said, {"role": "user", "content": ask}]


def request_body(spec: VlmRewardSpec, rubric: Rubric, messages: list[Message]) -> dict[str, Any]:
    """The arguments of one chat completion.

    The service samples video_num_frames frames itself and its processor must not sample again: some models
    otherwise take two frames a second. Greedy, so that a clip has one verdict.
    """
    body: dict[str, Any] = {
        "model": spec.model,
        "messages": messages,
        "max_tokens": spec.max_new_tokens,
        "temperature": 0.0,
        "extra_body": {
            # "opencv" is vLLM's loader that keeps to num_frames; loaders of single model families do not.
            "media_io_kwargs": {"video": {"num_frames": spec.video_num_frames, "video_backend": "opencv"}},
            "mm_processor_kwargs": {"do_sample_frames": False},
        },
    }
    if spec.use_structured_output:
        schema = answer_schema(rubric, spec.score_max)
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "verdict", "strict": True, "schema": schema},
        }
    return body


def first_frame_jpeg(path: Path, max_edge: int, quality: int) -> bytes:
    """The image at `path` as JPEG, its longer edge at most max_edge; a smaller one is never enlarged."""
    image = Image.fromarray(read_image(path))
    image.thumbnail((max_edge, max_edge), Image.Resampling.LANCZOS, reducing_gap=None)
    target = io.BytesIO()
    image.save(target, format="JPEG", quality=quality)
    return target.getvalue()


def data_url(media_type: str, content: bytes) -> str:
    """`content` as a URL that holds it."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"


def _question(spec: VlmRewardSpec, rubric: Rubric, prompt: str, *, with_image: bool) -> str:
    given = "The image is the first frame the video was made from. " if with_image else ""
    return (
        f"{rubric.text}\n\n{given}The video follows. It was made from this instruction:\n<instruction>\n"
        f"{prompt}\n</instruction>\n\n{answer_form(rubric, spec.score_max)}"
    )


def _text(text: str) -> Message:
    return {"type": "text", "text": text}
