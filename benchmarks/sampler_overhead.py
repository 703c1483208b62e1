# ruff: noqa: T201
"""What a rollout costs beyond the transformer: sampler and policy against bare forwards of the same model.

    python benchmarks/sampler_overhead.py [--repeats N]

A mid-size TI2V-5B-like transformer on one processor thread, with enough tokens that its arithmetic dominates,
as it does at full size. The rollout is the product's own, with keyed noise, stochastic transitions,
log-probabilities of the replayed steps, first-frame pinning and FSDP at one rank (whose gathers are copies
here, and hide behind nothing); encoding text and decoding videos are outside. The bare side calls the plain
Diffusers module as often with ready-made inputs. Both take turns, and the fastest time of each counts. The
last line is one JSON object; `processor_time_ratio` is less disturbed by other work than `ratio`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from models import write_model

from wan_trainer.config import load_config, resolve
from wan_trainer.config.specs import RunSpec
from wan_trainer.distributed.mesh import init_mesh
from wan_trainer.models.wan.load import load_wan
from wan_trainer.models.wan.policy import WanPolicy, model_timestep
from wan_trainer.sampling.sampler import sample
from wan_trainer.sampling.schedule import replay_steps, sigmas
from wan_trainer.tiny.models import TEXT_DIM, TEXT_LENGTH
from wan_trainer.training.assembly import build_model
from wan_trainer.types import Condition, SampleId

CHUNK = 4


def run_spec(model: Path) -> RunSpec:
    """The quickstart's specification with this model and video size, sampled like the 5B recipe."""
    size = ("--num_frames", "17", "--height", "384", "--width", "384")
    chain = ("--grpo_num_sampling_steps", "6", "--flow_shift", "5", "--trajectory_dtype", "bfloat16")
    overrides = ["--device", "cpu", "--model_path", str(model), *size, *chain]
    return resolve(load_config("configs/quickstart.yaml", overrides), cuda_available=False)


def rollout(policy: WanPolicy, condition: Condition, spec: RunSpec, step: int) -> None:
    """One chunk of batch `step`, as `algorithms.colocated` draws it."""
    sampler, data = spec.sampler, spec.data
    keep = replay_steps(sampler.num_steps, sampler.replay_ratio, sampler.seed, step)
    ids = [SampleId(step, 0, member) for member in range(CHUNK)]
    shape = policy.latent_shape(data.num_frames, data.height, data.width)
    grid = sigmas(sampler.num_steps, 5.0)
    sample(policy.velocity, condition, ids, sampler, grid, keep, shape, "cpu")


def bare_forwards(
    expert: WanTransformer3DModel, latent: torch.Tensor, text: torch.Tensor, num_steps: int
) -> None:
    """The transformer alone, once for each denoising step."""
    tokens = latent.shape[2] * latent.shape[3] * latent.shape[4] // 4
    for sigma in sigmas(num_steps, 5.0)[:-1]:
        timestep = model_timestep(float(sigma)).expand(len(latent), tokens)
        expert(hidden_states=latent, timestep=timestep, encoder_hidden_states=text, return_dict=False)


@torch.no_grad()
def measure(repeats: int) -> dict[str, object]:
    mesh = init_mesh("cpu", 60)
    with tempfile.TemporaryDirectory(prefix="sampler-overhead-") as directory:
        path = write_model(Path(directory) / "model", heads=4, layers=4)
        spec = run_spec(path)
        bare = load_wan(spec.model, "cpu").transformer.eval()
        policy = build_model(spec, mesh).policy.eval()
    generator = torch.Generator().manual_seed(1)
    data, num_steps = spec.data, spec.sampler.num_steps
    shape = policy.latent_shape(data.num_frames, data.height, data.width)
    latent = torch.randn(CHUNK, *shape, generator=generator)
    condition = Condition(
        text=torch.randn(CHUNK, TEXT_LENGTH, TEXT_DIM, generator=generator),
        first_frame_latent=latent[:, :, :1],
    )
    calls: dict[str, Callable[[int], None]] = {
        "bare": lambda _: bare_forwards(bare, latent, condition.text, num_steps),
        "rollout": lambda step: rollout(policy, condition, spec, step),
    }
    wall: dict[str, list[float]] = {name: [] for name in calls}
    processor: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(repeats + 1):
        for name, call in calls.items():
            started = time.perf_counter(), time.process_time()
            call(step)
            wall[name].append(time.perf_counter() - started[0])
            processor[name].append(time.process_time() - started[1])
    # The first of each allocates.
    best = {name: min(times[1:]) for name, times in wall.items()}
    best_processor = {name: min(times[1:]) for name, times in processor.items()}
    return {
        "machine": f"{os.cpu_count()} CPU cores, one thread",
        "parameters": sum(parameter.numel() for parameter in bare.parameters()),
        "latent": list(latent.shape),
        "denoising_steps": num_steps,
        "repeats": repeats,
        "rollout_s": round(best["rollout"], 4),
        "bare_forwards_s": round(best["bare"], 4),
        "processor_time_ratio": round(best_processor["rollout"] / best_processor["bare"], 4),
        "ratio": round(best["rollout"] / best["bare"], 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        result = measure(max(1, args.repeats))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
