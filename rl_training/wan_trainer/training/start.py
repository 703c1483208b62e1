"""What is known of one start of a run, and what its record and the top of its log say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import wan_trainer
from wan_trainer.config import LoadedConfig, contract_digests, public_values
from wan_trainer.config.device import CPU_SOURCE
from wan_trainer.config.specs import RuleRewardSpec, RunSpec
from wan_trainer.data.dataset import Dataset
from wan_trainer.distributed.mesh import Mesh
from wan_trainer.recording.identity import DatasetIdentity, EvaluatorIdentity, code_identity, model_identity
from wan_trainer.recording.run_record import RunFacts, SamplerRecord
from wan_trainer.topology import Topology
from wan_trainer.training.assembly import Model, flow_shift, sigma_grid
from wan_trainer.training.resume import ResumePoint

PACKAGE = Path(wan_trainer.__file__).parent


@dataclass(frozen=True)
class Start:
    """What is known of a start before anything heavy is loaded; the same on every rank."""

    loaded: LoadedConfig
    spec: RunSpec
    topology: Topology
    contract: dict[str, dict[str, Any]]


def announce(console: Console, start: Start, model: Model, resume: ResumePoint | None, total: int) -> None:
    """What a log should show at its top: what is trained, on what, from where."""
    topology, spec = start.topology, start.spec
    sources = start.loaded.sources
    values = public_values(start.loaded.config)
    for key, source in sources.items():
        if source == CPU_SOURCE:
            console.print(f"device: cpu sets {key} to {values[key]}")
    for count in model.policy.trainable_report():
        word = "trained" if count.trained else "frozen"
        console.print(
            f"{count.expert}: {count.elements:,} {count.kind} parameters {word} ({count.tensors} tensors)"
        )
    console.print(
        f"{topology.world} ranks, {topology.prompts} prompts x {topology.group_size} rollouts a batch, "
        f"{topology.rollouts_per_rank} rollouts a rank, {topology.waves} waves, {total} batches"
    )
    if resume is not None:
        console.print(f"continuing after batch {resume.state.step} from {resume.checkpoint}")
    console.print(f"output: {spec.output.output_dir}")


def run_facts(start: Start, mesh: Mesh, dataset: Dataset, model: Model, done: int) -> RunFacts:
    """What run.json says about this start. done: batches that were trained before it."""
    spec, config, sampler = start.spec, start.loaded.config, start.spec.sampler
    reward = spec.reward
    assert isinstance(reward, RuleRewardSpec), "`unbuilt` refuses the judge"
    descriptor = spec.data.dataset_json.name
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    return RunFacts(
        algorithm="grpo",
        device=device,
        config_path=start.loaded.path,
        config=public_values(config),
        sources=start.loaded.sources,
        overrides=start.loaded.overrides,
        contract_digests=contract_digests(config, start.topology.prompts),
        contract_values=start.contract,
        topology=start.topology,
        sampler=SamplerRecord(
            kind=sampler.kind,
            sigmas=tuple(sigma_grid(spec, model.policy).tolist()),
            eta=sampler.eta,
            eta_range=sampler.eta_range,
            cfg_scale=sampler.cfg_scale,
            flow_shift=flow_shift(spec, model.policy),
            replay_ratio=sampler.replay_ratio,
            share_group_init_noise=sampler.share_group_init_noise,
            seed=sampler.seed,
        ),
        model=model_identity(spec.model.path, spec.model.family),
        dataset=DatasetIdentity(
            path=spec.data.dataset_json,
            sha256=dataset.digests[descriptor],
            manifests={name: digest for name, digest in dataset.digests.items() if name != descriptor},
            samples=len(dataset),
        ),
        evaluator=EvaluatorIdentity(reward.evalkit_dir, reward.source_sha256),
        code=code_identity(PACKAGE),
        start_batch=done,
    )
