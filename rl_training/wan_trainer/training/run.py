"""One start of a run: from a loaded configuration to an exit status."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import wan_trainer
from wan_trainer.config import (
    LoadedConfig,
    contract_digests,
    contract_values,
    public_values,
    resolve,
    settle_device,
    unbuilt,
)
from wan_trainer.config.specs import RuleRewardSpec, RunSpec
from wan_trainer.data.dataset import Dataset, load_dataset
from wan_trainer.data.loader import batches
from wan_trainer.distributed.collectives import (
    SharedUserError,
    differences_from_first,
    from_first_rank,
    gather_objects,
    on_every_rank,
)
from wan_trainer.distributed.mesh import Mesh, init_mesh
from wan_trainer.recording.clock import Clock
from wan_trainer.recording.console import console_for
from wan_trainer.recording.identity import DatasetIdentity, EvaluatorIdentity, code_identity, model_identity
from wan_trainer.recording.opening import open_run_log
from wan_trainer.recording.run_dir import RunFiles
from wan_trainer.recording.run_record import FinalCheckpoint, RunFacts, RunRecord, SamplerRecord
from wan_trainer.rewards.build import build_reward
from wan_trainer.topology import FAMILIES, Topology, assign, resolve_topology, total_batches
from wan_trainer.training.assembly import (
    Model,
    build_grpo,
    build_model,
    build_updater,
    flow_shift,
    sigma_grid,
)
from wan_trainer.training.checkpoint import (
    TrainState,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from wan_trainer.training.loop import Boundaries, run_loop
from wan_trainer.training.observer import RunObserver
from wan_trainer.training.resume import ResumePoint, find_resume_point
from wan_trainer.training.run_lock import RunLock
from wan_trainer.training.scheduler import ReplayScheduler
from wan_trainer.training.stop import EXIT_STOPPED, AgreedStop
from wan_trainer.types import StepRecord, UserError

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2


@dataclasses.dataclass(frozen=True)
class Start:
    """What is known of a start before anything heavy is loaded; the same on every rank."""

    loaded: LoadedConfig
    spec: RunSpec
    topology: Topology
    contract: dict[str, dict[str, Any]]


def train(start: Start, *, allow_changed: Collection[str] = ()) -> int:
    """Run or continue the run of `start`, on the ranks torchrun started; return the exit status.

    Raises UserError for input the user can mend, RendezvousError when ranks are missing, and whatever ended
    the training. What rank 0 knows of the end is in run.json by then.
    """
    spec = start.spec
    if spec.device == "cpu":
        # OpenMP threads that wait for each other at barriers stall whole runs on a busy machine.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    mesh = init_mesh(spec.device, spec.rendezvous_timeout_s, dp_replicate=start.topology.dp_replicate)
    try:
        _compare_nodes(mesh, start)
        lock = from_first_rank(mesh, lambda: _Unsent(RunLock(spec.output.output_dir)))
        record = RunRecord(RunFiles(spec.output.output_dir).record)
        try:
            return _recorded(mesh, start, record, allow_changed)
        finally:
            lock.release()
    finally:
        dist.destroy_process_group()


def plan_start(loaded: LoadedConfig) -> Start:
    """Resolve a configuration for the ranks that torchrun started.

    Raises UserError, the same on every rank of a machine.
    """
    nproc = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // nproc
    cuda_available = torch.cuda.is_available()
    loaded = settle_device(loaded, cuda_available=cuda_available)
    config = loaded.config
    problems = unbuilt(config, nodes=nodes)
    if problems:
        raise UserError(*problems)
    topology = resolve_topology(config, nodes, nproc)
    spec = resolve(config, cuda_available=cuda_available)
    return Start(
        loaded=loaded,
        spec=spec,
        topology=topology,
        contract=contract_values(config, topology.prompts),
    )


def _compare_nodes(mesh: Mesh, start: Start) -> None:
    """Refuse ranks that were started with another configuration, by key, before they hang or train apart."""
    values = {key: json.dumps(value) for key, value in public_values(start.loaded.config).items()}
    lines = differences_from_first(mesh, values | {"wan_trainer version": wan_trainer.__version__})
    if lines:
        raise SharedUserError(*(f"{line}: start every node with the same configuration" for line in lines))


class _Unsent:
    """Carries rank 0's lock through `from_first_rank`; the other ranks receive an empty one."""

    def __init__(self, lock: RunLock | None = None) -> None:
        self._lock = lock

    def __reduce__(self) -> tuple[type[_Unsent], tuple[()]]:
        return _Unsent, ()

    def release(self) -> None:
        """Release the lock where it is held."""
        if self._lock is not None:
            self._lock.release()


def _recorded(mesh: Mesh, start: Start, record: RunRecord, allow_changed: Collection[str]) -> int:
    """`_run`, with rank 0 writing into run.json how it ended."""
    status, reason = EXIT_FAILURE, ""
    try:
        status = _run(mesh, start, record, allow_changed)
        return status
    except UserError as error:
        status, reason = EXIT_BAD_INPUT, "; ".join(error.problems)
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise
    finally:
        if mesh.rank == 0:
            record.finish(status, reason, _final_checkpoint(start.spec.output.output_dir, status))


def _final_checkpoint(output_dir: Path, status: int) -> FinalCheckpoint | None:
    checkpoint = latest_checkpoint(output_dir)
    if checkpoint is None or status not in (EXIT_DONE, EXIT_STOPPED):
        return None
    try:
        verify_checkpoint(checkpoint)
        verified = True
    except UserError:
        verified = False
    return FinalCheckpoint(checkpoint, int(checkpoint.name.rpartition("-")[2]), verified)


def _run(mesh: Mesh, start: Start, record: RunRecord, allow_changed: Collection[str]) -> int:
    spec, topology = start.spec, start.topology
    console = console_for(mesh.rank)
    resume = from_first_rank(
        mesh,
        lambda: find_resume_point(
            spec.output.output_dir,
            start.contract,
            auto_resume=spec.output.auto_resume,
            allow_changed=allow_changed,
        ),
    )
    dataset = on_every_rank(mesh, lambda: load_dataset(spec.data))
    total = _total_batches(spec, topology, len(dataset))
    done = 0 if resume is None else resume.state.step
    if resume is not None and done >= total:
        console.print(
            f"The run in {spec.output.output_dir} is complete: {done} of {total} batches are trained. "
            "Raise max_steps or num_epochs to continue it."
        )
        return EXIT_DONE

    with ExitStack() as stack:
        # The scorers start first: they load while the model does.
        assert isinstance(spec.reward, RuleRewardSpec)
        reward_spec = spec.reward
        reward = on_every_rank(
            mesh, lambda: stack.enter_context(closing(build_reward(reward_spec, dataset.tasks)))
        )
        model = on_every_rank(mesh, lambda: build_model(spec, mesh))
        if resume is not None:
            load_checkpoint(resume.checkpoint, model.policy, model.optimizer, mesh)
        if mesh.rank == 0:
            record.start(_facts(start, mesh, dataset, model, done))
        _announce(console, start, model, resume, total)
        log = open_run_log(
            spec.output,
            rank=mesh.rank,
            console=console,
            config=public_values(start.loaded.config),
            total_batches=total,
            start_batch=done,
        )
        status = EXIT_FAILURE
        stack.callback(lambda: log.close(status))

        clock = Clock(mesh.rank)
        updater = build_updater(spec, model, total, 0 if resume is None else resume.state.updates)
        grpo = build_grpo(
            spec,
            topology,
            mesh,
            model,
            reward=reward,
            updater=updater,
            clock=clock,
            observer=RunObserver(
                log,
                every_steps=spec.output.rollout_video_every_steps,
                total_batches=total,
                fps=spec.data.fps,
            ),
            policy_version=0 if resume is None else resume.state.policy_version,
        )

        def keep_spans() -> None:
            for spans in gather_objects(mesh, clock.drain()):
                log.spans(spans)

        def keep_record(step_record: StepRecord) -> None:
            log.step(step_record)
            keep_spans()

        def save(seen: int) -> None:
            with clock.span("save", seen - 1):
                state = TrainState(
                    step=seen,
                    epoch=seen * topology.prompts // len(dataset),
                    updates=updater.updates,
                    policy_version=grpo.policy_version,
                    seed=spec.seed,
                    world=mesh.world,
                    wandb_id=_wandb_id(spec.output.output_dir),
                    contract=start.contract,
                )
                path = save_checkpoint(
                    spec.output.output_dir,
                    state,
                    model.policy,
                    model.optimizer,
                    mesh,
                    keep=spec.output.keep_checkpoints,
                )
            keep_spans()
            console.print(f"saved {path}")

        stop = AgreedStop(mesh)
        stop.install()
        finished = run_loop(
            batches(
                dataset,
                spec.data,
                batch_size=topology.prompts,
                num_batches=total,
                start=done,
                local_prompts=local_prompts(topology, mesh),
                with_first_frames=FAMILIES[spec.model.family].needs_image,
            ),
            ReplayScheduler(grpo.prepare, grpo.update, spec.grpo.depth),
            Boundaries(
                total=total,
                save_steps=spec.output.save_steps,
                accumulation=spec.optimizer.gradient_accumulation_steps,
                batch_size=topology.prompts,
                dataset_size=len(dataset),
            ),
            record=keep_record,
            save=save,
            stop_requested=stop.requested,
        )
        status = EXIT_DONE if finished else EXIT_STOPPED
        if finished:
            console.print(f"done: {total} batches, everything is in {spec.output.output_dir}")
        else:
            console.print("stopped after saving; the same command continues from there")
        return status


def _total_batches(spec: RunSpec, topology: Topology, samples: int) -> int:
    """Batches of the whole run, a multiple of the accumulation window."""
    total = total_batches(spec.stop.num_epochs, samples, topology.prompts)
    if spec.stop.max_steps is not None:
        total = min(total, spec.stop.max_steps)
    window = spec.optimizer.gradient_accumulation_steps
    if total < window:
        raise UserError(
            f"num_epochs {spec.stop.num_epochs:g} of {samples} samples in batches of {topology.prompts} "
            "prompts "
            f"make {total} batches, fewer than one optimizer update needs ({window}): raise num_epochs or "
            "max_steps, or lower batch_size"
        )
    return total // window * window


def local_prompts(topology: Topology, mesh: Mesh) -> list[int]:
    """The prompts of a batch, all waves, whose rollouts this rank draws."""
    share = assign(topology.wave, topology.group_size, mesh.dp_rank, mesh.dp_size)
    in_wave = sorted({prompt for prompt, _ in share})
    return [first + prompt for first in range(0, topology.prompts, topology.wave) for prompt in in_wave]


def _wandb_id(output_dir: Path) -> str | None:
    try:
        return str(json.loads((output_dir / "wandb.json").read_text())["id"])
    except (OSError, ValueError, KeyError):
        return None


def _announce(console: Console, start: Start, model: Model, resume: ResumePoint | None, total: int) -> None:
    """What a log should show at its top: what is trained, on what, from where."""
    topology, spec = start.topology, start.spec
    sources = start.loaded.sources
    values = public_values(start.loaded.config)
    for key, source in sources.items():
        if source == "device: cpu":
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


def _facts(start: Start, mesh: Mesh, dataset: Dataset, model: Model, done: int) -> RunFacts:
    spec, config, sampler = start.spec, start.loaded.config, start.spec.sampler
    assert isinstance(spec.reward, RuleRewardSpec)
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
            sha256=dataset.digests[spec.data.dataset_json.name],
            manifests={
                name: digest
                for name, digest in dataset.digests.items()
                if name != spec.data.dataset_json.name
            },
            samples=len(dataset),
        ),
        evaluator=EvaluatorIdentity(spec.reward.evalkit_dir, spec.reward.source_sha256),
        code=code_identity(Path(wan_trainer.__file__).parent),
        start_batch=done,
    )
