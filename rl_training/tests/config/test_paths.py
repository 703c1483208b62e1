"""Where a configuration file and the paths in it are looked for."""

import shutil

import pytest

from wan_trainer.config import find_config, load_config, resolve, trainer_path, trainer_root
from wan_trainer.types import UserError

NAME = "configs/train_rl_5b_cps.yaml"


def test_the_trainer_directory_is_found_from_the_package():
    assert (trainer_root() / "wan_trainer" / "config").is_dir()
    assert (trainer_root() / NAME).is_file()


@pytest.mark.parametrize("form", ["trainer", "repository", "absolute", "caller", "caller dot"])
def test_every_form_of_config_from_another_directory(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    shutil.copy(trainer_root() / NAME, tmp_path / "mine" / "recipe.yaml")
    forms = {
        "trainer": (NAME, trainer_root() / NAME),
        "repository": (f"rl_training/{NAME}", trainer_root() / NAME),
        "absolute": (str(trainer_root() / NAME), trainer_root() / NAME),
        "caller": ("mine/recipe.yaml", tmp_path / "mine" / "recipe.yaml"),
        "caller dot": ("./mine/recipe.yaml", tmp_path / "mine" / "recipe.yaml"),
    }
    name, expected = forms[form]
    assert find_config(name, {}) == expected
    assert load_config(name).batch_size == 32


def test_a_launcher_says_where_its_caller_stood(tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text("seed: 1\n", encoding="utf-8")
    monkeypatch.chdir(trainer_root())
    environment = {"WAN_TRAINER_CALLER_DIR": str(tmp_path)}
    assert find_config("recipe.yaml", environment) == tmp_path / "recipe.yaml"
    assert find_config("../" + tmp_path.name + "/recipe.yaml", environment) == tmp_path / "recipe.yaml"


def test_a_missing_file_names_the_places_and_keeps_flag_errors(tmp_path):
    with pytest.raises(UserError) as caught:
        load_config("configs/absent.yaml", ["--sed", "1"])
    assert str(trainer_root() / "configs/absent.yaml") in caught.value.problems[0]
    assert "did you mean --seed?" in caught.value.problems[1]
    with pytest.raises(UserError, match="is not a file"):
        find_config(str(tmp_path), {})


def test_paths_of_values_start_at_the_trainer(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = resolve(load("--output_dir", "../runs/x").config, cuda_available=False)
    assert spec.output.output_dir == trainer_root().parent / "runs" / "x"
    assert spec.data.dataset_json == trainer_root() / "storage/data/dataset.json"
    assert trainer_path("/absolute/x").as_posix() == "/absolute/x"


def test_an_installation_elsewhere_names_the_trainer_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("WAN_TRAINER_ROOT", str(tmp_path))
    assert trainer_path("storage/x") == tmp_path.resolve() / "storage/x"
    monkeypatch.setenv("WAN_TRAINER_ROOT", str(tmp_path / "absent"))
    with pytest.raises(UserError, match="is not a directory"):
        trainer_root()
    monkeypatch.delenv("WAN_TRAINER_ROOT")
    monkeypatch.setattr("wan_trainer.config.paths.PACKAGE_PARENT", tmp_path)
    with pytest.raises(UserError, match="outside the repository"):
        trainer_root()
