"""The memory that `wan-trainer plan` predicts beside what a training step allocates, at small sizes.

    python benchmarks/plan_memory.py [--ranks 2] [--case NAME ...]

Each case is a whole GRPO step (condition, rollout, decode, score, replay, AdamW) of the training code under
FSDP2 on gloo ranks, the second one, so that AdamW has its moments. Measured is the sum of all live tensor
storages of rank 0 at its fullest, phase by phase: every allocation passes the tracker, which knows nothing of
the prediction. The last line is one JSON object.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wan_trainer.config.resolution import resolve, topology_of
from wan_trainer.config.schema import TrainConfig
from wan_trainer.distributed.mesh import Mesh, init_mesh
from wan_trainer.models.wan.architecture import model_shape
from wan_trainer.planning.memory import estimate_memory
from wan_trainer.planning.workload import count_work
from wan_trainer.tiny.models import LATENT_CHANNELS, TEXT_DIM, make_tiny
from wan_trainer.training.assembly import build_grpo, build_model, build_updater
from wan_trainer.types import (
    PendingRewards,
    PromptBatch,
    RewardRequest,
    RewardResult,
    RewardTable,
    Sample,
)

# The plan's phases by the spans of the run.
PHASES = {"sample": "rollout", "decode": "decode", "replay": "replay", "optimize": "optimizer"}
TOLERANCE = 0.20


@dataclass(frozen=True)
class Case:
    """A model and a batch. size: pixels a side. config: other keys of the configuration."""

    family: str = "ti2v-5b"
    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    ffn: int = 128
    frames: int = 9
    size: int = 64
    chunk: int = 2
    config: dict[str, Any] = field(default_factory=dict[str, Any])


# Sizes at which the counting was checked while it was written.
DRAFT = {
    "wide": Case(layers=2, heads=4, head_dim=32, ffn=512, frames=9, size=128, chunk=2),
    "long": Case(layers=3, heads=2, head_dim=32, ffn=128, frames=17, size=256, chunk=4),
    "plain": Case(layers=4, frames=17, size=192, chunk=2, config={"gradient_checkpointing": False}),
    # Enough steps that each expert replays one.
    "two experts": Case(
        family="i2v-a14b",
        layers=2,
        frames=9,
        size=96,
        chunk=2,
        config={"grpo_num_sampling_steps": 4, "dancegrpo_timestep_selection_ratio": 1.0},
    ),
    "whole gradients": Case(
        layers=8, heads=4, head_dim=48, ffn=768, chunk=1, config={"grpo_fsdp_sync_each_backward": False}
    ),
}
# Sizes that the counting never saw.
UNSEEN = {
    "deep": Case(layers=6, heads=3, head_dim=24, ffn=200, frames=13, size=160, chunk=3),
    "deep, kept activations": Case(
        layers=5,
        heads=3,
        head_dim=24,
        ffn=320,
        frames=13,
        size=96,
        chunk=4,
        config={"gradient_checkpointing": False},
    ),
    "broad, bfloat16": Case(
        layers=2,
        heads=6,
        head_dim=64,
        ffn=1024,
        frames=5,
        size=128,
        chunk=1,
        config={"param_dtype": "bfloat16"},
    ),
    "guided text-to-video": Case(
        family="t2v-1.3b",
        layers=3,
        heads=4,
        head_dim=40,
        ffn=400,
        frames=17,
        size=80,
        chunk=2,
        config={"grpo_cfg_scale": 4.0},
    ),
    "whole gradients of two experts": Case(
        family="i2v-a14b",
        layers=3,
        heads=3,
        head_dim=56,
        ffn=448,
        frames=5,
        size=48,
        chunk=1,
        config={
            "grpo_fsdp_sync_each_backward": False,
            "grpo_num_sampling_steps": 4,
            "dancegrpo_timestep_selection_ratio": 1.0,
        },
    ),
}


class LiveStorages(TorchDispatchMode):
    """Bytes of all storages that operators made and that still live; the peak of each phase.

    FSDP frees and restores a storage in place, so `resize_` is watched too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peaks: dict[str, int] = {}
        self._phases = [""]
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveStorages:
        original = self._resize

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, DTensor):  # a wrapper of the global shape, around what is really here
                leaf = leaf._local_tensor
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self._see(leaf)
        return result

    def forget_peaks(self) -> None:
        """Start over."""
        self.peaks.clear()

    @contextlib.contextmanager
    def span(self, phase: str, step: int) -> Iterator[None]:
        """Within, peaks belong to `phase`: the clock of the run."""
        self._phases.append(phase)
        self._note()
        try:
            yield
        finally:
            self._phases.pop()

    def add(self, phase: str, step: int, started: float, ended: float) -> None:
        """Nothing: scoring elsewhere allocates no tensors."""

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._alive[key] = weakref.ref(storage, lambda _: self._drop(key))
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self._note()

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        del self._alive[key]

    def _note(self) -> None:
        phase = self._phases[-1]
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.live)


@dataclass(frozen=True)
class Verdicts:
    """Finished rewards."""

    results: list[RewardResult]

    def result(self) -> list[RewardResult]:
        """At once."""
        return self.results


class Brightness:
    """A reward from the mean of each video."""

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> PendingRewards:
        """Scored before it returns."""
        scores = [float(video.mean()) / 255 for video in videos]
        return Verdicts(
            [RewardResult(request.id, score) for request, score in zip(requests, scores, strict=True)]
        )

    def close(self) -> None:
        """Nothing to end."""


class Unwatched:
    """An observer that keeps nothing."""

    def videos(self, batch: PromptBatch, videos: np.ndarray, requests: Sequence[RewardRequest]) -> None:
        """Nothing."""

    def rewards(self, batch: PromptBatch, table: RewardTable) -> None:
        """Nothing."""


def make_model(case: Case, out: Path) -> Path:
    """A tiny directory whose transformers have the sizes of `case`."""
    make_tiny(case.family, out)
    names = ["transformer", *(["transformer_2"] if case.family == "i2v-a14b" else [])]
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        extra = LATENT_CHANNELS + 4 if case.family == "i2v-a14b" else 0
        WanTransformer3DModel(
            num_attention_heads=case.heads,
            attention_head_dim=case.head_dim,
            in_channels=LATENT_CHANNELS + extra,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_DIM,
            freq_dim=64,
            ffn_dim=case.ffn,
            num_layers=case.layers,
        ).save_pretrained(out / name)
    return out


def configure(case: Case, model: Path) -> TrainConfig:
    """One prompt for each rank, replayed in the chunks of the rollout."""
    values = {
        "device": "cpu",
        "model_path": str(model),
        "model_family": case.family,
        "dataset_json": "unused.json",
        "output_dir": "unused",
        "vbvr_reward_evalkit_dir": "unused",
        "vbvr_reward_evalkit_source_sha256": "0" * 64,
        "num_frames": case.frames,
        "height": case.size,
        "width": case.size,
        "max_steps": 2,
        "grpo_group_size": max(2, case.chunk),
        "grpo_sample_batch_size": case.chunk,
        "vbvr_reward_decode_batch_size": case.chunk,
        "grpo_num_sampling_steps": 3,
        **case.config,
    }
    return TrainConfig.model_validate(values)


def measure(case: Case, model: Path, mesh: Mesh) -> dict[str, dict[str, int]]:
    """Bytes of each phase on this rank, planned and measured."""
    config = configure(case, model)
    spec = resolve(config, cuda_available=False)
    topology = topology_of(config, 1, mesh.world)
    shape = model_shape(model, spec.model.family)
    planned = estimate_memory(spec, topology, shape, count_work(spec, topology))
    samples = tuple(Sample(f"task/{i}", "task", f"a square {'moves ' * i}") for i in range(topology.prompts))
    generator = torch.Generator().manual_seed(1)
    with LiveStorages() as tracker:
        built = build_model(spec, mesh)
        grpo = build_grpo(
            spec,
            topology,
            mesh,
            built,
            reward=Brightness(),
            updater=build_updater(spec, built, 2, 0),
            clock=tracker,  # pyright: ignore[reportArgumentType] - it times nothing
            observer=Unwatched(),  # pyright: ignore[reportArgumentType] - it writes nothing
            policy_version=0,
        )
        for step in range(2):
            tracker.forget_peaks()
            frames: dict[int, torch.Tensor] = {}
            if case.family != "t2v-1.3b":
                picture = torch.randint(
                    0, 256, (3, case.size, case.size), generator=generator, dtype=torch.uint8
                )
                frames = dict.fromkeys(range(topology.prompts), picture)
            batch = PromptBatch(step=step, epoch=0, samples=samples, first_frames=frames)
            grpo.update(grpo.prepare(batch, step))
    measured = {PHASES[name]: peak for name, peak in tracker.peaks.items() if name in PHASES}
    return {"planned": {name: planned.phases[name] for name in measured}, "measured": measured}


def compare(sides: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Both sides, planned / measured of each phase and of the peak."""
    planned, measured = sides["planned"], sides["measured"]
    ratios = {name: planned[name] / measured[name] for name in measured}
    return {**sides, "ratios": {**ratios, "peak": max(planned.values()) / max(measured.values())}}


def run_cases(cases: dict[str, Case], mesh: Mesh) -> dict[str, dict[str, Any]]:
    """Every case on every rank; the results of this one."""
    results: dict[str, dict[str, Any]] = {}
    shared: list[str] = [""]
    with tempfile.TemporaryDirectory() as folder:
        shared[0] = folder
        dist.broadcast_object_list(shared, src=0)
        for index, (name, case) in enumerate(cases.items()):
            model = Path(shared[0], str(index))
            if mesh.rank == 0:
                make_model(case, model)
            dist.barrier()
            results[name] = compare(measure(case, model, mesh))
        dist.barrier()
    return results


def main() -> int:
    """Print both sides of every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--case", action="append", choices=[*DRAFT, *UNSEEN], help="default: all")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        return subprocess.call([sys.executable, *launch, *sys.argv], env=environment)
    mesh = init_mesh("cpu", 60.0)
    chosen = args.case or [*DRAFT, *UNSEEN]
    results: dict[str, dict[str, Any]] = {}
    for name, case in {**DRAFT, **UNSEEN}.items():
        if name in chosen:
            results |= run_cases({name: case}, mesh)
            if mesh.rank == 0:
                print(f"{name} ({'unseen' if name in UNSEEN else 'draft'}): {asdict(case)}")
                result = results[name]
                for phase, measured in result["measured"].items():
                    sides = f"planned {result['planned'][phase]:>13,} B  measured {measured:>13,} B"
                    print(f"  {phase:<10} {sides}  {result['ratios'][phase]:.3f}", flush=True)
    if mesh.rank == 0:
        unseen = [result["ratios"].values() for name, result in results.items() if name in UNSEEN]
        far = [max(ratio, 1 / ratio) for ratios in unseen for ratio in ratios]
        print(json.dumps({"ranks": mesh.world, "cases": results, "worst_unseen": max(far, default=None)}))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
