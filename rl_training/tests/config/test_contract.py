"""Contract groups: what a resumed run must keep."""

import json

import pytest

from wan_trainer.config import contract_changes, contract_digests, contract_values, public_values

GROUPS = ("model", "data", "reward", "sampler", "optimization")


@pytest.mark.parametrize(
    ("values", "group"),
    [
        ({"lora_rank": 4}, "model"),
        ({"num_frames": 85}, "data"),
        ({"shuffle": False}, "data"),
        ({"vbvr_reward_evalkit_source_sha256": "1" * 64}, "reward"),
        ({"grpo_num_sampling_steps": 10}, "sampler"),
        ({"learning_rate": 1e-3}, "optimization"),
        ({"max_off_policy_steps": 1}, "optimization"),
        ({"grpo_delayed_replay": True}, "optimization"),
    ],
)
def test_a_key_changes_the_digest_of_its_group_only(load, values, group):
    before, after = contract_digests(load().config), contract_digests(load(**values).config)
    assert {name for name in GROUPS if before[name] != after[name]} == {group}


def test_another_seed_changes_the_draws_and_the_order(load):
    before, after = contract_digests(load(seed=1).config), contract_digests(load(seed=2).config)
    assert {name for name in GROUPS if before[name] != after[name]} == {"sampler", "data"}


@pytest.mark.parametrize(
    "values",
    [
        {"max_steps": 5},
        {"num_epochs": 2.0},
        {"output_dir": "storage/elsewhere"},
        {"batch_size": 2},
        {"hsdp": True},
        {"grpo_sample_batch_size": 4},
        {"wandb_project": "x"},
        {"vbvr_reward_cpu_workers": 4},
        {"max_off_policy_steps": 0},
    ],
)
def test_length_output_and_layout_are_in_no_group(load, values):
    assert contract_digests(load().config) == contract_digests(load(**values).config)


def test_the_prompts_of_a_step_are_part_of_the_data_order(load):
    config = load().config
    assert contract_digests(config, 16)["data"] != contract_digests(config, 32)["data"]
    assert contract_digests(config, 16) == contract_digests(load(batch_size=4).config, 16)
    shared = load(grpo_shared_prompt_batch=True, batch_size=16).config
    assert contract_digests(shared) == contract_digests(config, 16)


def test_changes_are_named_by_key_and_can_be_allowed(load):
    saved = json.loads(json.dumps(contract_values(load().config)))
    current = contract_values(load(learning_rate=1e-3, fps=8).config)
    lines = contract_changes(saved, current)
    assert [line.split(":")[0] for line in lines] == ["fps", "learning_rate"]
    assert "0.001 differs from 5e-06" in lines[1] and "--allow_changed learning_rate" in lines[1]
    assert contract_changes(saved, current, ["fps", "learning_rate"]) == []
    assert contract_changes(saved, contract_values(load().config)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_rank", 8),
        ("lora_target_modules", ["to_q"]),
        ("lora_module_prefix", "low_noise"),
        ("train_experts", "low"),
    ],
)
def test_what_a_checkpoint_holds_cannot_be_allowed_to_change(load, name, value):
    saved = contract_values(load().config)
    changed = {**saved, "model": saved["model"] | {name: value}}
    (line,) = contract_changes(saved, changed, [name])
    assert line.startswith(f"{name}: ") and "another output_dir" in line
    assert "--allow_changed" not in line, "it would be followed in vain"
    del saved["model"][name]  # as in a checkpoint from before there was the key
    (line,) = contract_changes(saved, changed, [])
    assert f"--allow_changed {name}" in line and contract_changes(saved, changed, [name]) == []


def test_a_secret_is_masked_where_values_are_shown(load):
    config = load(reward="judge", vlm_reward_api_key="hush").config
    assert "hush" not in json.dumps(public_values(config))
    assert config.vlm_reward_api_key == "hush"
