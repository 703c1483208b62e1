"""The model directory: each kind of damage is one line that names the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from wan_trainer.config.family import read_family
from wan_trainer.models.wan.directory import check_directory
from wan_trainer.models.wan.weight_files import count_adapter_elements, count_elements

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def model(tiny_ti2v: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_ti2v, tmp_path / "copy"))


def only(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    return lines[0]


def test_every_tiny_family_passes(tiny_ti2v, tiny_a14b, tiny_t2v):
    assert check_directory(tiny_ti2v, "ti2v-5b") == []
    assert check_directory(tiny_a14b, "i2v-a14b") == []
    assert check_directory(tiny_t2v, "t2v-1.3b") == []


def test_another_family_is_named_with_the_flag(tiny_ti2v, tiny_a14b):
    assert "--model_family ti2v-5b" in only(check_directory(tiny_ti2v, "i2v-a14b"))
    assert "--model_family i2v-a14b" in only(check_directory(tiny_a14b, "t2v-1.3b"))


def test_wrong_conditioning_channels_are_named(model):
    path = model / "transformer" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "in_channels": config["in_channels"] + 4}))
    assert "in_channels" in only(check_directory(model, "ti2v-5b"))


@pytest.mark.parametrize(
    "file",
    [
        "transformer/config.json",
        f"transformer/{WEIGHTS}",
        "vae/config.json",
        f"vae/{WEIGHTS}",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer_config.json",
        "tokenizer/tokenizer.json",
        "scheduler/scheduler_config.json",
    ],
)
def test_a_missing_and_an_empty_file_are_named(model, file):
    path = model / file
    path.write_bytes(b"")
    line = only(check_directory(model, "ti2v-5b"))
    assert str(path) in line and "empty" in line
    path.unlink()
    line = only(check_directory(model, "ti2v-5b"))
    assert str(path.parent) in line and path.name in line


def test_a_truncated_weight_file_is_told_from_a_whole_one(model):
    path = model / "vae" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])
    assert "interrupted copy" in only(check_directory(model, "ti2v-5b"))
    path.write_bytes(b"version https://git-lfs" * 10)
    assert "not a safetensors file" in only(check_directory(model, "ti2v-5b"))


def test_every_missing_shard_is_named(model):
    folder = model / "transformer"
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::3], names[1::3], names[2::3])):
        shard = f"diffusion_pytorch_model-{number + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert check_directory(model, "ti2v-5b") == []
    (folder / "diffusion_pytorch_model-00001-of-00003.safetensors").unlink()
    (folder / "diffusion_pytorch_model-00003-of-00003.safetensors").unlink()
    lines = check_directory(model, "ti2v-5b")
    assert len(lines) == 2
    assert "00001-of" in lines[0] and "00003-of" in lines[1]


def test_pickled_weights_are_recognised(model):
    (model / "transformer" / WEIGHTS).rename(model / "transformer" / "diffusion_pytorch_model.bin")
    assert "save it as safetensors" in only(check_directory(model, "ti2v-5b"))


def test_all_damage_is_said_at_once(model):
    shutil.rmtree(model / "vae")
    (model / "transformer" / "config.json").unlink()
    (model / "scheduler" / "scheduler_config.json").unlink()
    assert len(check_directory(model, "ti2v-5b")) == 3


def test_no_directory_and_no_index_are_one_line(tmp_path):
    assert "--model_path" in only(check_directory(tmp_path / "none", "ti2v-5b"))
    assert "model_index.json" in only(check_directory(tmp_path, "ti2v-5b"))
    (tmp_path / "model_index.json").write_text("[")
    assert "model_index.json" in only(check_directory(tmp_path, "ti2v-5b"))


def test_parameters_are_counted_as_diffusers_counts_them(tiny_a14b):
    transformer = WanTransformer3DModel.from_pretrained(tiny_a14b, subfolder="transformer")
    elements = sum(parameter.numel() for parameter in transformer.parameters())
    assert count_elements(tiny_a14b / "transformer") == elements
    rank = 4
    expected = sum(
        rank * (module.in_features + module.out_features)
        for name, module in transformer.named_modules()
        if name.endswith((".to_q", ".to_out.0"))
    )
    assert count_adapter_elements(tiny_a14b / "transformer", rank, ("to_q", "to_out.0")) == expected


def test_the_configuration_tells_the_family_by_the_same_rule(model, tiny_a14b, tiny_t2v):
    assert [read_family(path) for path in (model, tiny_a14b, tiny_t2v)] == ["ti2v-5b", "i2v-a14b", "t2v-1.3b"]
    index = model / "model_index.json"
    values = json.loads(index.read_text())
    index.write_text(json.dumps({**values, "_class_name": "WanPipeline"}))
    assert read_family(model) == "ti2v-5b"
    index.write_text(json.dumps({**values, "_class_name": "FluxPipeline"}))
    assert read_family(model) is None
    assert "FluxPipeline" in only(check_directory(model))
    config = model / "transformer" / "config.json"
    index.write_text(json.dumps({**values, "expand_timesteps": False}))
    config.write_text(json.dumps({**json.loads(config.read_text()), "in_channels": 12}))
    assert read_family(model) is None
    assert "image-to-video model with one transformer" in only(check_directory(model))
