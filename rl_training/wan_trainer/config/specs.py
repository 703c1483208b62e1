"""Small frozen specifications, one per component: what a component needs to know and nothing else.

They are built once from the flat public config (`wan_trainer.config.resolve`), so that no component reads a
config key and no key is read in two places. All paths are absolute, every `auto` is resolved.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

Family = Literal["ti2v-5b", "i2v-a14b", "t2v-1.3b", "t2v-a14b"]
Dtype = Literal["float32", "bfloat16", "float16"]
TransitionKind = Literal["flowcps", "dancegrpo", "flowgrpo"]
Device = Literal["cuda", "cpu"]
Experts = Literal["both", "high", "low"]
LrSchedule = Literal["cosine", "linear_warmup", "constant"]
AlgorithmName = Literal["dancegrpo", "refl"]
ReflAlgorithm = Literal["last_step", "truncated", "random_k", "x0_jump", "drtune"]


@dataclass(frozen=True)
class Target:
    """A part of the user's own: what to call, and with what.

    path: "module.attribute". arguments_json: its keyword arguments as JSON with sorted keys, so that a
    specification can be compared and hashed like any other.
    """

    path: str
    arguments_json: str = "{}"

    def __str__(self) -> str:
        return self.path

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments, new ones at each call."""
        return json.loads(self.arguments_json)


TransitionChoice = TransitionKind | Target


@dataclass(frozen=True)
class LoraSpec:
    """Low-rank adapters: rank, alpha, module name suffixes, and an optional expert or module prefix."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    module_prefix: str | None


@dataclass(frozen=True)
class ModelSpec:
    """The model directory and how it is loaded.

    load_dtype "auto": float32 for what is trained, the checkpoint's dtype for what is frozen.
    train_experts matters for two-expert families only. weights_from: experts to start from in place of those
    of `path`, which the run finds out; a Diffusers directory or safetensors.
    """

    path: Path
    family: Family
    device: Device
    load_dtype: Literal["auto", "float32", "bfloat16", "float16"]
    param_dtype: Dtype
    reduce_dtype: Dtype
    train_experts: Experts
    lora: LoraSpec | None
    negative_prompt: str
    gradient_checkpointing: bool
    attention_backend: str
    disable_cudnn_sdp: bool
    use_liger_kernel: bool
    compile_backend: str | None
    compile_mode: str | None
    offload_inference_models: bool
    fsdp: bool
    base_lora: Path | None = None
    weights_from: Path | None = None


@dataclass(frozen=True)
class DataSpec:
    """The dataset and the order of its stream. `fps` is frames a second of the rollout video."""

    dataset_json: Path
    dataset_size: int | None
    num_frames: int
    height: int
    width: int
    fps: int
    shuffle: bool
    shuffle_seed: int
    num_workers: int
    prefetch_factor: int
    persistent_workers: bool


@dataclass(frozen=True)
class SamplerSpec:
    """How a rollout is drawn. eta_range, if set, replaces eta: one uniform draw per prompt group and step."""

    kind: TransitionChoice
    eta: float
    eta_range: tuple[float, float] | None
    num_steps: int
    flow_shift: float | None
    cfg_scale: float
    share_group_init_noise: bool
    replay_ratio: float
    trajectory_dtype: Dtype
    seed: int


@dataclass(frozen=True)
class GrpoSpec:
    """The GRPO objective. clip_range serves on-policy rollouts, stale_clip_range those of an older policy.

    fail_on_reward_error_key: the configuration key that fail_on_reward_error comes from, for its message.
    loss: None is the clipped surrogate.
    """

    group_size: int
    sample_batch_size: int
    train_sample_batch_size: int
    clip_range: float
    stale_clip_range: float
    depth: int
    kl_coeff: float
    adv_clip_max: float
    updates_per_rollout: int
    ratio_gate_tolerance: float
    sync_each_backward: bool
    reward_max_error_rate: float
    fail_on_reward_error: bool
    fail_on_reward_error_key: str = "vbvr_reward_fail_on_error"
    loss: Target | None = None


@dataclass(frozen=True)
class RolesSpec:
    """Who scores a ReFL run, and where.

    monitor: scored and logged, never trained on. reward_ranks: ranks of the reward's own, the last ones of
    the run; 0 shares the actor's. monitor_with_reward: the monitor is where the reward is.
    """

    reward: Target
    monitor: Target | None = None
    reward_ranks: int = 0
    monitor_with_reward: bool = False

    @property
    def targets(self) -> dict[str, Target]:
        """The parts by the configuration key that names them."""
        named = {"roles.reward": self.reward}
        return named if self.monitor is None else {**named, "roles.monitor": self.monitor}


@dataclass(frozen=True)
class ReflSpec:
    """The ReFL objective: minus `weight` (reward - baseline) / scale, plus kl_coeff times the divergence.

    first_grad_step, last_grad_step: denoising steps with a gradient, 0 the noisiest. cfg_grad: which branch
    of guidance has one. fixed_noise: every rollout starts from the same draw. sample_batch_size: videos that
    are sampled, decoded and scored in one call.
    """

    algorithm: ReflAlgorithm
    first_grad_step: int
    last_grad_step: int
    cfg_grad: Literal["conditional", "both"]
    weight: float
    baseline: float
    scale: float
    kl_coeff: float
    fixed_noise: bool
    sample_batch_size: int
    reward_max_error_rate: float
    roles: RolesSpec
    tiling: VaeTiling | None = None


@dataclass(frozen=True)
class OptimizerSpec:
    """AdamW and its schedule. warmup_steps and horizons count optimizer updates."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    warmup_steps: int
    lr_schedule: LrSchedule | Target
    gradient_accumulation_steps: int
    max_nonfinite_steps: int
    ema_decay: float


@dataclass(frozen=True)
class RuleRewardSpec:
    """The external rule evaluator (contract in docs/rewards.md). Counts are per rank; times in seconds."""

    evalkit_dir: Path
    source_sha256: str
    easyocr_module_path: Path | None
    device: str
    fps: int
    prepared_width: int
    prepared_height: int
    prepare_crf: int
    max_duration_s: float
    workers: int
    threads_per_worker: int
    max_pending_jobs: int
    timeout_s: float
    unsupported_score: float | None
    task_specific_only: bool
    tmp_dir: Path
    keep_tmp: bool
    fast_decode: bool
    weights: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class VlmRewardSpec:
    """A vision-language judge behind an OpenAI-compatible endpoint. Counts are per rank; times in seconds.

    score_max: the judge's full mark; a reward is the mark divided by it. error_score None: a failed verdict
    is a missing reward.
    """

    base_url: str
    model: str
    api_key: str = field(repr=False)
    prompt_mode: Literal["task_specific", "custom"]
    prompt_dir: Path | None
    prompt_sha256: str | None
    video_fps: int
    video_num_frames: int
    include_gt_first_frame: bool
    concurrency: int
    max_pending_jobs: int
    request_timeout_s: float
    max_retries: int
    retry_backoff_s: float
    max_new_tokens: int
    image_max_edge: int
    jpeg_quality: int
    score_max: float
    use_structured_output: bool
    validate_service: bool
    error_score: float | None
    log_first_n: int
    timeout_s: float
    weights: tuple[tuple[str, float], ...]

    @property
    def is_local(self) -> bool:
        """Whether the endpoint is on the machine of the rank that asks it."""
        host = urlsplit(self.base_url).hostname or ""
        try:
            return host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True)
class OwnRewardSpec:
    """A reward of the user's own: a whole `types.Reward`, or a function that scores one rollout.

    workers, timeout_s: of a function, which runs in that many processes a rank and has so many seconds a
    rollout.
    """

    target: Target
    workers: int
    timeout_s: float


PartSpec = RuleRewardSpec | VlmRewardSpec | OwnRewardSpec


@dataclass(frozen=True)
class RewardPart:
    """One of a run's rewards. name: what weights and components call it. weight: in the trained sum."""

    name: str
    spec: PartSpec
    weight: float = 1.0


@dataclass(frozen=True)
class RewardSpec:
    """What a run is trained on, the weighted sum of `trained`, and what it only logs."""

    trained: tuple[RewardPart, ...]
    monitored: tuple[RewardPart, ...] = ()

    @property
    def parts(self) -> tuple[RewardPart, ...]:
        """All of them."""
        return self.trained + self.monitored

    @property
    def rule(self) -> RuleRewardSpec | None:
        """The rule evaluator, if it is one of them."""
        return next((part.spec for part in self.parts if isinstance(part.spec, RuleRewardSpec)), None)

    @property
    def judge(self) -> VlmRewardSpec | None:
        """The vision-language judge, if it is one of them."""
        return next((part.spec for part in self.parts if isinstance(part.spec, VlmRewardSpec)), None)

    @property
    def keyed_parts(self) -> list[tuple[str, RewardPart]]:
        """All of them, each with the configuration key that names it: `key[name]` where it names several."""
        keyed: list[tuple[str, RewardPart]] = []
        for key, parts in (("grpo_reward_fn", self.trained), ("reward_monitor", self.monitored)):
            keyed += [(key if len(parts) == 1 else f"{key}[{part.name}]", part) for part in parts]
        return keyed

    @property
    def own(self) -> dict[str, OwnRewardSpec]:
        """The user's own rewards by the configuration key that names them."""
        return {key: part.spec for key, part in self.keyed_parts if isinstance(part.spec, OwnRewardSpec)}


@dataclass(frozen=True)
class BatchSpec:
    """How many prompts a step has. batch_size is global with shared_prompts, else per data-parallel replica.

    wave: prompts whose rewards are gathered together (None: all of the step).
    """

    batch_size: int = 1
    shared_prompts: bool = False
    wave: int | None = None
    expected_global_prompts: int | None = None


@dataclass(frozen=True)
class ParallelSpec:
    """How ranks divide the model: shard groups of one node with hsdp, tensor parallelism inside a node.

    fsdp False: every data-parallel rank holds all of it.
    """

    fsdp: bool = True
    hsdp: bool = False
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class ResumeSpec:
    """Where training starts from when output_dir holds no checkpoint.

    weights_only: counters, optimizer, data order and EMA start fresh.
    """

    resume_from: Path | None = None
    weights_only: bool = True


@dataclass(frozen=True)
class OutputSpec:
    """Where a run writes and how often. Intervals count batches; 0 switches a periodic output off.

    keep_checkpoints: how many of the newest stay, 0 for all.
    """

    output_dir: Path
    auto_resume: bool
    save_steps: int
    log_steps: int
    keep_checkpoints: int
    rollout_video_every_steps: int
    wandb_project: str | None
    wandb_run_name: str | None


@dataclass(frozen=True)
class EvalSpec:
    """Evaluation on held prompts. steps: batches between; size: how many of them, None for all."""

    steps: int
    dataset_json: Path
    size: int | None = None


@dataclass(frozen=True)
class StopSpec:
    """When the run ends: after num_epochs passes, or max_steps batches, whichever comes first."""

    num_epochs: float
    max_steps: int | None


@dataclass(frozen=True)
class VaeTiling:
    """Tiles that a decode with a gradient is cut into: height x width pixels, neighbours share `overlap`.

    All three are multiples of the VAE's spatial factor (16 for ti2v-5b, else 8); overlap is less than height
    and width. parallel: the tiles are spread over ranks that hold the same latents.
    """

    height: int
    width: int
    overlap: int
    parallel: bool = False


@dataclass(frozen=True)
class RunSpec:
    """Everything the run needs, resolved. `decode_batch_size`: videos per VAE decode call.

    refl: set in a ReFL run, whose `grpo` holds what both algorithms have: one rollout a prompt, no delay.
    evaluation: None when it is off.
    """

    seed: int
    device: Device
    model: ModelSpec
    data: DataSpec
    sampler: SamplerSpec
    grpo: GrpoSpec
    optimizer: OptimizerSpec
    reward: RewardSpec
    output: OutputSpec
    stop: StopSpec
    decode_batch_size: int
    rendezvous_timeout_s: float
    batch: BatchSpec = field(default_factory=BatchSpec)
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    resume: ResumeSpec = field(default_factory=ResumeSpec)
    algorithm: AlgorithmName | Target = "dancegrpo"
    refl: ReflSpec | None = None
    evaluation: EvalSpec | None = None
