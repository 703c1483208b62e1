"""Qwen2-VL with a linear reward head read at the special token of each head."""

from __future__ import annotations

import json
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers import Qwen2VLConfig, Qwen2VLModel
from transformers.initialization import no_init_weights
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLDecoderLayer, Qwen2VLVisionBlock
from transformers.vision_utils import get_vision_position_ids

from wan_trainer.rewards.videoalign.files import CheckpointFiles
from wan_trainer.rewards.videoalign.options import HEADS
from wan_trainer.rewards.videoalign.weights import EMBEDDING, HEAD, check_names, read_weights
from wan_trainer.types import UserError, first_line


class RewardNetwork(nn.Module):
    """`backbone`, whose text head is left out, and `rm_head` of one output shared by the heads, or of three.

    With three outputs each head has its own row. The head computes in float32 on the backbone's states.
    """

    def __init__(self, config: Qwen2VLConfig, outputs: int) -> None:
        super().__init__()
        text_config = cast("Qwen2VLTextConfig", config.text_config)
        self.video_token_id = config.video_token_id
        self.vocabulary = text_config.vocab_size
        self.backbone = Qwen2VLModel._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        self.rm_head = nn.Linear(text_config.hidden_size, outputs, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        reward_at: torch.Tensor,
        patches: torch.Tensor,
        grid: torch.Tensor,
    ) -> torch.Tensor:
        """The raw values of the heads, (N, 3) float32, in the order of `HEADS`.

        input_ids: (N, L) int64 on the CPU, padded on the right. reward_at: (N, 3) int64 on the CPU, the
        positions of the reward tokens. patches: (N * T * h * w, D) on the device, as the processor lays them
        out. grid: (N, 3) int64 on the CPU, the T, h, w of each video in patches.

        Index tensors stay on the CPU until the numbers in them have shaped the work: read back from a GPU,
        each of them would stop it once a layer. Padding needs no mask: attention is causal, and the padding
        stands after all that is read.
        """
        device = patches.device
        visual, text = self.backbone.visual, self.backbone.language_model
        is_video = input_ids == self.video_token_id
        positions = get_vision_position_ids(grid, visual.spatial_merge_size).to(device)
        seen = visual(
            patches.to(text.embed_tokens.weight.dtype), grid_thw=grid, position_ids=positions
        ).pooler_output
        embedded = text.embed_tokens(input_ids.to(device))
        embedded = embedded.masked_scatter(is_video.unsqueeze(-1).to(device), seen.to(embedded.dtype))
        positions, _ = self.backbone.get_rope_index(
            cast("torch.LongTensor", input_ids),
            mm_token_type_ids=cast("torch.IntTensor", 2 * is_video.int()),
            video_grid_thw=cast("torch.LongTensor", grid),
        )
        states = text(inputs_embeds=embedded, position_ids=positions.to(device), use_cache=False)
        rows = torch.arange(len(input_ids), device=device).unsqueeze(1)
        values = self.rm_head(states.last_hidden_state[rows, reward_at.to(device)].float())
        return values.squeeze(-1) if values.shape[-1] == 1 else values.diagonal(dim1=1, dim2=2)


def load_network(
    files: CheckpointFiles, dtype: torch.dtype, device: torch.device, gradient_checkpointing: bool
) -> RewardNetwork:
    """The checkpoint's network on `device`, frozen and in eval mode; the backbone in `dtype`.

    gradient_checkpointing: each layer is computed again in the backward pass. Raises UserError when the
    tensors are not exactly those of the configuration, or the head has neither one output nor three.
    """
    source = files.weights[-1]
    weights = read_weights(files, dtype)
    outputs = _outputs(weights, source.name)
    try:
        config = Qwen2VLConfig.from_dict(json.loads(files.config.read_text(encoding="utf-8")))
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"videoalign.model_path: {files.config} describes no Qwen2-VL ({first_line(error)}); use the "
            "one of Qwen2-VL-2B-Instruct"
        ) from None
    if EMBEDDING in weights:
        # The special tokens were added by resizing the embedding, which config.json does not know.
        cast("Qwen2VLTextConfig", config.text_config).vocab_size = weights[EMBEDDING].shape[0]
    with no_init_weights():
        network = RewardNetwork(config, outputs)
    named = {key if key == HEAD else f"backbone.{key}": tensor for key, tensor in weights.items()}
    expected = {name.removeprefix("backbone."): tensor for name, tensor in network.state_dict().items()}
    check_names(expected, weights, source)
    # Assigned, not copied: buffers of the rotary embedding stay float32 whatever the weights are.
    network.load_state_dict(named, assign=True)
    network.requires_grad_(False).eval().to(device)
    if gradient_checkpointing:
        # Not transformers' own switch: it acts in training mode only.
        apply_activation_checkpointing(
            network,
            checkpoint_wrapper_fn=partial(checkpoint_wrapper, preserve_rng_state=False),
            check_fn=lambda module: isinstance(module, Qwen2VLDecoderLayer | Qwen2VLVisionBlock),
        )
    return network


def _outputs(weights: dict[str, torch.Tensor], source: str) -> int:
    head = weights.get(HEAD)
    if head is None:
        raise UserError(
            f"videoalign.model_path: {source} lacks {HEAD}; use a VideoReward checkpoint, not a bare Qwen2-VL"
        )
    if head.ndim != 2 or head.shape[0] not in (1, len(HEADS)):
        raise UserError(
            f"videoalign.model_path: {source} has {HEAD} of shape {tuple(head.shape)}; VideoAlign's has 1 "
            f"output for all heads or {len(HEADS)}, one for each of {', '.join(HEADS)}; use such a checkpoint"
        )
    return head.shape[0]
