"""From the flat public configuration to the small specifications that components take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import JsonValue

from wan_trainer.config import specs
from wan_trainer.config.device import resolve_device
from wan_trainer.config.family import known_family
from wan_trainer.config.paths import trainer_path
from wan_trainer.config.refl_rules import grad_window, is_refl
from wan_trainer.config.reward_choice import JUDGE, RULE, label, monitored, trained, uses
from wan_trainer.config.roles import as_roles
from wan_trainer.config.target import as_target, chosen
from wan_trainer.topology import Topology, check_video_shape, resolve_topology
from wan_trainer.types import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from wan_trainer.config.schema import TrainConfig

WHOLE_SCORE = (("score", 1.0),)
"""Component weights of a built-in reward that is one of several."""


def resolve(
    config: TrainConfig, *, cuda_available: bool, family: specs.Family | None = None
) -> specs.RunSpec:
    """Everything a run needs, with absolute paths and every `auto` settled.

    family: what the model directory was found to hold; needed only when `model_family` is auto and the
    directory cannot be read from here. Raises UserError when a family cannot be told, its
    video shape does not fit, or `device: cuda` meets no GPU.
    """
    if config.device == "cuda" and not cuda_available:
        raise UserError("device: cuda was asked for, and no CUDA device is visible; use --device cpu")
    config = resolve_device(config, cuda_available=cuda_available)
    known = family or known_family(config)
    if known is None:
        raise UserError(
            f"model_family: auto finds no Wan model_index.json in {trainer_path(config.model_path)}; mend "
            "model_path or set model_family"
        )
    problems = check_video_shape(known, config.num_frames, config.height, config.width)
    if problems:
        raise UserError(*problems)
    return specs.RunSpec(
        seed=config.seed,
        device="cuda" if config.device == "cuda" else "cpu",
        model=_model(config, known),
        data=_data(config),
        sampler=_sampler(config),
        grpo=_grpo(config),
        optimizer=_optimizer(config),
        reward=_reward(config),
        output=_output(config),
        stop=specs.StopSpec(num_epochs=config.num_epochs, max_steps=config.max_steps),
        decode_batch_size=_decode_batch_size(config),
        rendezvous_timeout_s=config.rendezvous_timeout_s,
        batch=_batch(config),
        parallel=_parallel(config),
        resume=specs.ResumeSpec(
            resume_from=_optional_path(config.resume_from), weights_only=config.reset_dataloader is not False
        ),
        algorithm=_algorithm(config),
        refl=_refl(config),
        evaluation=_evaluation(config),
    )


def topology_of(config: TrainConfig, nodes: int, nproc: int) -> Topology:
    """The topology of `config` on `nodes` machines with `nproc` processes each: needs no model, no family.

    Raises UserError with every rule that the numbers break.
    """
    refl = _refl(config)
    return resolve_topology(
        _batch(config),
        _parallel(config),
        config.grpo_group_size if refl is None else 1,
        nodes,
        nproc,
        0 if refl is None else refl.roles.reward_ranks,
    )


def counts_all_ranks(config: TrainConfig) -> bool:
    """Whether batch_size counts the prompts of all ranks."""
    return config.grpo_shared_prompt_batch or is_refl(config)


def replay_depth(config: TrainConfig) -> int:
    """Steps between a rollout and its replay; 0 is on-policy."""
    if config.max_off_policy_steps is not None:
        return config.max_off_policy_steps
    return int(config.grpo_delayed_replay or False)


def _optional_path(value: str | None) -> Path | None:
    return None if value is None else trainer_path(value)


def _batch(config: TrainConfig) -> specs.BatchSpec:
    return specs.BatchSpec(
        batch_size=config.batch_size,
        shared_prompts=counts_all_ranks(config),
        wave=config.grpo_shared_prompt_microbatch_size,
        expected_global_prompts=config.expected_global_prompts,
    )


def _parallel(config: TrainConfig) -> specs.ParallelSpec:
    return specs.ParallelSpec(
        fsdp=config.fsdp, hsdp=config.hsdp, tensor_parallel_size=config.tensor_parallel_size
    )


def _model(config: TrainConfig, family: specs.Family) -> specs.ModelSpec:
    lora = None
    if config.lora_rank > 0:
        lora = specs.LoraSpec(
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            target_modules=tuple(config.lora_target_modules),
            module_prefix=config.lora_module_prefix,
        )
    return specs.ModelSpec(
        path=trainer_path(config.model_path),
        family=family,
        device="cuda" if config.device == "cuda" else "cpu",
        load_dtype=config.transformer_load_dtype,
        param_dtype=config.param_dtype,
        reduce_dtype=config.reduce_dtype,
        train_experts=config.train_experts,
        lora=lora,
        negative_prompt=config.negative_prompt,
        gradient_checkpointing=config.gradient_checkpointing,
        attention_backend=config.attention_backend,
        disable_cudnn_sdp=config.disable_cudnn_sdp,
        use_liger_kernel=config.use_liger_kernel,
        compile_backend=config.torch_compile_backend if config.torch_compile else None,
        compile_mode=config.torch_compile_mode if config.torch_compile else None,
        offload_inference_models=config.grpo_offload_inference_models,
        fsdp=config.fsdp,
        base_lora=_optional_path(config.base_lora),
    )


def _data(config: TrainConfig) -> specs.DataSpec:
    seed = config.shuffle_raw_indices_seed
    return specs.DataSpec(
        dataset_json=trainer_path(config.dataset_json),
        dataset_size=config.dataset_size,
        num_frames=config.num_frames,
        height=config.height,
        width=config.width,
        fps=config.fps,
        shuffle=config.shuffle,
        shuffle_seed=config.seed if seed is None else seed,
        num_workers=config.num_workers,
        prefetch_factor=config.prefetch_factor,
        persistent_workers=config.persistent_workers,
    )


def _algorithm(config: TrainConfig) -> specs.AlgorithmName | specs.Target:
    if isinstance(config.trainer, str):
        # `contradictions` knows two names.
        return "refl" if is_refl(config) else "dancegrpo"
    return as_target(config.trainer)


def _refl(config: TrainConfig) -> specs.ReflSpec | None:
    if not is_refl(config):
        return None
    assert config.roles is not None, "contradictions() requires them"
    first, last = grad_window(config)
    return specs.ReflSpec(
        algorithm=config.refl_algorithm,
        first_grad_step=first,
        last_grad_step=last,
        cfg_grad=config.refl_cfg_grad,
        weight=config.refl_weight,
        baseline=config.refl_baseline,
        scale=config.refl_scale,
        kl_coeff=config.refl_kl_coeff,
        fixed_noise=config.refl_fixed_noise,
        sample_batch_size=config.refl_sample_batch_size,
        reward_max_error_rate=config.reward_max_error_rate,
        roles=as_roles(config.roles),
        tiling=_tiling(config),
    )


def _tiling(config: TrainConfig) -> specs.VaeTiling | None:
    height, width = config.refl_vae_tile_height, config.refl_vae_tile_width
    if height is None or width is None:
        return None
    return specs.VaeTiling(height, width, config.refl_vae_tile_overlap, config.refl_vae_tile_parallel)


def _sampler(config: TrainConfig) -> specs.SamplerSpec:
    if is_refl(config):
        return specs.SamplerSpec(
            kind="flowcps",
            eta=0.0,  # every step of flowcps without noise is Euler's
            eta_range=None,
            num_steps=config.refl_num_sampling_steps,
            flow_shift=config.flow_shift,
            cfg_scale=config.refl_cfg_scale,
            share_group_init_noise=False,
            replay_ratio=1.0,
            trajectory_dtype="float32",
            seed=config.seed,
        )
    return specs.SamplerSpec(
        kind=chosen(config.grpo_sde_formula),
        eta=config.grpo_sde_noise_scale,
        eta_range=config.grpo_cps_noise_scale_range,
        num_steps=config.grpo_num_sampling_steps,
        flow_shift=config.flow_shift,
        cfg_scale=config.grpo_cfg_scale,
        share_group_init_noise=config.dancegrpo_share_group_init_noise,
        replay_ratio=config.dancegrpo_timestep_selection_ratio,
        trajectory_dtype=config.trajectory_dtype,
        seed=config.seed,
    )


def _grpo(config: TrainConfig) -> specs.GrpoSpec:
    """In a ReFL run the keys of GRPO have their defaults, and what both have comes from ReFL's."""
    refl = is_refl(config)
    clip, stale = config.grpo_clip_range, config.grpo_delayed_replay_clip_range
    tolerance = config.ratio_gate_tolerance
    # Where both are trained on, `contradictions` requires the two to be alike.
    judge = trained(config) == [JUDGE]
    return specs.GrpoSpec(
        group_size=1 if refl else config.grpo_group_size,
        sample_batch_size=config.refl_sample_batch_size if refl else config.grpo_sample_batch_size,
        train_sample_batch_size=config.refl_sample_batch_size
        if refl
        else config.grpo_train_sample_batch_size or config.grpo_sample_batch_size,
        clip_range=clip,
        stale_clip_range=clip if stale is None else stale,
        depth=replay_depth(config),
        kl_coeff=config.refl_kl_coeff if refl else config.grpo_kl_coeff,
        adv_clip_max=config.grpo_adv_clip_max,
        updates_per_rollout=config.grpo_updates_per_rollout,
        ratio_gate_tolerance=0.1 * clip if tolerance is None else tolerance,
        sync_each_backward=config.grpo_fsdp_sync_each_backward,
        reward_max_error_rate=config.reward_max_error_rate,
        fail_on_reward_error=config.vlm_reward_fail_on_error if judge else config.vbvr_reward_fail_on_error,
        fail_on_reward_error_key="vlm_reward_fail_on_error" if judge else "vbvr_reward_fail_on_error",
        loss=None if config.grpo_loss is None else as_target(config.grpo_loss),
    )


def _optimizer(config: TrainConfig) -> specs.OptimizerSpec:
    return specs.OptimizerSpec(
        learning_rate=config.learning_rate,
        betas=config.adam_betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        warmup_steps=config.warmup_steps,
        lr_schedule=chosen(config.lr_scheduler),
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        max_nonfinite_steps=config.max_nonfinite_steps,
        ema_decay=config.ema_decay,
    )


def _pending_bound(config: TrainConfig, stated: int | None) -> int:
    """Rollouts that may wait for a verdict: as stated, else all that one rank can have at any topology."""
    if stated is not None:
        return stated
    return config.batch_size * config.grpo_group_size * (replay_depth(config) + 1)


def _decode_batch_size(config: TrainConfig) -> int:
    """The smaller of two: memory must suffice for the rewards that are in use."""
    sizes = [config.vlm_reward_decode_batch_size] if uses(config, JUDGE) else []
    if uses(config, RULE) or not sizes:
        sizes.append(config.vbvr_reward_decode_batch_size)
    return min(sizes)


def _reward(config: TrainConfig) -> specs.RewardSpec:
    if is_refl(config):
        return specs.RewardSpec(())
    choices, weights = trained(config), config.reward_weights
    if len(choices) == 1:
        parts = (_part(config, choices[0], tuple(weights.items())),)
    else:
        parts = tuple(
            replace(_part(config, choice, WHOLE_SCORE), weight=weights[label(choice)]) for choice in choices
        )
    return specs.RewardSpec(
        trained=parts, monitored=tuple(_part(config, choice, WHOLE_SCORE) for choice in monitored(config))
    )


def _part(config: TrainConfig, choice: JsonValue, weights: tuple[tuple[str, float], ...]) -> specs.RewardPart:
    """One reward; weights: of its own components."""
    if isinstance(choice, Mapping):
        spec = specs.OwnRewardSpec(as_target(choice), config.reward_workers, config.reward_timeout_s)
    else:
        spec = _rule_reward(config, weights) if choice == RULE else _judge_reward(config, weights)
    return specs.RewardPart(label(choice), spec)


def _rule_reward(config: TrainConfig, weights: tuple[tuple[str, float], ...]) -> specs.RuleRewardSpec:
    directory, digest = config.vbvr_reward_evalkit_dir, config.vbvr_reward_evalkit_source_sha256
    assert directory is not None and digest is not None, "contradictions() requires both"
    return specs.RuleRewardSpec(
        evalkit_dir=trainer_path(directory),
        source_sha256=digest,
        easyocr_module_path=_optional_path(config.vbvr_reward_easyocr_module_path),
        device=config.vbvr_reward_device,
        fps=config.vbvr_reward_fps,
        prepared_width=config.vbvr_reward_prepared_width,
        prepared_height=config.vbvr_reward_prepared_height,
        prepare_crf=config.vbvr_reward_prepare_crf,
        max_duration_s=config.vbvr_reward_max_duration_seconds,
        workers=config.vbvr_reward_cpu_workers if config.vbvr_reward_use_process_pool else 1,
        threads_per_worker=config.vbvr_reward_cpu_threads_per_worker,
        max_pending_jobs=_pending_bound(config, config.vbvr_reward_max_pending_jobs),
        timeout_s=config.reward_timeout_s,
        unsupported_score=config.vbvr_reward_unsupported_score,
        task_specific_only=config.vbvr_reward_task_specific_only,
        tmp_dir=trainer_path(config.vbvr_reward_tmp_dir),
        keep_tmp=config.vbvr_reward_keep_tmp,
        fast_decode=config.vbvr_reward_fast_decode,
        weights=weights,
    )


def _judge_reward(config: TrainConfig, weights: tuple[tuple[str, float], ...]) -> specs.VlmRewardSpec:
    assert config.vlm_reward_model is not None, "contradictions() requires it"
    return specs.VlmRewardSpec(
        base_url=config.vlm_reward_base_url,
        model=config.vlm_reward_model,
        api_key=config.vlm_reward_api_key,
        prompt_mode=config.vlm_reward_prompt_mode,
        prompt_dir=_optional_path(config.vlm_reward_prompt_dir),
        prompt_sha256=config.vlm_reward_prompt_sha256,
        video_fps=config.vlm_reward_video_fps,
        video_num_frames=config.vlm_reward_video_num_frames,
        include_gt_first_frame=config.vlm_reward_include_gt_first_frame,
        concurrency=config.vlm_reward_concurrency,
        max_pending_jobs=_pending_bound(config, config.vlm_reward_max_pending_jobs),
        request_timeout_s=config.vlm_reward_request_timeout_seconds,
        max_retries=config.vlm_reward_max_retries,
        retry_backoff_s=config.vlm_reward_retry_backoff_seconds,
        max_new_tokens=config.vlm_reward_max_new_tokens,
        image_max_edge=config.vlm_reward_image_max_edge,
        jpeg_quality=config.vlm_reward_jpeg_quality,
        score_max=config.vlm_reward_score_max,
        use_structured_output=config.vlm_reward_use_structured_output,
        validate_service=config.vlm_reward_validate_service,
        error_score=config.vlm_reward_error_score,
        log_first_n=config.vlm_reward_log_first_n,
        timeout_s=config.reward_timeout_s,
        weights=weights,
    )


def _output(config: TrainConfig) -> specs.OutputSpec:
    return specs.OutputSpec(
        output_dir=trainer_path(config.output_dir),
        auto_resume=config.auto_resume,
        save_steps=config.save_steps,
        log_steps=config.log_steps,
        keep_checkpoints=config.keep_checkpoints,
        rollout_video_every_steps=config.rollout_video_every_steps,
        wandb_project=config.wandb_project if config.report_to_wandb else None,
        wandb_run_name=config.wandb_run_name,
    )


def _evaluation(config: TrainConfig) -> specs.EvalSpec | None:
    if config.eval_steps == 0:
        return None
    assert config.eval_dataset_json is not None, "contradictions() requires it"
    return specs.EvalSpec(config.eval_steps, trainer_path(config.eval_dataset_json), config.eval_size)
