import json
import re
import shutil
from pathlib import Path

import pytest

from wan_trainer.config import load_config, resolve, trainer_root
from wan_trainer.data.dataset import load_dataset
from wan_trainer.data.prompt_list import read_prompts
from wan_trainer.models.wan.directory import read_directory
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.tiny import world as tiny_world
from wan_trainer.tiny.warmup import WarmupSpec
from wan_trainer.tiny.world import World, build, evalkit_source
from wan_trainer.types import UserError

SHORT = WarmupSpec(steps=2, batch_size=2, clips=4)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build(tmp_path_factory.mktemp("world") / "quickstart", warmup=SHORT)


def times(root: Path) -> dict[Path, int]:
    return {
        path: path.stat().st_mtime_ns for path in root.rglob("*") if path.name not in (".lock", "world.json")
    }


def test_world_is_what_the_quickstart_config_needs(built: World) -> None:
    overrides = [*built.overrides, "--output_dir", str(built.root / "run"), "--device", "cpu"]
    config = load_config(trainer_root() / "configs" / "quickstart.yaml", overrides)
    spec = resolve(config, cuda_available=False)
    dataset = load_dataset(spec.data)
    assert len(dataset) == 24
    assert {sample.task for sample in dataset} == {task.name for task in tiny_world.TASKS}
    assert spec.model.path == built.model
    assert (built.model / "model_index.json").is_file()
    rule = spec.reward.rule
    assert rule is not None and source_sha256(rule.evalkit_dir) == rule.source_sha256


def test_quickstart_pins_the_evaluator_of_the_repository() -> None:
    text = (trainer_root() / "configs" / "quickstart.yaml").read_text()
    pinned = re.search(r"^vbvr_reward_evalkit_source_sha256: (\w+)$", text, re.MULTILINE)
    assert pinned is not None
    assert pinned[1] == source_sha256(evalkit_source())


def test_second_build_writes_nothing(built: World) -> None:
    before = times(built.root)
    lines: list[str] = []
    assert build(built.root, warmup=SHORT, progress=lines.append) == built
    assert times(built.root) == before
    assert [line for line in lines if "building" in line] == []
    facts = json.loads((built.root / "world.json").read_text())
    assert facts["evalkit_sha256"] == built.evalkit_sha256
    assert facts["overrides"] == list(built.overrides)


def test_only_stale_parts_are_rebuilt_and_partial_ones_replaced(built: World, tmp_path: Path) -> None:
    root = Path(shutil.copytree(built.root, tmp_path / "copy"))
    (root / ".evalkit.key").write_text("older")
    shutil.rmtree(root / "dataset")
    lines: list[str] = []
    again = build(root, warmup=SHORT, progress=lines.append)
    assert {line.split(":")[0] for line in lines if "building" in line} == {"dataset", "evalkit"}
    assert again.dataset_json.is_file()
    assert not [path for path in root.iterdir() if path.name.endswith((".partial", ".previous"))]


def test_foreign_directories_and_edited_evaluators_are_refused(built: World, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "model").mkdir(parents=True)
    (foreign / "model" / "weights").write_text("mine")
    with pytest.raises(UserError, match="is in the way"):
        build(foreign, warmup=SHORT)
    assert (foreign / "model" / "weights").read_text() == "mine"
    edited = Path(shutil.copytree(built.root, tmp_path / "edited"))
    with (edited / "evalkit" / "run_evaluation.py").open("a") as source:
        source.write("# changed\n")
    with pytest.raises(UserError, match="changed by hand"):
        build(edited, warmup=SHORT)


def test_command_line_prints_the_facts(
    built: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiny_world, "build", lambda *_, **__: built)
    assert tiny_world.main(["--out", str(built.root)]) == 0
    assert f"dataset_json: {built.dataset_json}" in capsys.readouterr().out.splitlines()


def test_a_world_of_prompts_is_what_the_refl_quickstart_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--out", str(tmp_path / "world"), "--family", "t2v-1.3b"]
    assert tiny_world.main(arguments) == 0
    facts = json.loads((tmp_path / "world" / "world.json").read_text())
    assert f"prompts: {facts['prompts']}" in capsys.readouterr().out.splitlines()
    parts = [tmp_path / "world" / name for name in ("model", "prompts")]
    before = [times(part) for part in parts]
    assert tiny_world.main(arguments) == 0 and [times(part) for part in parts] == before

    overrides = [*facts["overrides"], "--output_dir", str(tmp_path / "run"), "--device", "cpu"]
    config = load_config(trainer_root() / "configs" / "quickstart_refl.yaml", overrides)
    spec = resolve(config, cuda_available=False)
    assert read_directory(spec.model.path, spec.model.family).family == "t2v-1.3b"
    prompts = {sample.prompt for sample in load_dataset(spec.data)}
    held_out = {sample.prompt for sample in read_prompts(Path(facts["eval_prompts"]))}
    assert len(prompts) == 24 and held_out and not prompts & held_out


def test_command_line_reports_user_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    assert tiny_world.main(["--out", str(tmp_path)]) == 2
    assert "is in the way" in capsys.readouterr().err
