"""`wan-trainer plan`: what a recipe amounts to at a topology, on any machine."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass

from wan_trainer.config.device import resolve_device, unbuilt
from wan_trainer.config.family import known_family
from wan_trainer.config.load import load_config
from wan_trainer.config.resolution import replay_depth
from wan_trainer.config.schema import GrpoConfig
from wan_trainer.config.specs import Family
from wan_trainer.topology import (
    FAMILIES,
    Topology,
    pending_rewards_needed,
    replay_step_count,
    resolve_topology,
    total_batches,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; unknown ones are configuration overrides."""
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe (YAML)")
    parser.add_argument("--nodes", type=int, default=1, help="machines (default 1)")
    parser.add_argument("--nproc", type=int, default=8, help="processes on each machine (default 8)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default text")


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Print the plan, or raise UserError when the numbers do not fit together."""
    config = load_config(args.config, rest)
    plan = make_plan(config, args.nodes, args.nproc)
    print(json.dumps(plan.as_data(), indent=2) if args.format == "json" else plan.as_text())
    return 0


@dataclass(frozen=True)
class Plan:
    """The numbers of a run. Forwards are batched transformer calls of one rank in one step.

    batches and updates are None when neither dataset_size nor max_steps says how long the run is.
    """

    config: GrpoConfig
    topology: Topology
    family: Family | None
    replayed_steps: int
    rollout_forwards: int
    replay_forwards: int
    batches: int | None
    updates: int | None
    pending_needed: int
    pending_allowed: int | None
    notes: tuple[str, ...]

    def as_data(self) -> dict[str, object]:
        """JSON-able numbers."""
        topology = {
            **dataclasses.asdict(self.topology),
            "ranks_per_prompt": str(self.topology.ranks_per_prompt),
        }
        plain = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("config", "topology")
        }
        return {"topology": topology, **plain}

    def as_text(self) -> str:
        """Aligned lines for people."""
        rows = [
            ("ranks", _ranks(self.topology)),
            ("video", _video(self.config, self.family)),
            ("batch", _batch(self.topology)),
            ("each rank", _share(self.config, self.topology)),
            ("rollout", self._rollout()),
            ("replay", self._replay()),
            ("length", self._length()),
            ("scoring", self._scoring()),
        ]
        lines = [f"{name:<10} {text}" for name, text in rows]
        lines += [f"note       {note}" for note in self.notes]
        return "\n".join(lines)

    def _rollout(self) -> str:
        config = self.config
        bounds = config.grpo_cps_noise_scale_range
        eta = config.grpo_sde_noise_scale if bounds is None else f"drawn from {list(bounds)} for each prompt"
        guidance = (
            "" if config.grpo_cfg_scale == 1 else f", guidance {config.grpo_cfg_scale:g} doubles a batch"
        )
        return (
            f"{config.grpo_num_sampling_steps} denoising steps ({config.grpo_sde_formula}, eta {eta})"
            f"{guidance}; {self.rollout_forwards:,} forward calls a rank and step"
        )

    def _replay(self) -> str:
        depth = replay_depth(self.config)
        age = "on-policy" if depth == 0 else f"{depth} step{'s' if depth > 1 else ''} late"
        passes = self.config.grpo_updates_per_rollout
        again = "" if passes == 1 else f", {passes} passes"
        noisy = self.config.grpo_num_sampling_steps - 1
        return (
            f"{self.replayed_steps} of {noisy} noisy steps{again}, {age}; {self.replay_forwards:,} forward "
            "and backward calls a rank and step"
        )

    def _length(self) -> str:
        if self.batches is None:
            return "unknown: neither dataset_size nor max_steps is set"
        config = self.config
        saves = (
            f"a checkpoint every {config.save_steps}" if config.save_steps else "one checkpoint at the end"
        )
        return f"{self.batches:,} batches, {self.updates:,} updates, {saves}"

    def _scoring(self) -> str:
        config, topology = self.config, self.topology
        if config.grpo_reward_fn == "vbvr_vlm":
            ranks = topology.nproc // topology.tp
            text = f"vbvr_vlm: {config.vlm_reward_concurrency * ranks} requests in flight a node"
        else:
            each = config.vbvr_reward_cpu_workers if config.vbvr_reward_use_process_pool else 1
            workers = each * topology.nproc // topology.tp
            threads = workers * config.vbvr_reward_cpu_threads_per_worker
            text = f"vbvr_rule: {workers} scorer processes, {threads} threads a node"
        return f"{text}; up to {self.pending_needed} rollouts of a rank wait for a verdict"


def make_plan(config: GrpoConfig, nodes: int, nproc: int) -> Plan:
    """The plan of `config` on `nodes` x `nproc` processes."""
    topology = resolve_topology(config, nodes, nproc)
    replayed = replay_step_count(config.grpo_num_sampling_steps, config.dancegrpo_timestep_selection_ratio)
    sample = config.grpo_sample_batch_size
    train = config.grpo_train_sample_batch_size or sample
    share = topology.rollouts_per_rank_wave
    batches = config.max_steps
    if config.dataset_size is not None:
        whole = total_batches(config.num_epochs, config.dataset_size, topology.prompts)
        batches = whole if batches is None else min(batches, whole)
    updates = None
    if batches is not None:
        updates = batches // config.gradient_accumulation_steps * config.grpo_updates_per_rollout
    needed = pending_rewards_needed(topology, replay_depth(config))
    allowed = (
        config.vbvr_reward_max_pending_jobs
        if config.grpo_reward_fn == "vbvr_rule"
        else config.vlm_reward_max_pending_jobs
    )
    return Plan(
        config=config,
        topology=topology,
        family=known_family(config),
        replayed_steps=replayed,
        rollout_forwards=config.grpo_num_sampling_steps * math.ceil(share / sample) * topology.waves,
        replay_forwards=replayed
        * _chunks(share, sample, train)
        * topology.waves
        * config.grpo_updates_per_rollout,
        batches=batches,
        updates=updates,
        pending_needed=needed,
        pending_allowed=allowed,
        notes=_notes(config, topology, needed, allowed),
    )


def _chunks(share: int, sample: int, train: int) -> int:
    """Replay calls for one denoising step: every rollout chunk is cut into pieces of at most `train`."""
    whole, rest = divmod(share, sample)
    return whole * math.ceil(sample / train) + math.ceil(rest / train)


def _notes(config: GrpoConfig, topology: Topology, needed: int, allowed: int | None) -> tuple[str, ...]:
    notes: list[str] = []
    if allowed is not None and allowed < needed:
        name = "vbvr_reward" if config.grpo_reward_fn == "vbvr_rule" else "vlm_reward"
        notes.append(
            f"{name}_max_pending_jobs: {allowed} is less than the {needed} rollouts of a rank that can wait; "
            f"use --{name}_max_pending_jobs {needed}"
        )
    if config.fsdp and config.hsdp and topology.nodes == 1:
        notes.append("hsdp: true is plain fsdp on one node")
    cuda = resolve_device(config, cuda_available=config.device != "cpu")
    return (*notes, *unbuilt(cuda, nodes=topology.nodes))


def _ranks(topology: Topology) -> str:
    layout = f"data parallel {topology.dp}: {topology.dp_replicate} x {topology.dp_shard} (replicas x shards)"
    tensor = f"tensor parallel {topology.tp}, " if topology.tp > 1 else ""
    nodes = f"{topology.nodes} node{'s' if topology.nodes > 1 else ''}"
    return f"{nodes} x {topology.nproc} processes = {topology.world}; {tensor}{layout}"


def _video(config: GrpoConfig, family: Family | None) -> str:
    size = f"{config.num_frames} frames, {config.width} x {config.height} pixels, {config.fps} fps"
    if family is None:
        return f"{size}; the family is known once model_path exists"
    shape = FAMILIES[family]
    latent = " x ".join(str(n) for n in shape.latent_shape(config.num_frames, config.height, config.width))
    tokens = shape.tokens(config.num_frames, config.height, config.width)
    return f"{family}: {size}; latent {latent}, {tokens:,} tokens"


def _batch(topology: Topology) -> str:
    waves = "one wave" if topology.waves == 1 else f"{topology.waves} waves of {topology.wave} prompts"
    return (
        f"{topology.prompts} prompts x {topology.group_size} rollouts = {topology.rollouts_per_step:,} "
        f"rollouts a step, in {waves}"
    )


def _share(config: GrpoConfig, topology: Topology) -> str:
    ratio = topology.ranks_per_prompt
    if ratio >= 1:
        kind = "ranks" if topology.tp == 1 else "model copies"
        spread = "one prompt" if ratio == 1 else f"{float(ratio):g} {kind} share a prompt"
    else:
        spread = f"{float(1 / ratio):g} prompts"
    wave = topology.rollouts_per_rank_wave
    calls = math.ceil(wave / config.grpo_sample_batch_size)
    size = min(wave, config.grpo_sample_batch_size)
    return (
        f"{topology.rollouts_per_rank} rollouts a step ({spread}), {wave} a wave in {calls} "
        f"chunk{'s' if calls > 1 else ''} of {size}"
    )
