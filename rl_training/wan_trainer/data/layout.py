"""The public archive layout and the materialised layout that `unpack` makes of it."""

from __future__ import annotations

import re

SOURCE_REPO = "VBVR-Pro-RL"
PUBLIC_REVISION = "ca0aaffea93b07d269c6fe2fbfe533f1fdab9aa1"
PUBLIC_TASKS = 50
PUBLIC_SAMPLES = 50_000

ARCHIVE_FOLDER = "VBVR-Pro-RL-Video"
ARCHIVE_SUFFIX = ".tar.gz"
TASK_SPLIT = "In-Domain_50"

FIRST_FRAME = "first_frame.png"
METADATA = "metadata.json"
GROUND_TRUTH = "video/ground_truth.mp4"
FINAL_FRAME = "video/final_frame.png"
PROMPT = "video/prompt.txt"
# The same paths in an archive, below <task>/<group dir>/<sample id>, and on disk, below raw/<task>/<sample
# id>.
SAMPLE_FILES = (FIRST_FRAME, METADATA, FINAL_FRAME, GROUND_TRUTH, PROMPT)
# An empty prompt is a prompt; an empty image, video or record is a broken download.
MAY_BE_EMPTY = frozenset({PROMPT})

RAW_FOLDER = "raw"
DATASET_JSON = "dataset.json"
SPLIT_MANIFEST = "split_manifest_rl.json"
MATERIALIZATION = "materialization.json"

_NAME = re.compile(r"[\w-][\w.+-]{0,199}", re.ASCII)


def is_safe_name(name: str) -> bool:
    """Whether a task name or a sample id may name a directory: plain ASCII, no separator, no leading dot."""
    return _NAME.fullmatch(name) is not None
