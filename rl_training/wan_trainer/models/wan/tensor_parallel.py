"""Tensor parallelism of a Wan transformer: attention heads and feed-forward width over the tp ranks."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as collectives
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from wan_trainer.models.wan.lora import ADAPTER

_COLUMN_WISE = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q", "attn2.to_k", "attn2.to_v")
_ROW_WISE = ("attn1.to_out.0", "attn2.to_out.0", "ffn.net.2")
_FFN_IN = "ffn.net.0.proj"


def split_over_heads(expert: WanTransformer3DModel, mesh: DeviceMesh) -> None:
    """Give each rank of the one-axis `mesh` its heads and its share of the feed-forward width, in place.

    Queries, keys, values and the feed-forward's first matrix are split by column (output features), the
    attention's and the feed-forward's last matrix by row, so that a block needs one all-reduce after each. A
    module whose input feeds several split matrices sees it once, hence one all-reduce of its gradient. What
    lies between blocks, and what is small within them, is whole on every rank, with equal values: all ranks
    compute it from equal inputs. Meta tensors stay on meta; other tensors are cut without communication, for
    every rank has loaded the same. Names are unchanged, adapters included.

    The number of heads and the feed-forward width must be multiples of the number of ranks
    (`architecture.check_heads`).
    """
    ranks = mesh.size()
    styles = _styles()
    for block in expert.blocks:
        assert isinstance(block, nn.Module)
        plan: dict[str, ParallelStyle] = {
            "attn1": styles.self_attention_input,
            "attn2": styles.cross_attention_input,
            "ffn": styles.feed_forward_input,
        }
        for name in (*_COLUMN_WISE, _FFN_IN):
            plan.update(styles.column_wise(name, block.get_submodule(name)))
        for name in _ROW_WISE:
            plan.update(styles.row_wise(name, block.get_submodule(name)))
        # No rank sends its values to the others: they all have them, or all are on the meta device.
        parallelize_module(block, mesh, plan, src_data_rank=None)
        for name in ("attn1", "attn2"):
            attention: Any = block.get_submodule(name)
            assert attention.add_k_proj is None, "no supported family attends to image embeddings"
            assert attention.heads % ranks == 0, (attention.heads, ranks)
            attention.heads //= ranks
            for norm in ("norm_q", "norm_k"):
                weight = cast(nn.Parameter, getattr(attention, norm).weight)
                setattr(attention, norm, ShardedRMSNorm(weight, float(expert.config["eps"]), mesh))


class ShardedRMSNorm(nn.Module):
    """Wan's query and key norm, over the features of ALL heads, of which this rank holds a share.

    Input and output (..., features / ranks) in any dtype; computed in float32 like `torch.nn.RMSNorm`. The
    mean square is over the features of all ranks; its gradient therefore is too. The parameter is `weight`,
    of full shape, sharded.
    """

    weight: nn.Parameter

    def __init__(self, weight: nn.Parameter, eps: float, mesh: DeviceMesh) -> None:
        super().__init__()
        self.eps = eps
        self._features = weight.numel()
        self._group = mesh.get_group().group_name
        self.weight = _distributed(weight, mesh, Shard(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        total: torch.Tensor = _SumOverRanks.apply(wide.square().sum(-1, keepdim=True), self._group)
        weight = cast(DTensor, self.weight).to_local()
        return (wide * torch.rsqrt(total / self._features + self.eps) * weight).type_as(x)


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks, which every rank goes on to use for its own features.

    Each rank's use contributes to the gradient of every rank's summand, so the backward sums as well.
    """

    @staticmethod
    def forward(ctx: Any, summand: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _sum(summand, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _sum(gradients[0], ctx.group), None


def _sum(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    return collectives.wait_tensor(collectives.all_reduce(tensor.contiguous(), "sum", group))


class _Styles:
    """How modules are split."""

    def __init__(self) -> None:
        whole = Replicate()
        # (hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        self.self_attention_input = _seen_once((whole, None, None, None))
        self.cross_attention_input = _seen_once((whole, whole, None, None))
        self.feed_forward_input = _seen_once((whole,))
        self._column_wise = ColwiseParallel()
        self._row_wise = RowwiseParallel()
        self._whole = _Whole()

    def column_wise(self, name: str, layer: nn.Module) -> dict[str, ParallelStyle]:
        """The layer and, of an adapter, lora_B by column; lora_A, whose output is small, is whole.

        lora_A is a DTensor all the same: each rank's columns give a part of its gradient, which FSDP adds up.
        """
        if not isinstance(layer, LoraLayer):
            return {name: self._column_wise}
        return {
            f"{name}.base_layer": self._column_wise,
            f"{name}.lora_A.{ADAPTER}": self._whole,
            f"{name}.lora_B.{ADAPTER}": self._column_wise,
        }

    def row_wise(self, name: str, layer: nn.Module) -> dict[str, ParallelStyle]:
        """The layer and, of an adapter, lora_A by row; lora_B is whole, and equal on all ranks."""
        if not isinstance(layer, LoraLayer):
            return {name: self._row_wise}
        return {f"{name}.base_layer": self._row_wise, f"{name}.lora_A.{ADAPTER}": self._row_wise}


@cache
def _styles() -> _Styles:
    """One object for all blocks of all experts: a graph compiled for one block serves all with its styles."""
    return _Styles()


class _Whole(ParallelStyle):
    """Parameters replicated as DTensors; input and output are replicated DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, _distributed(parameter, device_mesh, Replicate()))
        return module


def _seen_once(layouts: tuple[Placement | None, ...]) -> PrepareModuleInput:
    # The stub has no None, which passes an argument through.
    known = cast(tuple[Placement], layouts)
    return PrepareModuleInput(input_layouts=known, desired_input_layouts=known)


def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    distributed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(distributed, requires_grad=parameter.requires_grad)
