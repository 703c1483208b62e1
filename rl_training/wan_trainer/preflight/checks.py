"""All checks before torchrun starts, in one list, so that one attempt shows everything to mend."""

from __future__ import annotations

import os
from collections.abc import Mapping

from wan_trainer.config.checks import few_steps_warning
from wan_trainer.config.family import known_family
from wan_trainer.config.resolution import resolve, topology_of
from wan_trainer.config.schema import TrainConfig
from wan_trainer.config.specs import Family, RuleRewardSpec, RunSpec
from wan_trainer.models.wan.architecture import check_adapters, check_heads, model_shape
from wan_trainer.models.wan.directory import check_directory
from wan_trainer.preflight.cuda import cuda_devices
from wan_trainer.preflight.finding import Finding
from wan_trainer.preflight.inputs import check_clip_length, check_dataset, check_evaluator, check_queue
from wan_trainer.preflight.judge import check_judge
from wan_trainer.preflight.kernels import check_kernels
from wan_trainer.preflight.machine import check_accelerator, check_disk
from wan_trainer.preflight.network import check_rendezvous
from wan_trainer.preflight.openings import check_openings, check_own_reward, check_refl
from wan_trainer.preflight.start import check_base, check_start
from wan_trainer.topology import Topology
from wan_trainer.types import UserError

DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_PORT = 29500
DEFAULT_HEAD_DIM = 128
# Stands in for a family that cannot be told yet; its shape rules are those that every family shares.
_ANY_FAMILY: Family = "t2v-1.3b"


def resolve_here(config: TrainConfig, family: Family | None = None) -> RunSpec:
    """The specification of the run on this machine: `device: auto` is what torch finds here.

    A stated `device: cuda` resolves without a GPU too, so that the other checks are still made;
    `check_accelerator` reports the GPU. Raises UserError when a family cannot be told or shapes do not fit.
    """
    return resolve(config, cuda_available=_cuda(config), family=family)


def run_checks(
    config: TrainConfig, nodes: int, nproc: int, rank: int, env: Mapping[str, str]
) -> list[Finding]:
    """Every finding on this node: config, model, data, reward, machine and network, in this order."""
    problems: list[Finding] = []
    topology: Topology | None = None
    try:
        topology = topology_of(config, nodes, nproc)
    except UserError as error:
        problems += [Finding(line) for line in error.problems]
    family = known_family(config)
    try:
        spec = resolve_here(config, family or _ANY_FAMILY)
    except UserError as error:
        return problems + [Finding(line) for line in error.problems] + check_network(nodes, rank, env)
    model_lines = check_directory(spec.model.path, family)
    problems += [Finding(line) for line in model_lines]
    head_dim = DEFAULT_HEAD_DIM
    if family is not None:
        model = model_shape(spec.model.path, family)
        head_dim = model.transformer.attention_head_dim
        heads = check_heads(model.transformer, spec.parallel.tensor_parallel_size)
        problems += [Finding(line) for line in (heads, check_adapters(model, spec.model)) if line]
    problems += check_start(spec)
    problems += check_base(spec.model, readable=not model_lines)
    few = few_steps_warning(spec)
    problems += [Finding(few, "warning")] if few else []
    problems += check_openings(spec)
    problems += check_refl(spec, family, readable=not model_lines)
    problems += check_inputs(spec, topology, env, family)
    problems += check_accelerator(spec.device, nproc, env, stated=config.device)
    problems += check_kernels(spec.model, head_dim, env)
    if not model_lines:
        problems += check_disk(spec.output.output_dir, spec.model, spec.optimizer.ema_decay > 0)
    return problems + check_network(nodes, rank, env)


def check_inputs(
    spec: RunSpec, topology: Topology | None, env: Mapping[str, str], family: Family | None
) -> list[Finding]:
    """Dataset and reward, and what each asks of the other."""
    rule = spec.reward.rule
    problems, tasks = check_dataset(spec.data, family, needs_ground_truth=rule is not None)
    if spec.evaluation is not None:
        found, held = check_dataset(
            spec.data, family, needs_ground_truth=rule is not None, held=spec.evaluation
        )
        problems, tasks = problems + found, tuple(dict.fromkeys((*tasks, *held)))
    if rule is not None:
        problems += check_evaluator(rule, tasks)
        problems += check_clip_length(spec.data, rule)
        if topology is not None:
            problems += check_queue(rule, topology, spec.grpo.depth)
            problems.append(count_scorers(rule, topology))
    judge = spec.reward.judge
    if judge is not None:
        problems += check_judge(judge, tasks, topology, spec.grpo.depth, env)
    for key, own in spec.reward.own.items():
        problems += check_own_reward(key, own, tasks)
    return problems


def check_network(nodes: int, rank: int, env: Mapping[str, str]) -> list[Finding]:
    """The rendezvous of the environment, as the launcher sets it."""
    address = env.get("MASTER_ADDR") or DEFAULT_ADDRESS
    port = env.get("MASTER_PORT") or str(DEFAULT_PORT)
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        return [Finding(f"MASTER_PORT is '{port}': set a port in 1..65535")]
    return check_rendezvous(address, int(port), nodes, rank)


def count_scorers(reward: RuleRewardSpec, topology: Topology) -> Finding:
    """Scorer processes and threads of this node: the config counts them per rank, easily overlooked."""
    # The ranks of one tensor-parallel group share their rollouts, and one of them submits.
    submitting = topology.nproc // topology.tp
    processes = reward.workers * submitting
    threads = processes * reward.threads_per_worker
    cores = os.cpu_count() or 1
    line = (
        f"{processes} scorer processes with {threads} threads on {cores} cores "
        f"({submitting} ranks x {reward.workers} workers x {reward.threads_per_worker} threads)"
    )
    if threads > 4 * cores:
        remedy = "set fewer --vbvr_reward_cpu_workers or --vbvr_reward_cpu_threads_per_worker"
        return Finding(f"{line}: {remedy}", "warning")
    return Finding(line, "note")


def _cuda(config: TrainConfig) -> bool:
    return config.device == "cuda" or (config.device == "auto" and cuda_devices().count > 0)
