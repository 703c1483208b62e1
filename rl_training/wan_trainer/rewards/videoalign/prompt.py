"""The text in which the reward model reads a video and its prompt."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from wan_trainer.rewards.videoalign.options import HEADS
from wan_trainer.types import UserError

PLACEHOLDER = "{text_prompt}"
REWARD_TOKENS = tuple(f"<|{head}_reward|>" for head in HEADS)
VIDEO_TOKEN = "<|video_pad|>"
# Qwen2-VL's chat format for one video and one text, with its default system message.
_BEFORE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    f"<|im_start|>user\n<|vision_start|>{VIDEO_TOKEN}<|vision_end|>"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n"


def read_template(path: Path | None) -> str:
    """The template of the question, every character of the file; None = the one of this package.

    Raises UserError when it cannot be read, or lacks or repeats the placeholder or a reward token.
    """
    if path is None:
        return files(__package__).joinpath("prompt_template.txt").read_text(encoding="utf-8")
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError:
        raise UserError(
            f"videoalign.prompt_template: {path} is no readable file; name a text file, or leave the key out"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"videoalign.prompt_template: {path} is not UTF-8 text; save it as such") from None
    problems = [
        f"videoalign.prompt_template: {path} has {part} {text.count(part)} times; it must stand there once"
        for part in (PLACEHOLDER, *REWARD_TOKENS)
        if text.count(part) != 1
    ]
    if problems:
        raise UserError(*problems)
    return text


def question(template: str, prompt: str) -> str:
    """The whole conversation about a video made from `prompt`; the video's place is one `VIDEO_TOKEN`.

    The prompt is put in as it is: braces in it mean nothing.
    """
    return f"{_BEFORE}{template.replace(PLACEHOLDER, prompt)}{_AFTER}"
