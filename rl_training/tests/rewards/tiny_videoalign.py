"""A VideoReward checkpoint of small width and random weights, with the published layout and key names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
REWARD_TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ("t h", "Ġ th", "i n")
ORDINARY = len(LETTERS) + len(MERGES)
TOKENS = ORDINARY + len(SPECIALS) + len(REWARD_TOKENS)
STEPS = (8, 100)
RANK, ALPHA = 2, 6

# As config.json of Qwen2-VL-2B-Instruct is: flat, with more embedding rows than the tokenizer has tokens.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "max_window_layers": 2,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": True,
    "vocab_size": TOKENS + 20,
    "max_position_embeddings": 32768,
    "bos_token_id": ORDINARY,
    "eos_token_id": ORDINARY + SPECIALS.index("<|im_end|>"),
    "vision_start_token_id": ORDINARY + SPECIALS.index("<|vision_start|>"),
    "vision_end_token_id": ORDINARY + SPECIALS.index("<|vision_end|>"),
    "image_token_id": ORDINARY + SPECIALS.index("<|image_pad|>"),
    "video_token_id": ORDINARY + SPECIALS.index("<|video_pad|>"),
    "vision_config": {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 32,
        "mlp_ratio": 2,
        "num_heads": 2,
        "in_chans": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
MODEL_CONFIG: dict[str, Any] = {
    "data_config": {"fps": 2.0, "max_frame_pixels": 200704, "num_frames": None},
    "model_config": {"output_dim": 1, "reward_token": "special", "use_special_tokens": True},
    "peft_lora_config": {"lora_enable": True, "lora_r": RANK, "lora_alpha": ALPHA, "use_rslora": False},
}


def build_model(outputs: int, seed: int = 0) -> tuple[Qwen2VLForConditionalGeneration, torch.Tensor]:
    """transformers' own model with the embedding resized to the tokenizer, and the head's (outputs, 32)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Qwen2VLConfig.from_dict(json.loads(json.dumps(CONFIG)))
        config.text_config.vocab_size = TOKENS
        model = Qwen2VLForConditionalGeneration(config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            # Ten times the usual spread: values must differ between videos, prompts and heads.
            spread = 0.2 if parameter.ndim > 1 else 0.1
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, spread)
        return model, torch.randn(outputs, CONFIG["hidden_size"])


def published_state(model: Qwen2VLForConditionalGeneration, head: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state dict as transformers of the time of the checkpoint named it."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        name = name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
        state[name] = tensor.clone()
    return {**state, "rm_head.weight": head.clone()}


def as_adapter(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The state with every attention projection's weight split in a base weight and LoRA factors.

    Returns the state with the base weights, and the factors; base + ALPHA / RANK * B A is the given weight.
    """
    generator = torch.Generator().manual_seed(1)
    base, factors = dict(state), {}
    for name, weight in state.items():
        if name.endswith(("_proj.weight", "attn.qkv.weight")):
            module = name.removesuffix(".weight")
            up = torch.randn(weight.shape[0], RANK, generator=generator)
            down = 0.1 * torch.randn(RANK, weight.shape[1], generator=generator)
            base[name] = weight - ALPHA / RANK * up @ down
            factors |= {f"{module}.lora_A": down, f"{module}.lora_B": up}
    return base, factors


def write_checkpoint(directory: Path, state: dict[str, torch.Tensor], **model_config: object) -> Path:
    """Write model_config.json, two checkpoint-N directories of which the newer has the weights, and the
    config and tokenizer."""
    newest = directory / f"checkpoint-{STEPS[1]}"
    newest.mkdir(parents=True)
    (directory / f"checkpoint-{STEPS[0]}").mkdir()
    torch.save(state, newest / "model.pth")
    torch.save({}, directory / f"checkpoint-{STEPS[0]}" / "model.pth")
    (directory / "model_config.json").write_text(json.dumps({**MODEL_CONFIG, **model_config}))
    write_base(directory)
    return directory


def write_base(directory: Path) -> Path:
    """Write Qwen2-VL's config.json and the tokenizer, which does not know the reward tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    pieces = [*LETTERS, *(merge.replace(" ", "") for merge in MERGES)]
    (directory / "vocab.json").write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    (directory / "merges.txt").write_text("\n".join(("#version: 0.2", *MERGES)) + "\n")
    added = {
        str(ORDINARY + index): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for index, token in enumerate(SPECIALS)
    }
    tokenizer_config = {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIALS[1:]),
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory
