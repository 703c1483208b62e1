"""The public schema, one section a concern: model, data, run and output, optimizer, parallelism.

Keys are flat and keep the spelling of the reference recipes, so that a recipe is a plain list of values.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict

from wan_trainer.config.fields import key
from wan_trainer.config.target import TargetMapping


def _pair_from_list(value: object) -> object:
    """YAML has lists only; strict validation of a tuple would refuse them."""
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


Pair = Annotated[tuple[float, float], BeforeValidator(_pair_from_list)]


class Section(BaseModel):
    """Strict values (a text is never taken for a number), no unknown keys, immutable once built."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    title: ClassVar[str] = ""


class ModelSection(Section):
    title: ClassVar[str] = "Model"

    model_path: str = key(
        "", "Diffusers directory of the model to train.", group="model", path=True, required=True
    )
    model_family: Literal["auto", "ti2v-5b", "i2v-a14b", "t2v-1.3b", "t2v-a14b"] = key(
        "auto", "Wan variant; auto reads model_index.json of model_path.", group="model"
    )
    transformer_load_dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto",
        "Dtype the transformer is held in; auto is float32 for what is trained and the checkpoint's dtype "
        "for what is frozen.",
        group="model",
    )
    param_dtype: Literal["float32", "bfloat16", "float16"] = key(
        "bfloat16", "Dtype of forward and backward; on device cpu the default becomes float32.", group="model"
    )
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = key(
        "float32", "Dtype in which gradients are reduced across ranks.", group="model"
    )
    train_experts: Literal["both", "high", "low"] = key(
        "both", "Experts that are trained; high and low are for two-expert families.", group="model"
    )
    lora_rank: int = key(0, "Rank of the adapters; 0 trains all weights.", group="model", ge=0)
    lora_alpha: float = key(32.0, "Adapter scale: updates count alpha / rank.", group="model", gt=0)
    lora_target_modules: list[str] = key(
        ["to_q", "to_k", "to_v", "to_out.0"],
        "Suffixes of the module names that get an adapter.",
        group="model",
        min_length=1,
    )
    lora_module_prefix: str | None = key(
        None,
        "Only modules whose name starts so get an adapter, for example blocks.0, transformer_2, high_noise.",
        group="model",
    )
    base_lora: str | None = key(
        None,
        "LoRA merged into the weights before training: a safetensors file, or a directory (training page).",
        group="model",
        path=True,
    )
    gradient_checkpointing: bool = key(True, "Recompute activations in the backward pass to save memory.")
    use_liger_kernel: bool = key(False, "Replace Wan's norm modules by fused Liger kernels.")
    attention_backend: str = key("native", "Attention backend by its Diffusers name.")
    disable_cudnn_sdp: bool = key(False, "Keep PyTorch from choosing the cuDNN attention kernel.")
    torch_compile: bool = key(False, "Compile the transformer blocks.")
    torch_compile_backend: Literal["inductor", "aot_eager", "eager"] = key(
        "inductor", "Compiler used when torch_compile is on."
    )
    torch_compile_mode: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    ) = key(None, "Mode of the inductor backend; null is its default.")
    grpo_offload_inference_models: bool = key(
        False, "Keep text encoder and VAE in host memory while they are not used."
    )


class DataSection(Section):
    title: ClassVar[str] = "Data"

    dataset_json: str = key(
        "",
        "Dataset descriptor (.json) or prompt list (.txt, .jsonl); see the data page.",
        group="data",
        path=True,
        required=True,
    )
    dataset_size: int | None = key(
        None, "Number of samples the dataset must have; null accepts any.", group="data", ge=1
    )
    num_frames: int = key(81, "Frames of a rollout, 4k+1.", group="data", ge=1)
    height: int = key(512, "Height in pixels.", group="data", ge=16)
    width: int = key(512, "Width in pixels.", group="data", ge=16)
    fps: int = key(16, "Frames a second of a rollout.", group="data", ge=1)
    shuffle: bool = key(
        True,
        "Visit samples in a new order each epoch, keyed by seed and epoch; false keeps the file's order.",
        group="data",
    )
    shuffle_raw_indices: bool | None = key(
        None, "The reference recipes' spelling of shuffle; null leaves it to shuffle."
    )
    shuffle_raw_indices_seed: int | None = key(
        None, "Seed of the sample order; null takes seed.", group="data", ge=0
    )
    num_workers: int = key(2, "Loader processes of each rank; 0 loads in the rank itself.", ge=0)
    prefetch_factor: int = key(2, "Batches each loader process prepares ahead.", ge=1)
    persistent_workers: bool = key(True, "Keep loader processes alive between epochs.")
    latent_webdataset_dir: str | None = key(
        None,
        "Refused: pre-encoded latents are not an input of GRPO, which encodes the first frame itself.",
        path=True,
    )


class RunSection(Section):
    title: ClassVar[str] = "Run and output"

    trainer: str | TargetMapping = key(
        "dancegrpo",
        "Training algorithm: dancegrpo is GRPO, refl backpropagates a differentiable reward; or your own.",
        group="optimization",
    )
    device: Literal["auto", "cuda", "cpu"] = key("auto", "Where to run; auto is cuda where there is one.")
    seed: int = key(42, "Seed of every random draw.", group="sampler", ge=0)
    output_dir: str = key("", "Run directory.", path=True, required=True)
    auto_resume: bool = key(True, "Go on from the newest complete checkpoint of output_dir.")
    resume_from: str | None = key(
        None, "Weights or checkpoint to start from when output_dir holds none.", path=True
    )
    reset_dataloader: bool | None = key(
        None, "With resume_from: true or null loads weights only, false restores the whole training state."
    )
    num_epochs: float = key(1.0, "Passes over the dataset; fractions are allowed.", gt=0)
    max_steps: int | None = key(None, "Stop after this many batches, if num_epochs does not end first.", ge=1)
    save_steps: int = key(100, "Batches between checkpoints; 0 saves at the end only.", ge=0)
    keep_checkpoints: int = key(3, "Newest checkpoints that are kept; 0 keeps all.", ge=0)
    log_steps: int = key(1, "Batches between lines of progress output.", ge=1)
    rollout_video_every_steps: int = key(50, "Batches between saved rollout videos; 0 saves none.", ge=0)
    eval_steps: int = key(0, "Batches between evaluations on held prompts; 0 is off.", ge=0)
    eval_dataset_json: str | None = key(
        None, "Prompt list or dataset descriptor of the held prompts; eval_steps needs it.", path=True
    )
    eval_size: int | None = key(None, "How many of the held prompts, from the first; null is all.", ge=1)
    wandb_project: str | None = key(None, "Weights & Biases project; null writes no such log.")
    report_to_wandb: bool = key(True, "False writes no Weights & Biases log though a project is named.")
    wandb_run_name: str | None = key(None, "Name of the run in Weights & Biases and in the report.")


class OptimizerSection(Section):
    title: ClassVar[str] = "Optimizer"

    learning_rate: float = key(5e-6, "Peak learning rate of AdamW.", group="optimization", ge=0)
    lr_scheduler: Literal["cosine", "linear_warmup", "constant"] | TargetMapping = key(
        "cosine",
        "cosine: warm-up, then cosine to 0; linear_warmup: warm-up, then constant; constant: no warm-up.",
        group="optimization",
    )
    warmup_steps: int = key(0, "Optimizer updates of linear warm-up.", group="optimization", ge=0)
    weight_decay: float = key(0.01, "Decoupled weight decay.", group="optimization", ge=0)
    adam_betas: Pair = key((0.9, 0.999), "Decay rates of AdamW's two moments.", group="optimization")
    adam_eps: float = key(1e-8, "Term added to AdamW's denominator.", group="optimization", gt=0)
    max_grad_norm: float = key(
        1.0, "Global gradient norm above which gradients shrink.", group="optimization", gt=0
    )
    gradient_accumulation_steps: int = key(
        1, "Batches whose gradients make one optimizer update.", group="optimization", ge=1
    )
    max_nonfinite_steps: int = key(
        3, "Updates in a row that may be skipped for a non-finite gradient before the run stops.", ge=0
    )
    ema_decay: float = key(
        0.0, "Decay of the averaged weights; 0 keeps none.", group="optimization", ge=0, lt=1
    )


class ParallelSection(Section):
    title: ClassVar[str] = "Batch and parallelism"

    batch_size: int = key(
        1,
        "Prompts a step: global with grpo_shared_prompt_batch and in ReFL, otherwise of each data-parallel "
        "replica.",
        ge=1,
    )
    expected_global_prompts: int | None = key(
        None, "Prompts a step over all ranks; a topology that gives another number is refused.", ge=1
    )
    grpo_shared_prompt_batch: bool = key(
        False,
        "Spread the group of one prompt over several ranks instead of giving each rank its own prompts.",
    )
    grpo_shared_prompt_microbatch_size: int | None = key(
        None, "Prompts of one wave, scored together while the next is sampled; null is one wave.", ge=1
    )
    tensor_parallel_size: int = key(1, "Ranks that share one copy of the model's matrices.", ge=1)
    fsdp: bool = key(True, "Shard parameters, gradients and optimizer state over ranks.")
    hsdp: bool = key(False, "Shard within a node and replicate across nodes; on one node the same as fsdp.")
    grpo_fsdp_sync_each_backward: bool = key(
        True, "Reduce gradients in every backward pass: less memory, more traffic than once an update."
    )
    rendezvous_timeout_s: float = key(
        600.0, "Seconds to wait for the other nodes at start and in a collective.", gt=0
    )
    expert_parallel: bool = key(False, "Refused when true: experts on separate ranks are not built.")
    rl_train_node_count: int = key(0, "Refused unless 0: separate rollout nodes are not built.", ge=0)
    rl_train_rank_count: int = key(0, "Refused unless 0: separate rollout ranks are not built.", ge=0)
    rl_actor_weight_sync: str = key("none", "Refused unless none: there are no actors to synchronise.")
    rl_actor_weight_sync_interval: int = key(1, "Refused unless 1: there are no actors to synchronise.", ge=1)
    rl_async_rollout: bool = key(False, "Refused when true: use max_off_policy_steps for overlap.")
    rl_async_rollout_prefetch_steps: int = key(
        0, "Refused unless 0: max_off_policy_steps sets the overlap.", ge=0
    )
    rl_split_debug_logs: bool = key(False, "Refused when true: there are no actors to log.")
