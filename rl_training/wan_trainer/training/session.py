"""The training of one start: what is to be done, the parts it takes, and the loop over batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from wan_trainer.algorithms.base import Algorithm
from wan_trainer.config import public_values
from wan_trainer.config.specs import RunSpec
from wan_trainer.data.dataset import Dataset, check_ground_truth, load_dataset
from wan_trainer.data.image_rule import takes_first_frames
from wan_trainer.data.loader import batches
from wan_trainer.distributed.collectives import (
    SharedUserError,
    from_first_rank,
    gather_from_every_rank,
    on_every_rank,
    require_same_files,
)
from wan_trainer.distributed.mesh import Mesh
from wan_trainer.models.wan.adapter_files import adapter_configs
from wan_trainer.recording.clock import Clock
from wan_trainer.recording.console import console_for
from wan_trainer.recording.opening import open_run_log
from wan_trainer.recording.run_dir import RunFiles
from wan_trainer.recording.run_record import RunRecord
from wan_trainer.recording.tracking import stored_run_id
from wan_trainer.rewards.build import build_reward
from wan_trainer.rewards.role_checks import check_samples
from wan_trainer.topology import Topology, assign, total_batches
from wan_trainer.training.assembly import (
    Model,
    build_evaluation,
    build_grpo,
    build_model,
    build_refl,
    build_updater,
    evaluation_scorer,
)
from wan_trainer.training.checkpoint import CheckpointWriter, TrainState, load_checkpoint
from wan_trainer.training.evaluation import Evaluation, Held, due_at_start, open_held
from wan_trainer.training.expert_coverage import ExpertCoverage, learning_experts
from wan_trainer.training.loop import Boundaries, run_loop
from wan_trainer.training.observer import RunObserver
from wan_trainer.training.optimizer import Updater
from wan_trainer.training.resume import ResumePoint, find_resume_point
from wan_trainer.training.reward_role import MONITOR, REWARD, differentiable_rewards
from wan_trainer.training.scheduler import ReplayScheduler
from wan_trainer.training.start import Start, announce, run_facts
from wan_trainer.training.starting_point import StartingPoint, find_starting_point
from wan_trainer.training.stop import AgreedStop
from wan_trainer.types import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_STOPPED,
    DifferentiableReward,
    PromptBatch,
    Reward,
    StepRecord,
    UserError,
)


@dataclass(frozen=True)
class Work:
    """What this start has to train. Counts are batches of the whole run."""

    resume: ResumePoint | None
    starting_point: StartingPoint | None
    dataset: Dataset
    total: int
    held: Held | None = None

    @property
    def done(self) -> int:
        """Batches that earlier starts trained."""
        return 0 if self.resume is None else self.resume.state.step

    @property
    def complete(self) -> bool:
        """Nothing is left to do."""
        return self.resume is not None and self.done >= self.total

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of all tasks that a reward will be asked about."""
        held = () if self.held is None else self.held.tasks
        return tuple(dict.fromkeys((*self.dataset.tasks, *held)))


def train_on(mesh: Mesh, start: Start, record: RunRecord, allow_changed: Collection[str]) -> int:
    """Train what is left of the run on the ranks of `mesh`; return the exit status."""
    console = console_for(mesh.rank)
    dataset = _open_dataset(mesh, start.spec)
    start = start.with_content(dataset)
    work = _find_work(mesh, start, dataset, allow_changed)
    starting_point = work.starting_point
    if starting_point is not None:
        start = replace(start, spec=starting_point.applied(start.spec))
    spec = start.spec
    if work.complete:
        console.print(
            f"The run in {spec.output.output_dir} is complete: {work.done} of {work.total} batches are "
            "trained. Raise max_steps or num_epochs to continue it."
        )
        return EXIT_DONE
    work = replace(work, held=open_held(spec, mesh))
    # Before the minutes of loading: a signal to one rank then is not the end of that rank alone.
    stop = AgreedStop(mesh)
    stop.install()
    with ExitStack() as stack:
        # The scorers start first: they load while the model does.
        rewards = on_every_rank(mesh, lambda: _rewards(start, mesh, work.tasks, stack))
        begin = None if starting_point is None else starting_point.loader()
        model = on_every_rank(mesh, lambda: build_model(spec, mesh, begin))
        if work.resume is not None:
            load_checkpoint(work.resume.checkpoint, model.policy, model.optimizer, mesh, ema=model.ema)
        if mesh.rank == 0:
            record.start(run_facts(start, mesh, work.dataset, model, starting_point, work.done))
        announce(console, start, model, work.resume, starting_point, work.total)
        if stop.requested():
            console.print("stopped before the first batch; the same command continues from there")
            return EXIT_STOPPED
        return _train(mesh, start, work, model, rewards, stop, console)


def _find_work(mesh: Mesh, start: Start, dataset: Dataset, allow_changed: Collection[str]) -> Work:
    spec = start.spec
    resume = from_first_rank(
        mesh,
        lambda: find_resume_point(
            spec.output.output_dir,
            start.contract,
            auto_resume=spec.output.auto_resume,
            allow_changed=allow_changed,
            resume=spec.resume,
        ),
    )
    starting_point = from_first_rank(mesh, lambda: find_starting_point(spec, resume))
    stop, window = spec.stop, spec.optimizer.gradient_accumulation_steps
    total = total_batches(stop.num_epochs, stop.max_steps, len(dataset), start.topology.prompts, window)
    work = Work(resume, starting_point, dataset, total)
    if work.done % window and not work.complete:
        raise SharedUserError(
            f"gradient_accumulation_steps: {window} does not divide the {work.done} batches of the "
            "checkpoint to go on from, so that updates would not end at saves; restore it, or choose another "
            "output_dir"
        )
    return work


def _open_dataset(mesh: Mesh, spec: RunSpec) -> Dataset:
    """The data set, the same on every node, with all that the model and the reward ask of it."""

    def opened() -> Dataset:
        dataset = load_dataset(spec.data)
        takes_first_frames(dataset, spec.model.family)
        if spec.reward.rule is not None:
            check_ground_truth(dataset)
        if spec.refl is not None:
            lines = check_samples(spec.refl.roles, dataset, spec.data.num_frames, spec.data.fps)
            if lines:
                raise UserError(*lines)
        return dataset

    dataset = on_every_rank(mesh, opened)
    require_same_files(mesh, "dataset_json", dataset.digests)
    return dataset


@dataclass(frozen=True)
class Rewards:
    """What scores the videos of this rank.

    scorers: of GRPO, none where a tensor-parallel peer submits the rollouts. The others: of ReFL.
    """

    scorers: Reward | None = None
    differentiable: DifferentiableReward | None = None
    monitor: DifferentiableReward | None = None


def _rewards(start: Start, mesh: Mesh, tasks: Collection[str], stack: ExitStack) -> Rewards:
    """The rewards, open until `stack` unwinds."""
    spec = start.spec
    if spec.refl is not None:
        built = differentiable_rewards(start, spec.refl.roles, mesh)
        return Rewards(differentiable=built[REWARD], monitor=built.get(MONITOR))
    if mesh.tp_rank > 0:
        return Rewards()
    return Rewards(stack.enter_context(closing(build_reward(spec.reward, tasks))))


def _train(
    mesh: Mesh,
    start: Start,
    work: Work,
    model: Model,
    rewards: Rewards,
    stop: AgreedStop,
    console: Console,
) -> int:
    spec, topology, resume = start.spec, start.topology, work.resume
    log = open_run_log(
        spec.output,
        rank=mesh.rank,
        console=console,
        config=public_values(start.loaded.config),
        total_batches=work.total,
        start_batch=work.done,
        # A run that goes on in another output_dir is another wandb run.
        tracked_id=resume.state.wandb_id if resume is not None and resume.own else None,
    )
    status = EXIT_FAILURE
    open_parts = ExitStack()
    try:
        clock = Clock(mesh.rank)
        updater = build_updater(spec, model, work.total, 0 if resume is None else resume.state.updates)
        observer = RunObserver(
            log,
            every_steps=spec.output.rollout_video_every_steps,
            total_batches=work.total,
            fps=spec.data.fps,
        )
        algorithm = _algorithm(start, mesh, work, model, rewards, updater, clock, observer)
        coverage = ExpertCoverage(learning_experts(model.policy))
        writer = CheckpointWriter(
            spec.output.output_dir,
            mesh,
            keep=spec.output.keep_checkpoints,
            adapters=adapter_configs(model.policy.experts, spec.model.path),
            roles={} if spec.refl is None else spec.refl.roles.targets,
            clock=clock,
        )
        open_parts.callback(writer.close)

        def keep_spans() -> None:
            for spans in gather_from_every_rank(mesh, clock.drain()):
                log.spans(spans)

        def keep_record(step_record: StepRecord) -> None:
            log.step(step_record)
            for warning in coverage.add(step_record.epoch, step_record.replayed_per_expert):
                console.print(warning)
            keep_spans()

        def save(seen: int) -> None:
            with clock.span("save", seen - 1):
                said(writer.wait())
                state = _state(start, mesh, work, seen, updater.updates, algorithm.policy_version)
                writer.start(state, model.policy, model.optimizer, model.ema)
            keep_spans()

        evaluation = _evaluation(start, mesh, work, model, rewards, clock, observer)

        def evaluate(seen: int) -> None:
            if evaluation is not None:
                log.evaluation(evaluation(seen, updater.updates))
                keep_spans()

        def said(path: Path | None) -> None:
            if path is not None:
                console.print(f"saved {path}")

        def at_safe_point() -> bool:
            said(writer.poll())
            return stop.requested()

        if _begins_with_evaluation(spec, mesh, work):
            evaluate(work.done)
        finished = run_loop(
            _batches(spec, topology, mesh, work),
            ReplayScheduler(algorithm.prepare, algorithm.update, spec.grpo.depth),
            Boundaries(
                total=work.total,
                save_steps=spec.output.save_steps,
                accumulation=spec.optimizer.gradient_accumulation_steps,
                batch_size=topology.prompts,
                dataset_size=len(work.dataset),
                eval_steps=0 if spec.evaluation is None else spec.evaluation.steps,
            ),
            record=keep_record,
            save=save,
            stop_requested=at_safe_point,
            evaluate=evaluate,
        )
        said(writer.wait())
        keep_spans()
        status = EXIT_DONE if finished else EXIT_STOPPED
        if finished:
            for warning in coverage.close():
                console.print(warning)
            console.print(f"done: {work.total} batches, everything is in {spec.output.output_dir}")
        else:
            console.print("stopped after saving; the same command continues from there")
        return status
    finally:
        open_parts.close()
        log.close(status)


def _algorithm(
    start: Start,
    mesh: Mesh,
    work: Work,
    model: Model,
    rewards: Rewards,
    updater: Updater,
    clock: Clock,
    observer: RunObserver,
) -> Algorithm[Any]:
    spec, version = start.spec, 0 if work.resume is None else work.resume.state.policy_version
    if spec.refl is None:
        return build_grpo(
            spec,
            start.topology,
            mesh,
            model,
            reward=rewards.scorers,
            updater=updater,
            clock=clock,
            observer=observer,
            policy_version=version,
        )
    assert rewards.differentiable is not None
    return build_refl(
        spec,
        spec.refl,
        mesh,
        model,
        reward=rewards.differentiable,
        monitor=rewards.monitor,
        updater=updater,
        clock=clock,
        observer=observer,
        policy_version=version,
    )


def _evaluation(
    start: Start,
    mesh: Mesh,
    work: Work,
    model: Model,
    rewards: Rewards,
    clock: Clock,
    observer: RunObserver,
) -> Evaluation | None:
    if work.held is None:
        return None
    score = evaluation_scorer(
        start.spec, mesh, model, rewards.scorers, rewards.differentiable, rewards.monitor
    )
    return build_evaluation(start.spec, start.topology, mesh, model, work.held, score, clock, observer)


def _begins_with_evaluation(spec: RunSpec, mesh: Mesh, work: Work) -> bool:
    evaluation, files = spec.evaluation, RunFiles(spec.output.output_dir)
    return evaluation is not None and from_first_rank(
        mesh, lambda: due_at_start(files, evaluation.steps, work.done)
    )


def _state(start: Start, mesh: Mesh, work: Work, seen: int, updates: int, policy_version: int) -> TrainState:
    return TrainState(
        step=seen,
        epoch=seen * start.topology.prompts // len(work.dataset),
        updates=updates,
        policy_version=policy_version,
        seed=start.spec.seed,
        world=mesh.world,
        wandb_id=stored_run_id(start.spec.output.output_dir),
        contract=start.contract,
        started_from=_started_from(work),
    )


def _started_from(work: Work) -> str | None:
    if work.resume is not None:
        return work.resume.state.started_from
    return None if work.starting_point is None else str(work.starting_point.path)


def _batches(spec: RunSpec, topology: Topology, mesh: Mesh, work: Work) -> Iterator[PromptBatch]:
    return batches(
        work.dataset,
        spec.data,
        batch_size=topology.prompts,
        num_batches=work.total,
        start=work.done,
        local_prompts=local_prompts(topology, mesh),
        with_first_frames=takes_first_frames(work.dataset, spec.model.family),
    )


def local_prompts(topology: Topology, mesh: Mesh) -> list[int]:
    """The prompts of a batch, all waves, whose rollouts this rank draws."""
    share = assign(topology.wave, topology.group_size, mesh.dp_rank, mesh.dp_size)
    in_wave = sorted({prompt for prompt, _ in share})
    return [first + prompt for first in range(0, topology.prompts, topology.wave) for prompt in in_wave]
