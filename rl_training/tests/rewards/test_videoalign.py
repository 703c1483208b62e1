"""VideoAlign's reward and its gradient, against transformers' own model and processor on the same frames."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Tokenizer, Qwen2VLForConditionalGeneration, Qwen2VLVideoProcessor

from rl_training.tests.rewards.tiny_videoalign import (
    ALPHA,
    RANK,
    REWARD_TOKENS,
    as_adapter,
    build_model,
    published_state,
    write_base,
    write_checkpoint,
)
from wan_trainer.rewards.videoalign import VideoAlign
from wan_trainer.rewards.videoalign.prompt import question, read_template
from wan_trainer.types import DifferentiableScores, RewardContext, Sample, UserError

CONTEXT = RewardContext(torch.device("cpu"), fps=16)
# Prompts of different lengths: the shorter row is padded. Braces mean nothing.
SAMPLES = [Sample("a/0", "a", "the thing in {text_prompt} turns"), Sample("a/1", "a", "go")]
SIZE = {"height": 28, "width": 56}
WEIGHTS = {"VQ": 1.0, "MQ": -0.5, "TA": 2.0}
STATISTICS = torch.tensor([[3.6757, 2.2476], [1.1646, 1.3811], [2.8105, 2.5121]])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one output for all heads."""
    directory = tmp_path_factory.mktemp("videoalign") / "VideoReward"
    return write_checkpoint(directory, published_state(*build_model(1)))


@pytest.fixture(scope="module")
def videos() -> torch.Tensor:
    """Two noisy videos of 21 frames, smooth enough that a resize overshoots nowhere."""
    noise = torch.rand(2, 3, 21, 40, 70, generator=torch.Generator().manual_seed(3))
    return 0.3 + 0.4 * noise


def _reference(
    model: Qwen2VLForConditionalGeneration,
    head: torch.Tensor,
    directory: Path,
    video: torch.Tensor,
    prompt: str,
) -> torch.Tensor:
    """The raw values of the heads (3,) of one video (3, F, H, W), by the way the libraries pave."""
    tokenizer = Qwen2Tokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(REWARD_TOKENS)})
    # 21 frames at 16 fps: 2.6 frames at 2 fps, so the least, 4.
    frames = video[:, [0, 7, 13, 20]].transpose(0, 1)
    size = {"shortest_edge": 28 * 56, "longest_edge": 28 * 56}
    processor = Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=False, do_sample_frames=False)
    seen = processor([frames], do_rescale=False, return_tensors="pt")
    assert seen["video_grid_thw"].tolist() == [[2, 2, 4]]
    text = question(read_template(None), prompt).replace("<|video_pad|>", 4 * "<|video_pad|>")
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    is_video = ids == tokenizer.get_vocab()["<|video_pad|>"]
    states = model.model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values_videos=seen["pixel_values_videos"],
        video_grid_thw=seen["video_grid_thw"],
        mm_token_type_ids=2 * is_video.int(),
    ).last_hidden_state[0]
    values = states @ head.T
    rows = [ids[0].tolist().index(tokenizer.get_vocab()[token]) for token in REWARD_TOKENS]
    return torch.stack([values[row, column % len(head)] for column, row in enumerate(rows)])


@pytest.mark.parametrize("outputs", [1, 3])
def test_reward_and_gradient_equal_those_of_the_libraries(
    outputs: int, tmp_path: Path, videos: torch.Tensor
) -> None:
    model, head = build_model(outputs)
    directory = write_checkpoint(tmp_path / "VideoReward", published_state(model, head))
    reward = VideoAlign(CONTEXT, model_path=directory, weights=WEIGHTS, **SIZE)
    pixels = videos.clone().requires_grad_()
    scores = reward.score(pixels, SAMPLES)
    assert scores.reward.dtype == torch.float32
    # Each video by itself: no padding, no other video in the batch.
    reference = videos.clone().requires_grad_()
    raw = torch.stack(
        [
            _reference(model, head, directory, video, sample.prompt)
            for video, sample in zip(reference, SAMPLES, strict=True)
        ]
    )
    assert raw.std(0).min() > 0.01, "the values differ between the videos"
    assert raw.std(1).min() > 0.01, "and between the heads"
    scaled = (raw - STATISTICS[:, 0]) / STATISTICS[:, 1]
    for column, name in enumerate(("VQ", "MQ", "TA")):
        torch.testing.assert_close(scores.components[name], scaled[:, column].detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            scores.components[f"{name}_raw"], raw[:, column].detach(), rtol=1e-4, atol=1e-5
        )
        assert not scores.components[name].requires_grad
    expected = scaled[:, 0] - 0.5 * scaled[:, 1] + 2 * scaled[:, 2]
    torch.testing.assert_close(scores.reward, expected, rtol=1e-4, atol=1e-5)
    (gradient,) = torch.autograd.grad((scores.reward * torch.tensor([1.0, 3.0])).sum(), pixels)
    (wanted,) = torch.autograd.grad((expected * torch.tensor([1.0, 3.0])).sum(), reference)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item())


def test_gradient_is_the_slope_of_the_reward(checkpoint: Path, videos: torch.Tensor) -> None:
    runs = [_run(checkpoint, videos, checkpointing) for checkpointing in (True, False)]
    (reward, value, gradient, kept), (_, value_again, gradient_again, kept_again) = runs
    assert kept < 0.7 * kept_again, "with recomputation less is kept for the backward pass"
    torch.testing.assert_close(value, value_again, rtol=0, atol=0)
    torch.testing.assert_close(gradient, gradient_again, rtol=1e-6, atol=1e-9)
    # Along the gradient itself, where a float32 reward moves by more than its rounding.
    step = 0.02 * gradient / gradient.norm()
    with torch.no_grad():
        ahead, behind = (reward.score(videos + sign * step, SAMPLES).reward.sum() for sign in (1, -1))
    torch.testing.assert_close((ahead - behind) / 2, 0.02 * gradient.norm(), rtol=0.02, atol=0)


def _run(
    checkpoint: Path, videos: torch.Tensor, checkpointing: bool
) -> tuple[VideoAlign, torch.Tensor, torch.Tensor, int]:
    """The reward, its values, the gradient of their sum, and how many numbers were kept for it."""
    reward = VideoAlign(CONTEXT, model_path=checkpoint, gradient_checkpointing=checkpointing, **SIZE)
    network = reward._scorer._network
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    pixels = videos.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = reward.score(pixels, SAMPLES)
    (gradient,) = torch.autograd.grad(scores.reward.sum(), pixels)
    return reward, scores.reward.detach(), gradient, sum(kept)


def test_adapters_merge_to_the_same_model(checkpoint: Path, tmp_path: Path, videos: torch.Tensor) -> None:
    expected = VideoAlign(CONTEXT, model_path=checkpoint, **SIZE).score(videos, SAMPLES)
    state = published_state(*build_model(1))
    base, factors = as_adapter(state)
    # A full state dict of PEFT's model: prefixed, with base layers, adapter names and saved modules.
    peft = {}
    for name, tensor in base.items():
        module = name.rpartition(".")[0]
        wrapped = name.replace(module, f"{module}.base_layer") if f"{module}.lora_A" in factors else name
        peft[f"base_model.model.{wrapped}"] = tensor
    head = peft.pop("base_model.model.rm_head.weight")
    peft |= {
        "base_model.model.rm_head.original_module.weight": torch.zeros_like(head),
        "base_model.model.rm_head.modules_to_save.default.weight": head,
    }
    peft |= {f"base_model.model.{name}.default.weight": tensor for name, tensor in factors.items()}
    whole = write_checkpoint(tmp_path / "whole", peft)
    # A tokenizer saved after training knows the reward tokens.
    tokenizer = Qwen2Tokenizer.from_pretrained(checkpoint)
    tokenizer.add_special_tokens({"additional_special_tokens": list(REWARD_TOKENS)})
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (whole / name).unlink()
    tokenizer.save_pretrained(whole / "checkpoint-100")
    _assert_same(VideoAlign(CONTEXT, model_path=whole, **SIZE).score(videos, SAMPLES), expected)
    # An adapter beside what is not LoRA, on a base model elsewhere, whose embedding has more rows.
    lora = tmp_path / "lora" / "checkpoint-5"
    lora.mkdir(parents=True)
    save_file(
        {f"base_model.model.{n}.weight": t for n, t in factors.items()}, lora / "adapter_model.safetensors"
    )
    adapter = {"r": RANK, "lora_alpha": ALPHA, "use_rslora": False}
    (lora / "adapter_config.json").write_text(json.dumps(adapter))
    torch.save({"base_model.model.rm_head.weight": state["rm_head.weight"]}, lora / "non_lora_state_dict.pth")
    elsewhere = write_base(tmp_path / "base")
    rows = torch.cat([base["model.embed_tokens.weight"], torch.zeros(20, 32)])
    del base["rm_head.weight"]
    save_file(
        {**base, "model.embed_tokens.weight": rows, "lm_head.weight": rows.clone()},
        elsewhere / "model.safetensors",
    )
    reward = VideoAlign(CONTEXT, model_path=tmp_path / "lora", base_model_path=elsewhere, **SIZE)
    _assert_same(reward.score(videos, SAMPLES), expected)


def _assert_same(scores: DifferentiableScores, expected: DifferentiableScores) -> None:
    torch.testing.assert_close(scores.reward, expected.reward, rtol=1e-3, atol=1e-3)


def test_options(
    checkpoint: Path, tmp_path: Path, videos: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    plain = VideoAlign(CONTEXT, model_path=checkpoint, **SIZE).score(videos, SAMPLES)
    assert caplog.text.count("videoalign.prompt_template: is not set") == 1
    one = VideoAlign(CONTEXT, model_path=checkpoint, weights={"MQ": 2}, **SIZE).score(videos, SAMPLES)
    torch.testing.assert_close(one.reward, 2 * plain.components["MQ"])
    caplog.clear()
    template = tmp_path / "template.txt"
    template.write_text("<|TA_reward|>{text_prompt}<|MQ_reward|><|VQ_reward|>")
    asked = VideoAlign(CONTEXT, model_path=checkpoint, prompt_template=template, **SIZE).score(
        videos, SAMPLES
    )
    assert (asked.reward - plain.reward).abs().min() > 1e-3
    assert "prompt_template" not in caplog.text
    half = VideoAlign(CONTEXT, model_path=checkpoint, dtype="bfloat16", **SIZE)
    buffers = dict(half._scorer._network.named_buffers())
    assert {str(tensor.dtype) for tensor in buffers.values()} == {"torch.float32"}, "rotary frequencies"
    torch.testing.assert_close(half.score(videos, SAMPLES).reward, plain.reward, rtol=0.2, atol=0.2)
    more = VideoAlign(CONTEXT, model_path=checkpoint, num_frames=6, height=56, width=28)
    pixels = videos.clone().requires_grad_()
    more.score(pixels, SAMPLES).reward.sum().backward()
    assert pixels.grad is not None
    assert pixels.grad.abs().amax((0, 1, 3, 4)).nonzero().flatten().tolist() == [0, 4, 8, 12, 16, 20]
    with pytest.raises(UserError, match="prompt of a/7: holds one of"):
        more.score(videos[:1], [Sample("a/7", "a", "sees <|VQ_reward|>")])


def test_checkpoints_own_statistics_count(tmp_path: Path, videos: torch.Tensor) -> None:
    own = {
        f"{head}_{name}": value
        for head in ("VQ", "MQ", "TA")
        for name, value in (("mean", 1.0), ("std", 4.0))
    }
    directory = write_checkpoint(tmp_path / "own", published_state(*build_model(1)), inference_config=own)
    scores = VideoAlign(CONTEXT, model_path=directory, **SIZE).score(videos, SAMPLES)
    torch.testing.assert_close(scores.components["TA"], (scores.components["TA_raw"] - 1) / 4)
