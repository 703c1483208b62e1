"""The two ReFL recipes: the published values, and what they amount to on eight ranks."""

from __future__ import annotations

from typing import Any

import pytest

from wan_trainer.config import load_with_sources, resolve, trainer_root
from wan_trainer.planning.plan import make_plan
from wan_trainer.planning.text import describe

ENVIRONMENT = {
    "PRETRAINED_MODEL": "/models/wan",
    "DATA_PATH": "/data/prompts.jsonl",
    "EVAL_DATA_PATH": "/data/held_out.jsonl",
    "VIDEOALIGN_MODEL_PATH": "/models/video_reward",
    "FACE_MODEL_PATH": "/models/faces",
    "OUTPUT_DIR": "/runs/a",
}
# The published values, written down here a second time on purpose: a recipe that drifts fails.
BOTH = {
    "trainer": "refl",
    "num_frames": 81,
    "flow_shift": 5.0,
    "batch_size": 8,
    "weight_decay": 0.0,
    "adam_betas": (0.9, 0.999),
    "adam_eps": 1e-8,
    "max_grad_norm": 1.0,
    "lr_scheduler": "linear_warmup",
    "warmup_steps": 10,
    "param_dtype": "bfloat16",
    "lora_target_modules": ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"],
    "refl_fixed_noise": True,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "refl_wan21_t2v_videoalign": BOTH
    | {
        "model_family": "t2v-1.3b",
        "height": 480,
        "width": 832,
        "refl_num_sampling_steps": 25,
        "refl_algorithm": "last_step",
        "refl_first_grad_step": 24,
        "refl_last_grad_step": 24,
        "refl_cfg_scale": 5.0,
        "refl_weight": 0.25,
        "refl_baseline": 0.0,
        "refl_scale": 1.0,
        "refl_kl_coeff": 0.0,
        "learning_rate": 5e-6,
        "lora_rank": 64,
        "lora_alpha": 128.0,
        "lora_module_prefix": None,
        "max_steps": 835,
    },
    "refl_wan22_i2v_face": BOTH
    | {
        "model_family": "i2v-a14b",
        "height": 352,
        "width": 640,
        "refl_num_sampling_steps": 8,
        "refl_algorithm": "truncated",
        "refl_first_grad_step": 4,
        "refl_last_grad_step": 7,
        "refl_cfg_scale": 1.0,
        "refl_weight": 0.1,
        "refl_baseline": 0.54,
        "refl_scale": 0.16,
        "refl_kl_coeff": 1.0,
        "learning_rate": 2.5e-6,
        "lora_rank": 32,
        "lora_alpha": 32.0,
        "lora_module_prefix": "low_noise",
        "max_steps": 690,
    },
}
# Per rank: sampling, calls beside, calls with a backward.
CALLS = {
    "refl_wan21_t2v_videoalign": ["50 forward calls", "1 forward and backward call, 1 forward call without"],
    "refl_wan22_i2v_face": ["8 forward calls", "4 forward and backward calls, 4 forward calls without"],
}
REWARDS = {
    "refl_wan21_t2v_videoalign": ("wan_trainer.rewards.videoalign.VideoAlign", "/models/video_reward"),
    "refl_wan22_i2v_face": ("wan_trainer.rewards.face.Face", "/models/faces"),
}


def load(name: str, *flags: str, **environment: str):
    return load_with_sources(
        trainer_root() / "configs" / f"{name}.yaml", flags, {**ENVIRONMENT, **environment}
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_refl_recipe_has_the_published_values(name):
    config = load(name).config
    values = config.model_dump()
    assert {key: values[key] for key in PUBLISHED[name]} == PUBLISHED[name]
    spec = resolve(config, cuda_available=True)
    assert spec.refl is not None
    path, model = REWARDS[name]
    assert (spec.refl.roles.reward.path, spec.refl.roles.reward.arguments["model_path"]) == (path, model)
    assert spec.refl.roles.reward_ranks == 0
    assert str(spec.model.path) == "/models/wan" and str(spec.data.dataset_json) == "/data/prompts.jsonl"
    assert spec.evaluation is not None and str(spec.evaluation.dataset_json) == "/data/held_out.jsonl"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_refl_recipe_plans_on_eight_ranks(name):
    plan = make_plan(load(name).config, 1, 8)
    assert (plan.topology.prompts, plan.topology.rollouts_per_rank) == (8, 1)
    assert plan.work.batches == plan.work.updates == PUBLISHED[name]["max_steps"]
    text = describe(plan)
    for words in (*CALLS[name], f"reward {REWARDS[name][0]} on ranks 0..7", "not counted: the reward's"):
        assert words in text, text


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_and_biases_is_off_until_it_is_asked_for(name):
    def project(**environment: str) -> str | None:
        return resolve(load(name, **environment).config, cuda_available=True).output.wandb_project

    assert project() is None
    assert project(WANDB_PROJECT="mine", REPORT_TO_WANDB="false") is None
    assert project(WANDB_PROJECT="mine", REPORT_TO_WANDB="true") == "mine"
    assert project(REPORT_TO_WANDB="true") == "wan-refl"


def test_the_few_step_adapter_of_the_i2v_recipe_comes_from_the_environment():
    name = "refl_wan22_i2v_face"
    assert load(name).config.base_lora is None
    assert load(name, BASE_LORA_PATH="/models/few_steps").config.base_lora == "/models/few_steps"
