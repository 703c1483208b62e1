"""Contradictions: each one line that names the value, the rule and the remedy."""

import json

import pytest

from wan_trainer.config import TrainConfig, load_with_sources, resolve
from wan_trainer.config.checks import few_steps_warning
from wan_trainer.types import UserError

A14B = {"model_family": "i2v-a14b"}
SHARED = {"grpo_shared_prompt_batch": True, "batch_size": 32}

OWN = {"_target_": "mine.rewards.brightness"}
JUDGE = {"vlm_reward_model": "judge", "vlm_reward_prompt_mode": "custom"}
ALONE = {"reward": "judge", **JUDGE}
BOTH = {"grpo_reward_fn": ["vbvr_rule", "vbvr_vlm"], **JUDGE}

CASES = [
    ({"num_frames": 80}, ["num_frames", "80 is not 4k+1", "use 77 or 81"]),
    ({"num_frames": 1}, ["num_frames", "at least 5", "use 5"]),
    ({"height": 500}, ["height", "500 is not a multiple of 32", "480 or 512"]),
    ({"width": 264, **A14B}, ["width", "264 is not a multiple of 16", "256 or 272"]),
    ({"train_experts": "high"}, ["train_experts", "two-expert", "use both"]),
    ({"trainer": "ppo"}, ["trainer", "ppo", "use dancegrpo"]),
    ({"latent_webdataset_dir": "x"}, ["latent_webdataset_dir", "pre-encoded", "dataset_json"]),
    ({"expert_parallel": True}, ["expert_parallel", "use false"]),
    ({"rl_async_rollout": True}, ["rl_async_rollout", "max_off_policy_steps"]),
    ({"rl_train_node_count": 2}, ["rl_train_node_count", "2 is refused", "use 0"]),
    ({"lora_alpha": 8.0}, ["lora_alpha", "lora_rank is 0"]),
    ({"lora_module_prefix": "blocks"}, ["lora_module_prefix", "lora_rank is 0"]),
    (
        {**A14B, "lora_rank": 4, "train_experts": "high", "lora_module_prefix": "low_noise"},
        ["lora_module_prefix", "in the low-noise expert", "use train_experts: low or both"],
    ),
    (
        {**A14B, "lora_rank": 4, "train_experts": "low", "lora_module_prefix": "transformer.blocks.1"},
        ["lora_module_prefix", "in the high-noise expert", "use train_experts: high or both"],
    ),
    ({"transformer_load_dtype": "bfloat16"}, ["transformer_load_dtype", "round away", "use auto"]),
    ({"attention_backend": "_flash_3_hubb"}, ["attention_backend", "use _flash_3_hub"]),
    ({"attention_backend": "sage_hub"}, ["attention_backend", "no backward pass", "use native"]),
    ({"attention_backend": "sage", "device": "cpu"}, ["attention_backend", "no backward pass"]),
    ({"attention_backend": "_flash_3"}, ["attention_backend", "no backward pass", "use _flash_3_hub"]),
    (
        {"attention_backend": "_flash_3_hub", "param_dtype": "float32"},
        ["attention_backend", "16 bits", "--param_dtype bfloat16"],
    ),
    ({"attention_backend": "flex"}, ["attention_backend", "score matrix", "--torch_compile"]),
    (
        {"attention_backend": "flex", "torch_compile": True, "torch_compile_backend": "aot_eager"},
        ["attention_backend", "torch_compile_backend inductor"],
    ),
    (
        {"attention_backend": "_native_cudnn", "disable_cudnn_sdp": True},
        ["attention_backend", "--no-disable_cudnn_sdp"],
    ),
    (
        {"torch_compile_mode": "max-autotune", "torch_compile_backend": "eager"},
        ["torch_compile_mode", "inductor", "use null"],
    ),
    ({"hsdp": True, "fsdp": False}, ["hsdp", "--no-hsdp"]),
    ({"shuffle": True, "shuffle_raw_indices": False}, ["shuffle", "--shuffle_raw_indices null"]),
    ({"reset_dataloader": True}, ["reset_dataloader", "resume_from"]),
    (
        {"grpo_shared_prompt_microbatch_size": 4},
        ["grpo_shared_prompt_microbatch_size", "--grpo_shared_prompt_batch"],
    ),
    ({"grpo_shared_prompt_microbatch_size": 12, **SHARED}, ["12 does not divide batch_size 32", "8 or 16"]),
    (
        {"grpo_sample_batch_size": 8, "grpo_train_sample_batch_size": 3},
        ["grpo_train_sample_batch_size", "3 does not divide", "use 2"],
    ),
    ({"grpo_sde_noise_scale": 1.2}, ["grpo_sde_noise_scale", "1.2 is outside flowcps"]),
    ({"grpo_sde_noise_scale": 0.0, "grpo_sde_formula": "dancegrpo"}, ["0.0 is outside dancegrpo", "0.3"]),
    (
        {"grpo_cps_noise_scale_range": [0.0, 1.0], "grpo_sde_formula": "flowgrpo"},
        ["grpo_cps_noise_scale_range", "flowgrpo", "use null or flowcps"],
    ),
    ({"grpo_cps_noise_scale_range": [-0.1, 0.5]}, ["[-0.1, 0.5] leaves", "0 to 1"]),
    ({"grpo_sde_noise_scale": 0.0}, ["grpo_sde_noise_scale", "nothing to learn from", "0.7"]),
    ({"grpo_cps_noise_scale_range": [0.0, 0.0]}, ["grpo_cps_noise_scale_range", "nothing to learn from"]),
    ({"grpo_cps_noise_scale_range": [0.5, 0.4]}, ["starts above its end", "[0.4, 0.5]"]),
    ({"negative_prompt": "blurry"}, ["negative_prompt", "grpo_cfg_scale"]),
    (
        {"grpo_delayed_replay": True, "max_off_policy_steps": 2},
        ["max_off_policy_steps", "2 contradicts grpo_delayed_replay: true", "--grpo_delayed_replay null"],
    ),
    ({"grpo_delayed_replay": False, "max_off_policy_steps": 1}, ["contradicts grpo_delayed_replay: false"]),
    ({"lr_scheduler": "constant", "warmup_steps": 5}, ["warmup_steps", "linear_warmup"]),
    ({"save_steps": 10, "gradient_accumulation_steps": 4}, ["save_steps", "use 8 or 12"]),
    (
        {"max_steps": 10, "save_steps": 0, "gradient_accumulation_steps": 4},
        ["max_steps", "use 8 or 12"],
    ),
    (
        {"grpo_updates_per_rollout": 2, "gradient_accumulation_steps": 2},
        ["grpo_updates_per_rollout", "set one of them to 1"],
    ),
    ({"adam_betas": [0.9, 1.0]}, ["adam_betas", "1.0", "[0.9, 0.999]"]),
    ({"reward_weights": {"score": 0.0}}, ["reward_weights", "same reward"]),
    ({"vbvr_reward_device": "cuda"}, ["vbvr_reward_device", "use cpu"]),
    (
        {"vlm_reward_concurrency": 9},
        ["vlm_reward_concurrency", "rewards in use are vbvr_rule", "name vbvr_vlm"],
    ),
    ({"reward_workers": 2}, ["reward_workers", "scoring functions of your own", "remove it"]),
    ({"reward_monitor": ["vbvr_rule"]}, ["vbvr_rule is named 2 times", "name it once"]),
    ({"reward_monitor": [OWN, {**OWN, "blur": 2}]}, ["brightness is named 2 times"]),
    (BOTH, ["reward_weights", "score is not one of the rewards", "{vbvr_rule: 0.5, vbvr_vlm: 0.5}"]),
    (BOTH | {"reward_weights": {"vbvr_rule": 1}}, ["vbvr_vlm has no weight"]),
    (BOTH | {"reward_weights": {"vbvr_rule": 1, "vbvr_vlm": 0}}, ["vbvr_vlm has weight 0", "reward_monitor"]),
    (
        BOTH | {"reward_weights": {"vbvr_rule": 1, "vbvr_vlm": 1}, "vlm_reward_fail_on_error": True},
        ["vbvr_reward_fail_on_error", "set both alike"],
    ),
    (ALONE | {"vlm_reward_base_url": "127.0.0.1:18080"}, ["vlm_reward_base_url", "plain address"]),
    (
        ALONE | {"vlm_reward_base_url": "http://me:secret@judge/v1"},
        ["vlm_reward_base_url", "vlm_reward_api_key"],
    ),
    (ALONE | {"vlm_reward_api_key": "sk-secret\n"}, ["vlm_reward_api_key", "the end of its line"]),
    (ALONE | {"vlm_reward_base_url": "http://judge:port/v1"}, ["vlm_reward_base_url", "plain address"]),
    (ALONE | {"vlm_reward_base_url": "http://ju dge/v1"}, ["vlm_reward_base_url", "plain address"]),
    (ALONE | {"vlm_reward_base_url": "http://judge\0/v1"}, ["vlm_reward_base_url", "plain address"]),
    (ALONE | {"vlm_reward_base_url": "http://\u0661.\u0661/v1"}, ["vlm_reward_base_url", "plain address"]),
    ({"vbvr_reward_prepared_height": 1023}, ["vbvr_reward_prepared_height", "1023 is odd", "use 1024"]),
    (ALONE | {"vlm_reward_score_max": 10}, ["vlm_reward_score_max", "generic rubric", "use 100"]),
    (ALONE | {"vlm_reward_error_score": 101}, ["vlm_reward_error_score", "use 0 to 100"]),
    (
        ALONE | {"vlm_reward_error_score": 0, "vlm_reward_fail_on_error": True},
        ["vlm_reward_fail_on_error", "leaves none"],
    ),
]


@pytest.mark.parametrize(("values", "fragments"), CASES, ids=[json.dumps(values) for values, _ in CASES])
def test_a_contradiction_is_one_line(load, values, fragments):
    with pytest.raises(UserError) as caught:
        load(**values)
    lines = caught.value.problems
    assert len(lines) == (3 if values == BOTH else 1), lines
    for fragment in fragments:
        assert fragment in lines[0]
    assert "secret" not in lines[0]


@pytest.mark.parametrize(
    "values",
    [
        {"grpo_delayed_replay": True, "max_off_policy_steps": 1},
        {"max_off_policy_steps": 3},
        {"lora_rank": 0, "lora_alpha": 32},
        {"lora_rank": 8, "transformer_load_dtype": "bfloat16"},
        {**A14B, "lora_rank": 8, "train_experts": "low", "lora_module_prefix": "low_noise"},
        {**A14B, "lora_rank": 8, "train_experts": "low", "lora_module_prefix": "blocks.3"},
        {"grpo_sde_noise_scale": 0.0, "grpo_cps_noise_scale_range": [0.0, 0.1]},
        {"grpo_cps_noise_scale_range": [0.5, 0.5]},
        {"reward_weights": {"score": -1}},
        {"reward_monitor": ["vbvr_vlm", OWN], "vlm_reward_concurrency": 9, "reward_workers": 2, **JUDGE},
        BOTH | {"reward_weights": {"vbvr_rule": 0.7, "vbvr_vlm": -0.3}},
        {"grpo_reward_fn": ["vbvr_rule", OWN], "reward_weights": {"vbvr_rule": 1, "brightness": 1}},
        {"grpo_sample_batch_size": 8, "grpo_train_sample_batch_size": 4},
        {"save_steps": 8, "gradient_accumulation_steps": 4},
        {"learning_rate": 0.0},
        {"num_frames": 9, "height": 64, "width": 64},
    ],
)
def test_a_permitted_combination(load, values):
    load(**values)


def test_the_judge_needs_its_model_and_its_rubrics(load):
    with pytest.raises(UserError) as caught:
        load(reward="judge", vlm_reward_model=None, vlm_reward_prompt_mode="task_specific")
    assert [line.split()[0] for line in caught.value.problems] == [
        "vlm_reward_model",
        "vlm_reward_prompt_dir",
    ]
    assert "--vlm_reward_prompt_mode custom" in caught.value.problems[1]


def test_auto_reads_the_family_from_the_model_directory(load, tmp_path):
    def write(index, transformer):
        (tmp_path / "transformer").mkdir(exist_ok=True)
        (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
        (tmp_path / "transformer" / "config.json").write_text(json.dumps(transformer), encoding="utf-8")

    shape = {"model_family": "auto", "height": 272, "width": 272}
    second = {"transformer_2": ["diffusers", "WanTransformer3DModel"]}
    write({"_class_name": "WanImageToVideoPipeline", **second}, {"in_channels": 36, "out_channels": 16})
    load(model_path=str(tmp_path), train_experts="high", **shape)
    # The published TI2V-5B names WanPipeline: one expert, and sizes in multiples of 32.
    index = {"_class_name": "WanPipeline", "expand_timesteps": True, "transformer_2": [None, None]}
    write(index, {"in_channels": 48, "out_channels": 48})
    with pytest.raises(UserError) as caught:
        load(model_path=str(tmp_path), train_experts="high", **shape)
    assert len(caught.value.problems) == 3


def test_an_unknown_family_is_held_to_what_all_families_need(load):
    with pytest.raises(UserError) as caught:
        load(model_family="auto", height=500, num_frames=80)
    assert len(caught.value.problems) == 2
    load(model_family="auto", height=496)


def test_building_the_schema_directly_asks_the_same_questions(load):
    values = {**load().config.model_dump(), "num_frames": 80, "warmup_steps": 3, "lr_scheduler": "constant"}
    with pytest.raises(UserError) as caught:
        TrainConfig.model_validate(values)
    assert len(caught.value.problems) == 2


def test_eight_steps_of_two_experts_without_a_few_step_adapter_are_a_warning():
    places = {name: "x" for name in ("PRETRAINED_MODEL", "DATA_PATH", "FACE_MODEL_PATH", "OUTPUT_DIR")}

    def warning(*flags, **env):
        loaded = load_with_sources(
            "configs/refl_wan22_i2v_face.yaml", flags, {**places, "EVAL_DATA_PATH": "x", **env}
        )
        return few_steps_warning(resolve(loaded.config, cuda_available=True))

    line = warning()
    assert line is not None and line.startswith("refl_num_sampling_steps: 8 steps are few")
    assert "set base_lora to a few-step adapter" in line
    assert warning("--refl_num_sampling_steps", "9") is None
    assert warning(BASE_LORA_PATH="storage/lora") is None
