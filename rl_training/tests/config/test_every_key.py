"""Every public key changes what the run does, or is refused with a reason: none is ignored."""

import json

import pytest

from wan_trainer.config import keys, resolve
from wan_trainer.config.algorithm_sections import GrpoSection, RuleRewardSection, VlmRewardSection
from wan_trainer.types import UserError

COMPILED = {"torch_compile": True}
ADAPTED = {"lora_rank": 4}
HELD = {"eval_dataset_json": "storage/data/held.txt"}
SHARED = {"grpo_shared_prompt_batch": True, "batch_size": 4}

# key: another value than the base's, and what else must be set for the key to be live.
CHANGES = {
    "model_path": ("storage/models/other", {}),
    "model_family": ("i2v-a14b", {}),
    "transformer_load_dtype": ("float32", {}),
    "param_dtype": ("float16", {}),
    "reduce_dtype": ("bfloat16", {}),
    "train_experts": ("high", {"model_family": "i2v-a14b"}),
    "lora_rank": (8, {}),
    "lora_alpha": (16.0, ADAPTED),
    "lora_target_modules": (["to_q"], ADAPTED),
    "lora_module_prefix": ("blocks", ADAPTED),
    "base_lora": ("storage/lora", {}),
    "gradient_checkpointing": (False, {}),
    "use_liger_kernel": (True, {}),
    "attention_backend": ("_native_math", {}),
    "disable_cudnn_sdp": (True, {}),
    "torch_compile": (True, {}),
    "torch_compile_backend": ("eager", COMPILED),
    "torch_compile_mode": ("max-autotune", COMPILED),
    "grpo_offload_inference_models": (True, {}),
    "dataset_json": ("storage/data/other.json", {}),
    "dataset_size": (7, {}),
    "num_frames": (85, {}),
    "height": (256, {}),
    "width": (256, {}),
    "fps": (8, {}),
    "shuffle": (False, {}),
    "shuffle_raw_indices": (False, {}),
    "shuffle_raw_indices_seed": (5, {}),
    "num_workers": (0, {}),
    "prefetch_factor": (4, {}),
    "persistent_workers": (False, {}),
    "device": ("cpu", {}),
    "seed": (7, {}),
    "output_dir": ("storage/runs/b", {}),
    "auto_resume": (False, {}),
    "resume_from": ("storage/start", {}),
    "reset_dataloader": (False, {"resume_from": "storage/start"}),
    "num_epochs": (2.5, {}),
    "max_steps": (12, {}),
    "save_steps": (7, {}),
    "keep_checkpoints": (1, {}),
    "log_steps": (5, {}),
    "rollout_video_every_steps": (2, {}),
    "eval_steps": (10, HELD),
    "eval_dataset_json": ("storage/data/other.txt", {**HELD, "eval_steps": 10}),
    "eval_size": (3, {**HELD, "eval_steps": 10}),
    "wandb_project": ("project", {}),
    "report_to_wandb": (False, {"wandb_project": "project"}),
    "wandb_run_name": ("name", {}),
    "learning_rate": (1e-3, {}),
    "lr_scheduler": ("linear_warmup", {}),
    "warmup_steps": (3, {}),
    "weight_decay": (0.0, {}),
    "adam_betas": ([0.8, 0.9], {}),
    "adam_eps": (1e-6, {}),
    "max_grad_norm": (2.0, {}),
    "gradient_accumulation_steps": (2, {}),
    "max_nonfinite_steps": (0, {}),
    "ema_decay": (0.9, {}),
    "batch_size": (3, {}),
    "expected_global_prompts": (8, {}),
    "grpo_shared_prompt_batch": (True, {}),
    "grpo_shared_prompt_microbatch_size": (2, SHARED),
    "tensor_parallel_size": (2, {}),
    "fsdp": (False, {}),
    "hsdp": (True, {}),
    "grpo_fsdp_sync_each_backward": (False, {}),
    "rendezvous_timeout_s": (5.0, {}),
    "grpo_group_size": (4, {}),
    "grpo_sample_batch_size": (2, {}),
    "grpo_train_sample_batch_size": (1, {"grpo_sample_batch_size": 2}),
    "grpo_num_sampling_steps": (10, {}),
    "grpo_sde_formula": ("flowgrpo", {}),
    "grpo_sde_noise_scale": (0.5, {}),
    "grpo_cps_noise_scale_range": ([0.1, 0.9], {}),
    "flow_shift": (3.0, {}),
    "grpo_cfg_scale": (4.0, {}),
    "negative_prompt": ("blurry", {"grpo_cfg_scale": 4.0}),
    "dancegrpo_share_group_init_noise": (False, {}),
    "dancegrpo_timestep_selection_ratio": (1.0, {}),
    "trajectory_dtype": ("bfloat16", {}),
    "grpo_clip_range": (1e-3, {}),
    "grpo_delayed_replay": (True, {}),
    "max_off_policy_steps": (2, {}),
    "grpo_delayed_replay_clip_range": (0.01, {}),
    "grpo_updates_per_rollout": (2, {}),
    "grpo_adv_clip_max": (1.0, {}),
    "grpo_loss": ({"_target_": "mine.losses.Loss", "power": 2.0}, {}),
    "grpo_kl_coeff": (0.1, {}),
    "ratio_gate_tolerance": (0.5, {}),
    "grpo_reward_fn": ("vbvr_vlm", {}),
    "reward_weights": ({"score": -1.0}, {}),
    "reward_monitor": ([{"_target_": "mine.rewards.Second"}], {}),
    "reward_workers": (2, {"reward_monitor": [{"_target_": "mine.rewards.Second"}]}),
    "reward_timeout_s": (5.0, {}),
    "reward_max_error_rate": (0.0, {}),
    "vbvr_reward_evalkit_dir": ("storage/evalkits/b", {}),
    "vbvr_reward_evalkit_source_sha256": ("1" * 64, {}),
    "vbvr_reward_easyocr_module_path": ("storage/ocr", {}),
    "vbvr_reward_device": ("cuda", {}),
    "vbvr_reward_fps": (8, {}),
    "vbvr_reward_decode_batch_size": (4, {}),
    "vbvr_reward_max_pending_jobs": (99, {}),
    "vbvr_reward_cpu_workers": (3, {}),
    "vbvr_reward_cpu_threads_per_worker": (3, {}),
    "vbvr_reward_use_process_pool": (False, {"vbvr_reward_cpu_workers": 2}),
    "vbvr_reward_prepared_width": (64, {}),
    "vbvr_reward_prepared_height": (64, {}),
    "vbvr_reward_prepare_crf": (20, {}),
    "vbvr_reward_max_duration_seconds": (1.0, {}),
    "vbvr_reward_task_specific_only": (False, {}),
    "vbvr_reward_unsupported_score": (0.0, {}),
    "vbvr_reward_fail_on_error": (True, {}),
    "vbvr_reward_tmp_dir": ("storage/tmp", {}),
    "vbvr_reward_keep_tmp": (True, {}),
    "vbvr_reward_fast_decode": (False, {}),
    "vlm_reward_base_url": ("http://judge/v1", {}),
    "vlm_reward_model": ("other", {}),
    "vlm_reward_api_key": ("token", {}),
    "vlm_reward_prompt_mode": ("task_specific", {"vlm_reward_prompt_dir": "storage/rubrics"}),
    "vlm_reward_prompt_dir": ("storage/rubrics", {}),
    "vlm_reward_prompt_sha256": ("2" * 64, {}),
    "vlm_reward_video_fps": (8, {}),
    "vlm_reward_video_num_frames": (8, {}),
    "vlm_reward_include_gt_first_frame": (False, {}),
    "vlm_reward_decode_batch_size": (4, {}),
    "vlm_reward_concurrency": (8, {}),
    "vlm_reward_max_pending_jobs": (99, {}),
    "vlm_reward_request_timeout_seconds": (5.0, {}),
    "vlm_reward_max_retries": (0, {}),
    "vlm_reward_retry_backoff_seconds": (3.0, {}),
    "vlm_reward_max_new_tokens": (10, {}),
    "vlm_reward_image_max_edge": (64, {}),
    "vlm_reward_jpeg_quality": (50, {}),
    "vlm_reward_score_max": (
        10.0,
        {"vlm_reward_prompt_mode": "task_specific", "vlm_reward_prompt_dir": "storage/rubrics"},
    ),
    "vlm_reward_use_structured_output": (True, {}),
    "vlm_reward_validate_service": (False, {}),
    "vlm_reward_fail_on_error": (True, {}),
    "vlm_reward_error_score": (0.0, {}),
    "vlm_reward_log_first_n": (0, {}),
    "latent_webdataset_dir": ("storage/latents", {}),
    "trainer": ("ppo", {}),
    "expert_parallel": (True, {}),
    "rl_train_node_count": (1, {}),
    "rl_train_rank_count": (1, {}),
    "rl_actor_weight_sync": ("nccl", {}),
    "rl_actor_weight_sync_interval": (2, {}),
    "rl_async_rollout": (True, {}),
    "rl_async_rollout_prefetch_steps": (1, {}),
    "rl_split_debug_logs": (True, {}),
}
TILES = {"refl_vae_tile_height": 64, "refl_vae_tile_width": 64, "refl_vae_tile_overlap": 16}
REFL = {
    "roles": ({"reward": {"_target_": "mine.rewards.Other"}}, {}),
    "refl_algorithm": ("drtune", {}),
    "refl_first_grad_step": (20, {}),
    "refl_last_grad_step": (23, {}),
    "refl_num_sampling_steps": (10, {}),
    "refl_cfg_scale": (5.0, {}),
    "refl_cfg_grad": ("both", {"refl_cfg_scale": 5.0}),
    "refl_weight": (-0.5, {}),
    "refl_baseline": (0.5, {}),
    "refl_scale": (2.0, {}),
    "refl_kl_coeff": (0.1, {}),
    "refl_fixed_noise": (True, {}),
    "refl_sample_batch_size": (2, {}),
    "refl_vae_tile_height": (32, TILES),
    "refl_vae_tile_width": (32, TILES),
    "refl_vae_tile_overlap": (32, TILES),
    "refl_vae_tile_parallel": (True, {**TILES, "tensor_parallel_size": 2}),
}
"""What only `trainer: refl` reads."""

REFUSED = {
    "latent_webdataset_dir",
    "trainer",
    "expert_parallel",
    "vbvr_reward_device",
    *(name for name in CHANGES if name.startswith("rl_")),
    # Keys that another one makes meaningless are refused too; here the judge lacks its model.
    "grpo_reward_fn",
}


def reward_of(name: str) -> str:
    return "judge" if name.startswith("vlm_") else "rule"


def test_the_table_names_every_key():
    assert set(CHANGES) | set(REFL) == set(keys())


@pytest.mark.parametrize("name", CHANGES)
def test_a_key_changes_the_resolved_run_or_is_refused(load, name):
    value, context = CHANGES[name]
    reward = reward_of(name)
    before = resolve(load(reward=reward, **context).config, cuda_available=True)
    if name in REFUSED:
        with pytest.raises(UserError) as refused:
            load(reward=reward, **{**context, name: value})
        assert any(line.startswith((f"{name} ", "vlm_reward_")) for line in refused.value.problems)
        return
    after = resolve(load(reward=reward, **{**context, name: value}).config, cuda_available=True)
    assert after != before


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in REFUSED])
def test_a_key_works_from_the_command_line_too(load, name):
    value, context = CHANGES[name]
    reward = reward_of(name)
    tokens = (
        [json.dumps(word) if isinstance(word, dict) else str(word) for word in value]
        if isinstance(value, list)
        else [str(value).replace("'", '"') if isinstance(value, dict) else str(value)]
    )
    loaded = load(f"--{name}", *tokens, reward=reward, **context)
    assert loaded.config == load(reward=reward, **{**context, name: value}).config
    assert loaded.sources[name] == "cli"


def test_without_the_process_pool_a_rank_has_one_scorer(load):
    config = load(vbvr_reward_cpu_workers=4, vbvr_reward_use_process_pool=False).config
    rule = resolve(config, cuda_available=False).reward.rule
    assert rule is not None and rule.workers == 1


UNREAD = {
    *GrpoSection.model_fields,
    *RuleRewardSection.model_fields,
    *VlmRewardSection.model_fields,
    "grpo_shared_prompt_batch",
    "grpo_shared_prompt_microbatch_size",
}
"""What ReFL does not read."""

IN_REFL = {
    **{name: change for name, change in CHANGES.items() if name not in UNREAD},
    **REFL,
    "train_experts": ("high", {"model_family": "t2v-a14b"}),
    "negative_prompt": ("blurry", {"refl_cfg_scale": 4.0}),
    "trainer": ({"_target_": "mine.algorithms.Own"}, {}),
    "refl_first_grad_step": (20, {"refl_last_grad_step": 22}),
    "refl_last_grad_step": (22, {"refl_first_grad_step": 20}),
}


@pytest.mark.parametrize("name", IN_REFL)
def test_a_key_changes_a_resolved_refl_run_or_is_refused(load, name):
    value, context = IN_REFL[name]
    before = resolve(load(reward="refl", **context).config, cuda_available=True)
    if name in REFUSED:
        with pytest.raises(UserError) as refused:
            load(reward="refl", **{**context, name: value})
        # The roles of another trainer are what is too much.
        start = "roles " if name == "trainer" else f"{name} "
        assert any(line.startswith(start) for line in refused.value.problems)
        return
    after = resolve(load(reward="refl", **{**context, name: value}).config, cuda_available=True)
    assert after != before


@pytest.mark.parametrize("name", sorted(UNREAD))
def test_a_key_that_refl_does_not_read_is_refused_in_it(load, name):
    value, context = CHANGES[name]
    others = {key: part for key, part in context.items() if key in UNREAD}
    if name == "vlm_reward_prompt_mode":
        value = "custom"  # the base's other value is the default here
    with pytest.raises(UserError) as refused:
        load(reward="refl", **{**others, name: value})
    lines = [line for line in refused.value.problems if line.startswith(f"{name} ")]
    assert len(lines) == 1 and "trainer: refl; remove it" in lines[0]


@pytest.mark.parametrize("name", REFL)
def test_a_key_of_refl_is_refused_in_grpo(load, name):
    value, _ = REFL[name]
    with pytest.raises(UserError) as refused:
        load(**{name: value})
    assert any(
        line.startswith(f"{name} ") and "trainer: refl only" in line for line in refused.value.problems
    )
