"""`wan-trainer validate`: everything at once, one line each, exit status 2."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import time
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from wan_trainer.cli.main import main
from wan_trainer.config import load_config
from wan_trainer.preflight.checks import run_checks
from wan_trainer.preflight.cuda import cuda_devices

EVALUATOR_WITH_FFPROBE = """
    import subprocess

    TASK_EVALUATOR_MAP = {"O-1_slide_data-generator": object, "O-2_turn_data-generator": object}

    def evaluate_single_video(video_path, task_name, gt_info, device):
        return {"score": float(subprocess.check_output(["ffprobe", video_path]))}
"""


def validate(world, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command in this process."""
    words = ["validate", "--config", str(world.config), "--nproc", "2", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.dict(os.environ, env), redirect_stdout(out), redirect_stderr(err):
        status = main(words)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def errors(
    world, *, nodes: int = 1, nproc: int = 2, rank: int = 0, kind: str = "error", **env: str
) -> list[str]:
    """The messages of one kind, in this process."""
    found = run_checks(load_config(world.config), nodes, nproc, rank, {**os.environ, **env})
    return [problem.message for problem in found if problem.kind == kind]


def test_a_good_config_passes_and_leaves_the_facts(world):
    facts = world.root / "facts"
    done = validate(world, "--facts", str(facts))
    assert done.returncode == 0, done.stderr
    warnings = done.stderr.splitlines()  # the files of this dataset hold no pictures
    assert len(warnings) == 2 and all("warning: task O-" in line for line in warnings), warnings
    assert all("ground_truth.mp4: not a readable video" in line for line in warnings), warnings
    assert f"node 0 ({socket.gethostname()}): note: device is cpu" in done.stdout
    assert "2 scorer processes with 2 threads" in done.stdout
    assert "passed" in done.stdout
    assert facts.read_text().splitlines() == [
        "device=cpu",
        f"output_dir={world.root / 'run'}",
        "rendezvous_timeout_s=600",
    ]


def test_everything_wrong_is_said_at_once_with_node_and_status_2(world):
    shutil.rmtree(world.model / "vae")
    (world.evalkit / "run_evaluation.py").write_text("changed = 1\n")
    (world.sample("O-1_slide_data-generator", "0001") / "metadata.json").unlink()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        held = ("--eval_steps", "5", "--eval_dataset_json", str(world.root / "held.txt"))
        done = validate(world, *held, MASTER_PORT=port)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if ": error: " in line]
    for expected in ("vae", "source_sha256", "metadata.json", f"MASTER_PORT {port}", "held.txt"):
        assert sum(expected in line for line in lines) == 1, (expected, done.stderr)
    assert all(line.startswith(f"node 0 ({socket.gethostname()}): error: ") for line in lines)
    assert "Traceback" not in done.stderr


def test_a_broken_config_also_says_which_paths_are_missing(world):
    world.set(learning_rat=1e-5, model_path=str(world.root / "nowhere"), num_frames=80)
    done = validate(world)
    assert done.returncode == 2
    assert "learning_rate" in done.stderr
    assert "num_frames" in done.stderr
    assert f"model_path: {world.root / 'nowhere'} does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_paths_given_as_flags_are_said_with_a_bad_flag(world):
    done = validate(world, "--learning_rat", "1", f"--dataset_json={world.root / 'no.json'}")
    assert done.returncode == 2
    assert "learning_rate" in done.stderr
    assert f"dataset_json: {world.root / 'no.json'} does not exist" in done.stderr


def test_a_missing_config_file_is_one_error(world):
    world.config.unlink()
    done = validate(world)
    assert done.returncode == 2
    assert done.stderr.count(": error: ") == 1


@pytest.mark.skipif(cuda_devices().count > 0, reason="this machine has a CUDA device")
def test_a_cuda_config_without_a_gpu_has_one_clear_line_beside_the_other_checks(world):
    world.set(device="cuda", param_dtype="float32")
    (world.sample("O-2_turn_data-generator", "0002") / "first_frame.png").unlink()
    lines = errors(world)
    assert sum("--device cpu" in line for line in lines) == 1
    assert sum("first_frame.png" in line for line in lines) == 1
    assert len(lines) == 2


def test_a_model_that_is_missing_does_not_hide_the_rest(world):
    shutil.rmtree(world.model)
    world.set(dataset_size=5)
    lines = errors(world)
    assert any("model_path" in line for line in lines)
    assert any("dataset_size" in line for line in lines)


def test_adapters_that_have_no_place_are_said(world):
    world.set(lora_rank=4, lora_module_prefix="low_noise")
    (line,) = errors(world)
    assert line.startswith("lora_module_prefix: low_noise (here transformer_2) is the beginning of no target")
    world.set(lora_rank=4, lora_target_modules=["to_q", "to_query"])
    (line,) = errors(world)
    assert line.startswith("lora_target_modules: to_query match no linear layer of the trained experts")


def test_a_base_lora_is_compared_with_the_model(world):
    file = world.root / "few_steps.safetensors"
    world.set(base_lora=str(file))
    (line,) = errors(world)
    assert line.startswith(f"base_lora: {file} does not exist")
    pair = {"lora_A": torch.zeros(2, 64), "lora_B": torch.zeros(64, 2)}
    for layer, expected in (
        ("attn1.to_q", []),
        ("attn1.to_query", ["1 of its keys match no linear layer of the model"]),
        ("ffn.net.2", ["is for a weight of (64, 64), and the model's has (64, 128)"]),
    ):
        save_file({f"transformer.blocks.0.{layer}.{side}.weight": t for side, t in pair.items()}, file)
        lines = errors(world)
        assert len(lines) == len(expected) and all(word in lines[0] for word in expected), lines
        assert all(line.startswith("base_lora: ") for line in lines)


def test_a_model_of_another_family(world):
    world.set(model_family="t2v-1.3b")
    (line,) = errors(world)
    assert "--model_family ti2v-5b" in line


def test_tasks_that_the_evaluator_does_not_know(world, capsys):
    text = (world.evalkit / "run_evaluation.py").read_text().replace("O-2_turn", "O-2_twist")
    (world.evalkit / "run_evaluation.py").write_text(text)
    assert main(["evalkit-digest", str(world.evalkit)]) == 0
    digest = {"vbvr_reward_evalkit_source_sha256": capsys.readouterr().out.strip()}
    world.set(**digest)
    (line,) = errors(world)
    assert "O-2_turn_data-generator" in line and "vbvr_reward_unsupported_score" in line
    world.set(**digest, vbvr_reward_unsupported_score=0.25)
    assert errors(world) == []
    (line,) = errors(world, kind="warning")
    assert "0.25" in line


def test_a_prompt_list_is_checked_as_a_dataset(world):
    path = world.root / "list.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "picture": "b.png"}\n')
    world.set(dataset_json=str(path), dataset_size=None)
    (line,) = errors(world)
    assert f"{path}:2: 'picture', unknown key" in line
    path.write_text('{"prompt": "a"}\n')
    (line,) = errors(world)
    assert "1 of 1 samples have no ground truth (first: list/00000000)" in line


def test_ffprobe_is_asked_for_only_when_the_evaluator_calls_it(world, write_evaluator, monkeypatch):
    monkeypatch.setattr("wan_trainer.preflight.inputs.shutil.which", lambda name: None)
    assert errors(world) == []
    world.set(vbvr_reward_evalkit_source_sha256=write_evaluator(EVALUATOR_WITH_FFPROBE))
    (line,) = errors(world)
    assert "ffprobe" in line and "install ffmpeg" in line


def test_a_queue_that_is_too_short_names_the_number(world):
    # 2 prompts x 4 rollouts on 2 ranks are 4 a rank.
    world.set(vbvr_reward_max_pending_jobs=3)
    (line,) = errors(world)
    assert "--vbvr_reward_max_pending_jobs 4" in line
    world.set(vbvr_reward_max_pending_jobs=4)
    assert errors(world) == []


def test_a_rollout_that_outlasts_the_evaluators_limit_is_a_warning_with_both_fixes(world):
    world.set(vbvr_reward_max_duration_seconds=0.7)
    assert errors(world) == []
    (line,) = errors(world, kind="warning")
    assert "--vbvr_reward_max_duration_seconds 1.125" in line and "--num_frames 5" in line
    world.set(vbvr_reward_max_duration_seconds=1.125)
    assert errors(world, kind="warning") == []


def test_heads_that_tensor_parallel_ranks_cannot_share_are_named(world):
    world.set(tensor_parallel_size=4)
    (line,) = errors(world, nproc=4)
    assert "tensor_parallel_size: 4 does not divide the 2 attention heads" in line and "use 2" in line


def test_a_topology_that_does_not_divide_is_named(world):
    lines = errors(world, nproc=3)
    assert len(lines) == 1 and "data-parallel ranks" in lines[0]


def test_a_missing_ocr_directory_is_named(world):
    world.set(vbvr_reward_easyocr_module_path=str(world.root / "ocr"))
    lines = errors(world)
    assert sum("vbvr_reward_easyocr_module_path" in line and "EasyOCR" in line for line in lines) == 1
    (world.root / "ocr").mkdir()
    (line,) = errors(world)
    assert "craft_mlt_25k.pth and no english_g2.pth" in line


def test_many_scorer_threads_are_a_warning(world):
    world.set(vbvr_reward_cpu_workers=os.cpu_count(), vbvr_reward_cpu_threads_per_worker=4)
    assert errors(world) == []
    assert any("scorer processes" in line for line in errors(world, kind="warning"))


def test_the_trainers_own_flags_are_no_config_keys(world):
    done = validate(world, "--allow_changed", "learning_rate", "--seed", "3")
    assert done.returncode == 0, done.stderr


def test_a_node_rank_outside_the_run_is_one_line(world):
    done = validate(world, "--nodes", "2", "--node-rank", "2")
    assert done.returncode == 2
    assert "0..1" in done.stderr and "Traceback" not in done.stderr


def test_a_missing_node_ends_within_the_configured_time(world):
    world.set(rendezvous_timeout_s=0.5)
    started = time.monotonic()
    done = validate(world, "--nproc", "1", "--nodes", "2", "--node-rank", "0", "--join")
    assert done.returncode == 2
    assert time.monotonic() - started < 30
    assert "node 1 of 2 did not report within rendezvous_timeout_s 0.5" in done.stderr
