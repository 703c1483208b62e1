"""What is known of one start of a run, and what its record and the top of its log say."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import wan_trainer
from wan_trainer.config import LoadedConfig, common_values, group_digests, public_values
from wan_trainer.config.checks import few_steps_warning
from wan_trainer.config.device import CPU_SOURCE
from wan_trainer.config.specs import AlgorithmName, OptimizerSpec, RuleRewardSpec, RunSpec, Target
from wan_trainer.data.dataset import Dataset
from wan_trainer.distributed.collectives import SharedUserError
from wan_trainer.distributed.mesh import Mesh
from wan_trainer.models.wan.base_lora_files import SHA256_KEY
from wan_trainer.models.wan.kernel_cache import attention_identity, kernels_cache
from wan_trainer.models.wan.liger import liger_report
from wan_trainer.models.wan.trained_modules import describe_trained, trained_modules
from wan_trainer.recording.identity import (
    DatasetIdentity,
    EvaluatorIdentity,
    code_digest,
    code_identity,
    model_identity,
    weights_identity,
)
from wan_trainer.recording.run_record import RunFacts, SamplerRecord
from wan_trainer.rewards.runtime import scorer_runtime
from wan_trainer.targets import named_targets, source_digests
from wan_trainer.topology import Topology, counted
from wan_trainer.training.assembly import Model, flow_shift, sigma_grid
from wan_trainer.training.expert_coverage import unreachable_experts
from wan_trainer.training.resume import ResumePoint
from wan_trainer.training.starting_point import StartingPoint

PACKAGE = Path(wan_trainer.__file__).parent
NAMES: Mapping[AlgorithmName, str] = {"dancegrpo": "grpo", "refl": "refl"}


@dataclass(frozen=True)
class Start:
    """What is known of a start before anything heavy is loaded; the same on every rank."""

    loaded: LoadedConfig
    spec: RunSpec
    topology: Topology
    contract: dict[str, dict[str, Any]]

    def with_content(self, dataset: Dataset) -> Start:
        """With a contract that also holds what the files of the data set say, not only where they are."""
        data = self.contract["data"] | {"dataset_sha256": dataset.sha256}
        return replace(self, contract=self.contract | {"data": data})


def shared_values(start: Start) -> dict[str, str]:
    """What every rank of a run must have alike, by the name to tell users."""
    values = {key: json.dumps(value) for key, value in common_values(start.loaded.config).items()}
    values |= {f"the source of {key}": digest for key, digest in source_digests(start.spec).items()}
    values |= {"the content of base_lora": start.contract["model"].get(SHA256_KEY, "")}
    return values | {"the version of the code": own_code_digest()}


@cache
def own_code_digest() -> str:
    """The version of the code as this process found it, whatever becomes of its files later."""
    return code_digest(PACKAGE)


def native_threads(text: str) -> int:
    """Threads of one rank on a CPU: OMP_NUM_THREADS, whose OpenMP form is a number or a list of numbers, one
    for each level of nesting; 1 when it is empty.

    Raises SharedUserError: every rank of a machine has the same environment.
    """
    first = text.partition(",")[0].strip() or "1"
    if not first.isdecimal() or int(first) < 1:
        raise SharedUserError(
            f"OMP_NUM_THREADS: '{text}' is not a number of threads; set 1, or unset it, so that ranks on one "
            "machine do not wait for each other's threads"
        )
    return int(first)


def device_lines(loaded: LoadedConfig) -> list[str]:
    """What `device: cpu` changed of the configuration, one line each, as far as the run uses it."""
    values = public_values(loaded.config)
    idle = () if values["torch_compile"] else ("torch_compile_backend", "torch_compile_mode")
    changed = [key for key, source in loaded.sources.items() if source == CPU_SOURCE and key not in idle]
    return [f"device: cpu sets {key} to {values[key]}" for key in changed]


def unfinished_warmup(spec: OptimizerSpec, updates: int) -> str | None:
    """A warning for a run of `updates` updates that ends before its learning rate has reached the peak.

    Not refused: a few steps of a recipe are how one tries it.
    """
    if isinstance(spec.lr_schedule, Target) or spec.warmup_steps <= updates:
        return None
    return (
        f"warning: warmup_steps {spec.warmup_steps} is longer than the run of {updates} updates: the "
        f"learning rate ends at {100 * updates / spec.warmup_steps:.3g}% of learning_rate"
    )


def announce(
    console: Console,
    start: Start,
    model: Model,
    resume: ResumePoint | None,
    starting_point: StartingPoint | None,
    total: int,
) -> None:
    """What a log should show at its top: what is trained, on what, from where."""
    topology, spec = start.topology, start.spec
    for line in device_lines(start.loaded):
        console.print(line)
    for count in model.policy.trainable_report():
        word = "trained" if count.trained else "frozen"
        console.print(
            f"{count.expert}: {count.elements:,} {count.kind} parameters {word} ({count.tensors} tensors)"
        )
    for line in describe_trained(trained_modules(model.policy.trainable())):
        console.print(line)
    if spec.model.base_lora is not None:
        console.print(f"base_lora {spec.model.base_lora}: merged into the starting weights")
    for name, expert in model.policy.experts.items():
        if spec.model.use_liger_kernel:
            console.print(f"{name}: liger kernels in place of {liger_report(expert) or 'no module'}")
    idle = unreachable_experts(model.policy, sigma_grid(spec, model.policy)) if spec.refl is None else []
    for name in idle:
        console.print(
            f"warning: {name} is trained, and none of the steps that can be replayed is routed to it: it "
            "will not change. Raise grpo_num_sampling_steps, or leave it out of train_experts"
        )
    if model.reference is not None:
        what = "a frozen copy of the trained experts" if spec.model.lora is None else "adapters switched off"
        console.print(f"reference policy of the KL term: {what}")
    if model.ema is not None:
        console.print(f"averages of the trained weights: decay {spec.optimizer.ema_decay:g}, float32")
    group = "" if topology.group_size == 1 else f" x {topology.group_size} rollouts"
    own = f" and {topology.reward_ranks} of the reward's own" if topology.reward_ranks else ""
    console.print(
        f"{topology.world} ranks{own}, {topology.prompts} prompts{group} a batch, "
        f"{counted(topology.rollouts_per_rank, 'rollout')} a rank, {counted(topology.waves, 'wave')}, "
        f"{counted(total, 'batch')}"
    )
    if starting_point is not None:
        console.print(f"starting weights: {starting_point.path}")
    if resume is not None:
        for note in resume.notes:
            console.print(note)
        console.print(f"continuing after batch {resume.state.step} from {resume.checkpoint}")
    for key, target in named_targets(spec).items():
        console.print(f"{key}: {target.path}")
    updates = total // spec.optimizer.gradient_accumulation_steps * spec.grpo.updates_per_rollout
    warning = unfinished_warmup(spec.optimizer, updates)
    if warning is not None:
        console.print(warning)
    few = few_steps_warning(spec)
    if few is not None:
        console.print(f"warning: {few}")
    console.print(f"output: {spec.output.output_dir}")


def _evaluator(rule: RuleRewardSpec) -> EvaluatorIdentity:
    """The evaluator with the libraries of this machine, which its scores depend on."""
    runtime = scorer_runtime(import_all=False)
    packages = {package.name: package.installed for package in runtime.packages}
    return EvaluatorIdentity(
        rule.evalkit_dir,
        rule.source_sha256,
        {"fingerprint": runtime.fingerprint, "lines_layout": runtime.lines_layout, "packages": packages},
    )


def run_facts(
    start: Start, mesh: Mesh, dataset: Dataset, model: Model, starting_point: StartingPoint | None, done: int
) -> RunFacts:
    """What run.json says about this start. done: batches that were trained before it."""
    spec, config, sampler = start.spec, start.loaded.config, start.spec.sampler
    rule, algorithm, digests = spec.reward.rule, spec.algorithm, source_digests(spec)
    descriptor = spec.data.dataset_json.name
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    return RunFacts(
        algorithm=str(algorithm) if isinstance(algorithm, Target) else NAMES[algorithm],
        device=device,
        config_path=start.loaded.path,
        config=public_values(config),
        sources=start.loaded.sources,
        overrides=start.loaded.overrides,
        contract_digests=group_digests(start.contract),
        contract_values=start.contract,
        topology=start.topology,
        sampler=SamplerRecord(
            kind=str(sampler.kind) if spec.refl is None else "euler",
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
        initial_weights=None if starting_point is None else weights_identity(starting_point.path),
        dataset=DatasetIdentity(
            path=spec.data.dataset_json,
            sha256=dataset.digests[descriptor],
            manifests={name: digest for name, digest in dataset.digests.items() if name != descriptor},
            samples=len(dataset),
        ),
        evaluator=None if rule is None else _evaluator(rule),
        attention=attention_identity(spec.model.attention_backend, kernels_cache(os.environ)),
        targets={
            key: {"path": target.path, "source": digests[key]} for key, target in named_targets(spec).items()
        },
        trained=[asdict(count) for count in trained_modules(model.policy.trainable())],
        base_lora_sha256=start.contract["model"].get(SHA256_KEY),
        code=code_identity(PACKAGE, own_code_digest()),
        start_batch=done,
    )
