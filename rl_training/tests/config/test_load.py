"""Files and overrides: precedence, sources, forms of a value, and errors."""

import pytest
import yaml

from wan_trainer.config import load_config, load_with_sources
from wan_trainer.types import UserError


def problems(load, *flags, **options) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        load(*flags, **options)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def test_overrides_win_over_the_file_and_the_file_over_defaults(load):
    loaded = load("--seed", "3", seed=2, fps=8)
    assert (loaded.config.seed, loaded.sources["seed"]) == (3, "cli")
    assert (loaded.config.fps, loaded.sources["fps"]) == (8, "yaml")
    assert (loaded.config.num_frames, loaded.sources["num_frames"]) == (81, "default")


def test_yaml_numbers_are_numbers(load):
    config = load(text="learning_rate: 1e-5\ngrpo_clip_range: 1E-3\nseed: 010\nnum_epochs: 5\n").config
    assert config.learning_rate == 1e-5
    assert config.grpo_clip_range == 1e-3
    assert config.seed == 10
    assert config.num_epochs == 5.0


@pytest.mark.parametrize(
    ("tokens", "key", "value"),
    [
        (["--seed", "3"], "seed", 3),
        (["--seed=3"], "seed", 3),
        (["--seed", "1", "--seed", "3"], "seed", 3),
        (["--", "--seed", "3"], "seed", 3),
        (["--learning-rate", "1e-5"], "learning_rate", 1e-5),
        (["--shuffle"], "shuffle", True),
        (["--no-shuffle"], "shuffle", False),
        (["--shuffle", "false"], "shuffle", False),
        (["--shuffle=True"], "shuffle", True),
        (["--no-grpo_delayed_replay"], "grpo_delayed_replay", False),
        (["--adam_betas", "0.1", "0.9"], "adam_betas", (0.1, 0.9)),
        (["--adam_betas", "[0.1, 0.9]"], "adam_betas", (0.1, 0.9)),
        (["--adam_betas=[0.1,0.9]"], "adam_betas", (0.1, 0.9)),
        (["--reward_weights", '{"score": -1, "b": 0.5}'], "reward_weights", {"score": -1.0, "b": 0.5}),
        (["--lora_rank", "2", "--lora_target_modules", "a", "b"], "lora_target_modules", ["a", "b"]),
        (["--reward_monitor", "[]"], "reward_monitor", []),
        (["--dataset_size", "null"], "dataset_size", None),
        (["--grpo_cps_noise_scale_range", "null"], "grpo_cps_noise_scale_range", None),
        (["--grpo_cfg_scale", "2", "--negative_prompt=--low quality"], "negative_prompt", "--low quality"),
        (["--wandb_run_name", "123"], "wandb_run_name", "123"),
    ],
)
def test_every_form_of_an_override(load, tokens, key, value):
    assert getattr(load(*tokens).config, key) == value


def test_a_negative_number_is_a_value_and_not_a_flag(load):
    (line,) = problems(load, "--learning_rate", "-0.5")
    assert "learning_rate (command line): -0.5 is too small: it must be at least 0" in line


@pytest.mark.parametrize(
    ("tokens", "fragments"),
    [
        (["--grpo_group_sise", "4"], ["--grpo_group_sise", "did you mean --grpo_group_size?"]),
        (["--no_shuffle"], ["did you mean --no-shuffle?"]),
        (["--no-seed"], ["--no-seed", "not a switch", "--seed VALUE"]),
        (["--no-shuffle", "true"], ["takes no value"]),
        (["--seed"], ["--seed: has no value", "whole number"]),
        (["--seed", "1", "2"], ["--seed: takes one value", "1 2"]),
        (["stray"], ["stray: stands alone"]),
        (["--shuffle", "yes"], ["shuffle (command line): yes is not true or false", "true"]),
        (["--seed", "1.5"], ["seed (command line): 1.5 is not a whole number"]),
        (["--learning_rate", "fast"], ["fast is not a number", "5e-06"]),
        (["--learning_rate", "nan"], ["learning_rate"]),
        (["--device", "gpu"], ["gpu is not one of auto, cuda, cpu", "did you mean cpu?"]),
        (["--adam_betas", "0.9"], ["adam_betas", "[0.9, 0.999]"]),
        (["--adam_betas", "0.9", "x"], ["adam_betas[1]", "x is not a number"]),
        (["--reward_weights", "{score: high}"], ["reward_weights[score]", "high is not a number"]),
        (["--reward_weights", "score"], ["reward_weights", "{score: 1.0}"]),
        (["--vbvr_reward_evalkit_source_sha256", "abc"], ["is not a sha256 digest", "64"]),
        (["--grpo_group_size", "1"], ["grpo_group_size", "at least 2"]),
        (["--dancegrpo_timestep_selection_ratio", "1.5"], ["is too large", "at most 1"]),
    ],
)
def test_a_wrong_override_is_one_line_with_the_remedy(load, tokens, fragments):
    lines = problems(load, *tokens)
    assert len(lines) == 1
    for fragment in fragments:
        assert fragment in lines[0]
    assert "pydantic" not in lines[0] and "http" not in lines[0] and "Input should" not in lines[0]


def test_a_long_or_broken_value_stays_one_line(load):
    (line,) = problems(load, "--seed", "many\nlines " + "x" * 10_000)
    assert "many lines" in line and len(line) < 250


def test_everything_wrong_is_listed_at_once_and_names_its_place(load, tmp_path):
    lines = problems(
        load,
        "--grpo_group_sise",
        "4",
        "--batch_size",
        "0",
        num_frames=80,
        grpo_cps_noise_scale_range=[0.9, 0.1],
        text="hight: 3\nseed: x\n",
    )
    recipe = tmp_path / "recipe.yaml"
    assert len(lines) == 6
    text = "\n".join(lines)
    assert "did you mean --grpo_group_size?" in text
    assert f"hight ({recipe} line 11): is not a configuration key; did you mean height?" in text
    assert f"seed ({recipe} line 12): x is not a whole number" in text
    assert "batch_size (command line): 0 is too small" in text
    assert f"num_frames ({recipe} line 7): 80 is not 4k+1; use 77 or 81" in text
    assert "[0.9, 0.1] starts above its end; use [0.1, 0.9]" in text


def test_a_key_set_twice_is_an_error(load):
    (line,) = problems(load, text="seed: 1\nseed: 2\n")
    assert "seed" in line and "line 8" in line and "line 7" in line
    (line,) = problems(load, text="reward_weights: {score: 1.0, score: 2.0}\n")
    assert "names score twice" in line


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words", "a: [1, 2\n", "\tseed: 1\n"])
def test_a_file_that_is_not_keys_and_values(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert str(path) in caught.value.problems[0] and "key: value" in caught.value.problems[0]


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00seed")
    with pytest.raises(UserError, match="cannot be read as UTF-8"):
        load_config(path)


def test_python_objects_are_not_built_from_yaml(load):
    (line,) = problems(load, text="wandb_project: !!python/object/apply:os.getcwd []\n")
    assert "not a plain value" in line


def test_an_empty_file_lacks_only_what_has_no_default(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_config(path)
    named = {line.split()[0] for line in caught.value.problems}
    assert named == {
        "model_path",
        "dataset_json",
        "output_dir",
        "vbvr_reward_evalkit_dir",
        "vbvr_reward_evalkit_source_sha256",
    }


def test_variables_of_the_environment(load):
    text = (
        "seed: ${SEED}\nlearning_rate: ${RATE:-1e-5}\nwandb_project: 'p-${NAME}'\nwandb_run_name: $${NAME}\n"
        "lora_rank: 4\nlora_target_modules: ['${NAME}']\ntorch_compile: ${FLAG}\nadam_betas: ${BETAS}\n"
    )
    env = {"SEED": "7", "NAME": "x", "FLAG": "true", "BETAS": "[0.1, 0.2]"}
    loaded = load(text=text, env=env)
    config = loaded.config
    assert (config.seed, loaded.sources["seed"]) == (7, "env")
    assert (config.learning_rate, loaded.sources["learning_rate"]) == (1e-5, "yaml")
    assert (config.wandb_project, loaded.sources["wandb_project"]) == ("p-x", "env")
    assert config.wandb_run_name == "${NAME}"
    assert config.lora_target_modules == ["x"]
    assert config.torch_compile is True
    assert config.adam_betas == (0.1, 0.2)


def test_an_override_wins_over_a_variable(load):
    loaded = load("--seed", "3", text="seed: ${SEED}\n", env={"SEED": "7"})
    assert (loaded.config.seed, loaded.sources["seed"]) == (3, "cli")


def test_an_unset_variable_is_one_line_that_names_key_and_variable(load):
    (line,) = problems(load, text="model_family: auto\n".replace("model_family: auto", "seed: ${RUN_SEED}"))
    assert line.startswith("seed (") and "RUN_SEED is not set" in line and "${RUN_SEED:-default}" in line


def test_an_unset_variable_hides_no_other_problem_and_adds_none(load):
    lines = problems(load, text="wandb_project: ${ABSENT}\nseed: x\n")
    assert len(lines) == 2


def test_judge_variables_apply_where_the_judge_does(load):
    env = {"WAN_TRAINER_VLM_BASE_URL": "http://a/v1", "WAN_TRAINER_VLM_MODEL": "m"}
    loaded = load("--vlm_reward_model", "mine", reward="judge", env=env)
    assert loaded.config.vlm_reward_base_url == "http://a/v1"
    assert loaded.sources["vlm_reward_base_url"] == "env"
    assert loaded.config.vlm_reward_model == "mine"
    assert load(env=env).sources["vlm_reward_base_url"] == "default"


def test_the_recipe_spelling_of_shuffle_sets_shuffle(load):
    loaded = load(shuffle_raw_indices=False)
    assert loaded.config.shuffle is False
    assert loaded.sources["shuffle"] == "yaml"


def test_a_shown_configuration_loads_to_itself(load, tmp_path):
    first = load("--grpo_delayed_replay", "--no-shuffle_raw_indices").config
    path = tmp_path / "shown.yaml"
    path.write_text(yaml.safe_dump(first.model_dump(mode="json")), encoding="utf-8")
    assert load_with_sources(path, (), {}).config == first


@pytest.mark.parametrize("words", [["0.9"], ["0.9", "0.8", "0.7"], ["[0.9]"]])
def test_a_pair_without_two_members_says_that_two_numbers_are_needed(load, words):
    (line,) = problems(load, "--adam_betas", *words)
    shown = "[0.9, 0.8, 0.7]" if len(words) == 3 else "[0.9]"
    assert line == (f"adam_betas (command line): {shown} is not two numbers; write for example [0.9, 0.999]")
