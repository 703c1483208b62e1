"""Liger in place of Wan's norms: which modules, same names, same numbers (in Triton's interpreter)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm
from torch import nn

from wan_trainer.models.wan import liger
from wan_trainer.models.wan.liger import LigerLayerNorm, LigerRMSNorm, liger_report, replace_norms, use_liger
from wan_trainer.types import UserError

NUMERICS = Path(__file__).with_name("liger_numerics.py")


def test_the_norms_with_parameters_are_replaced_and_keep_their_names(load) -> None:
    expert = load("i2v-a14b").policy.transformer
    before = {name: parameter for name, parameter in expert.named_parameters()}
    replace_norms(expert)
    assert {name: parameter for name, parameter in expert.named_parameters()} == before
    assert list(expert.state_dict()) == list(before)
    block = expert.blocks[0]
    assert type(block.norm2) is LigerLayerNorm
    assert type(block.attn1.norm_q) is type(block.attn2.norm_k) is LigerRMSNorm
    assert type(block.norm1) is FP32LayerNorm, "it has no parameters"
    blocks = len(expert.blocks)
    assert liger_report(expert) == f"{blocks} norm2, {2 * blocks} norm_k, {2 * blocks} norm_q"


def test_norms_that_are_not_torchs_own_are_left_alone() -> None:
    class ShardedNorm(nn.RMSNorm):
        pass

    attention = nn.ModuleDict({"norm_q": ShardedNorm(8, eps=1e-6), "norm_k": nn.RMSNorm(8, eps=1e-6)})
    replace_norms(attention)
    assert type(attention["norm_q"]) is ShardedNorm
    assert liger_report(attention) == "1 norm_k"


def test_without_cuda_or_triton_it_is_refused_with_the_reason(load, monkeypatch) -> None:
    expert = load("t2v-1.3b").policy.transformer
    with pytest.raises(UserError, match=r"needs a CUDA device.*--no-use_liger_kernel"):
        use_liger(expert, torch.device("cpu"))
    monkeypatch.setattr(liger, "_missing", "No module named 'triton'")
    with pytest.raises(UserError, match=r"No module named 'triton'.*--no-use_liger_kernel"):
        use_liger(expert, torch.device("cuda"))
    assert liger_report(expert) == ""


def test_forward_and_backward_equal_torch_in_tritons_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(NUMERICS)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all equal"
