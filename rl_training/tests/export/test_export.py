"""Exports: what Diffusers and PEFT load computes what the policy computed in training."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from rl_training.tests.models.families import FRAMES, HEIGHT, WIDTH, Loaded, model_spec, random_condition
from rl_training.tests.models.pipelines import load_pipeline, reference, rollout
from rl_training.tests.ranks import run_ranks
from wan_trainer.cli.main import main
from wan_trainer.config.specs import Family, LoraSpec
from wan_trainer.distributed.mesh import init_mesh
from wan_trainer.models.wan.adapter_files import adapter_configs
from wan_trainer.models.wan.base_lora_files import base_lora_sha256
from wan_trainer.models.wan.load import load_wan
from wan_trainer.models.wan.parallelize import parallelize
from wan_trainer.models.wan.policy import build_policy
from wan_trainer.recording.identity import model_identity
from wan_trainer.recording.manifest import hash_files
from wan_trainer.training.checkpoint import TrainState, save_checkpoint
from wan_trainer.training.ema import Ema

pytestmark = pytest.mark.slow

STEPS = 3
LORA = LoraSpec(rank=4, alpha=6.0, target_modules=("to_q", "to_v", "net.2"), module_prefix=None)


@dataclass(frozen=True)
class Trained:
    """A checkpoint and what the policy that was saved in it samples, from its last weights and averages."""

    checkpoint: Path
    model: Path
    x0: torch.Tensor
    averaged: torch.Tensor
    noise: torch.Tensor


def _train(directory: str, family: Family, out: str, tp: int, changes: dict[str, Any]) -> tuple[Any, ...]:
    """A few updates of every expert that is trained, a checkpoint, and rollouts without noise."""
    mesh = init_mesh("cpu", 60, tp=tp)
    spec = model_spec(Path(directory), family, **changes)
    components = load_wan(spec, "cpu", materialize=False)
    policy = parallelize(build_policy(components, spec, 1.0, seed=0), spec, mesh, seed=0)
    optimizer = torch.optim.AdamW([parameter for _, parameter in policy.trainable()], lr=5e-3)
    ema = Ema(policy.trainable(), 0.5)
    shape = policy.latent_shape(FRAMES, HEIGHT, WIDTH)
    x_t = torch.randn(1, *shape, generator=torch.Generator().manual_seed(4))
    for sigma in (0.95, 0.5, 0.95, 0.5):
        if policy.trains_at(sigma):
            policy.velocity(x_t, sigma, random_condition(policy, 1, shape)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
    save_checkpoint(
        Path(out),
        TrainState(4, 0, 4, 4, 1, mesh.world, None, {}),
        policy,
        optimizer,
        mesh,
        keep=0,
        ema=ema,
        adapters=adapter_configs(policy.experts, spec.path),
    )
    loaded = Loaded(spec, components, policy)
    x0, noise, _ = rollout(loaded, 1, 1.0, STEPS)
    for expert in policy.experts.values():
        expert.reshard()
    with torch.no_grad():
        for name, parameter in policy.trainable():
            parameter.copy_(ema.averages[name])
    averaged, _, _ = rollout(loaded, 1, 1.0, STEPS)
    return x0.tolist(), averaged.tolist(), noise.tolist()


def _trained(root: Path, model: Path, family: Family, world: int, tp: int, **changes: Any) -> Trained:
    arguments = (str(model), family, str(root), tp, changes)
    values = (torch.tensor(value) for value in run_ranks(world, _train, *arguments)[0])
    configs = model_identity(model, family)
    record = {"model": {"path": str(model), "configs": configs.configs, "weights": configs.weights}}
    (root / "run.json").write_text(json.dumps(record))
    return Trained(root / "checkpoint-4", model, *values)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, tiny_ti2v: Path) -> Trained:
    """All weights of a 5B policy, trained on two ranks that shared them."""
    return _trained(tmp_path_factory.mktemp("full"), tiny_ti2v, "ti2v-5b", world=2, tp=1)


@pytest.fixture(scope="module")
def high(tmp_path_factory: pytest.TempPathFactory, tiny_a14b: Path) -> Trained:
    """The high-noise expert of an A14B policy, trained by two tensor-parallel ranks."""
    root = tmp_path_factory.mktemp("high")
    return _trained(root, tiny_a14b, "i2v-a14b", world=2, tp=2, train_experts="high")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, tiny_a14b: Path) -> Trained:
    """Adapters on both experts of an A14B policy whose blocks were compiled."""
    root = tmp_path_factory.mktemp("adapted")
    return _trained(root, tiny_a14b, "i2v-a14b", world=1, tp=1, lora=LORA, compile_backend="eager")


def export(checkpoint: Path, out: Path, to: str, *words: str) -> Path:
    """The command, as typed."""
    assert main(["export", str(checkpoint), "--to", to, "--out", str(out), *words]) == 0
    return out


def assert_samples(pipeline: Any, trained: Trained, expected: torch.Tensor) -> None:
    """The pipeline's latents are those of the policy, to rounding."""
    found, _ = reference(pipeline, 0, trained.noise, 1.0, STEPS)
    if pipeline.config.expand_timesteps:  # Diffusers pins the first frame only after its last callback
        found, expected = found[:, :, 1:], expected[:, :, 1:]
    assert (found - expected).abs().max() < 1e-5


def test_full_weights_and_their_averages_sample_what_the_policy_sampled(
    full: Trained, tmp_path: Path
) -> None:
    before, _ = reference(load_pipeline(full.model, "ti2v-5b"), 0, full.noise, 1.0, STEPS)
    assert (before - full.x0)[:, :, 1:].abs().max() > 1e-2, "training changed nothing: nothing is compared"
    assert (full.averaged - full.x0).abs().max() > 1e-3

    last = export(full.checkpoint, tmp_path / "last", "diffusers")
    assert_samples(load_pipeline(last, "ti2v-5b"), full, full.x0)
    # By its run, the newest checkpoint is meant.
    averages = export(full.checkpoint.parent, tmp_path / "averages", "diffusers", "--ema")
    assert_samples(load_pipeline(averages, "ti2v-5b"), full, full.averaged)

    weights = "diffusion_pytorch_model.safetensors"
    assert not os.path.samefile(last / "transformer" / weights, full.model / "transformer" / weights)
    assert os.path.samefile(last / "vae" / weights, full.model / "vae" / weights), "no second copy"
    for name in ("model_index.json", "vae/config.json", "transformer/config.json"):
        assert (last / name).read_bytes() == (full.model / name).read_bytes()
        assert not os.path.samefile(last / name, full.model / name), "editing one must not change the other"
    assert json.loads((averages / "export.json").read_text())["weights"] == "averages"


def test_half_precision_keeps_what_diffusers_keeps_in_float32(full: Trained, tmp_path: Path) -> None:
    out = export(full.checkpoint, tmp_path / "half", "diffusers", "--dtype", "bfloat16")
    tensors = load_file(out / "transformer" / "diffusion_pytorch_model.safetensors")
    assert tensors["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16
    assert tensors["condition_embedder.time_embedder.linear_1.weight"].dtype == torch.float32
    assert tensors.keys() == load_file(full.model / "transformer/diffusion_pytorch_model.safetensors").keys()


def test_shards_are_those_of_the_base(full: Trained, tmp_path: Path) -> None:
    base = tmp_path / "base"
    export(full.checkpoint, base, "diffusers")
    transformer = base / "transformer"
    whole = load_file(transformer / "diffusion_pytorch_model.safetensors")
    (transformer / "diffusion_pytorch_model.safetensors").unlink()
    names = sorted(whole)
    shards = {"first.safetensors": names[::2], "second.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: torch.zeros_like(whole[name]) for name in members}, transformer / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": {n: s for s, m in shards.items() for n in m}}
    (transformer / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    (transformer / "diffusion_pytorch_model.bin").write_bytes(b"weights of before, in another format")
    (full.checkpoint.parent / "run.json").rename(full.checkpoint.parent / "away.json")
    try:
        out = export(full.checkpoint, tmp_path / "out", "diffusers", "--model", str(base))
    finally:
        (full.checkpoint.parent / "away.json").rename(full.checkpoint.parent / "run.json")
    assert sorted(path.name for path in (out / "transformer").iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors.index.json",
        *shards,
    ]
    for shard, members in shards.items():
        tensors = load_file(out / "transformer" / shard)
        assert all(torch.equal(tensors[name], whole[name]) for name in members)
    written = json.loads((out / "transformer" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert written["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())


def test_one_trained_expert_of_two(high: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = export(high.checkpoint, tmp_path / "out", "diffusers")
    assert_samples(load_pipeline(out, "i2v-a14b"), high, high.x0)
    weights = "transformer_2/diffusion_pytorch_model.safetensors"
    assert os.path.samefile(out / weights, high.model / weights)
    said = capsys.readouterr().out
    assert "transformer: trained, float32" in said and "transformer_2: unchanged" in said
    assert main(["export", str(high.checkpoint), "--to", "lora", "--out", str(tmp_path / "lora")]) == 2
    assert "holds no adapters, all weights were trained: use --to diffusers" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing half-written is left"


def test_adapters_load_into_diffusers_and_peft_and_merge(adapted: Trained, tmp_path: Path) -> None:
    base = load_pipeline(adapted.model, "i2v-a14b")
    before, _ = reference(base, 0, adapted.noise, 1.0, STEPS)
    assert (before - adapted.x0).abs().max() > 1e-3, "training changed nothing: nothing is compared"

    files = export(adapted.checkpoint, tmp_path / "lora", "lora")
    base.load_lora_weights(files / "transformer")
    base.load_lora_weights(files / "transformer_2", load_into_transformer_2=True)
    assert_samples(base, adapted, adapted.x0)

    merged = export(adapted.checkpoint, tmp_path / "merged", "diffusers")
    assert_samples(load_pipeline(merged, "i2v-a14b"), adapted, adapted.x0)

    peft = load_pipeline(adapted.model, "i2v-a14b")
    for name in ("transformer", "transformer_2"):
        wrapped = PeftModel.from_pretrained(getattr(peft, name), adapted.checkpoint / "lora" / name)
        setattr(peft, name, wrapped.base_model.model)
    assert_samples(peft, adapted, adapted.x0)

    averages = export(adapted.checkpoint, tmp_path / "averages", "lora", "--ema")
    base.unload_lora_weights()
    base.load_lora_weights(averages / "transformer")
    base.load_lora_weights(averages / "transformer_2", load_into_transformer_2=True)
    assert_samples(base, adapted, adapted.averaged)


def started_from(trained: Trained, path: Path, run: Path) -> Path:
    """A copy of a checkpoint that says its run's weights started from `path`."""
    return with_state(trained, run, started_from=str(path))


def with_state(trained: Trained, run: Path, **changes: object) -> Path:
    """A copy of a checkpoint with another train_state.json."""
    checkpoint = run / "checkpoint-4"
    shutil.copytree(trained.checkpoint, checkpoint)
    shutil.copy(trained.checkpoint.parent / "run.json", run)
    state = json.loads((checkpoint / "train_state.json").read_text())
    (checkpoint / "train_state.json").write_text(json.dumps({**state, **changes}))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name, entry in hash_files(checkpoint, [checkpoint / "train_state.json"]).items():
        manifest["files"][name] = {"size": entry.size, "sha256": entry.sha256}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return checkpoint


def test_what_is_frozen_is_what_the_run_started_with(
    high: Trained, adapted: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = "transformer/diffusion_pytorch_model.safetensors"
    low = weights.replace("transformer/", "transformer_2/")

    # Adapters on the whole weights of another run's checkpoint.
    on_trained = export(
        started_from(adapted, high.checkpoint, tmp_path / "a"), tmp_path / "a out", "diffusers"
    )
    on_model = export(adapted.checkpoint, tmp_path / "b out", "diffusers")
    moved, merged = load_file(on_trained / weights), load_file(on_model / weights)
    trained = load_file(export(high.checkpoint, tmp_path / "c out", "diffusers") / weights)
    model = load_file(adapted.model / weights)
    assert any((trained[name] - model[name]).abs().max() > 1e-3 for name in model)
    for name, tensor in moved.items():
        torch.testing.assert_close(tensor - merged[name], trained[name] - model[name], rtol=0, atol=1e-6)
    assert (on_trained / low).read_bytes() == (on_model / low).read_bytes(), "that run did not train this one"

    # An expert that was not trained, from a directory of weights.
    start = tmp_path / "start" / "transformer_2"
    start.mkdir(parents=True)
    halved = {name: tensor / 2 for name, tensor in load_file(high.model / low).items()}
    save_file(halved, start / "diffusion_pytorch_model.safetensors")
    checkpoint = started_from(high, start.parent, tmp_path / "d")
    capsys.readouterr()
    out = export(checkpoint, tmp_path / "d out", "diffusers")
    found = load_file(out / low)
    assert all(torch.equal(found[name], tensor) for name, tensor in halved.items())
    assert f"transformer_2: not trained, as in {start.parent}, float32" in capsys.readouterr().out
    shutil.rmtree(start.parent)
    assert main(["export", str(checkpoint), "--to", "diffusers", "--out", str(tmp_path / "e out")]) == 2
    said = capsys.readouterr().err
    assert "the weights the run started from" in said and "does not exist" in said and said.count("\n") == 1


def test_a_base_lora_is_in_what_the_checkpoint_does_not_hold(
    high: Trained, adapted: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: f"{name}/diffusion_pytorch_model.safetensors" for name in ("transformer", "transformer_2")}
    layer = "blocks.1.attn1.to_k"
    generator = torch.Generator().manual_seed(2)
    down, up = (torch.randn(shape, generator=generator) for shape in ((2, 64), (64, 2)))
    pair = {f"transformer.{layer}.lora_A.weight": down, f"transformer.{layer}.lora_B.weight": up}
    lora = tmp_path / "base.safetensors"
    save_file(pair, lora)
    digest = base_lora_sha256(lora, list(files))
    contract = {"model": {"base_lora": str(lora), "base_lora_sha256": digest}}

    def difference(trained: Trained, name: str) -> tuple[dict[str, torch.Tensor], Path]:
        """What the weights of an export are more than without the adapter."""
        plain = export(trained.checkpoint, tmp_path / f"{name} plain", "diffusers")
        out = export(
            with_state(trained, tmp_path / name, contract=contract), tmp_path / f"{name} out", "diffusers"
        )
        pairs = {expert: (load_file(out / file), load_file(plain / file)) for expert, file in files.items()}
        return {
            f"{expert}.{key}": tensor - before[key]
            for expert, (after, before) in pairs.items()
            for key, tensor in after.items()
            if not torch.equal(tensor, before[key])
        }, out

    moved, _ = difference(adapted, "a")
    assert moved.keys() == {f"{expert}.{layer}.weight" for expert in files}
    for tensor in moved.values():
        torch.testing.assert_close(tensor, up @ down, rtol=0, atol=1e-5)
    assert f"transformer: trained, adapters merged after base_lora {lora}" in capsys.readouterr().out
    # The other expert is whole in the checkpoint: what was merged into it before training is in there.
    moved, _ = difference(high, "b")
    assert moved.keys() == {f"transformer_2.{layer}.weight"}
    assert f"transformer_2: not trained, base_lora {lora} merged, float32" in capsys.readouterr().out

    out = export(tmp_path / "a" / "checkpoint-4", tmp_path / "lora", "lora")
    said = f"apply to weights into which base_lora {lora} is merged"
    assert said in capsys.readouterr().out and said in (out / "export.json").read_text()
    save_file({name: 2 * tensor for name, tensor in pair.items()}, lora)
    for line in ("is no longer what", "does not exist"):
        words = [
            "export",
            str(tmp_path / "a" / "checkpoint-4"),
            "--to",
            "diffusers",
            "--out",
            str(tmp_path / "c"),
        ]
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("base_lora: ") and line in said and said.count("\n") == 1
        lora.unlink(missing_ok=True)


def test_adapter_files_hold_adapters_only_and_say_how_to_use_them(adapted: Trained, tmp_path: Path) -> None:
    exported = export(adapted.checkpoint, tmp_path / "lora", "lora")
    manifest = json.loads((adapted.checkpoint / "manifest.json").read_text())
    for expert in ("transformer", "transformer_2"):
        assert f"lora/{expert}/adapter_model.safetensors" in manifest["files"]
        for directory in (adapted.checkpoint / "lora" / expert, exported / expert):
            config = json.loads((directory / "adapter_config.json").read_text())
            assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 6.0)
            assert config["base_model_name_or_path"] == str(adapted.model / expert)
            tensors = load_file(directory / "adapter_model.safetensors")
            layers = ("attn1.to_q", "attn1.to_v", "attn2.to_q", "attn2.to_v", "ffn.net.2")
            assert tensors.keys() == {
                f"base_model.model.blocks.{block}.{layer}.lora_{side}.weight"
                for block in range(2)
                for layer in layers
                for side in "AB"
            }
            assert all(tensor.any() and tensor.dtype == torch.float32 for tensor in tensors.values())
    for file in tmp_path.rglob("*.safetensors"):
        assert file.stat().st_mode == (file.parent / "adapter_config.json").stat().st_mode
        assert not any("_orig_mod" in name or "base_layer" in name for name in load_file(file))


@pytest.fixture
def damaged(full: Trained) -> Iterator[Path]:
    """A checkpoint with one flipped byte, mended afterwards."""
    shard = next((full.checkpoint / "state").glob("*.distcp"))
    content = shard.read_bytes()
    middle = len(content) // 2
    shard.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    yield full.checkpoint
    shard.write_bytes(content)


def test_damage_is_refused_before_anything_is_written(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out"
    assert main(["export", str(damaged), "--to", "diffusers", "--out", str(out)]) == 2
    assert "its bytes differ from the manifest's sha256" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_one_line(
    full: Trained, adapted: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    checkpoint = str(full.checkpoint)
    out = str(tmp_path / "out")
    refused = {
        (checkpoint, str(taken)): "exists: name a directory that is not there yet with --out",
        (checkpoint, str(tmp_path / "file" / "out")): "cannot be written",
        (checkpoint, f"{checkpoint}/out"): "is in the checkpoint",
        (str(tmp_path), out): "holds no complete checkpoint",
        (str(tmp_path / "nowhere"), out): "is no directory",
        (checkpoint, out, "--model", str(adapted.model)): "is not the model that the run started from",
        (checkpoint, out, "--model", str(tmp_path)): "model_index.json",
    }
    (tmp_path / "file").write_text("")
    for (source, target, *words), line in refused.items():
        assert main(["export", source, "--to", "diffusers", "--out", target, *words]) == 2
        said = capsys.readouterr().err
        assert line in said and said.count("\n") == 1, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]
