"""Opening the log of a run, as the configuration asks for it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rich.console import Console

from wan_trainer.config.specs import OutputSpec
from wan_trainer.recording.jsonl import Json
from wan_trainer.recording.progress import ProgressDisplay
from wan_trainer.recording.run_dir import NullRunLog, RunLog, RunWriter
from wan_trainer.recording.tracking import WandbTracker, wandb_mode


def open_run_log(
    output: OutputSpec,
    *,
    rank: int,
    console: Console,
    config: Mapping[str, Json],
    total_batches: int,
    start_batch: int = 0,
    tracked_id: str | None = None,
) -> RunLog:
    """The run log of this rank, cut back to `start_batch` batches; 0, a fresh start, clears old files.

    Rank 0 gets the writer with its progress display and, when a wandb project is set, its tracker;
    `config` is what wandb shows, `tracked_id` the wandb run in the checkpoint that is continued. Every other
    rank gets a log that writes nothing.
    """
    if rank != 0:
        return NullRunLog(output.output_dir)
    log = RunWriter(output.output_dir)
    log.truncate_after(start_batch)
    if output.wandb_project is not None:
        tracker = WandbTracker(
            output.output_dir,
            project=output.wandb_project,
            name=output.wandb_run_name,
            config=config,
            mode=wandb_mode(os.environ),
            console=console,
            resumed_id=tracked_id,
        )
        log.observe(tracker)
    progress = ProgressDisplay(
        console, total_batches=total_batches, start_batch=start_batch, log_steps=output.log_steps
    )
    log.observe(progress)
    return log
