"""A base LoRA in the weights: against Diffusers' own fusing, in every layout, whole and sharded."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from rl_training.tests.models.families import FRAMES, HEIGHT, WIDTH, Loaded, model_spec, random_condition
from rl_training.tests.models.pipelines import load_pipeline
from rl_training.tests.ranks import run_ranks
from wan_trainer.config.specs import Family, LoraSpec
from wan_trainer.distributed.mesh import init_mesh
from wan_trainer.models.wan.adapter_files import write_adapter, write_diffusers_adapter
from wan_trainer.models.wan.base_lora_files import base_lora_file, base_lora_sha256, check_base_lora
from wan_trainer.models.wan.load import load_wan
from wan_trainer.models.wan.parallelize import parallelize
from wan_trainer.models.wan.policy import build_policy
from wan_trainer.models.wan.reference import WithoutAdapters, frozen_copy
from wan_trainer.types import UserError

RANK, DIM, FFN = 3, 64, 128
# Diffusers' names and those of the original implementation, with the shapes of the tiny models' layers.
LAYERS = {
    "attn1.to_q": ("self_attn.q", DIM, DIM),
    "attn1.to_out.0": ("self_attn.o", DIM, DIM),
    "attn2.to_k": ("cross_attn.k", DIM, DIM),
    "ffn.net.0.proj": ("ffn.0", DIM, FFN),
    "ffn.net.2": ("ffn.2", FFN, DIM),
}
Tensors = dict[str, torch.Tensor]


def matrices(seed: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(down, up) by Diffusers' layer name, large enough to matter."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    return {
        f"blocks.{block}.{layer}": (draw(RANK, inputs), draw(outputs, RANK))
        for block in range(2)
        for layer, (_, inputs, outputs) in LAYERS.items()
    }


def write(path: Path, tensors: Tensors, **metadata: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata or None)
    return path


def diffusers_file(path: Path, seed: int = 0) -> Path:
    """Diffusers' layout without a header: alpha is the rank."""
    tensors: Tensors = {}
    for layer, (down, up) in matrices(seed).items():
        tensors[f"transformer.{layer}.lora_A.weight"] = down
        tensors[f"transformer.{layer}.lora_B.weight"] = up
    return write(path, tensors)


def original_file(path: Path) -> Path:
    """The original implementation's names with lora_down/up, an alpha and a difference of the bias each."""
    tensors: Tensors = {}
    for layer, (down, up) in matrices().items():
        block, name = layer.split(".")[1], layer.split(".", 2)[2]
        theirs = f"diffusion_model.blocks.{block}.{LAYERS[name][0]}"
        tensors[f"{theirs}.lora_down.weight"] = down.bfloat16()
        tensors[f"{theirs}.lora_up.weight"] = up.bfloat16()
        tensors[f"{theirs}.alpha"] = torch.tensor(1.5)
        tensors[f"{theirs}.diff_b"] = torch.linspace(-0.2, 0.2, len(up))
    return write(path, tensors)


def musubi_file(path: Path) -> Path:
    """Flat names, as musubi-tuner writes them: every layer of a block, with an alpha each."""
    generator = torch.Generator().manual_seed(7)
    shapes = {f"{part}_attn_{name}": (DIM, DIM) for part in ("self", "cross") for name in "qkvo"}
    tensors: Tensors = {}
    for block in range(2):
        for name, (inputs, outputs) in {**shapes, "ffn_0": (DIM, FFN), "ffn_2": (FFN, DIM)}.items():
            start = f"lora_unet_blocks_{block}_{name}"
            tensors[f"{start}.lora_down.weight"] = 0.3 * torch.randn(RANK, inputs, generator=generator)
            tensors[f"{start}.lora_up.weight"] = 0.3 * torch.randn(outputs, RANK, generator=generator)
            tensors[f"{start}.alpha"] = torch.tensor(4.0)
    return write(path, tensors)


def exported_directory(path: Path, *, diffusers: bool = True) -> Path:
    """An adapter as this trainer exports it: PEFT's layout, and Diffusers' beside it."""
    patterns = {"alpha_pattern": {"ffn.net.2": 9}, "use_rslora": True}
    config = LoraConfig(r=RANK, lora_alpha=5, target_modules=list(matrices()), **patterns).to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    tensors = {
        f"{layer}.lora_{side}.default.weight": tensor
        for layer, pair in matrices().items()
        for side, tensor in zip("AB", pair, strict=True)
    }
    write_adapter(path, plain, tensors)
    if diffusers:
        write_diffusers_adapter(path, plain, tensors)
    return path


def fused(directory: Path, family: Family, **adapters: Path) -> dict[str, Tensors]:
    """The weights of each expert after Diffusers' pipeline loaded and fused the adapters."""
    pipeline = load_pipeline(directory, family)
    for name, path in adapters.items():
        pipeline.load_lora_weights(path, load_into_transformer_2=name == "transformer_2")
        pipeline.fuse_lora(components=[name])
        pipeline.unload_lora_weights()
    return {
        name: dict(part.state_dict())
        for name in ("transformer", "transformer_2")
        if (part := getattr(pipeline, name, None)) is not None
    }


def assert_weights(loaded: Loaded, expected: dict[str, Tensors], moved: float = 0.05) -> None:
    for name, expert in loaded.components.experts.items():
        state = expert.state_dict()
        assert state.keys() == expected[name].keys()
        for key, tensor in state.items():
            assert (tensor - expected[name][key]).abs().max() < 1e-5, key
    plain = load_wan(model_spec(loaded.spec.path, loaded.spec.family), "cpu").transformer.state_dict()
    change = plain["blocks.1.ffn.net.2.weight"] - expected["transformer"]["blocks.1.ffn.net.2.weight"]
    assert change.abs().max() > moved, "the adapter does something"


def test_merged_weights_are_those_of_diffusers(
    load: Callable[..., Loaded], directories: dict[Family, Path], tmp_path: Path
) -> None:
    family: Family = "t2v-1.3b"
    plain = diffusers_file(tmp_path / "plain.safetensors")
    original = original_file(tmp_path / "original.safetensors")
    exported = exported_directory(tmp_path / "exported")
    for path in (plain, original, musubi_file(tmp_path / "musubi.safetensors"), exported):
        assert_weights(load(family, base_lora=path), fused(directories[family], family, transformer=path))
    # PEFT's layout has the same content, and its alpha in another file.
    peft = exported_directory(tmp_path / "peft", diffusers=False)
    assert_weights(load(family, base_lora=peft), fused(directories[family], family, transformer=exported))
    bias = "blocks.0.attn1.to_q.bias"
    plain_bias = load(family).components.transformer.state_dict()[bias]
    moved = load(family, base_lora=original).components.transformer.state_dict()[bias]
    torch.testing.assert_close(moved - plain_bias, torch.linspace(-0.2, 0.2, DIM), rtol=0, atol=1e-6)


def test_experts_take_one_file_or_one_each(
    load: Callable[..., Loaded], directories: dict[Family, Path], tmp_path: Path
) -> None:
    family: Family = "i2v-a14b"
    high = diffusers_file(tmp_path / "published" / "high_noise_model.safetensors", seed=1)
    low = diffusers_file(tmp_path / "published" / "low_noise_model.safetensors", seed=2)
    both = fused(directories[family], family, transformer=high, transformer_2=low)
    assert_weights(load(family, base_lora=high.parent), both)
    same = fused(directories[family], family, transformer=high, transformer_2=high)
    assert_weights(load(family, base_lora=high), same)
    (tmp_path / "own" / "transformer").mkdir(parents=True)
    shutil.copy(high, tmp_path / "own" / "transformer" / "any.safetensors")
    untouched = load(family).components.experts["transformer_2"].state_dict()
    loaded = load(family, base_lora=tmp_path / "own")
    assert_weights(loaded, {**both, "transformer_2": dict(untouched)})


def test_a_half_precision_base_is_rounded_once(directories: dict[Family, Path], tmp_path: Path) -> None:
    lora = LoraSpec(rank=2, alpha=2, target_modules=("to_q",), module_prefix=None)
    file = diffusers_file(tmp_path / "a.safetensors")
    changes: dict[str, Any] = {"lora": lora, "load_dtype": "bfloat16", "base_lora": file}
    spec = model_spec(directories["t2v-1.3b"], "t2v-1.3b", **changes)
    expert = load_wan(spec, "cpu").transformer
    stored = load_file(spec.path / "transformer" / "diffusion_pytorch_model.safetensors")
    for layer, (down, up) in matrices().items():
        exact = (stored[f"{layer}.weight"].double() + up.double() @ down.double()).to(torch.bfloat16)
        found = expert.get_parameter(f"{layer}.weight")
        assert found.dtype == torch.bfloat16
        # Exact sums that lie on a tie of bfloat16 may go either way from float32; nothing else may differ.
        assert (found != exact).float().mean() < 1e-3


def _shards(directory: str, lora: str) -> list[tuple[str, list[Any]]]:
    """The whole tensors of a policy that is sharded both ways, whose frozen copy is equal to the bit."""
    mesh = init_mesh("cpu", 60, tp=2)
    spec = model_spec(Path(directory), "t2v-1.3b", base_lora=Path(lora))
    components = load_wan(spec, mesh.device, materialize=False)
    policy = parallelize(build_policy(components, spec, 1.0, seed=0), spec, mesh, seed=0)
    copy = frozen_copy(components, spec, mesh, 1.0, seed=0)
    found: list[tuple[str, list[Any]]] = []
    for (name, own), (_, frozen) in zip(policy.named_parameters(), copy.named_parameters(), strict=True):
        assert isinstance(own, DTensor) and isinstance(frozen, DTensor)
        assert torch.equal(own.to_local(), frozen.to_local()), name
        found.append((name.removeprefix("transformer."), own.full_tensor().tolist()))
    return found


def test_every_rank_merges_into_its_own_shard(
    load: Callable[..., Loaded], directories: dict[Family, Path], tmp_path: Path
) -> None:
    file = original_file(tmp_path / "a.safetensors")
    whole = load("t2v-1.3b", base_lora=file).components.transformer.state_dict()
    found = run_ranks(4, _shards, str(directories["t2v-1.3b"]), str(file))
    assert found[1:] == found[:-1] and {name for name, _ in found[0]} == whole.keys()
    for name, values in found[0]:
        torch.testing.assert_close(torch.tensor(values), whole[name], rtol=0, atol=1e-6)


def test_the_reference_of_adapters_is_the_merged_base(load: Callable[..., Loaded], tmp_path: Path) -> None:
    file = diffusers_file(tmp_path / "a.safetensors")
    merged = load("t2v-1.3b", base_lora=file).policy
    spec = LoraSpec(rank=2, alpha=2, target_modules=("to_q", "ffn.net.2"), module_prefix=None)
    adapted = load("t2v-1.3b", base_lora=file, lora=spec).policy
    with torch.no_grad():
        for name, parameter in adapted.trainable():
            if "lora_B" in name:
                parameter.fill_(0.1)
        shape = merged.latent_shape(FRAMES, HEIGHT, WIDTH)
        x_t = torch.randn(1, *shape, generator=torch.Generator().manual_seed(4))
        condition = random_condition(merged, 1, shape)
        expected = merged.velocity(x_t, 0.5, condition)
        assert torch.equal(WithoutAdapters(adapted)(x_t, 0.5, condition), expected)
        assert not torch.equal(adapted.velocity(x_t, 0.5, condition), expected)


def renamed(path: Path, before: str, after: str) -> Path:
    return write(path, {name.replace(before, after): t for name, t in load_file(path).items()})


def dropped(path: Path, word: str) -> Path:
    return write(path, {name: tensor for name, tensor in load_file(path).items() if word not in name})


def narrowed(path: Path) -> Path:
    return write(path, {name: t[:, :-1] if "lora_A" in name else t for name, t in load_file(path).items()})


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda p: p.with_name("none.safetensors"), "does not exist"),
        (lambda p: shutil.copy(p, p.with_suffix(".bin")) and p.with_suffix(".bin"), r"is no .safetensors"),
        (lambda p: p.write_bytes(p.read_bytes()[:-9]) and p, "an interrupted copy"),
        (lambda p: (p.parent / "empty").mkdir() or p.parent / "empty", "holds no .safetensors file"),
        (lambda p: shutil.copy(p, p.with_name("b.safetensors")) and p.parent, "holds 2 .safetensors files"),
        (lambda p: renamed(p, "to_q", "to_query"), r"4 of its keys|2 of its keys match no linear layer"),
        (
            lambda p: renamed(p, "transformer.", "text_encoder."),
            r"match no linear layer of the model \(first",
        ),
        (lambda p: renamed(p, "attn1.to_q.lora_A", "attn1.to_q.hada_w1"), "match no linear layer"),
        (lambda p: renamed(p, "attn1.to_q", "attn1.norm_q"), "is for a weight of|has shape"),
        (lambda p: dropped(p, "0.attn1.to_q.lora_B"), "is no pair of matrices"),
        (lambda p: renamed(p, "transformer.", "diffusion_model."), "that Diffusers reads"),
        (lambda p: renamed(p, "transformer.", "base_model.model."), "adapter_config.json, which states its"),
        (lambda p: renamed(p, "ffn.net.2.lora_A.weight", "ffn.net.2.dora_scale"), "is a DoRA"),
        (narrowed, r"is for a weight of \(64, 63\), and the model's has \(64, 64\)"),
    ],
)
def test_what_cannot_be_merged_is_one_line(
    make: Callable[[Path], Path], line: str, directories: dict[Family, Path], tmp_path: Path
) -> None:
    path = make(diffusers_file(tmp_path / "a.safetensors"))
    problems = check_base_lora(path, ["transformer"])
    if not problems:
        with pytest.raises(UserError) as caught:
            load_wan(
                model_spec(directories["t2v-1.3b"], "t2v-1.3b", base_lora=path), "cpu", materialize=False
            )
        problems = list(caught.value.problems)
    assert all(problem.startswith("base_lora: ") and "\n" not in problem for problem in problems)
    assert re.search(line, problems[0]), problems


def test_files_are_found_and_told_apart(tmp_path: Path) -> None:
    file = diffusers_file(tmp_path / "a" / "a.safetensors")
    copy = diffusers_file(tmp_path / "b" / "other.safetensors")
    assert base_lora_file(file, "transformer") == base_lora_file(file.parent, "transformer_2") == file
    digest = base_lora_sha256(file, ["transformer"])
    assert digest == base_lora_sha256(copy.parent, ["transformer"]), "where it lies is no part of it"
    assert digest != base_lora_sha256(file, ["transformer", "transformer_2"])
    assert digest != base_lora_sha256(diffusers_file(tmp_path / "c.safetensors", 5), ["transformer"])
    (line,) = check_base_lora(
        diffusers_file(tmp_path / "d/transformer_2/x.safetensors").parents[1], ["transformer"]
    )
    assert "is for an expert that the model has not" in line
    peft = exported_directory(tmp_path / "peft", diffusers=False)
    before = base_lora_sha256(peft, ["transformer"])
    config = json.loads((peft / "adapter_config.json").read_text())
    (peft / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 99}))
    assert base_lora_sha256(peft, ["transformer"]) != before, "alpha is part of an adapter"
