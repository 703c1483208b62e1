"""First frames as training makes them, and which runs start from them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from wan_trainer.config.specs import DataSpec, Family
from wan_trainer.data.dataset import Dataset, check_ground_truth, load_dataset
from wan_trainer.data.first_frames import load_first_frames
from wan_trainer.data.image_rule import takes_first_frames
from wan_trainer.data.loader import batches
from wan_trainer.data.prompt_list import read_prompts
from wan_trainer.media import write_image
from wan_trainer.topology import FAMILIES
from wan_trainer.types import UserError

Spec = Callable[..., DataSpec]


def pictures(folder: Path, count: int) -> Path:
    """A list of prompts that start from noise images of several sizes."""
    generator = np.random.default_rng(0)
    lines: list[str] = []
    for number in range(count):
        size = (24 + 8 * number, 64, 3)
        write_image(folder / f"{number}.png", generator.integers(0, 256, size, dtype=np.uint8))
        lines.append(json.dumps({"prompt": f"prompt {number}", "image": f"{number}.png"}))
    (folder / "pictures.jsonl").write_text("\n".join(lines))
    return folder / "pictures.jsonl"


def test_a_list_keeps_its_order_over_epochs_and_its_images_are_those_of_training(
    tmp_path: Path, spec: Spec
) -> None:
    path = pictures(tmp_path, 5)
    wanted = spec(path, shuffle=False)
    samples, frames = read_prompts(path), load_first_frames(read_prompts(path), 32, 32)
    assert frames is not None and frames.dtype == torch.uint8 and frames.shape == (5, 3, 32, 32)
    seen: list[int] = []
    stream = batches(
        load_dataset(wanted),
        wanted,
        batch_size=3,
        num_batches=5,
        start=0,
        local_prompts=range(3),
        with_first_frames=True,
    )
    for batch in stream:
        indices = [samples.index(sample) for sample in batch.samples]
        assert batch.epoch == len(seen) // 5
        assert all(torch.equal(batch.first_frames[row], frames[index]) for row, index in enumerate(indices))
        seen += indices
    assert seen == [*range(5)] * 3


def test_images_of_some_and_images_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    samples = read_prompts(pictures(tmp_path, 3))
    for name in ("0.png", "2.png"):
        (tmp_path / name).write_bytes(b"no image")
    with pytest.raises(UserError) as caught:
        load_first_frames(samples, 32, 32)
    assert [
        re.search(r"\d\.png: not a readable image", line) is not None for line in caught.value.problems
    ] == [
        True,
        True,
    ]
    (tmp_path / "text.txt").write_text("a cat\na dog\n")
    text = read_prompts(tmp_path / "text.txt")
    assert load_first_frames(text, 32, 32) is None
    with pytest.raises(UserError, match="sample text/00000000 has no image"):
        load_first_frames([samples[1], text[0]], 32, 32)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_each_family_asks_of_a_list(tmp_path: Path, spec: Spec, family: Family) -> None:
    path = pictures(tmp_path, 2)
    (tmp_path / "text.txt").write_text("a cat\na dog\na bird")
    sources = [{"format": "prompt_list", "path": name} for name in ("pictures.jsonl", "text.txt")]
    (tmp_path / "both.json").write_text(json.dumps(sources))

    def answer(name: str) -> bool | str:
        try:
            return takes_first_frames(load_dataset(spec(tmp_path / name)), family)
        except UserError as error:
            (line,) = error.problems
            return line

    takes = family in ("ti2v-5b", "i2v-a14b")
    assert answer(path.name) is takes
    assert takes_first_frames(read_prompts(path), family) is takes
    for name, count in (("text.txt", "3 of 3 samples"), ("both.json", "3 of 5 samples")):
        if family == "i2v-a14b":
            line = answer(name)
            assert f"dataset_json: {count} have no first frame (first: text/00000000)" in str(line)
            assert "i2v-a14b needs one of each" in str(line)
    if family == "ti2v-5b":
        assert answer("text.txt") is False
        assert "ti2v-5b takes one of each or none at all" in str(answer("both.json"))
    if family.startswith("t2v"):
        assert answer("text.txt") is answer("both.json") is False
    if family == "i2v-a14b":
        with pytest.raises(UserError, match=r"^refl_prompts: 3 of 3 samples have no first frame"):
            takes_first_frames(read_prompts(tmp_path / "text.txt"), family, "refl_prompts")


def test_a_prompt_list_has_no_ground_truth(tmp_path: Path, spec: Spec) -> None:
    dataset: Dataset = load_dataset(spec(pictures(tmp_path, 2)))
    with pytest.raises(UserError, match=r"2 of 2 samples have no ground truth \(first: pictures/00000000\)"):
        check_ground_truth(dataset)
