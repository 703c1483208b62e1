# ruff: noqa: T201
"""Everything the main job needs, at a size that trains on two processor cores: model, dataset, evaluator.

    python -m wan_trainer.tiny.world --out storage/quickstart

builds `<out>/model` (a warmed-up tiny pipeline), `<out>/archives` and `<out>/dataset` (tiny tasks, packed
like the public archives and unpacked by `wan_trainer.data.unpack`), `<out>/evalkit` (a copy of the small
evaluator checkout), and `<out>/world.json`, which says where they are. With `--family t2v-1.3b` it is what
ReFL needs instead: `<out>/model`, not warmed up, and `<out>/prompts` with two prompt lists. Parts that are
already there and current are kept.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from wan_trainer.config import trainer_root
from wan_trainer.data.unpack import unpack
from wan_trainer.media.atomic import replacing
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.tiny.models import TINY_FAMILIES, make_tiny, replace_directory
from wan_trainer.tiny.tasks import FPS, NUM_FRAMES, SIZE, TASKS, write_archives
from wan_trainer.tiny.warmup import Progress, WarmupSpec, silent, warm_up
from wan_trainer.types import UserError

PROMPT_FAMILY = "t2v-1.3b"
TinyFamily = Literal["ti2v-5b", "i2v-a14b", "t2v-1.3b"]
SAMPLES_PER_TASK = 12
_SOURCE_REVISION = "tiny"
_FACTS = "world.json"
# What decides the content of each part; editing one of these files makes the part stale.
_PLAIN_MODEL_SOURCES = ("models.py", "analytic_vae.py")
_MODEL_SOURCES = (*_PLAIN_MODEL_SOURCES, "warmup.py", "tasks.py")
_DATA_SOURCES = ("tasks.py",)


@dataclass(frozen=True)
class World:
    """Where the parts are. All paths are absolute; evalkit_sha256 pins the evaluator checkout."""

    root: Path
    family: str
    model: Path
    dataset_json: Path
    evalkit: Path
    evalkit_sha256: str

    @property
    def overrides(self) -> tuple[str, ...]:
        """Config overrides that point a run at this world; `configs/quickstart.yaml` does so by itself."""
        return (
            *("--model_path", str(self.model), "--model_family", self.family),
            *("--dataset_json", str(self.dataset_json)),
            *(
                "--num_frames",
                str(NUM_FRAMES),
                "--height",
                str(SIZE),
                "--width",
                str(SIZE),
                "--fps",
                str(FPS),
            ),
            *("--vbvr_reward_evalkit_dir", str(self.evalkit)),
            *("--vbvr_reward_evalkit_source_sha256", self.evalkit_sha256),
        )


@dataclass(frozen=True)
class PromptWorld:
    """Where the parts of a text-to-video world are, absolute. eval_prompts: other prompts than `prompts`."""

    root: Path
    family: str
    model: Path
    prompts: Path
    eval_prompts: Path

    @property
    def overrides(self) -> tuple[str, ...]:
        """Config overrides that point a run at this world, as `configs/quickstart_refl.yaml` does."""
        model = ("--model_path", str(self.model), "--model_family", self.family)
        data = ("--dataset_json", str(self.prompts), "--eval_dataset_json", str(self.eval_prompts))
        return (*model, *data)


def evalkit_source() -> Path:
    """The evaluator checkout that comes with the trainer."""
    return trainer_root() / "examples" / "tiny_evalkit"


def build(
    root: Path,
    *,
    family: TinyFamily = "ti2v-5b",
    seed: int = 0,
    warmup: WarmupSpec | None = None,
    progress: Progress = silent,
) -> World:
    """Build what is missing or stale under `root` and return where everything is.

    Each part appears whole or not at all, and carries the key of what it was made from, so that a second call
    takes a moment and a killed one goes on. Two processes that build the same root wait for each other.
    """
    root = root.absolute()
    root.mkdir(parents=True, exist_ok=True)
    spec = warmup or WarmupSpec(seed=seed)
    with _exclusive(root):
        model = _part(
            root / "model",
            _key(family, seed, json.dumps(asdict(spec)), *_sources(_MODEL_SOURCES)),
            lambda out: _write_model(out, family, seed, spec, progress),
            progress,
        )
        data_key = _key(seed, SAMPLES_PER_TASK, *_sources(_DATA_SOURCES))
        archives = _part(
            root / "archives",
            data_key,
            lambda out: write_archives(out, samples_per_task=SAMPLES_PER_TASK, seed=seed),
            progress,
        )
        dataset = _part(root / "dataset", data_key, lambda out: _unpack(archives, out), progress)
        sha256 = source_sha256(evalkit_source())
        evalkit = _part(root / "evalkit", sha256, _copy_evalkit, progress)
        if source_sha256(evalkit) != sha256:
            raise UserError(f"{evalkit}: was changed by hand; remove the directory and run the command again")
        world = World(root, family, model, dataset / "dataset.json", evalkit, sha256)
        _write_facts(world)
    return world


def build_prompt_world(root: Path, *, seed: int = 0, progress: Progress = silent) -> PromptWorld:
    """Like `build`, for a model that draws from text alone: random weights, two lists of prompts."""
    root = root.absolute()
    root.mkdir(parents=True, exist_ok=True)
    with _exclusive(root):
        model_key = _key(PROMPT_FAMILY, seed, *_sources(_PLAIN_MODEL_SOURCES))
        model = _part(
            root / "model", model_key, lambda out: make_tiny(PROMPT_FAMILY, out, seed=seed), progress
        )
        lists = prompt_lists()
        prompts = _part(
            root / "prompts", _key(json.dumps(lists)), lambda out: _write_lists(out, lists), progress
        )
        paths = [prompts / name for name in lists]
        world = PromptWorld(root, PROMPT_FAMILY, model, *paths)
        _write_facts(world)
    return world


def prompt_lists() -> dict[str, list[str]]:
    """The prompts of each list by its file name: the evaluation has shapes that training never names."""
    colours = ("red", "green", "blue", "yellow", "purple", "orange")
    shapes = {"prompts.txt": ("square", "ball", "plain", "ground"), "eval_prompts.txt": ("shape",)}
    return {
        name: [f"a {colour} {shape} on a gray background" for shape in named for colour in colours]
        for name, named in shapes.items()
    }


def _write_lists(out: Path, lists: Mapping[str, Sequence[str]]) -> None:
    out.mkdir()
    for name, prompts in lists.items():
        (out / name).write_text("".join(f"{prompt}\n" for prompt in prompts), encoding="utf-8")


def _key(*parts: object) -> str:
    return hashlib.sha256("\n".join(str(part) for part in parts).encode()).hexdigest()


def _sources(names: tuple[str, ...]) -> list[str]:
    folder = Path(__file__).parent
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]


def _part(directory: Path, key: str, write: Callable[[Path], object], progress: Progress) -> Path:
    """`directory`, written by `write` unless it is there with this key. The key file is what makes it
    complete."""
    marker = directory.with_name(f".{directory.name}.key")
    if directory.is_dir() and marker.is_file() and marker.read_text() == key:
        progress(f"{directory.name}: already there")
        return directory
    if directory.exists() and not marker.exists():
        raise UserError(f"{directory} is in the way: remove it, or choose another directory with --out")
    progress(f"{directory.name}: building")
    partial = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.partial")
    try:
        write(partial)
        # The old key stays until the new part is in place: a kill in between leaves a stale part, not a
        # foreign one.
        replace_directory(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    with replacing(marker) as temporary:
        temporary.write_text(key)
    return directory


def _write_model(out: Path, family: str, seed: int, spec: WarmupSpec, progress: Progress) -> None:
    make_tiny(family, out, seed=seed)
    warm_up(out, spec, progress)


def _unpack(archives: Path, out: Path) -> None:
    unpack(
        archives,
        out,
        source_revision=_SOURCE_REVISION,
        expected_tasks=len(TASKS),
        expected_samples=len(TASKS) * SAMPLES_PER_TASK,
        workers=1,
    )


def _copy_evalkit(out: Path) -> None:
    shutil.copytree(evalkit_source(), out, ignore=shutil.ignore_patterns("__pycache__"))


def _write_facts(world: World | PromptWorld) -> None:
    facts = {name: str(value) for name, value in asdict(world).items()}
    with replacing(world.root / _FACTS) as temporary:
        temporary.write_text(json.dumps({**facts, "overrides": list(world.overrides)}, indent=2) + "\n")


@contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: list[str] | None = None) -> int:
    """The command line of this module; prints one `name: value` line a fact."""
    parser = argparse.ArgumentParser(
        description="Build the tiny model and data of the quickstart, and its evaluator."
    )
    parser.add_argument("--out", type=Path, default=trainer_root() / "storage" / "quickstart", metavar="DIR")
    parser.add_argument("--family", choices=TINY_FAMILIES, default="ti2v-5b")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, clips and tasks (default 0)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the tensors are too small to share, and waiting threads stall a busy machine

    def progress(line: str) -> None:
        print(f"  {line}", flush=True)

    try:
        if args.family == PROMPT_FAMILY:
            world = build_prompt_world(args.out, seed=args.seed, progress=progress)
        else:
            world = build(args.out, family=args.family, seed=args.seed, progress=progress)
    except UserError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    for name, value in asdict(world).items():
        print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
