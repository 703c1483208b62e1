# ruff: noqa: T201
"""What a rollout costs beyond the transformer: sampler and policy against bare forwards of the same model.

    python benchmarks/sampler_overhead.py [--repeats N]

A mid-size TI2V-5B-like transformer on one processor thread: large enough that a forward dominates, as it does
at full size. The rollout is the product's own, with keyed noise, stochastic transitions, log-probabilities of
the replayed steps, first-frame pinning and FSDP at one rank; encoding text and decoding videos are outside.
The bare side calls the plain Diffusers module as often with ready-made inputs. Both take turns, and the
fastest of each counts. The last line is one JSON object; its `processor_time_ratio` is less disturbed by
other work on the machine than `ratio`, the one of wall times.
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
    size = ("--num_frames", "17", "--height", "192", "--width", "192")
    chain = ("--grpo_num_sampling_steps", "10", "--flow_shift", "5", "--trajectory_dtype", "bfloat16")
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


def seconds(call: Callable[[], None]) -> tuple[float, float]:
    """Wall and processor time of a call."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - processor


@torch.no_grad()
def measure(repeats: int) -> dict[str, object]:
    mesh = init_mesh("cpu", 60)
    with tempfile.TemporaryDirectory(prefix="sampler-overhead-") as directory:
        spec = run_spec(write_model(Path(directory) / "model", heads=4, layers=4))
        bare = load_wan(spec.model, "cpu").transformer.eval()
        policy = build_model(spec, mesh).policy
    policy.eval()
    generator = torch.Generator().manual_seed(1)
    data, num_steps = spec.data, spec.sampler.num_steps
    shape = policy.latent_shape(data.num_frames, data.height, data.width)
    latent = torch.randn(CHUNK, *shape, generator=generator)
    condition = Condition(
        text=torch.randn(CHUNK, TEXT_LENGTH, TEXT_DIM, generator=generator),
        first_frame_latent=latent[:, :, :1],
    )
    rollouts: list[tuple[float, float]] = []
    forwards: list[tuple[float, float]] = []
    for step in range(repeats + 1):
        forwards.append(seconds(lambda: bare_forwards(bare, latent, condition.text, num_steps)))
        rollouts.append(seconds(lambda step=step: rollout(policy, condition, spec, step)))
    # The first of each allocates.
    rollout_s, rollout_cpu_s = map(min, zip(*rollouts[1:], strict=True))
    forwards_s, forwards_cpu_s = map(min, zip(*forwards[1:], strict=True))
    return {
        "machine": f"{os.cpu_count()} CPU cores, one thread",
        "parameters": sum(parameter.numel() for parameter in bare.parameters()),
        "latent": list(latent.shape),
        "denoising_steps": num_steps,
        "repeats": repeats,
        "rollout_s": round(rollout_s, 4),
        "bare_forwards_s": round(forwards_s, 4),
        "processor_time_ratio": round(rollout_cpu_s / forwards_cpu_s, 4),
        "ratio": round(rollout_s / forwards_s, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=6)
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
