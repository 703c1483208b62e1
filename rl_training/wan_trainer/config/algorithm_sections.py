"""The public schema, continued: the objectives and samplers of GRPO and ReFL, and the two rewards."""

from __future__ import annotations

from typing import ClassVar, Literal

from wan_trainer.config.fields import key
from wan_trainer.config.reward_choice import RewardChoice
from wan_trainer.config.roles import RolesMapping
from wan_trainer.config.sections import Pair, Section
from wan_trainer.config.target import TargetMapping

SHA256 = r"^[0-9a-f]{64}$"


class RolloutSection(Section):
    title: ClassVar[str] = "Rollouts of every algorithm"

    flow_shift: float | None = key(
        None, "Shift of the noise schedule; null takes the model's own.", group="sampler", gt=0
    )
    negative_prompt: str = key("", "Text of the unconditional branch when guidance is on.", group="sampler")
    reward_max_error_rate: float = key(
        0.2, "Share of a step's rewards that may be missing before the run stops.", ge=0, le=1
    )


class ReflSection(Section):
    title: ClassVar[str] = "ReFL (trainer: refl)"

    roles: RolesMapping | None = key(
        None,
        "Reward, monitor and reference of a ReFL run and where each is placed (see the ReFL page); "
        "`roles.actor` may hold any of the flat keys.",
        group="reward",
    )
    refl_algorithm: Literal["last_step", "truncated", "random_k", "x0_jump", "drtune"] = key(
        "truncated",
        "Which denoising steps have a gradient: the last one, all of the window, its last K for a random K, "
        "one at random with a jump to its x0, or all of the window with the step's input detached.",
        group="optimization",
    )
    refl_first_grad_step: int | None = key(
        None,
        "First step of the gradient window, 0 the noisiest; null is the last one.",
        group="sampler",
        ge=0,
    )
    refl_last_grad_step: int | None = key(
        None, "Last step of the gradient window; null is the last one.", group="sampler", ge=0
    )
    refl_num_sampling_steps: int = key(25, "Euler steps of a rollout.", group="sampler", ge=1)
    refl_cfg_scale: float = key(1.0, "Guidance scale; 1 is without guidance.", group="sampler", ge=1)
    refl_cfg_grad: Literal["conditional", "both"] = key(
        "conditional", "Branches of guidance that have a gradient.", group="optimization"
    )
    refl_weight: float = key(
        1.0, "Weight of the reward; the loss is -weight * (reward - baseline) / scale.", group="optimization"
    )
    refl_baseline: float = key(0.0, "Reward that counts as 0 in the loss.", group="optimization")
    refl_scale: float = key(
        1.0, "Reward difference that counts as 1 in the loss.", group="optimization", gt=0
    )
    refl_kl_coeff: float = key(
        0.0, "Weight of the divergence from the starting policy; 0 builds none.", group="optimization", ge=0
    )
    refl_fixed_noise: bool = key(
        False, "Start every rollout of every batch from the same noise.", group="sampler"
    )
    refl_sample_batch_size: int = key(1, "Videos sampled, decoded and scored in one call.", ge=1)
    refl_vae_tile_height: int | None = key(
        None,
        "Decode in tiles of this many pixels, an approximation; null decodes exactly.",
        group="sampler",
        ge=16,
    )
    refl_vae_tile_width: int | None = key(
        None, "Width of a tile in pixels; set with refl_vae_tile_height.", group="sampler", ge=16
    )
    refl_vae_tile_overlap: int = key(
        64, "Pixels that neighbouring tiles share and blend.", group="sampler", ge=0
    )
    refl_vae_tile_parallel: bool = key(
        False, "Spread the tiles over the ranks of a tensor-parallel group, which hold the same latents."
    )


class GrpoSection(Section):
    title: ClassVar[str] = "GRPO and sampler"

    grpo_group_size: int = key(
        16, "Rollouts of one prompt, compared with each other.", group="optimization", ge=2
    )
    grpo_sample_batch_size: int = key(1, "Rollouts sampled in one batched call.", ge=1)
    grpo_train_sample_batch_size: int | None = key(
        None, "Rollouts replayed in one batched call; null takes grpo_sample_batch_size.", ge=1
    )
    grpo_num_sampling_steps: int = key(30, "Denoising steps of a rollout.", group="sampler", ge=2)
    grpo_sde_formula: Literal["flowcps", "dancegrpo", "flowgrpo"] | TargetMapping = key(
        "flowcps", "Stochastic transition of the sampler.", group="sampler"
    )
    grpo_sde_noise_scale: float = key(
        0.7,
        "Noise strength eta: 0 to 1 with flowcps, above 0 and at most 2 otherwise, above 0 with your own.",
        group="sampler",
    )
    grpo_cps_noise_scale_range: Pair | None = key(
        None,
        "With flowcps or your own: draw eta uniformly from these bounds, once a prompt and step.",
        group="sampler",
    )
    grpo_cfg_scale: float = key(
        1.0, "Guidance scale of rollout and replay; 1 is without guidance.", group="sampler", ge=1
    )
    dancegrpo_share_group_init_noise: bool = key(
        True, "Start all rollouts of a group from the same noise.", group="sampler"
    )
    dancegrpo_timestep_selection_ratio: float = key(
        0.6, "Share of the denoising steps that is replayed.", group="sampler", gt=0, le=1
    )
    trajectory_dtype: Literal["float32", "bfloat16", "float16"] = key(
        "float32", "Dtype in which rollout latents are stored until replay.", group="sampler"
    )
    grpo_clip_range: float = key(
        1e-4, "Clip range of the ratio for rollouts of the current policy.", group="optimization", gt=0, lt=1
    )
    grpo_delayed_replay: bool | None = key(
        None, "True replays each rollout one step late, so that scoring overlaps sampling."
    )
    max_off_policy_steps: int | None = key(
        None,
        "Steps between rollout and replay; 0 is on-policy, null is 1 with grpo_delayed_replay, else 0.",
        ge=0,
    )
    grpo_delayed_replay_clip_range: float | None = key(
        None,
        "Clip range for rollouts of an older policy; null takes grpo_clip_range.",
        group="optimization",
        gt=0,
        lt=1,
    )
    grpo_updates_per_rollout: int = key(
        1, "Optimizer updates made from each rollout.", group="optimization", ge=1
    )
    grpo_adv_clip_max: float = key(5.0, "Advantages are clamped to this size.", group="optimization", gt=0)
    grpo_loss: TargetMapping | None = key(
        None, "Policy loss of your own; null is the clipped surrogate.", group="optimization"
    )
    grpo_kl_coeff: float = key(
        0.0, "Weight of the divergence from the starting policy; 0 builds none.", group="optimization", ge=0
    )
    ratio_gate_tolerance: float | None = key(
        None,
        "Largest distance of the ratio from 1 when nothing was updated; null is a tenth of grpo_clip_range.",
        gt=0,
    )
    grpo_reward_fn: RewardChoice = key(
        "vbvr_rule",
        "Reward: the rule evaluator, the vision-language judge, your own, or a list of these.",
        group="reward",
    )
    reward_weights: dict[str, float] = key(
        {"score": 1.0},
        "Weight of each named score in the reward, or of each reward of a list; negative ones are allowed.",
        group="reward",
    )
    reward_monitor: RewardChoice = key([], "Rewards that are scored and logged without being trained on.")
    reward_workers: int = key(1, "Processes a rank that run a scoring function of your own.", ge=1)
    reward_timeout_s: float = key(300.0, "Seconds after which an unfinished verdict counts as missing.", gt=0)


class RuleRewardSection(Section):
    title: ClassVar[str] = "Rule reward (vbvr_rule)"

    vbvr_reward_evalkit_dir: str | None = key(
        None, "Checkout of the external evaluator; required by vbvr_rule.", path=True
    )
    vbvr_reward_evalkit_source_sha256: str | None = key(
        None,
        "Digest of the evaluator's sources (wan-trainer evalkit-digest prints it); required by vbvr_rule.",
        group="reward",
        pattern=SHA256,
    )
    vbvr_reward_easyocr_module_path: str | None = key(
        None, "Directory of the OCR weights, for tasks that read text.", path=True
    )
    vbvr_reward_device: str = key("cpu", "Device of the scorers; only cpu, since GPUs are hidden from them.")
    vbvr_reward_fps: int = key(16, "Frames a second of the video that is scored.", group="reward", ge=1)
    vbvr_reward_decode_batch_size: int = key(1, "Rollouts decoded by the VAE in one call.", ge=1)
    vbvr_reward_max_pending_jobs: int | None = key(
        None, "Rollouts of a rank that may wait for a verdict; null holds all that a run can have.", ge=1
    )
    vbvr_reward_cpu_workers: int = key(1, "Scorer processes of each rank.", ge=1)
    vbvr_reward_cpu_threads_per_worker: int = key(1, "Native threads of each scorer process.", ge=1)
    vbvr_reward_use_process_pool: bool = key(
        True, "Run vbvr_reward_cpu_workers scorers; false runs one isolated scorer process a rank."
    )
    vbvr_reward_prepared_width: int = key(1024, "Width of the video that is scored.", group="reward", ge=16)
    vbvr_reward_prepared_height: int = key(1024, "Height of the video that is scored.", group="reward", ge=16)
    vbvr_reward_prepare_crf: int = key(
        12, "H.264 quality of the video that is scored; lower is better.", group="reward", ge=0, le=51
    )
    vbvr_reward_max_duration_seconds: float = key(
        5.0625, "Seconds of a rollout that are scored; the rest is cut.", group="reward", gt=0
    )
    vbvr_reward_task_specific_only: bool = key(
        True, "Take only the task's own score instead of the mean of all its dimensions.", group="reward"
    )
    vbvr_reward_unsupported_score: float | None = key(
        None,
        "Score of tasks the evaluator does not know; null refuses them at start.",
        group="reward",
        ge=0,
        le=1,
    )
    vbvr_reward_fail_on_error: bool = key(False, "Stop the run at the first missing reward.")
    vbvr_reward_tmp_dir: str = key(
        "/tmp/wan-trainer", "Where videos wait to be scored; a fast local disk.", path=True
    )
    vbvr_reward_keep_tmp: bool = key(False, "Keep the scored videos for inspection.")
    vbvr_reward_fast_decode: bool = key(
        True, "Read videos without seeking where that is first proven to give the evaluator's own frames."
    )


class VlmRewardSection(Section):
    title: ClassVar[str] = "Judge reward (vbvr_vlm)"

    vlm_reward_base_url: str = key("http://127.0.0.1:18080/v1", "Root of the OpenAI-compatible endpoint.")
    vlm_reward_model: str | None = key(
        None, "Model name the endpoint serves; required by vbvr_vlm.", group="reward"
    )
    vlm_reward_api_key: str = key("EMPTY", "Key sent to the endpoint.", secret=True)
    vlm_reward_prompt_mode: Literal["task_specific", "custom"] = key(
        "task_specific", "task_specific: a rubric for each task; custom: one generic rubric.", group="reward"
    )
    vlm_reward_prompt_dir: str | None = key(
        None, "Directory of the task rubrics; required by task_specific.", path=True
    )
    vlm_reward_prompt_sha256: str | None = key(
        None, "Digest of the rubric directory.", group="reward", pattern=SHA256
    )
    vlm_reward_video_fps: int = key(16, "Frames a second of the clip sent.", group="reward", ge=1)
    vlm_reward_video_num_frames: int = key(32, "Frames the endpoint samples from it.", group="reward", ge=1)
    vlm_reward_include_gt_first_frame: bool = key(
        True, "Send the first frame as an image beside the clip.", group="reward"
    )
    vlm_reward_decode_batch_size: int = key(1, "Rollouts decoded by the VAE in one call.", ge=1)
    vlm_reward_concurrency: int = key(2, "Requests of a rank in flight.", ge=1)
    vlm_reward_max_pending_jobs: int | None = key(
        None, "Rollouts of a rank that may wait for a verdict; null holds all that a run can have.", ge=1
    )
    vlm_reward_request_timeout_seconds: float = key(300.0, "Seconds one request may take.", gt=0)
    vlm_reward_max_retries: int = key(2, "Attempts after a failed request.", ge=0)
    vlm_reward_retry_backoff_seconds: float = key(1.0, "Seconds before the first new attempt.", ge=0)
    vlm_reward_max_new_tokens: int = key(1024, "Length of an answer in tokens.", group="reward", ge=1)
    vlm_reward_image_max_edge: int = key(
        512, "Longer edge of the image sent; never enlarged.", group="reward", ge=16
    )
    vlm_reward_jpeg_quality: int = key(85, "JPEG quality of the image sent.", group="reward", ge=1, le=100)
    vlm_reward_score_max: float = key(
        100.0, "Full mark of the rubric; a reward is the mark divided by it.", group="reward", gt=0
    )
    vlm_reward_use_structured_output: bool = key(
        False, "Ask the endpoint to constrain the answer to a JSON schema.", group="reward"
    )
    vlm_reward_validate_service: bool = key(True, "Try the endpoint with one request before training.")
    vlm_reward_fail_on_error: bool = key(False, "Stop the run at the first missing reward.")
    vlm_reward_error_score: float | None = key(
        None, "Score of a failed verdict; null counts it as missing.", group="reward"
    )
    vlm_reward_log_first_n: int = key(2, "Answers of each rank that are logged in full.", ge=0)
