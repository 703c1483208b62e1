"""What a start begins with: a run's own checkpoint, another run's, weights alone, or nothing; whole runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_training.tests.ranks import run_ranks
from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training.runs import MeanColour, rows, run, tiny_recipe, write_recipe
from wan_trainer.recording.manifest import hash_files
from wan_trainer.training.checkpoint import read_train_state
from wan_trainer.training.stored_state import StoredState

pytestmark = pytest.mark.slow

# Nothing moves at learning rate 0: what is saved is what was loaded.
STILL = ["--learning_rate", "0", "--max_steps", "1"]
KL = ["--grpo_kl_coeff", "10"]
LORA = ["--lora_rank", "2"]
EXACT = ("batch", "step", "policy_loss", "kl_loss", "reward_mean", "grad_norm", "lr", "ratio_max_dev")


def _everything(recipe: str, out: Path, scaled: Path) -> dict[str, Any]:
    """Every start of this module in one process: its status, or what it refused."""
    seen: dict[str, Any] = {}

    def start(name: str, *overrides: str, as_: str | None = None) -> None:
        seen[as_ or name] = run(recipe, ["--output_dir", str(out / name), *overrides], MeanColour())

    weights = ("--resume_from", str(out / "whole" / "checkpoint-2"))
    start("whole", "--max_steps", "3")
    start("elsewhere", "--max_steps", "3", *weights, "--no-reset_dataloader")
    # Weights alone, from each kind of source.
    start("from checkpoint", *weights, *KL, "--ema_decay", "0.5", *STILL)
    start("from run", "--resume_from", str(out / "whole"), "--reset_dataloader", *STILL)
    start("from directory", "--resume_from", str(scaled), *KL, *STILL)
    start("from file", "--resume_from", str(next((scaled / "transformer").glob("*.safetensors"))), *STILL)
    # A second start of such a run measures from the same reference.
    start("moving", *weights, *KL, "--max_steps", "2")
    start("moving in parts", *weights, *KL, "--max_steps", "1", as_="moving first part")
    start("moving in parts", *weights, *KL, "--max_steps", "2")
    # Adapters.
    start("adapters", *weights, *LORA, *KL, "--max_steps", "1")
    start("adapters", *weights, *LORA, *KL, "--max_steps", "2", as_="adapters again")
    adapted = ("--resume_from", str(out / "adapters" / "checkpoint-2"))
    start("refused", *adapted, as_="whole weights from adapters")
    start("refused", *adapted, *LORA, as_="adapters on weights that are not the model's")
    start("adapters", "--max_steps", "3", as_="adapters off")
    start("plain adapters", *LORA, "--max_steps", "1")
    plain = ("--resume_from", str(out / "plain adapters"), *LORA)
    start("refused", *plain, *KL, as_="adapters and a reference")
    start("from adapters", *plain, *STILL)
    start("refused", *adapted, "--no-reset_dataloader", as_="contract")
    # What is not there or not whole.
    start("refused", "--resume_from", str(out / "nothing"), as_="missing")
    start("refused", "--resume_from", str(out / "nothing"), "--no-reset_dataloader", as_="missing, full")
    broken = out / "broken" / "checkpoint-2"
    shutil.copytree(out / "whole" / "checkpoint-2", broken)
    shard = next((broken / "state").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    start("refused", "--resume_from", str(broken), as_="damaged")
    start("refused", "--resume_from", str(broken), "--no-reset_dataloader", as_="damaged, full")
    (broken / "manifest.json").unlink()
    start("refused", "--resume_from", str(broken), as_="no manifest")
    # A run that started elsewhere needs that place for its reference.
    shutil.copytree(out / "moving", out / "homeless")
    state = out / "homeless" / "checkpoint-2" / "train_state.json"
    text = state.read_text().replace(str(out / "whole"), str(out / "gone"))
    manifest = state.with_name("manifest.json")
    entries = json.loads(manifest.read_text())
    state.write_text(text)
    entries["files"] |= {state.name: asdict(hash_files(state.parent, [state])[state.name])}
    manifest.write_text(json.dumps(entries))
    start("homeless", *KL, "--max_steps", "3")
    # Its own checkpoint wins.
    shutil.copytree(out / "whole", out / "own")
    start("own", "--resume_from", str(out / "nothing"), "--max_steps", "4")
    return seen


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory, tiny_ti2v: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit
) -> tuple[Path, dict[str, Any]]:
    """All runs of this module."""
    out = tmp_path_factory.mktemp("resume")
    scaled = out / "scaled"
    shutil.copytree(tiny_ti2v, scaled)
    file = next((scaled / "transformer").glob("*.safetensors"))
    save_file({name: 1.25 * tensor for name, tensor in load_file(file).items()}, file)
    values = tiny_recipe(out / "run", tiny_ti2v, tiny_dataset, *tiny_evalkit)
    recipe = write_recipe(out / "recipe.yaml", {**values, "save_steps": 2, "lr_scheduler": "constant"})
    (seen,) = run_ranks(1, _everything, str(recipe), out, scaled)
    return out, seen


def _weights(checkpoint: Path, section: str = "model") -> dict[str, torch.Tensor]:
    state = StoredState(checkpoint)
    return state.read(section, state.shapes(section))


def _equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _exact(run_dir: Path) -> list[list[Any]]:
    return [[row[key] for key in EXACT] for row in rows(run_dir, "metrics.jsonl")]


def test_a_full_resume_goes_on_in_another_directory_as_if_never_interrupted(
    ran: tuple[Path, dict[str, Any]],
) -> None:
    out, seen = ran
    assert [seen[name] for name in ("whole", "elsewhere")] == [0, 0]
    assert _exact(out / "elsewhere") == _exact(out / "whole")[2:]
    for section in ("model", "optimizer"):
        whole, elsewhere = (_weights(out / name / "checkpoint-3", section) for name in ("whole", "elsewhere"))
        assert _equal(whole, elsewhere), section
    assert read_train_state(out / "elsewhere" / "checkpoint-3").started_from is None


@pytest.mark.parametrize("name", ["from checkpoint", "from run", "from directory", "from file"])
def test_weights_alone_start_everything_else_afresh(ran: tuple[Path, dict[str, Any]], name: str) -> None:
    out, seen = ran
    assert seen[name] == 0
    last = max((out / name).glob("checkpoint-*"))
    loaded = _weights(last)
    if name in ("from checkpoint", "from run"):
        # The newest one of a run.
        source = "checkpoint-2" if name == "from checkpoint" else "checkpoint-3"
        assert _equal(loaded, _weights(out / "whole" / source))
    else:
        file = next((out / "scaled" / "transformer").glob("*.safetensors"))
        assert _equal(loaded, {f"transformer.{key}": value for key, value in load_file(file).items()})
    metrics = rows(out / name, "metrics.jsonl")
    assert [row["batch"] for row in metrics] == list(range(len(metrics)))
    assert metrics[0]["step"] == 1 and metrics[0]["policy_version"] <= 1
    moments = _weights(last, "optimizer")
    steps = {float(value) for key, value in moments.items() if key.endswith(".step")}
    assert steps == {float(len(metrics))}
    # The loaded weights are the reference too: what never moves does not diverge from it.
    assert all(row["kl_loss"] == 0 for row in metrics)
    order = [row["sample_id"] for row in rows(out / name, "rewards.jsonl")]
    assert order == [row["sample_id"] for row in rows(out / "whole", "rewards.jsonl")][: len(order)]
    if name == "from checkpoint":
        assert _equal(_weights(last, "ema"), loaded)


def test_a_later_start_keeps_the_reference_of_the_first(ran: tuple[Path, dict[str, Any]]) -> None:
    out, seen = ran
    assert [seen[name] for name in ("moving", "moving first part", "moving in parts")] == [0, 0, 0]
    whole = _exact(out / "moving")
    assert _exact(out / "moving in parts") == whole
    kl = EXACT.index("kl_loss")
    assert whole[0][kl] == 0 and whole[1][kl] > 0


def test_adapters_start_on_the_whole_weights_of_a_checkpoint(ran: tuple[Path, dict[str, Any]]) -> None:
    out, seen = ran
    assert (seen["adapters"], seen["adapters again"]) == (0, 0)
    first, later = rows(out / "adapters", "metrics.jsonl")
    assert first["kl_loss"] == 0 and later["kl_loss"] > 0
    # Another base draws other rollouts.
    whole = rows(out / "whole", "metrics.jsonl")
    assert first["reward_mean"] != whole[0]["reward_mean"]
    assert first["reward_mean"] == rows(out / "from checkpoint", "metrics.jsonl")[0]["reward_mean"]
    assert seen["from adapters"] == 0
    plain, again = (_weights(out / name / "checkpoint-1") for name in ("plain adapters", "from adapters"))
    assert _equal(plain, again) and all(".lora_" in name for name in plain)
    started = read_train_state(out / "adapters" / "checkpoint-2").started_from
    assert started == str((out / "whole" / "checkpoint-2").resolve())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("whole weights from adapters", "lora_rank: "),
        ("adapters on weights that are not the model's", "holds adapters to the weights of"),
        ("adapters off", "lora_rank: 0 differs from 2"),
        ("adapters and a reference", "grpo_kl_coeff: 10 measures from the weights without adapters"),
        ("contract", "lora_rank: 0 differs from 2"),
        ("missing", "nothing does not exist"),
        ("homeless", "which holds what it does not train and the reference of its KL term, and is gone"),
        ("missing, full", "nothing is no directory"),
        ("damaged", "its bytes differ from the manifest's sha256"),
        ("damaged, full", "its bytes differ from the manifest's sha256"),
        ("no manifest", "manifest.json is missing or unreadable"),
    ],
)
def test_what_cannot_be_started_from_is_refused_before_anything_is_written(
    ran: tuple[Path, dict[str, Any]], name: str, says: str
) -> None:
    out, seen = ran
    lines = seen[name]
    assert isinstance(lines, list) and any(says in line for line in lines), lines
    assert all("\n" not in line and "Traceback" not in line for line in lines)
    assert not (out / "refused" / "metrics.jsonl").exists()


def test_the_own_checkpoint_wins_over_resume_from(ran: tuple[Path, dict[str, Any]]) -> None:
    out, seen = ran
    assert seen["own"] == 0
    assert [row["batch"] for row in rows(out / "own", "metrics.jsonl")] == [0, 1, 2, 3]
