"""What each layout splits, what it communicates, and that the split norm is the whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from rl_training.tests.distributed.layouts import LORA, lay_out
from rl_training.tests.models.families import FRAMES, HEIGHT, WIDTH, model_spec, random_condition
from rl_training.tests.ranks import run_ranks
from wan_trainer.distributed.mesh import Mesh, init_mesh
from wan_trainer.models.wan.load import load_wan
from wan_trainer.models.wan.parallelize import parallelize
from wan_trainer.models.wan.policy import WanPolicy, build_policy
from wan_trainer.models.wan.tensor_parallel import ShardedRMSNorm
from wan_trainer.types import UserError

pytestmark = pytest.mark.slow

FOURS = ("fsdp4", "hsdp2x2", "tp2 x fsdp2")


def _build(path: Path, mesh: Mesh, **changes: Any) -> WanPolicy:
    spec = model_spec(path, "i2v-a14b", **changes)
    policy = build_policy(load_wan(spec, "cpu", materialize=False), spec, cfg_scale=1.0, seed=3)
    return parallelize(policy, spec, mesh, seed=3)


def _split(placements: tuple[Placement, ...]) -> str:
    """A word an axis: whole, or the dim, within as many parts as tensor parallelism made of it first."""
    words = []
    for placement in placements:
        if isinstance(placement, _StridedShard):
            words.append(f"{placement.dim} within {placement.split_factor}")
        elif isinstance(placement, Shard):
            words.append(str(placement.dim))
        else:
            assert isinstance(placement, Replicate), placement
            words.append("whole")
    return ", ".join(words)


def _collectives(policy: WanPolicy) -> dict[str, dict[str, int]]:
    """Collectives by kind of a rollout's forward, and of a replay's forward and backward."""
    shape = policy.latent_shape(FRAMES, HEIGHT, WIDTH)
    x_t = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    condition = random_condition(policy, 1, shape)
    with Collectives() as rollout, torch.no_grad():
        policy.velocity(x_t, 0.95, condition)
    with Collectives() as forward:
        velocity = policy.velocity(x_t, 0.95, condition)
    with Collectives() as backward:
        velocity.square().sum().backward()
    return {"rollout": rollout.counts, "forward": forward.counts, "backward": backward.counts}


class Collectives(TorchDispatchMode):
    """Counts collectives by kind. (torch's CommDebugMode fails where checkpointing recomputes a block.)"""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            for kind in ("gather", "scatter", "reduce"):
                if kind in func.__name__:
                    self.counts[kind] = self.counts.get(kind, 0) + 1
                    break
        return func(*args, **(kwargs or {}))


def _norm_error(mesh: Mesh) -> dict[str, float]:
    """The split norm beside torch's whole one: relative errors of output and gradients."""
    tp = mesh.device_mesh["tp"]
    generator = torch.Generator().manual_seed(1)
    x, weight, upstream = (
        torch.randn(*size, generator=generator) for size in ((2, 5, 12), (12,), (2, 5, 12))
    )
    # One channel dominates: ranks that took the mean square over their own heads would differ wildly.
    x[..., 0] *= 30
    whole = nn.RMSNorm(12, eps=1e-6)
    whole.weight.data.copy_(weight)
    split = ShardedRMSNorm(nn.Parameter(weight.clone()), 1e-6, tp)
    mine = slice(mesh.tp_rank * 6, mesh.tp_rank * 6 + 6)
    inputs = x.clone().requires_grad_(), x[..., mine].clone().requires_grad_()
    outputs = whole(inputs[0]), split(inputs[1])
    (outputs[0] * upstream).sum().backward()
    (outputs[1] * upstream[..., mine]).sum().backward()
    assert (
        isinstance(split.weight.grad, DTensor) and inputs[0].grad is not None and inputs[1].grad is not None
    )
    pairs = {
        "output": (outputs[1], outputs[0][..., mine]),
        "input": (inputs[1].grad, inputs[0].grad[..., mine]),
        "weight": (split.weight.grad.full_tensor(), whole.weight.grad),
    }
    return {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}  # type: ignore[operator,union-attr]


def _neighbours(mesh: Mesh) -> tuple[int, int, list[int], list[int]]:
    """dp rank, tp rank, and the ranks of this rank's tp and shard groups."""
    groups = [mesh.device_mesh.get_group(axis) for axis in ("tp", "dp_shard")]
    tp, shard = (dist.get_process_group_ranks(group) for group in groups)
    return mesh.dp_rank, mesh.tp_rank, tp, shard


def _heads(block: nn.Module, attention: str) -> int:
    heads: Any = block.get_submodule(attention).heads
    return heads


def _adamw_differences(block: nn.Module) -> dict[str, float]:
    """Two updates by torch's other implementations, over parameters of two meshes, beside its loop."""
    weights: dict[str, list[torch.Tensor]] = {}
    parameters = list(block.parameters())
    assert len({parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}) == 2
    start = [parameter.detach().clone() for parameter in parameters]
    for kind in ("loop", "foreach", "fused"):
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=kind == "foreach", fused=kind == "fused")
        for _ in range(2):
            for number, parameter in enumerate(parameters, start=1):
                parameter.grad = parameter.detach() * number
            optimizer.step()
        weights[kind] = [p.to_local().detach().clone() for p in parameters if isinstance(p, DTensor)]
    return {
        kind: max(float((a - b).norm()) for a, b in zip(weights[kind], weights["loop"], strict=True))
        for kind in ("foreach", "fused")
    }


def inspect(path: Path) -> dict[str, Any]:
    mesh = init_mesh("cpu", 60.0, tp=2)
    report: dict[str, Any] = {"ranks": _neighbours(mesh)}
    assert _neighbours(lay_out(mesh, "tp2 x fsdp2")) == report["ranks"]
    for layout in FOURS:
        laid = lay_out(mesh, layout)
        policy = _build(path, laid)
        report[layout] = {
            "split": {
                n: _split(p.placements) for n, p in policy.named_parameters() if isinstance(p, DTensor)
            },
            "elements": sum(p.to_local().numel() for p in policy.parameters() if isinstance(p, DTensor)),
            "collectives": _collectives(policy),
            "heads": {
                _heads(block, name) for block in policy.transformer.blocks for name in ("attn1", "attn2")
            },
        }
        if layout != "hsdp2x2":
            recomputed = _collectives(_build(path, laid, gradient_checkpointing=True))
            report[layout]["recomputed"] = recomputed["backward"]
    adapted = _build(path, laid, lora=LORA)
    report["lora"] = {
        name: _split(parameter.placements)
        for name, parameter in adapted.trainable()
        if isinstance(parameter, DTensor)
    }
    report["norm"] = _norm_error(laid)
    report["adamw"] = _adamw_differences(policy.transformer.blocks[0])
    return report


@pytest.fixture(scope="module")
def reports(tiny_a14b: Path) -> list[dict[str, Any]]:
    """Reports of four ranks."""
    return run_ranks(4, inspect, tiny_a14b)


def test_tensor_parallel_groups_are_neighbours(reports: list[dict[str, Any]]) -> None:
    assert [report["ranks"] for report in reports] == [
        (0, 0, [0, 1], [0, 2]),
        (0, 1, [0, 1], [1, 3]),
        (1, 0, [2, 3], [0, 2]),
        (1, 1, [2, 3], [1, 3]),
    ]


@pytest.mark.parametrize(("layout", "expected"), [("fsdp4", "0"), ("hsdp2x2", "whole, 0")])
def test_data_parallel_layouts_split_the_first_dim_of_everything(
    reports: list[dict[str, Any]], layout: str, expected: str
) -> None:
    for report in reports:
        assert set(report[layout]["split"].values()) == {expected}
        assert report[layout]["heads"] == {2}


BY_COLUMN, BY_ROW = "0 within 2, 0", "0, 1"
TENSOR = {
    **{f"attn{i}.to_{x}.{kind}": BY_COLUMN for i in (1, 2) for x in "qkv" for kind in ("weight", "bias")},
    **{f"attn{i}.norm_{x}.weight": BY_COLUMN for i in (1, 2) for x in "qk"},
    **{f"attn{i}.to_out.0.weight": BY_ROW for i in (1, 2)},
    **{f"attn{i}.to_out.0.bias": "0, whole" for i in (1, 2)},
    "ffn.net.0.proj.weight": BY_COLUMN,
    "ffn.net.0.proj.bias": BY_COLUMN,
    "ffn.net.2.weight": BY_ROW,
    "ffn.net.2.bias": "0, whole",
    "norm2.weight": "0",
    "norm2.bias": "0",
    "scale_shift_table": "0",
}


def test_tensor_parallel_ranks_split_heads_and_feed_forward_and_keep_the_rest_whole(
    reports: list[dict[str, Any]],
) -> None:
    for report in reports:
        split = report["tp2 x fsdp2"]["split"]
        in_blocks = {name for name in split if ".blocks." in name}
        assert len(in_blocks) == 2 * 2 * len(TENSOR)
        for name in in_blocks:
            assert split[name] == TENSOR[name.split(".", 3)[3]], name
        assert {split[name] for name in split.keys() - in_blocks} == {"0"}
        assert report["tp2 x fsdp2"]["heads"] == {1}
        # Half of the blocks' matrices, and all of the rest, is more than a quarter and less than a half.
        assert (
            report["fsdp4"]["elements"] < report["tp2 x fsdp2"]["elements"] < 2 * report["fsdp4"]["elements"]
        )


def test_adapters_are_split_like_the_layer_they_are_on(reports: list[dict[str, Any]]) -> None:
    expected = {
        "attn1.to_q.lora_A": "0, whole",
        "attn1.to_q.lora_B": BY_COLUMN,
        "ffn.net.0.proj.lora_A": "0, whole",
        "ffn.net.0.proj.lora_B": BY_COLUMN,
        "attn2.to_out.0.lora_A": BY_ROW,
        "attn2.to_out.0.lora_B": "0",
        "ffn.net.2.lora_A": BY_ROW,
        "ffn.net.2.lora_B": "0",
    }
    for report in reports:
        for name, split in expected.items():
            assert report["lora"][f"transformer.blocks.1.{name}.default.weight"] == split, name


def test_collectives_of_one_step_are_counted(reports: list[dict[str, Any]]) -> None:
    # Two blocks, the time embedder and the root are gathered, and freed but for the root, which waits for a
    # backward.
    first, again, scattered = {"gather": 4}, {"gather": 3}, 4
    for report in reports:
        sharded, replicas, tensor = (report[layout] for layout in FOURS)
        back = {**again, "scatter": scattered}
        for report_of in (sharded, replicas):
            assert report_of["collectives"]["rollout"] == first
            assert report_of["collectives"]["forward"] == again
        assert sharded["collectives"]["backward"] == sharded["recomputed"] == back
        assert replicas["collectives"]["backward"] == {**back, "reduce": scattered}
        # A block: two for the norms and one for the output of each attention, one for the feed-forward.
        assert tensor["collectives"]["rollout"] == {**first, "reduce": 2 * 7}
        assert tensor["collectives"]["forward"] == {**again, "reduce": 2 * 7}
        # A block: four norms; the inputs of self-attention, cross-attention (two) and feed-forward.
        assert tensor["collectives"]["backward"] == {**back, "reduce": 2 * 8}
        assert tensor["recomputed"] == {**back, "reduce": 2 * (8 + 7)}


def test_the_split_norm_is_the_norm_over_all_heads(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert all(error < 1e-6 for error in report["norm"].values()), report["norm"]


def test_adamw_steps_over_split_and_whole_parameters_at_once(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["adamw"]["foreach"] == 0
        assert report["adamw"]["fused"] < 1e-5


def test_heads_that_tensor_parallel_ranks_cannot_share_are_one_line(tiny_a14b: Path) -> None:
    alone = Mesh(
        device_mesh=None,  # type: ignore[arg-type]
        device=torch.device("cpu"),
        rank=0,
        world=4,
        local_rank=0,
        dp_rank=0,
        dp_size=1,
        tp_rank=0,
        tp_size=4,
    )
    with pytest.raises(UserError) as refused:
        _build(tiny_a14b, alone)
    (line,) = refused.value.problems
    assert line.startswith("tensor_parallel_size: 4 does not divide the 2 attention heads")
    assert "use 2" in line
