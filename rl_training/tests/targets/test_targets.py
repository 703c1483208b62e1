"""Targets are found, imported and called, or one line says which of these failed and what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from wan_trainer.config.specs import Target
from wan_trainer.targets import construct, make_importable, source_digest
from wan_trainer.types import UserError

SOURCE = """
class Part:
    def __init__(self, power, base=1):
        self.value = base * power

def fails(reason="broken"):
    raise RuntimeError(reason + "\\nsecond line")

number = 3
"""


def target(path: str, **arguments: object) -> Target:
    return Target(path, json.dumps(arguments, sort_keys=True))


def test_the_other_keys_are_keyword_arguments(module):
    name = module(SOURCE)
    part = construct("grpo_loss", target(f"{name}.Part", power=4, base=0.5))
    assert part.value == 2.0  # pyright: ignore[reportAttributeAccessIssue]
    assert type(part).__module__ == name


@pytest.mark.parametrize(
    ("attribute", "arguments", "words"),
    [
        ("Prat", {"power": 1}, ["has no Prat", "did you mean Part?"]),
        ("zzz", {}, ["has no zzz", "name what it defines: Part, fails, number"]),
        ("number", {}, ["number is int, which cannot be called", "class or function"]),
        ("Part", {}, ["missing a required argument: 'power'", "Part(power, base=1)", "keyword arguments"]),
        ("Part", {"power": 1, "pase": 2}, ["unexpected keyword argument 'pase'", "Part(power, base=1)"]),
        ("fails", {}, ["raised RuntimeError: broken second line", ".py line 7", "mend it"]),
    ],
)
def test_what_is_wrong_with_a_target_is_one_line(module, attribute, arguments, words):
    name = module(SOURCE)
    with pytest.raises(UserError) as refused:
        construct("lr_scheduler", target(f"{name}.{attribute}", **arguments))
    (line,) = refused.value.problems
    assert line.startswith("lr_scheduler: ") and "\n" not in line
    assert all(word in line for word in [name, *words]), line


def test_a_module_that_is_not_there_says_where_it_was_searched(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    make_importable(tmp_path / "recipes")
    with pytest.raises(UserError) as refused:
        construct("trainer", target("nowhere_to_be_found.algorithm.Mine"))
    (line,) = refused.value.problems
    assert line.startswith("trainer: no module nowhere_to_be_found for nowhere_to_be_found.algorithm.Mine;")
    assert str(tmp_path / "recipes") in line and "PYTHONPATH" in line and "on every node" in line
    assert "site-packages" not in line


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import nowhere_either", "ModuleNotFoundError: No module named 'nowhere_either'"),
        ("x = (", "SyntaxError"),
        ("raise OSError('no disk')", "OSError: no disk"),
    ],
)
def test_a_module_that_does_not_import_says_why(module, source, words):
    name = module(source)
    with pytest.raises(UserError) as refused:
        construct("grpo_loss", target(f"{name}.Part"))
    (line,) = refused.value.problems
    assert line.startswith(f"grpo_loss: importing {name} for {name}.Part raised ") and words in line


def test_a_line_of_the_users_own_passes_as_it_is(module):
    name = module(
        "from wan_trainer.types import UserError\ndef part():\n    raise UserError('power: too low')"
    )
    with pytest.raises(UserError) as refused:
        construct("grpo_loss", target(f"{name}.part"))
    assert refused.value.problems == ("power: too low",)


def test_a_file_beside_the_configuration_hides_no_library(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "yaml.py").write_text("safe_load = 3")
    (tmp_path / "beside_the_recipe.py").write_text("def part():\n    return 'found'")
    make_importable(tmp_path)
    make_importable(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1 and sys.path[-1] == str(tmp_path)
    assert construct("grpo_loss", target("beside_the_recipe.part")) == "found"
    assert callable(construct("grpo_loss", target("yaml.Loader", stream="a: 1")).get_data)  # pyright: ignore
    sys.modules.pop("beside_the_recipe")


def test_the_digest_of_a_source_follows_the_whole_package(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "digested_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "loss.py").write_text("def part(): ...")
    (package / "helper.py").write_text("scale = 1")
    before = source_digest(target("digested_package.loss.part"))
    assert len(before) == 12 and source_digest(target("digested_package.other.part")) == before
    (package / "helper.py").write_text("scale = 2")
    assert source_digest(target("digested_package.loss.part")) != before
    assert source_digest(target("nowhere_to_be_found.part")) == "missing"
