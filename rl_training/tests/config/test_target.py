"""`_target_` in the configuration: every form, every error in one line, and what a resumed run compares."""

import json

import pytest
import yaml

from wan_trainer.cli.config import as_yaml
from wan_trainer.config import contract_changes, contract_values, keys, resolve
from wan_trainer.config.specs import Target
from wan_trainer.types import UserError

OPENINGS = {
    "trainer": lambda spec: spec.algorithm,
    "lr_scheduler": lambda spec: spec.optimizer.lr_schedule,
    "grpo_sde_formula": lambda spec: spec.sampler.kind,
    "grpo_loss": lambda spec: spec.grpo.loss,
    "grpo_reward_fn": lambda spec: spec.reward.trained[0].spec.target,
    "reward_monitor": lambda spec: spec.reward.monitored[0].spec.target,
}
MAPPING = {"_target_": "mine.parts.Part", "power": 0.5, "names": ["a", {"b": None}]}
EXPECTED = Target("mine.parts.Part", json.dumps({"names": ["a", {"b": None}], "power": 0.5}))


def load_own(load, *flags, name, text=""):
    """A reward of one's own has no use for the evaluator of the base."""
    unused = (
        ("--vbvr_reward_evalkit_dir", "null", "--vbvr_reward_evalkit_source_sha256", "null")
        if name == "grpo_reward_fn"
        else ()
    )
    return load(*unused, *flags, text=text)


def test_the_keys_that_take_a_target():
    assert {name for name, info in keys().items() if info.target} == set(OPENINGS)


@pytest.mark.parametrize("name", OPENINGS)
def test_a_mapping_reaches_the_resolved_run_from_yaml_and_command_line(load, name):
    text = yaml.safe_dump({name: MAPPING}, sort_keys=False)
    files = load_own(load, name=name, text=text)
    for written in (json.dumps(MAPPING), "{_target_: mine.parts.Part, power: 0.5, names: [a, {b: null}]}"):
        flags = load_own(load, f"--{name}", written, name=name)
        assert flags.config == files.config and flags.sources[name] == "cli"
    spec = resolve(files.config, cuda_available=False)
    assert OPENINGS[name](spec) == EXPECTED and hash(EXPECTED)
    assert EXPECTED.arguments == {"power": 0.5, "names": ["a", {"b": None}]}


@pytest.mark.parametrize("name", OPENINGS)
def test_what_is_printed_loads_again(load, name, tmp_path):
    loaded = load_own(load, f"--{name}", json.dumps(MAPPING), name=name)
    printed = yaml.safe_load(as_yaml(loaded))
    assert printed[name] == MAPPING


@pytest.mark.parametrize("name", OPENINGS)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{power: 1}", ["has no _target_", "name what to call"]),
        ("{_target_: Part}", ["has _target_ Part", "not an import path", "module.attribute"]),
        ("{_target_: 3}", ["has _target_ 3", "not an import path"]),
        ('{_target_: "my.parts\\nPart"}', ["has _target_ my.parts Part, which is not an import path"]),
        ("{_target_: a.b, x-y: 1}", ["'x-y' as the name of an argument"]),
        ("{_target_: a.b, x: .nan}", ["not plain data"]),
        ("[a.b]", ["is no"]),
    ],
)
def test_a_malformed_target_is_one_line(load, name, value, words):
    with pytest.raises(UserError) as refused:
        load_own(load, f"--{name}", value, name=name)
    lines = [line for line in refused.value.problems if line.startswith(f"{name} (command line): ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), refused.value.problems


def test_a_wrong_word_is_still_compared_with_the_built_in_ones(load):
    with pytest.raises(UserError, match=r"flowcp is not one of flowcps, .*did you mean flowcps"):
        load(grpo_sde_formula="flowcp")
    with pytest.raises(UserError, match="ppo is no built-in trainer; use dancegrpo"):
        load(trainer="ppo")
    with pytest.raises(UserError, match=r"grpo_loss .* clip is not a mapping with `_target_` or null"):
        load(grpo_loss="clip")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"lr_scheduler": MAPPING, "warmup_steps": 5},
            ["warmup_steps", "5 has no place in a schedule of your own", "argument of the target"],
        ),
        (
            {"grpo_sde_formula": MAPPING, "grpo_sde_noise_scale": 0.0},
            ["grpo_sde_noise_scale", "0.0 must be above 0", "teaches nothing"],
        ),
        (
            {"grpo_sde_formula": MAPPING, "grpo_cps_noise_scale_range": [0.0, 0.5]},
            ["grpo_cps_noise_scale_range", "must rise from above 0"],
        ),
        (
            {"grpo_sde_formula": MAPPING, "grpo_cps_noise_scale_range": [0.5, 0.4]},
            ["grpo_cps_noise_scale_range", "must rise from above 0"],
        ),
        (
            {"grpo_reward_fn": MAPPING},
            ["vbvr_reward_evalkit_dir and 1 more", "set for vbvr_rule", "the rewards in use are Part"],
        ),
    ],
)
def test_keys_that_only_the_built_in_parts_read_are_refused(load, values, words):
    with pytest.raises(UserError) as refused:
        load(**values)
    (line,) = refused.value.problems
    assert all(word in line for word in words), line


def test_eta_of_a_transition_of_ones_own_is_on_its_own_scale(load):
    config = load(grpo_sde_formula=MAPPING, grpo_sde_noise_scale=3.5).config
    assert resolve(config, cuda_available=False).sampler.eta == 3.5
    ranged = load(grpo_sde_formula=MAPPING, grpo_cps_noise_scale_range=[0.1, 2.0]).config
    assert resolve(ranged, cuda_available=False).sampler.eta_range == (0.1, 2.0)


def test_a_variable_is_filled_in_inside_a_target(load):
    text = "grpo_loss:\n  _target_: mine.Part\n  words: x${SUFFIX}\n  power: ${POWER}\n"
    config = load(text=text, env={"SUFFIX": "y", "POWER": "0.25"}).config
    assert config.grpo_loss == {"_target_": "mine.Part", "words": "xy", "power": 0.25}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("trainer", "optimization"),
        ("lr_scheduler", "optimization"),
        ("grpo_loss", "optimization"),
        ("grpo_sde_formula", "sampler"),
        ("grpo_reward_fn", "reward"),
    ],
)
def test_a_resumed_run_keeps_target_and_arguments(load, name, group):
    def saved(mapping):
        config = load_own(load, f"--{name}", json.dumps(mapping), name=name).config
        return json.loads(json.dumps(contract_values(config)))

    before = saved(MAPPING)
    assert before[group][name] == MAPPING
    assert contract_changes(before, saved(dict(reversed(MAPPING.items())))) == []
    for changed in ({**MAPPING, "power": 0.6}, {**MAPPING, "_target_": "mine.parts.Other"}):
        (line,) = contract_changes(before, saved(changed))
        assert line.startswith(f"{name}: ") and f"({group})" in line and f"--allow_changed {name}" in line
        assert contract_changes(before, saved(changed), [name]) == []
