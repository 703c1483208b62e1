import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from wan_trainer.digests import file_sha256
from wan_trainer.recording.identity import (
    CodeIdentity,
    code_digest,
    code_identity,
    is_secret,
    launcher_environment,
    masked,
    masked_arguments,
    package_versions,
    weights_identity,
)
from wan_trainer.recording.run_record import (
    FinalCheckpoint,
    RunFacts,
    RunRecord,
    read_run_record,
)
from wan_trainer.types import UserError

ENVIRONMENT = {
    "WAN_TRAINER_VLM_API_KEY": "hunter2",
    "WAN_TRAINER_VLM_BASE_URL": "http://me:hunter2@judge:8000/v1",
    "MASTER_ADDR": "10.0.0.1",
    "WORLD_SIZE": "2",
    "RANK": "0",
    "HOME": "/home/me",
    "AWS_SECRET_ACCESS_KEY": "hunter2",
}


def test_record_says_everything_and_no_secret(tmp_path: Path, facts: RunFacts) -> None:
    path = tmp_path / "out" / "run.json"
    RunRecord(path).start(facts, ENVIRONMENT)
    text = path.read_text()
    assert "hunter2" not in text
    record = json.loads(text)
    assert record["status"] == "running"
    assert record["exit_status"] is None
    assert record["environment"] == {
        "MASTER_ADDR": "10.0.0.1",
        "RANK": "0",
        "WAN_TRAINER_VLM_API_KEY": "***",
        "WAN_TRAINER_VLM_BASE_URL": "http://***@judge:8000/v1",
        "WORLD_SIZE": "2",
    }
    assert record["overrides"] == [
        "--learning_rate",
        "1e-5",
        "--vlm_reward_api_key",
        "***",
        "--other_token=***",
    ]
    assert record["config"] == {"learning_rate": 1e-5, "vlm_reward_api_key": "***", "seed": 3}
    assert record["sources"]["learning_rate"] == "cli"
    assert record["contract"] == {"digests": {"model": "ab"}, "values": {"model": {"lora_rank": 8}}}
    assert record["topology"] == {"world": 2, "ranks_per_prompt": 0.5}
    assert record["sampler"]["sigmas"] == [1.0, 0.5, 0.0]
    assert record["model"]["weights"] == {"vae/weights.safetensors": 5}
    digest = file_sha256(tmp_path / "model" / "model_index.json")
    assert record["model"]["configs"] == {"model_index.json": digest}
    assert record["dataset"]["manifests"] == {"split.json": record["dataset"]["sha256"]}
    assert record["evaluator"]["source_sha256"] == "cd"
    assert (record["code"]["commit"], record["code"]["sources"]) == ("f00", "abc")
    assert record["attention"]["backend"] == "native"
    assert record["packages"]["numpy"]


def test_starts_are_kept_and_the_top_is_the_newest(tmp_path: Path, facts: RunFacts) -> None:
    path = tmp_path / "run.json"
    RunRecord(path).start(facts, ENVIRONMENT)  # killed: never finished
    stopped = RunRecord(path)
    stopped.start(replace(facts, start_batch=4), ENVIRONMENT)
    stopped.finish(75, "SIGTERM")
    last = RunRecord(path)
    last.start(replace(facts, start_batch=8), ENVIRONMENT)
    last.finish(0, final_checkpoint=FinalCheckpoint(tmp_path / "checkpoint-12", 12, True))
    record = json.loads(path.read_text())
    assert [(entry["status"], entry["exit_status"], entry["start_batch"]) for entry in record["starts"]] == [
        ("running", None, 0),
        ("stopped", 75, 4),
        ("finished", 0, 8),
    ]
    assert (record["status"], record["exit_status"], record["reason"]) == ("finished", 0, None)
    assert record["start"] == record["starts"][0]["start"]
    assert record["end"] >= record["starts"][2]["start"]
    assert record["final_checkpoint"] == {
        "path": str(tmp_path / "checkpoint-12"),
        "step": 12,
        "verified": True,
    }


def test_weights_a_run_starts_from_are_known_by_manifest_or_sizes(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    file = tmp_path / "transformer" / "a.safetensors"
    file.write_bytes(b"123")
    assert weights_identity(file).weights == {"a.safetensors": 3}
    assert weights_identity(tmp_path).weights == {"transformer/a.safetensors": 3}
    (tmp_path / "manifest.json").write_text("{}")
    checkpoint = weights_identity(tmp_path)
    assert (checkpoint.manifest, checkpoint.weights) == (file_sha256(tmp_path / "manifest.json"), {})


def test_a_refused_start_leaves_the_run_as_it_was(tmp_path: Path, facts: RunFacts) -> None:
    path = tmp_path / "run.json"
    done = RunRecord(path)
    done.start(facts, ENVIRONMENT)
    done.finish(0)
    before = json.loads(path.read_text())
    RunRecord(path).finish(2, "seed 4 is not the run's seed 3")
    after = json.loads(path.read_text())
    *earlier, refused = after.pop("starts")
    assert earlier == before.pop("starts")
    assert refused["exit_status"] == 2
    assert after == before


def test_a_start_that_fails_before_any_record_still_tells(tmp_path: Path) -> None:
    path = tmp_path / "out" / "run.json"
    RunRecord(path).finish(1, "no free port")
    record = json.loads(path.read_text())
    assert (record["status"], record["exit_status"], record["reason"]) == ("failed", 1, "no free port")


def test_a_broken_record_is_the_users_to_mend(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"format"')
    with pytest.raises(UserError, match=r"run\.json is not valid JSON .* move it away"):
        read_run_record(path)
    path.write_text("[]")
    with pytest.raises(UserError, match="not a run record"):
        read_run_record(path)


def git(directory: Path, *arguments: str) -> None:
    identity = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    names = ["-c", "user.name=n", "-c", "user.email=e@example.invalid"]
    environment: Mapping[str, str] = {**os.environ, **identity}
    subprocess.run(
        ["git", *names, *arguments], cwd=directory, env=environment, check=True, capture_output=True
    )


def test_code_identity_of_a_real_checkout(tmp_path: Path) -> None:
    def identity(directory: Path) -> CodeIdentity:
        return code_identity(directory, code_digest(directory))

    assert (identity(tmp_path).commit, identity(tmp_path).dirty) == (None, False)
    package = tmp_path / "package"
    package.mkdir()
    source = package / "a.py"
    source.write_text("x = 1\n")
    git(tmp_path, "init", "-q")
    untracked = identity(package)
    assert untracked.commit is None and len(untracked.sources) == 12
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    clean = identity(package)
    assert clean.commit is not None
    assert len(clean.commit) == 40
    assert not clean.dirty and clean.sources == untracked.sources
    source.write_text("x = 2\n")
    (tmp_path / "new.py").write_text("")
    dirty = identity(package)
    assert dirty.dirty and dirty.sources != clean.sources
    assert "-x = 1\n+x = 2\n" in dirty.diff
    assert dirty.untracked == ("new.py",)
    source.write_text("y\n" * 200_000)
    long = identity(package)
    assert long.diff_truncated
    assert len(long.diff) <= 256 * 1024
    # Below a checkout but not part of it, as an installed package is: no commit is claimed.
    installed = tmp_path / "installed"
    installed.mkdir()
    assert identity(installed).commit is None


@pytest.mark.parametrize(
    ("name", "secret"),
    [("WANDB_API_KEY", True), ("--hf-token", True), ("password", True), ("keep_checkpoints", False)],
)
def test_secret_names(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


def test_masking_keeps_what_is_no_secret() -> None:
    assert masked("", {"api_key": None, "token": "", "a": [{"token": "x"}]}) == {
        "api_key": None,
        "token": "",
        "a": [{"token": "***"}],
    }
    assert masked_arguments(["--api_key", "--flag", "--url", "https://u:p@h/x"]) == [
        "--api_key",
        "--flag",
        "--url",
        "https://***@h/x",
    ]
    assert launcher_environment({"MASTER_PORT": "1", "PATH": "x"}) == {"MASTER_PORT": "1"}


def test_package_versions_name_the_interpreter() -> None:
    assert package_versions()["python"].startswith("3.12")
