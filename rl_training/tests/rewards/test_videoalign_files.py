"""What is wrong with a VideoAlign configuration or checkpoint is said in one line each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rl_training.tests.rewards.tiny_videoalign import (
    as_adapter,
    build_model,
    published_state,
    write_checkpoint,
)
from wan_trainer.rewards.videoalign import VideoAlign
from wan_trainer.rewards.videoalign.prompt import read_template
from wan_trainer.types import RewardContext, UserError

CONTEXT = RewardContext(torch.device("cpu"), fps=16)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """The state dict of a tiny checkpoint."""
    return published_state(*build_model(1))


def _problems(call: Callable[[], object]) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        call()
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def _check(directory: Path, **config: Any) -> Callable[[], object]:
    return lambda: VideoAlign.check_files(model_path=str(directory), **config)


def test_options_are_checked_before_any_file(tmp_path: Path) -> None:
    # Neither the unknown head nor the sizes wait for the files, which are not there either.
    lines = _problems(
        _check(
            tmp_path / "none",
            weights={"VQ": 1, "TQ": 1},
            fps=0,
            num_frames=5,
            height=30,
            max_frame_pixels=1000,
            dtype="float8",
        )
    )
    assert (
        lines[0]
        == "videoalign.weights: TQ is no head of VideoAlign, which has VQ, MQ, TA; weigh one of these"
    )
    assert [line.partition(":")[0] for line in lines[1:]] == [
        f"videoalign.{key}"
        for key in ("fps", "num_frames", "max_frame_pixels", "height, videoalign.width", "height", "dtype")
    ]
    (line,) = _problems(_check(tmp_path, weights={"VQ": 0}))
    assert "the reward is always 0" in line
    (line,) = _problems(_check(tmp_path, weights={"VQ": float("nan")}))
    assert line.startswith("videoalign.weights: VQ: nan is not a finite number")
    lines = _problems(_check(tmp_path, weights=3, fps="two", num_frames=True, gradient_checkpointing=None))
    assert len(lines) == 4
    (line,) = _problems(lambda: VideoAlign(CONTEXT, model_path=""))
    assert line == "videoalign.model_path: '' must be text, the path of a file or directory; write one"
    # What the constructor refuses, it refuses with the same lines.
    (line,) = _problems(lambda: VideoAlign(CONTEXT, model_path=tmp_path / "none"))
    assert line.startswith(f"videoalign.model_path: {tmp_path / 'none'} is no directory; ")


def test_files_are_checked_without_torch(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    directory = write_checkpoint(tmp_path / "VideoReward", state)
    # The same step named twice over: its own directory may be given, too.
    VideoAlign.check_files(model_path=str(directory / "checkpoint-100"), base_model_path=str(directory))
    code = (
        "import sys\n"
        "from wan_trainer.rewards.videoalign import VideoAlign\n"
        f"VideoAlign.check_files(model_path={str(directory)!r})\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_missing_and_unreadable_files_are_one_line_each(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    lines = _problems(_check(empty, prompt_template=str(tmp_path / "question.txt")))
    assert [line.partition("; ")[0] for line in lines] == [
        f"videoalign.model_path: {empty} has no weights (model.pth, model.safetensors, "
        "adapter_model.safetensors)",
        f"videoalign.base_model_path: config.json is not in {empty}",
        f"videoalign.base_model_path: tokenizer.json (or vocab.json and merges.txt) is not in {empty}",
        f"videoalign.prompt_template: {tmp_path / 'question.txt'} is no readable file",
    ]
    directory = write_checkpoint(
        tmp_path / "VideoReward", state, inference_config={"VQ_mean": 1.0, "VQ_std": 0}
    )
    weights = directory / "checkpoint-100" / "model.pth"
    weights.write_bytes(weights.read_bytes()[:5000])
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    lines = _problems(_check(directory))
    assert lines[0] == f"videoalign.model_path: {weights} is no readable weight file; copy it again"
    assert "has model_type qwen2_5_vl" in lines[1]
    assert [line.split("usable ")[1].split(" ")[0] for line in lines[2:]] == ["VQ_mean", "MQ_mean", "TA_mean"]
    (directory / "model_config.json").write_text("[")
    assert f"{directory / 'model_config.json'} is no JSON object" in "".join(_problems(_check(directory)))
    last_token = {"reward_token": "last", "use_special_tokens": False}
    (directory / "model_config.json").write_text(json.dumps({"model_config": last_token}))
    assert "has reward_token last" in "".join(_problems(_check(directory)))
    # An adapter needs the base weights and the rest of the model.
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"\x00" * 40)
    lines = _problems(_check(adapter))
    assert [line.partition(":")[0] for line in lines] == [
        *("videoalign.base_model_path", "videoalign.model_path"),
        *("videoalign.base_model_path",) * 2,
    ]


def test_a_wrong_tensor_is_one_line_that_names_it(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    directory = write_checkpoint(tmp_path / "VideoReward", state)
    weights = directory / "checkpoint-100" / "model.pth"

    def problems(changes: dict[str, torch.Tensor | None]) -> tuple[str, ...]:
        changed = {name: tensor for name, tensor in {**state, **changes}.items() if tensor is not None}
        torch.save(changed, weights)
        VideoAlign.check_files(model_path=directory)
        return _problems(lambda: VideoAlign(CONTEXT, model_path=directory))

    norm = state["model.norm.weight"]
    (line,) = problems({"model.norm.weight": None, "lm_head.weight": None})
    assert line.startswith(f"videoalign.model_path: {weights} lacks model.norm.weight;")
    lines = problems({"visual.blocks.0.norm1.weight": None, "visual.block.0.norm1.weight": norm})
    assert "lacks visual.blocks.0.norm1.weight;" in lines[0]
    assert "has the unknown key visual.block.0.norm1.weight;" in lines[1]
    (line,) = problems({"model.layers.2.input_layernorm.weight": norm})
    assert "has the unknown key model.layers.2.input_layernorm.weight;" in line
    (line,) = problems({"model.norm.weight": norm[:-1]})
    assert "has model.norm.weight of shape (31,), config.json makes it (32,);" in line
    (line,) = problems({"rm_head.weight": None})
    assert "lacks rm_head.weight; use a VideoReward checkpoint" in line
    (line,) = problems({"rm_head.weight": torch.zeros(4, 32)})
    assert "has rm_head.weight of shape (4, 32); VideoAlign's has 1 output for all heads or 3," in line
    assert len(problems({name: None for name in state if name != "rm_head.weight"})) == 9
    # The reward tokens have no row in the embedding of a bare Qwen2-VL cut to its tokenizer.
    (line,) = problems({"model.embed_tokens.weight": state["model.embed_tokens.weight"][:-1]})
    assert "the tokenizer in" in line
    factor = torch.zeros(2, 32)
    (line,) = problems({"model.layers.0.self_attn.q_proj.lora_A.default.weight": factor})
    assert "has a LoRA factor of model.layers.0.self_attn.q_proj.weight without lora_B;" in line
    base, factors = as_adapter(state)
    (directory / "model_config.json").unlink()
    (line,) = problems({**base, **{f"{name}.weight": tensor for name, tensor in factors.items()}})
    assert "nothing tells lora_alpha;" in line
    weights.unlink()
    save_file({"rm_head.weight": state["rm_head.weight"]}, weights.with_name("model.safetensors"))
    lines = _problems(lambda: VideoAlign(CONTEXT, model_path=directory))
    assert "lacks visual.patch_embed.proj.weight;" in "".join(lines)
    assert lines[-1].endswith("more tensors do not fit " + str(weights.with_name("model.safetensors")))


def test_template_has_each_part_once(tmp_path: Path) -> None:
    built_in = read_template(None)
    own = tmp_path / "own.txt"
    own.write_bytes(built_in.replace("\n", "\r\n").encode())
    assert read_template(own) == built_in.replace("\n", "\r\n"), "every character counts"
    own.write_text(built_in.replace("{text_prompt}", "") + "<|MQ_reward|>")
    lines = _problems(lambda: read_template(own))
    assert [line.partition(";")[0] for line in lines] == [
        f"videoalign.prompt_template: {own} has {{text_prompt}} 0 times",
        f"videoalign.prompt_template: {own} has <|MQ_reward|> 2 times",
    ]
    own.write_bytes(b"\xff")
    (line,) = _problems(lambda: read_template(own))
    assert "is not UTF-8 text" in line
