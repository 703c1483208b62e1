"""Regional compilation of a Wan transformer: block by block, one graph for rollout and replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import nn

Forward = Callable[..., torch.Tensor]
# Whether the hidden states, the text and the time modulation of a block carry a gradient in replay.
Differentiable = tuple[bool, bool, bool]


def compile_blocks(expert: WanTransformer3DModel, backend: str, mode: str | None) -> None:
    """Compile the computation of each block, in place: no wrapper module, so names stay.

    `forward` and not the whole call is compiled: FSDP gathers and frees in hooks of the call, and those are
    each block's own, so that every block would be compiled anew. Blocks run the same code on equal shapes and
    share its graphs. Call it when `requires_grad` is settled, before FSDP is applied.
    """
    for block, inputs in zip(expert.blocks, _differentiable(expert), strict=True):
        assert isinstance(block, nn.Module)
        _remove_idle_dropout(block)
        compiled: Forward = torch.compile(block.forward, backend=backend, mode=mode)
        reached = any(inputs) or _trains(block.parameters())
        block.forward = _with_replay_graph(compiled, inputs) if reached else compiled


def _with_replay_graph(compiled: Forward, differentiable: Differentiable) -> Forward:
    """`compiled`, which computes without gradients in the very graph that replay uses.

    Compilers fuse a graph for inference differently from the forward half of one for training, and rounding
    follows: rollout and replay would disagree by up to a clip range. What the training graph keeps for its
    backward is dropped as soon as the block returns, and replay, which recomputes or keeps it, needs no less.
    """

    def forward(
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        inputs = (hidden_states, encoder_hidden_states, temb)
        if torch.is_grad_enabled():
            return compiled(*inputs, rotary_emb)
        with torch.enable_grad():
            marked = [
                tensor.detach().requires_grad_(wanted)
                for tensor, wanted in zip(inputs, differentiable, strict=True)
            ]
            return compiled(*marked, rotary_emb).detach()

    return forward


def _differentiable(expert: WanTransformer3DModel) -> Iterator[Differentiable]:
    """For each block, which of its inputs depend on a trained parameter."""
    embedder = expert.condition_embedder
    text = _trains(embedder.text_embedder.parameters())
    time = _trains([*embedder.time_embedder.parameters(), *embedder.time_proj.parameters()])
    hidden = _trains(expert.patch_embedding.parameters())
    for block in expert.blocks:
        yield hidden, text, time
        hidden = hidden or text or time or _trains(block.parameters())


def _trains(parameters: Iterable[nn.Parameter]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)


def _remove_idle_dropout(block: nn.Module) -> None:
    """Dropout of probability 0 does nothing but tie the graph to training or evaluation mode."""
    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout) and child.p == 0:
                setattr(module, name, nn.Identity())
