"""Loading: dtypes, memory, and every way a model directory can be wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from rl_training.tests.models.families import FAMILIES, FRAMES, HEIGHT, WIDTH, Loaded, model_spec, prompts
from wan_trainer.config.specs import Family, LoraSpec
from wan_trainer.models.wan.directory import read_directory
from wan_trainer.models.wan.load import load_wan
from wan_trainer.models.wan.text import encode_prompts
from wan_trainer.models.wan.vae import decode
from wan_trainer.types import UserError

WEIGHTS = "diffusion_pytorch_model.safetensors"
TEXT_WEIGHTS = "text_encoder/model.safetensors"


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_hold_the_weights_of_the_files(
    family: Family, load: Callable[..., Loaded], directories: dict[Family, Path]
) -> None:
    loaded = load(family)
    for name, expert in loaded.components.experts.items():
        reference = WanTransformer3DModel.from_pretrained(directories[family] / name)
        state, expected = expert.state_dict(), reference.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in expected)
        tables = dict(expert.named_buffers())
        assert all(torch.equal(tables[key], value) for key, value in reference.named_buffers())


def halved(directory: Path, out: Path) -> Path:
    """A copy whose transformers and text encoder are stored in bfloat16, as the published ones are."""
    shutil.copytree(directory, out)
    for file in [*out.glob("transformer*/*.safetensors"), *out.glob("text_encoder/*.safetensors")]:
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return out


def test_auto_is_float32_for_the_trained_and_the_file_dtype_for_the_frozen(
    directories: dict[Family, Path], tmp_path: Path
) -> None:
    path = halved(directories["i2v-a14b"], tmp_path / "model")
    high = load_wan(model_spec(path, "i2v-a14b", train_experts="high"), "cpu")
    assert {p.dtype for p in high.transformer.parameters()} == {torch.float32}
    assert high.transformer_2 is not None
    reference = WanTransformer3DModel.from_pretrained(path / "transformer_2", torch_dtype=torch.bfloat16)
    for (name, ours), theirs in zip(
        high.transformer_2.named_parameters(), reference.parameters(), strict=True
    ):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    assert high.transformer_2.proj_out.weight.dtype == torch.bfloat16
    assert high.text_encoder.dtype == torch.bfloat16
    assert high.vae.dtype == torch.float32
    assert not any(p.requires_grad for m in (high.text_encoder, high.vae) for p in m.parameters())

    lora = LoraSpec(rank=2, alpha=2, target_modules=("to_q",), module_prefix=None)
    frozen = load_wan(model_spec(path, "i2v-a14b", lora=lora), "cpu")
    assert frozen.transformer.proj_out.weight.dtype == torch.bfloat16
    explicit = load_wan(model_spec(path, "i2v-a14b", lora=lora, load_dtype="float32"), "cpu")
    assert {p.dtype for p in explicit.transformer.parameters()} == {torch.float32}


def test_half_precision_masters_are_refused(directories: dict[Family, Path]) -> None:
    with pytest.raises(UserError, match="bfloat16 would train weights"):
        load_wan(model_spec(directories["t2v-1.3b"], "t2v-1.3b", load_dtype="bfloat16"), "cpu")


def test_without_materializing_nothing_is_read(directories: dict[Family, Path]) -> None:
    components = load_wan(model_spec(directories["i2v-a14b"], "i2v-a14b"), "cpu", materialize=False)
    assert all(p.is_meta for expert in components.experts.values() for p in expert.parameters())


def test_offloaded_modules_work_and_rest_on_the_cpu(load: Callable[..., Loaded]) -> None:
    components = load("t2v-1.3b", offload_inference_models=True).components
    text = encode_prompts(components, [prompts(1)[0].prompt])
    video = decode(components, torch.zeros(1, 4, 3, 8, 8), batch_size=1)
    assert text.shape[0] == 1 and video.shape == (1, FRAMES, HEIGHT, WIDTH, 3)
    assert components.text_encoder.device.type == components.vae.device.type == "cpu"


def drop(path: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        target = root / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return damage


def truncate(path: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        data = (root / path).read_bytes()
        (root / path).write_bytes(data[: len(data) // 2])

    return damage


def rewrite(path: str, name: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    """Replace or add one tensor of a weight file; None takes it out."""

    def damage(root: Path) -> None:
        tensors = {key: tensor for key, tensor in load_file(root / path).items() if key != name}
        if value is not None:
            tensors[name] = value
        save_file(tensors, root / path, metadata={"format": "pt"})

    return damage


def write(path: str, text: str) -> Callable[[Path], None]:
    return lambda root: (root / path).write_text(text) and None


def edit_index(**changes: object) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        file = root / "model_index.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return damage


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (drop("model_index.json"), "model_index.json is missing"),
        (drop("vae"), "vae is missing, model_index.json names it"),
        (drop("transformer"), "transformer is missing, model_index.json names it"),
        (drop(f"transformer_2/{WEIGHTS}"), "transformer_2 has no diffusion_pytorch_model.safetensors"),
        (drop("text_encoder/config.json"), "text_encoder has no config.json"),
        (drop("tokenizer/tokenizer.json"), "tokenizer has no tokenizer.json"),
        (truncate(f"transformer/{WEIGHTS}"), "an interrupted copy"),
        (truncate(f"vae/{WEIGHTS}"), "an interrupted copy"),
        (truncate("text_encoder/model.safetensors"), "an interrupted copy"),
        (write("tokenizer/tokenizer.json", "{"), "holds no tokenizer that loads"),
        (write("transformer/config.json", "{"), "cannot be read"),
        (rewrite(f"transformer/{WEIGHTS}", "proj_out.bias", None), r"lacks 1 tensors \(proj_out.bias\)"),
        (rewrite(f"transformer/{WEIGHTS}", "extra", torch.zeros(1)), r"has the unknown 1 tensors \(extra\)"),
        (rewrite(f"transformer_2/{WEIGHTS}", "proj_out.bias", torch.zeros(3)), r"bias has shape \(3,\)"),
        (rewrite(f"vae/{WEIGHTS}", "post_quant_conv.bias", None), "vae lacks 1 tensors"),
        (rewrite(f"vae/{WEIGHTS}", "post_quant_conv.bias", torch.zeros(3)), "vae (does not load|misshapes)"),
        (rewrite(TEXT_WEIGHTS, "encoder.final_layer_norm.weight", None), "text_encoder lacks 1 tensors"),
        (rewrite(TEXT_WEIGHTS, "encoder.final_layer_norm.weight", torch.zeros(3)), "text_encoder"),
        (edit_index(boundary_ratio=None), "boundary_ratio is None"),
        (edit_index(_class_name="StableDiffusionPipeline"), "no Wan text- or image-to-video pipeline"),
        (edit_index(transformer_2=[None, None]), "no supported Wan family"),
    ],
)
def test_a_damaged_directory_is_one_line(
    damage: Callable[[Path], None], line: str, directories: dict[Family, Path], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(directories["i2v-a14b"], path)
    damage(path)
    with pytest.raises(UserError, match=line) as caught:
        load_wan(model_spec(path, "i2v-a14b"), "cpu")
    assert all("\n" not in problem and str(path) in problem for problem in caught.value.problems)


def test_a_missing_directory_and_a_wrong_family_are_one_line(directories: dict[Family, Path]) -> None:
    with pytest.raises(UserError, match="is not a directory"):
        load_wan(model_spec(Path("/no/such/model"), "t2v-1.3b"), "cpu")
    for actual in FAMILIES:
        for claimed in FAMILIES:
            if actual == claimed:
                assert read_directory(directories[actual], claimed).family == actual
                continue
            with pytest.raises(UserError, match=f"holds a {actual} pipeline but model_family is {claimed}"):
                load_wan(model_spec(directories[actual], claimed), "cpu")


def test_the_published_ti2v_index_names_the_text_pipeline(
    directories: dict[Family, Path], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(directories["ti2v-5b"], path)
    edit_index(_class_name="WanPipeline")(path)
    assert read_directory(path).family == "ti2v-5b"


def test_sharded_weights_load_and_a_missing_shard_is_named(
    directories: dict[Family, Path], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(directories["t2v-1.3b"], path)
    whole = WanTransformer3DModel.from_pretrained(path / "transformer")
    shutil.rmtree(path / "transformer")
    whole.save_pretrained(path / "transformer", max_shard_size="200KB")
    shards = sorted((path / "transformer").glob("*.safetensors"))
    assert len(shards) > 1
    loaded = load_wan(model_spec(path, "t2v-1.3b"), "cpu").transformer.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in whole.state_dict().items())
    shards[0].unlink()
    with pytest.raises(UserError, match=f"{shards[0].name} is missing, its shard index names it"):
        load_wan(model_spec(path, "t2v-1.3b"), "cpu")


def test_a_directory_is_read_without_torch(directories: dict[Family, Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from wan_trainer.models.wan.directory import read_directory\n"
        "read_directory(Path(sys.argv[1])); assert not {'torch', 'numpy', 'diffusers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(directories["ti2v-5b"])], check=True, timeout=60)
