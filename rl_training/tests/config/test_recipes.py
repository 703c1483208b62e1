"""The four recipes: the values of the reference runs, and what they amount to at their topologies."""

from pathlib import Path

import pytest
import yaml

from wan_trainer.config import load_config, load_with_sources, resolve, topology_of, trainer_root
from wan_trainer.planning.plan import make_plan
from wan_trainer.planning.text import describe
from wan_trainer.types import UserError

# The reference values, written down here a second time on purpose: a recipe that drifts fails.
EVERY_RECIPE = {
    "trainer": "dancegrpo",
    "dataset_json": "storage/datasets/VBVR-Pro-RL/materialized/dataset.json",
    "dataset_size": 50000,
    "fps": 16,
    "shuffle_raw_indices": True,
    "shuffle_raw_indices_seed": 42,
    "auto_resume": True,
    "rl_train_node_count": 0,
    "rl_train_rank_count": 0,
    "rl_actor_weight_sync": "none",
    "rl_actor_weight_sync_interval": 1,
    "rl_async_rollout": False,
    "rl_async_rollout_prefetch_steps": 0,
    "rl_split_debug_logs": False,
    "gradient_accumulation_steps": 1,
    "num_epochs": 5,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "save_steps": 100,
    "log_steps": 1,
    "seed": 42,
    "ema_decay": 0.0,
    "gradient_checkpointing": True,
    "use_liger_kernel": True,
    "torch_compile": True,
    "torch_compile_backend": "inductor",
    "torch_compile_mode": None,
    "num_workers": 2,
    "prefetch_factor": 2,
    "persistent_workers": True,
    "fsdp": True,
    "expert_parallel": False,
    "train_experts": "both",
    "lora_rank": 0,
    "grpo_fsdp_sync_each_backward": True,
    "grpo_num_sampling_steps": 30,
    "grpo_clip_range": 0.0001,
    "grpo_kl_coeff": 0,
    "grpo_cfg_scale": 1.0,
    "dancegrpo_share_group_init_noise": True,
    "dancegrpo_timestep_selection_ratio": 0.6,
}
ALL_5B = {
    "model_path": "storage/models/diffsynth_converted_5b/sft_model",
    "num_frames": 81,
    "height": 512,
    "width": 512,
    "resume_from": None,
    "reset_dataloader": None,
    "batch_size": 32,
    "learning_rate": 5e-06,
    "warmup_steps": 5,
    "transformer_load_dtype": "float32",
    "attention_backend": "_flash_3_hub",
    "disable_cudnn_sdp": True,
    "hsdp": True,
    "lora_alpha": 32,
    "grpo_shared_prompt_batch": True,
    "grpo_delayed_replay": True,
    "grpo_delayed_replay_clip_range": 0.01,
    "grpo_group_size": 32,
    "wandb_project": "wan-dancegrpo-vbvr-pro-5b",
}
RULE_5B = {
    "grpo_shared_prompt_microbatch_size": 32,
    "grpo_sample_batch_size": 8,
    "grpo_train_sample_batch_size": 8,
    "grpo_offload_inference_models": False,
    "grpo_reward_fn": "vbvr_rule",
    "vbvr_reward_evalkit_dir": "storage/evalkits/vbvr-evalkit-interleave-main_v2-e140038f",
    "vbvr_reward_evalkit_source_sha256": "4cc7d028d4106a28190a63bc179562d5ac9add9263cb71926dd6385c5714bcf8",
    "vbvr_reward_easyocr_module_path": "storage/evalkits/easyocr-shared",
    "vbvr_reward_device": "cpu",
    "vbvr_reward_fps": 16,
    "vbvr_reward_decode_batch_size": 8,
    "vbvr_reward_max_pending_jobs": 16,
    "vbvr_reward_cpu_workers": 4,
    "vbvr_reward_cpu_threads_per_worker": 4,
    "vbvr_reward_use_process_pool": True,
    "vbvr_reward_prepared_width": 1024,
    "vbvr_reward_prepared_height": 1024,
    "vbvr_reward_max_duration_seconds": 5.0625,
    "vbvr_reward_prepare_crf": 12,
    "vbvr_reward_fail_on_error": False,
    "vbvr_reward_task_specific_only": True,
    "vbvr_reward_keep_tmp": False,
    "vbvr_reward_unsupported_score": 0.0,
}
OWN_5B_CPS = {
    "output_dir": "storage/checkpoints/vbvr_pro_5b_cps",
    "grpo_sde_formula": "flowcps",
    "grpo_sde_noise_scale": 0.7,
    "vbvr_reward_tmp_dir": "/tmp/wan-trainer/vbvr_pro_5b_cps",
    "wandb_run_name": "vbvr_pro_5b_cps",
}
OWN_5B_SDE = {
    "output_dir": "storage/checkpoints/vbvr_pro_5b_sde",
    "grpo_sde_formula": "dancegrpo",
    "grpo_sde_noise_scale": 0.3,
    "vbvr_reward_tmp_dir": "/tmp/wan-trainer/vbvr_pro_5b_sde",
    "wandb_run_name": "vbvr_pro_5b_sde",
}
OWN_5B_VLM = {
    "output_dir": "storage/checkpoints/vbvr_pro_5b_vlm",
    "grpo_shared_prompt_microbatch_size": 16,
    "grpo_sample_batch_size": 4,
    "grpo_train_sample_batch_size": 4,
    "grpo_offload_inference_models": True,
    "grpo_reward_fn": "vbvr_vlm",
    "grpo_sde_formula": "flowcps",
    "grpo_sde_noise_scale": 0.7,
    "vlm_reward_base_url": "http://127.0.0.1:18080/v1",
    "vlm_reward_model": "qwen3.6-27b",
    "vlm_reward_api_key": "EMPTY",
    "vlm_reward_prompt_mode": "task_specific",
    "vlm_reward_video_fps": 16,
    "vlm_reward_video_num_frames": 32,
    "vlm_reward_include_gt_first_frame": True,
    "vlm_reward_decode_batch_size": 4,
    "vlm_reward_concurrency": 2,
    "vlm_reward_max_pending_jobs": 16,
    "vlm_reward_request_timeout_seconds": 300,
    "vlm_reward_max_retries": 2,
    "vlm_reward_retry_backoff_seconds": 1,
    "vlm_reward_max_new_tokens": 1024,
    "vlm_reward_image_max_edge": 512,
    "vlm_reward_jpeg_quality": 85,
    "vlm_reward_score_max": 100,
    "vlm_reward_use_structured_output": False,
    "vlm_reward_validate_service": True,
    "vlm_reward_fail_on_error": False,
    "vlm_reward_error_score": 0,
    "vlm_reward_log_first_n": 2,
    "wandb_run_name": "vbvr_pro_5b_vlm",
}
OWN_A14B_RULE = {
    "model_path": "storage/models/Wan2.2-I2V-A14B-Diffusers",
    "num_frames": 161,
    "height": 256,
    "width": 256,
    "output_dir": "storage/checkpoints/vbvr_pro_a14b_rule",
    "resume_from": "storage/checkpoints/vbvr_pro_sft/checkpoint",
    "reset_dataloader": True,
    "batch_size": 4,
    "learning_rate": 1e-05,
    "warmup_steps": 100,
    "transformer_load_dtype": "auto",
    "hsdp": False,
    "grpo_shared_prompt_batch": False,
    "grpo_group_size": 16,
    "grpo_sample_batch_size": 1,
    "grpo_train_sample_batch_size": 1,
    "grpo_offload_inference_models": True,
    "grpo_reward_fn": "vbvr_rule",
    "grpo_sde_formula": "flowcps",
    "grpo_sde_noise_scale": 0.7,
    "param_dtype": "bfloat16",
    "reduce_dtype": "float32",
    "tensor_parallel_size": 2,
    "grpo_cps_noise_scale_range": [0.0, 1.0],
    "vbvr_reward_evalkit_dir": "storage/evalkits/vbvr-evalkit",
    "vbvr_reward_evalkit_source_sha256": "f99edd06fd39b5025a0a46871fc7280f7353d47e8de45b627a0b0711318fd258",
    "vbvr_reward_easyocr_module_path": "storage/evalkits/easyocr-shared",
    "vbvr_reward_device": "cpu",
    "vbvr_reward_fps": 16,
    "vbvr_reward_decode_batch_size": 8,
    "vbvr_reward_cpu_workers": 1,
    "vbvr_reward_cpu_threads_per_worker": 16,
    "vbvr_reward_use_process_pool": True,
    "vbvr_reward_prepared_width": 1024,
    "vbvr_reward_prepared_height": 1024,
    "vbvr_reward_max_duration_seconds": 5.0,
    "vbvr_reward_prepare_crf": 12,
    "vbvr_reward_fail_on_error": True,
    "vbvr_reward_task_specific_only": True,
    "vbvr_reward_tmp_dir": "storage/tmp/vbvr_pro_a14b_rule",
    "vbvr_reward_keep_tmp": False,
    "vbvr_reward_unsupported_score": 0.0,
    "wandb_project": "vbvr-pro-a14b",
    "wandb_run_name": "a14b_rule",
}
GOLDEN = {
    "5b_cps": {**EVERY_RECIPE, **ALL_5B, **RULE_5B, **OWN_5B_CPS},
    "5b_sde": {**EVERY_RECIPE, **ALL_5B, **RULE_5B, **OWN_5B_SDE},
    "5b_vlm": {**EVERY_RECIPE, **ALL_5B, **OWN_5B_VLM},
    "a14b_rule": {**EVERY_RECIPE, **OWN_A14B_RULE},
}
# Keys of ours that the recipes state on top of the reference.
OURS = {
    "5b_cps": {"model_family": "ti2v-5b", "expected_global_prompts": 32, "device": "cuda"},
    "5b_sde": {"model_family": "ti2v-5b", "expected_global_prompts": 32, "device": "cuda"},
    "5b_vlm": {
        "model_family": "ti2v-5b",
        "expected_global_prompts": 32,
        "device": "cuda",
        "vlm_reward_prompt_dir": "storage/rubrics/vbvr_pro",
        "vlm_reward_prompt_sha256": None,
        # The reference's 16 hold one step's delay on 16 nodes only.
        "vlm_reward_max_pending_jobs": 64,
    },
    "a14b_rule": {"model_family": "i2v-a14b", "expected_global_prompts": 16, "device": "cuda"},
}
REFERENCE_TOPOLOGIES = [
    ("5b_cps", 16, 32, 8, 1),
    ("5b_sde", 16, 32, 8, 1),
    ("5b_vlm", 4, 32, 32, 2),
    ("5b_vlm", 8, 32, 16, 2),
    ("5b_vlm", 16, 32, 8, 2),
    ("a14b_rule", 1, 16, 64, 1),
]


def recipe(name: str) -> str:
    return f"configs/train_rl_{name}.yaml"


@pytest.mark.parametrize("name", GOLDEN)
def test_a_recipe_has_the_reference_values(name):
    loaded = load_with_sources(recipe(name))
    expected = {**GOLDEN[name], **OURS[name]}
    values = loaded.config.model_dump(mode="json")
    assert {key: values[key] for key in expected} == expected
    stated = {key for key, source in loaded.sources.items() if source == "yaml"}
    assert stated - {"shuffle"} == set(expected)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_recipe_states_numbers_that_any_yaml_reader_types_alike(name):
    text = Path(trainer_root(), recipe(name)).read_text(encoding="utf-8")
    ours = load_config(recipe(name)).model_dump(mode="json")
    for key, value in yaml.safe_load(text).items():
        if isinstance(ours[key], float):
            assert float(value) == ours[key]


@pytest.mark.parametrize(("name", "nodes", "prompts", "per_rank", "waves"), REFERENCE_TOPOLOGIES)
def test_a_recipe_loads_resolves_and_plans(name, nodes, prompts, per_rank, waves):
    config = load_config(recipe(name))
    spec = resolve(config, cuda_available=True)
    assert spec.model.path.is_absolute() and spec.output.output_dir.is_absolute()
    plan = make_plan(config, nodes, 8)
    assert plan.topology.prompts == prompts
    assert plan.topology.rollouts_per_rank == per_rank
    assert plan.topology.waves == waves
    assert plan.work.replayed_steps == 17
    assert plan.work.batches == 5 * 50_000 // prompts
    assert "replay" in describe(plan)


def test_the_5b_reference_numbers():
    topology = topology_of(load_config(recipe("5b_cps")), 16, 8)
    assert (topology.world, topology.rollouts_per_step, topology.ranks_per_prompt) == (128, 1024, 4)
    assert (topology.dp_replicate, topology.dp_shard) == (16, 8)


@pytest.mark.parametrize(("nodes", "per_wave"), [(4, 16), (8, 8), (16, 4)])
def test_the_judge_recipe_has_two_waves_at_every_size(nodes, per_wave):
    topology = topology_of(load_config(recipe("5b_vlm")), nodes, 8)
    assert (topology.wave, topology.waves, topology.rollouts_per_rank_wave) == (16, 2, per_wave)


def test_the_a14b_recipe_is_two_tensor_parallel_ranks_by_four_replicas():
    topology = topology_of(load_config(recipe("a14b_rule")), 1, 8)
    assert (topology.tp, topology.dp, topology.dp_shard, topology.dp_replicate) == (2, 4, 4, 1)
    assert topology.rollouts_per_step == 256


def test_the_a14b_recipe_on_four_nodes_is_refused_with_the_fix():
    with pytest.raises(UserError) as caught:
        topology_of(load_config(recipe("a14b_rule")), 4, 8)
    (line,) = caught.value.problems
    assert "expected_global_prompts: 16" in line and "gives 64" in line and "--batch_size 1" in line
    mended = topology_of(load_config(recipe("a14b_rule"), ["--batch_size", "1"]), 4, 8)
    assert mended.prompts == 16


def test_the_two_rule_recipes_differ_in_the_sampler_and_in_names_only():
    one, other = (load_config(recipe(name)).model_dump() for name in ("5b_cps", "5b_sde"))
    assert {key for key in one if one[key] != other[key]} == {
        "output_dir",
        "grpo_sde_formula",
        "grpo_sde_noise_scale",
        "vbvr_reward_tmp_dir",
        "wandb_run_name",
    }
