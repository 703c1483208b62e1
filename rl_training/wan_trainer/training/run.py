"""One start of a run: from a loaded configuration to an exit status."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import ExitStack, closing
from pathlib import Path

import torch
import torch.distributed as dist

from wan_trainer.config import (
    LoadedConfig,
    common_values,
    contract_values,
    public_values,
    resolve,
    settle_device,
    unbuilt,
)
from wan_trainer.config.specs import RunSpec
from wan_trainer.data.dataset import Dataset, load_dataset
from wan_trainer.data.loader import batches
from wan_trainer.distributed.collectives import (
    SharedUserError,
    differences_from_first,
    from_first_rank,
    gather_from_every_rank,
    on_every_rank,
)
from wan_trainer.distributed.mesh import Mesh, init_mesh
from wan_trainer.recording.clock import Clock
from wan_trainer.recording.console import console_for
from wan_trainer.recording.identity import code_digest
from wan_trainer.recording.opening import open_run_log
from wan_trainer.recording.run_dir import RunFiles
from wan_trainer.recording.run_record import FinalCheckpoint, RunRecord
from wan_trainer.recording.tracking import stored_run_id
from wan_trainer.rewards.build import build_reward
from wan_trainer.targets import make_importable, source_digests
from wan_trainer.topology import FAMILIES, Topology, assign, resolve_topology, total_batches
from wan_trainer.training.assembly import build_grpo, build_model, build_updater
from wan_trainer.training.checkpoint import (
    TrainState,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from wan_trainer.training.expert_coverage import ExpertCoverage, learning_experts
from wan_trainer.training.loop import Boundaries, run_loop
from wan_trainer.training.observer import RunObserver
from wan_trainer.training.openings import try_openings
from wan_trainer.training.resume import find_resume_point
from wan_trainer.training.run_lock import RunLock
from wan_trainer.training.scheduler import ReplayScheduler
from wan_trainer.training.start import PACKAGE, Start, announce, native_threads, run_facts
from wan_trainer.training.stop import AgreedStop
from wan_trainer.types import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_STOPPED,
    Reward,
    StepRecord,
    UserError,
)


def train(start: Start, *, allow_changed: Collection[str] = ()) -> int:
    """Run or continue the run of `start`, on the ranks torchrun started; return the exit status.

    Raises UserError for input the user can mend, RendezvousError when ranks are missing, and whatever ended
    the training. What rank 0 knows of the end is in run.json by then.
    """
    spec = start.spec
    if spec.device == "cpu":
        # OpenMP threads that wait for each other at barriers stall whole runs on a busy machine.
        torch.set_num_threads(native_threads(os.environ.get("OMP_NUM_THREADS", "")))
    topology = start.topology
    mesh = init_mesh(
        spec.device, spec.rendezvous_timeout_s, tp=topology.tp, dp_replicate=topology.dp_replicate
    )
    try:
        _compare_nodes(mesh, start)
        with ExitStack() as held:
            # The lock stays on rank 0; the others only learn whether it was free.
            from_first_rank(mesh, lambda: _lock(spec.output.output_dir, held))
            record = RunRecord(RunFiles(spec.output.output_dir).record)
            return _recorded(mesh, start, record, allow_changed)
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
    problems = unbuilt(config)
    if problems:
        raise UserError(*problems)
    spec = resolve(config, cuda_available=cuda_available)
    make_importable(loaded.path.parent)
    problems = try_openings(spec)
    if problems:
        raise UserError(*problems)
    topology = resolve_topology(spec.batch, spec.parallel, spec.grpo.group_size, nodes, nproc)
    return Start(
        loaded=loaded,
        spec=spec,
        topology=topology,
        contract=contract_values(config, topology.prompts),
    )


def _compare_nodes(mesh: Mesh, start: Start) -> None:
    """Refuse ranks that were started with another configuration, by key, before they hang or train apart.

    The launcher's roll call has said so already, without the minutes that ranks take to come up, and before
    a missing machine ends in a time-out. Ranks that torchrun or a scheduler starts directly have only this.
    """
    values = {key: json.dumps(value) for key, value in common_values(start.loaded.config).items()}
    values |= {f"the source of {key}": digest for key, digest in source_digests(start.spec).items()}
    lines = differences_from_first(mesh, values | {"the version of the code": code_digest(PACKAGE)})
    if lines:
        raise SharedUserError(*(f"{line}: start every node with the same configuration" for line in lines))


def _lock(output_dir: Path, held: ExitStack) -> None:
    held.callback(RunLock(output_dir).release)


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

    window = spec.optimizer.gradient_accumulation_steps
    if done % window:
        raise SharedUserError(
            f"gradient_accumulation_steps: {window} does not divide the {done} batches of the checkpoint to "
            "go on from, so that updates would not end at saves; restore it, or choose another output_dir"
        )

    with ExitStack() as stack:
        # The scorers start first: they load while the model does.
        reward = on_every_rank(mesh, lambda: _scorers(spec, mesh, dataset, stack))
        model = on_every_rank(mesh, lambda: build_model(spec, mesh))
        if resume is not None:
            load_checkpoint(resume.checkpoint, model.policy, model.optimizer, mesh, ema=model.ema)
        if mesh.rank == 0:
            record.start(run_facts(start, mesh, dataset, model, done))
        announce(console, start, model, resume, total)
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
            for spans in gather_from_every_rank(mesh, clock.drain()):
                log.spans(spans)

        coverage = ExpertCoverage(learning_experts(model.policy))

        def keep_record(step_record: StepRecord) -> None:
            log.step(step_record)
            for warning in coverage.add(step_record.epoch, step_record.replayed_per_expert):
                console.print(warning)
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
                    wandb_id=stored_run_id(spec.output.output_dir),
                    contract=start.contract,
                )
                path = save_checkpoint(
                    spec.output.output_dir,
                    state,
                    model.policy,
                    model.optimizer,
                    mesh,
                    keep=spec.output.keep_checkpoints,
                    ema=model.ema,
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
            for warning in coverage.close():
                console.print(warning)
            console.print(f"done: {total} batches, everything is in {spec.output.output_dir}")
        else:
            console.print("stopped after saving; the same command continues from there")
        return status


def _scorers(spec: RunSpec, mesh: Mesh, dataset: Dataset, stack: ExitStack) -> Reward | None:
    """The reward, open until `stack` unwinds; none where a tensor-parallel peer submits the rollouts."""
    if mesh.tp_rank > 0:
        return None
    return stack.enter_context(closing(build_reward(spec.reward, dataset.tasks)))


def _total_batches(spec: RunSpec, topology: Topology, samples: int) -> int:
    """Batches of the whole run."""
    stop, window = spec.stop, spec.optimizer.gradient_accumulation_steps
    return total_batches(stop.num_epochs, stop.max_steps, samples, topology.prompts, window)


def local_prompts(topology: Topology, mesh: Mesh) -> list[int]:
    """The prompts of a batch, all waves, whose rollouts this rank draws."""
    share = assign(topology.wave, topology.group_size, mesh.dp_rank, mesh.dp_size)
    in_wave = sorted({prompt for prompt, _ in share})
    return [first + prompt for first in range(0, topology.prompts, topology.wave) for prompt in in_wave]
