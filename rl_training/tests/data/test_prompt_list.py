"""Prompt lists: by themselves as a data set, and as the held prompts of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wan_trainer.config.specs import DataSpec
from wan_trainer.data.dataset import load_dataset
from wan_trainer.data.prompt_list import read_prompts
from wan_trainer.types import Sample, UserError

Spec = Callable[..., DataSpec]
LONG = "ten thousand characters " * 420


def write_list(folder: Path, *lines: dict[str, Any] | str, name: str = "list.jsonl") -> Path:
    """A list of lines as they are, or of objects; the media that it names are there."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / name).write_text("\n".join(text))
    for media in ("a.png", "b.png", "a.mp4"):
        (folder / media).write_bytes(b"x")
    return folder / name


def problems(path: Path) -> tuple[str, ...]:
    """What is wrong with a list, which a data set and an evaluation say alike; each in one line."""
    with pytest.raises(UserError) as caught:
        read_prompts(path)
    assert all(line and "\n" not in line for line in caught.value.problems)
    return caught.value.problems


def test_a_text_list_is_one_prompt_a_line(tmp_path: Path, spec: Spec) -> None:
    text = f"a cat\n\n猫が走る 🐈 с\u2028новой строки\r\n \t\n# {LONG[:10_000]}\n ../../etc/passwd \na cat"
    path = tmp_path / "wishes.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    dataset = load_dataset(spec(path))
    assert [sample.prompt for sample in dataset] == [
        "a cat",
        "猫が走る 🐈 с\u2028новой строки",
        f"# {LONG[:10_000]}".strip(),
        "../../etc/passwd",
        "a cat",
    ]
    assert dataset.sample_ids() == [f"wishes/{number:08d}" for number in (0, 2, 4, 5, 6)]
    assert dataset.tasks == ("wishes",)
    assert dataset[0] == Sample("wishes/00000000", "wishes", "a cat")
    assert tuple(dataset) == read_prompts(path)
    assert set(dataset.digests) == {"wishes.txt"}
    assert load_dataset(spec(path)).sha256 == dataset.sha256
    path.write_text(text + "!")
    assert load_dataset(spec(path)).sha256 != dataset.sha256


def test_json_lines_carry_media_and_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dog = {"prompt": " a dog", "image": "a.png", "reference_video": "a.mp4", "negative_prompt": "blurry"}
    other = {"prompt": "", "image": str(tmp_path / "b.png"), "id": "empty-one", "task": "special"}
    write_list(tmp_path, "", dog, other | {"reference_video": None}, "")
    monkeypatch.chdir(tmp_path)
    first, second = read_prompts(Path("list.jsonl"))
    assert first == Sample(
        "list/00000001",
        "list",
        "a dog",
        first_frame=tmp_path / "a.png",
        reference_video=tmp_path / "a.mp4",
        negative_prompt="blurry",
    )
    assert second == Sample("special/empty-one", "special", "", first_frame=tmp_path / "b.png")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"prompt": "a"}', '{"prompt": 3}'], [":2: prompt: 3, not text"]),
        ([{"prompt": "a", "pompt": "b"}], [":1: 'pompt', unknown key", "did you mean prompt?"]),
        ([{"text": "a"}], [":1: 'text', unknown key", "has no prompt"]),
        (['["a"]'], [":1: ", "not a JSON object"]),
        (['{"prompt": "a"'], [":1: ", "not JSON", "column"]),
        (["[" * 100_000], [":1: ", "not readable JSON"]),
        (['{"prompt": "a", "prompt": "b"}'], [":1: ", "not readable JSON ('prompt' stands twice)"]),
        ([{"prompt": "a", "id": "../up"}], [":1: id: '../up'"]),
        ([{"prompt": "a", "image": ""}], [":1: image: empty"]),
        (['{"prompt": "\\ud800"}'], [":1: prompt: '\\ud800', half of a surrogate pair"]),
        (['{"prompt": "a", "\\ud800": "b"}'], [":1: '\\ud800', unknown key"]),
        (
            [{"prompt": "a", "id": "x"}, "", {"prompt": "b", "id": "x"}],
            [":3: list/x, the sample id of line 1"],
        ),
        (["", ""], [": holds no prompt"]),
        (
            [{"prompt": "a", "image": "a.png"}, *[{"prompt": "b"}] * 3],
            ["1 prompts have an image (first: line 1)", "3 have none (first: line 2)"],
        ),
        (
            [
                {"prompt": "a", "image": "no.png"},
                {"prompt": "b", "image": "a.png", "reference_video": "no.mp4"},
            ],
            [":1: image", "no.png, missing", ":2: reference_video", "no.mp4, missing"],
        ),
    ],
)
def test_bad_lines_are_named(
    tmp_path: Path, spec: Spec, lines: list[dict[str, Any] | str], words: list[str]
) -> None:
    path = write_list(tmp_path, *lines)
    found = problems(path)
    assert all(line.startswith(f"{path}:") for line in found)
    assert all(word in "\n".join(found) for word in words), found
    assert "\n".join(found).encode()
    with pytest.raises(UserError) as caught:
        load_dataset(spec(path))
    assert caught.value.problems == found


def test_all_bad_lines_are_named_at_once(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "imge": "a.png"}, {"prompt": 1}, {"prompt": "c", "image": "no.png"}]
    assert len(problems(write_list(tmp_path, *lines))) == 3
    found = problems(write_list(tmp_path, *lines * 11))
    assert len(found) == 21 and "13 more problems" in found[-1]
    # A name that cannot be a task is one problem, not one of every line.
    (line,) = problems(write_list(tmp_path, "a", "b", name="my list.txt"))
    assert "'my list', no name for a task" in line


def test_what_is_no_list_is_one_line(tmp_path: Path, spec: Spec) -> None:
    (tmp_path / "list.csv").write_text("a")
    with pytest.raises(UserError, match=r"list.csv, neither a descriptor \(.json\) nor a prompt list"):
        load_dataset(spec(tmp_path / "list.csv"))
    assert ".txt or a .jsonl" in problems(tmp_path / "list.csv")[0]
    (tmp_path / "list.txt").write_bytes(b"a\xff")
    assert "not UTF-8 (byte 1)" in problems(tmp_path / "list.txt")[0]
    assert "No such file" in problems(tmp_path / "none.txt")[0]
