# ruff: noqa: T201
"""How long a checkpoint keeps training waiting: the copy of its state, against writing it.

    python benchmarks/checkpoint.py [--megabytes N] [--repeats N] [--output_dir DIR]

Weights and AdamW moments of one rank, float32, through the trainer's own `CheckpointWriter`. Every repeat
saves the same state twice: once waiting for the whole write, as a synchronous save would, and once going on
to train after the copy, with updates in place and a poll after each as in the training loop. What the second
save left on disk is compared with the weights as they were. `blocked_s` is all that the second save kept
training waiting, polls included; `synchronous_s` leaves the copy out, which a synchronous save could do
without. The median of the repeats counts. The first save of a run also touches the pages of the copy for the
first time (`first_blocked_s`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from wan_trainer.distributed.mesh import init_mesh
from wan_trainer.training.checkpoint import CheckpointWriter, TrainState
from wan_trainer.training.stored_state import StoredState

LAYERS = 8
# Weights and the two moments of AdamW, float32.
BYTES_PER_PARAMETER = 12


def network(megabytes: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """Square layers whose weights and moments take `megabytes`, and an optimizer that has its moments."""
    width = math.ceil(math.sqrt(megabytes * 2**20 / BYTES_PER_PARAMETER / LAYERS))
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    fully_shard(layers)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3, fused=True)
    update(layers, optimizer)
    return layers, optimizer


def update(layers: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """One update in place, which any save must not notice once it has its copy."""
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(megabytes: int, repeats: int, output_dir: Path) -> dict[str, object]:
    mesh = init_mesh("cpu", 60)
    layers, optimizer = network(megabytes)
    writer = CheckpointWriter(output_dir, mesh, keep=1)
    blocked: list[float] = []
    synchronous: list[float] = []
    behind: list[float] = []
    updates = 0
    whole = True

    def state(step: int) -> TrainState:
        return TrainState(step, 0, step, step, 0, mesh.world, None, {})

    started = time.perf_counter()
    writer.start(state(1), layers, optimizer)
    first = time.perf_counter() - started
    writer.wait()
    for repeat in range(repeats):
        writer.start(state(2 * repeat + 2), layers, optimizer)
        started = time.perf_counter()
        writer.wait()
        synchronous.append(time.perf_counter() - started)

        before = [parameter.to_local().clone() for parameter in layers.parameters()]  # type: ignore[attr-defined]
        started = time.perf_counter()
        writer.start(state(2 * repeat + 3), layers, optimizer)
        waited = time.perf_counter() - started
        path: Path | None = None
        while path is None:
            update(layers, optimizer)
            updates += 1
            polled = time.perf_counter()
            path = writer.poll()
            waited += time.perf_counter() - polled
        behind.append(time.perf_counter() - started)
        blocked.append(waited)
        stored = StoredState(path)
        saved = stored.read("model", stored.shapes("model"))
        whole &= all(
            torch.equal(saved[name], weight)
            for (name, _), weight in zip(layers.named_parameters(), before, strict=True)
        )
    writer.close()
    size = sum(file.stat().st_size for file in (output_dir / "latest").parent.glob("checkpoint-*/state/*"))
    return {
        "megabytes": round(size / 2**20),
        "ratio": round(statistics.median(blocked) / statistics.median(synchronous), 4),
        "blocked_s": round(statistics.median(blocked), 4),
        "synchronous_s": round(statistics.median(synchronous), 4),
        "first_blocked_s": round(first, 4),
        "behind_training_s": round(statistics.median(behind), 4),
        "updates_meanwhile": updates,
        "saved_as_of_its_step": whole,
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output_dir", type=Path, default=None, help="on the file system to be measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.output_dir) as directory:
            result = measure(arguments.megabytes, max(1, arguments.repeats), Path(directory))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
