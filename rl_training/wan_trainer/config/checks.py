"""Rules between the values of a configuration. Every rule is one function; all are always asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from wan_trainer.config.family import known_family
from wan_trainer.config.kernel_rules import attention_rules, compile_rules
from wan_trainer.config.refl_rules import is_refl, refl_rules
from wan_trainer.config.reward_rules import reward_rules
from wan_trainer.config.rules import Problem, Rule, changed_keys, refuse
from wan_trainer.topology import FAMILIES, check_video_shape, divisors

if TYPE_CHECKING:
    from wan_trainer.config.schema import TrainConfig
    from wan_trainer.config.specs import RunSpec


def contradictions(config: TrainConfig) -> list[Problem]:
    """Every rule between keys that `config` breaks."""
    rules = RULES if is_refl(config) else (*RULES, *GRPO_RULES)
    return [problem for rule in rules for problem in rule(config)]


FEW_STEPS = 8
"""Sampling steps up to which a two-expert model needs to be distilled."""


def few_steps_warning(spec: RunSpec) -> str | None:
    """A warning for a ReFL run of a two-expert model in so few steps that only a distilled one draws well.

    Not refused: the weights of model_path may be distilled already.
    """
    steps, model = spec.sampler.num_steps, spec.model
    if spec.refl is None or steps > FEW_STEPS or model.base_lora is not None:
        return None
    if FAMILIES[model.family].experts == 1:
        return None
    return (
        f"refl_num_sampling_steps: {steps} steps are few for a model that is not distilled, and base_lora is "
        "null; set base_lora to a few-step adapter unless model_path is distilled already, or raise the steps"
    )


def _required(config: TrainConfig) -> Iterator[Problem]:
    if not config.model_path:
        yield refuse("model_path", "is missing; name the Diffusers directory of the model")
    if not config.dataset_json:
        line = "is missing; name the dataset.json that wan-trainer unpack wrote, or a prompt list"
        yield refuse("dataset_json", line)
    if not config.output_dir:
        yield refuse("output_dir", "is missing; name the directory of the run")


def _not_built(config: TrainConfig) -> Iterator[Problem]:
    if isinstance(config.trainer, str) and config.trainer not in ("dancegrpo", "refl"):
        yield refuse(
            "trainer",
            f"{config.trainer} is no built-in trainer; use dancegrpo (GRPO) or refl, or a mapping with "
            "_target_ for your own",
        )
    if config.latent_webdataset_dir is not None:
        yield refuse(
            "latent_webdataset_dir",
            "pre-encoded latents are not an input: GRPO encodes the first frame itself and never the target "
            "video; use null and dataset_json",
        )
    if config.expert_parallel:
        yield refuse(
            "expert_parallel",
            "true is refused: experts on separate ranks are not built; use false, which "
            "shards both experts over all ranks",
        )
    idle: tuple[tuple[str, object, object], ...] = (
        ("rl_train_node_count", config.rl_train_node_count, 0),
        ("rl_train_rank_count", config.rl_train_rank_count, 0),
        ("rl_actor_weight_sync", config.rl_actor_weight_sync, "none"),
        ("rl_actor_weight_sync_interval", config.rl_actor_weight_sync_interval, 1),
        ("rl_async_rollout_prefetch_steps", config.rl_async_rollout_prefetch_steps, 0),
        ("rl_split_debug_logs", config.rl_split_debug_logs, False),
    )
    for name, value, accepted in idle:
        if value != accepted:
            shown = str(accepted).lower()
            yield refuse(
                name, f"{str(value).lower()} is refused: separate rollout actors are not built; use {shown}"
            )
    if config.rl_async_rollout:
        yield refuse(
            "rl_async_rollout",
            "true is refused: separate rollout actors are not built; use false, and max_off_policy_steps: 1 "
            "for overlap",
        )


def _video_shape(config: TrainConfig) -> Iterator[Problem]:
    for line in check_video_shape(known_family(config), config.num_frames, config.height, config.width):
        name = line.partition(":")[0]
        yield Problem((name, "model_family"), line)


def _experts(config: TrainConfig) -> Iterator[Problem]:
    family = known_family(config)
    if family is not None and FAMILIES[family].experts == 1 and config.train_experts != "both":
        yield refuse(
            "train_experts",
            f"{config.train_experts} needs a two-expert model, and {family} has one; use both",
            "model_family",
        )


def _adapters(config: TrainConfig) -> Iterator[Problem]:
    if config.lora_rank > 0:
        return
    for name in changed_keys(config, "lora_alpha", "lora_target_modules", "lora_module_prefix"):
        yield refuse(
            name,
            f"{getattr(config, name)} acts on adapters, and lora_rank is 0; set lora_rank or remove {name}",
            "lora_rank",
        )
    if config.transformer_load_dtype in ("bfloat16", "float16"):
        yield refuse(
            "transformer_load_dtype",
            f"{config.transformer_load_dtype} would round away most updates of full fine-tuning; use auto or "
            "float32 (param_dtype already computes in 16 bits)",
            "lora_rank",
        )


def _expert_of_adapters(config: TrainConfig) -> Iterator[Problem]:
    """A prefix that names the expert which is not trained; other prefixes need the model to be judged."""
    prefix = config.lora_module_prefix
    if config.lora_rank == 0 or prefix is None or config.train_experts == "both":
        return
    named = {"high_noise": "high", "transformer": "high", "low_noise": "low", "transformer_2": "low"}
    expert = named.get(prefix.partition(".")[0])
    if expert is not None and expert != config.train_experts:
        yield refuse(
            "lora_module_prefix",
            f"{prefix} is in the {expert}-noise expert, and train_experts is {config.train_experts}; use "
            f"train_experts: {expert} or both, or another prefix",
            "train_experts",
        )


def _sharding(config: TrainConfig) -> Iterator[Problem]:
    if config.hsdp and not config.fsdp:
        yield refuse("hsdp", "true shards within a node, and fsdp is false; use --fsdp or --no-hsdp", "fsdp")


def _order(config: TrainConfig) -> Iterator[Problem]:
    if config.shuffle_raw_indices is not None and config.shuffle_raw_indices != config.shuffle:
        yield refuse(
            "shuffle",
            f"{str(config.shuffle).lower()} contradicts shuffle_raw_indices: "
            f"{str(config.shuffle_raw_indices).lower()}, its recipe spelling; set only one "
            "(--shuffle_raw_indices null)",
            "shuffle_raw_indices",
        )


def _resume(config: TrainConfig) -> Iterator[Problem]:
    if config.reset_dataloader is not None and config.resume_from is None:
        yield refuse(
            "reset_dataloader",
            f"{str(config.reset_dataloader).lower()} acts on resume_from, which is null; use null or set "
            "resume_from",
            "resume_from",
        )


def _waves(config: TrainConfig) -> Iterator[Problem]:
    wave = config.grpo_shared_prompt_microbatch_size
    if wave is None:
        return
    name = "grpo_shared_prompt_microbatch_size"
    if not config.grpo_shared_prompt_batch:
        yield refuse(
            name,
            f"{wave} needs grpo_shared_prompt_batch: true; use null or --grpo_shared_prompt_batch",
            "grpo_shared_prompt_batch",
        )
    elif config.batch_size % wave:
        valid = divisors(config.batch_size)
        below = [n for n in valid if n < wave][-1:]
        above = [n for n in valid if n > wave][:1]
        near = " or ".join(str(n) for n in below + above)
        yield refuse(name, f"{wave} does not divide batch_size {config.batch_size}; use {near}", "batch_size")


def _chunks(config: TrainConfig) -> Iterator[Problem]:
    sample, train = config.grpo_sample_batch_size, config.grpo_train_sample_batch_size
    if train is not None and sample % train:
        near = max(n for n in divisors(sample) if n <= train)
        yield refuse(
            "grpo_train_sample_batch_size",
            f"{train} does not divide grpo_sample_batch_size {sample}, whose chunks it cuts; use {near}, or "
            "null for the same size",
            "grpo_sample_batch_size",
        )


def _noise(config: TrainConfig) -> Iterator[Problem]:
    formula, eta = config.grpo_sde_formula, config.grpo_sde_noise_scale
    if not isinstance(formula, str):
        yield from _own_noise(config)
        return
    if formula == "flowcps" and not 0 <= eta <= 1:
        yield refuse(
            "grpo_sde_noise_scale",
            f"{eta} is outside flowcps's range of 0 to 1; use a value between, 0.7 in the reference",
            "grpo_sde_formula",
        )
    if formula == "flowcps" and eta == 0 and config.grpo_cps_noise_scale_range is None:
        yield refuse(
            "grpo_sde_noise_scale",
            "0 leaves every rollout without noise, so that there is nothing to learn from; "
            "use for example 0.7",
            "grpo_sde_formula",
        )
    if formula != "flowcps" and not 0 < eta <= 2:
        yield refuse(
            "grpo_sde_noise_scale",
            f"{eta} is outside {formula}'s range, above 0 and at most 2; use "
            f"{'0.3' if formula == 'dancegrpo' else '0.7'}, as in the reference",
            "grpo_sde_formula",
        )
    bounds = config.grpo_cps_noise_scale_range
    if bounds is None:
        return
    name = "grpo_cps_noise_scale_range"
    shown = f"[{bounds[0]}, {bounds[1]}]"
    if formula != "flowcps":
        yield refuse(
            name,
            f"{shown} is for flowcps, and grpo_sde_formula is {formula}; use null or flowcps",
            "grpo_sde_formula",
        )
    if not all(0 <= bound <= 1 for bound in bounds):
        yield refuse(name, f"{shown} leaves flowcps's range of 0 to 1; use bounds within, such as [0.0, 1.0]")
    if bounds[0] > bounds[1]:
        yield refuse(name, f"{shown} starts above its end; use [{bounds[1]}, {bounds[0]}]")
    if bounds == (0, 0):
        yield refuse(
            name,
            f"{shown} leaves every rollout without noise, so that there is nothing to learn "
            "from; use for example [0.0, 1.0]",
        )


def _own_noise(config: TrainConfig) -> Iterator[Problem]:
    """A transition of the user's own has its own scale of eta; at 0 a group counts as one without choice."""
    why = "a group of eta 0 is taken to have no noise and teaches nothing"
    bounds = config.grpo_cps_noise_scale_range
    if config.grpo_sde_noise_scale <= 0 and bounds is None:
        yield refuse(
            "grpo_sde_noise_scale",
            f"{config.grpo_sde_noise_scale} must be above 0: {why}; use for example 0.7",
            "grpo_sde_formula",
        )
    if bounds is not None and not 0 < bounds[0] <= bounds[1]:
        yield refuse(
            "grpo_cps_noise_scale_range",
            f"[{bounds[0]}, {bounds[1]}] must rise from above 0: {why}; use for example [0.1, 0.7]",
            "grpo_sde_formula",
        )


def _guidance(config: TrainConfig) -> Iterator[Problem]:
    name = "refl_cfg_scale" if is_refl(config) else "grpo_cfg_scale"
    if config.negative_prompt and getattr(config, name) == 1:
        yield refuse(
            "negative_prompt",
            f"a negative prompt needs guidance, and {name} is 1; raise {name} or use ''",
            name,
        )


def _evaluation(config: TrainConfig) -> Iterator[Problem]:
    every, accumulation = config.eval_steps, config.gradient_accumulation_steps
    if every and not config.eval_dataset_json:
        yield refuse(
            "eval_dataset_json",
            f"is missing, and eval_steps is {every}; name a prompt list or a dataset.json of held prompts, "
            "or use eval_steps: 0",
            "eval_steps",
        )
    if every % accumulation:
        yield refuse(
            "eval_steps",
            f"{every} batches are not a multiple of gradient_accumulation_steps {accumulation}, so that "
            f"evaluations would come within an update; use {-(-every // accumulation) * accumulation}",
            "gradient_accumulation_steps",
        )


def _delay(config: TrainConfig) -> Iterator[Problem]:
    delayed, steps = config.grpo_delayed_replay, config.max_off_policy_steps
    if delayed is None or steps is None or steps == int(delayed):
        return
    yield refuse(
        "max_off_policy_steps",
        f"{steps} contradicts grpo_delayed_replay: {str(delayed).lower()}, which is {int(delayed)} steps; "
        "set only one (--grpo_delayed_replay null)",
        "grpo_delayed_replay",
    )


def _schedule(config: TrainConfig) -> Iterator[Problem]:
    accumulation = config.gradient_accumulation_steps
    if config.lr_scheduler == "constant" and config.warmup_steps:
        yield refuse(
            "warmup_steps",
            f"{config.warmup_steps} has no place in lr_scheduler: constant; use lr_scheduler: linear_warmup "
            "or warmup_steps: 0",
            "lr_scheduler",
        )
    if not isinstance(config.lr_scheduler, str) and config.warmup_steps:
        yield refuse(
            "warmup_steps",
            f"{config.warmup_steps} has no place in a schedule of your own, which is the whole factor; use "
            "warmup_steps: 0 and give it as an argument of the target",
            "lr_scheduler",
        )
    for name, value in (("save_steps", config.save_steps), ("max_steps", config.max_steps)):
        if value and value % accumulation:
            near = [
                n
                for n in (value // accumulation * accumulation, -(-value // accumulation) * accumulation)
                if n
            ]
            yield refuse(
                name,
                f"{value} batches are not a multiple of gradient_accumulation_steps {accumulation}, so that "
                f"part of an update would be lost; use {' or '.join(str(n) for n in near)}",
                "gradient_accumulation_steps",
            )
    if config.grpo_updates_per_rollout > 1 and accumulation > 1:
        yield refuse(
            "grpo_updates_per_rollout",
            f"{config.grpo_updates_per_rollout} makes several updates of one batch, and "
            f"gradient_accumulation_steps {accumulation} one update of several; set one of them to 1",
            "gradient_accumulation_steps",
        )
    for index, beta in enumerate(config.adam_betas):
        if not 0 <= beta < 1:
            yield refuse("adam_betas", f"{beta} (number {index + 1}) is not in [0, 1); use [0.9, 0.999]")


RULES: tuple[Rule, ...] = (
    _required,
    _not_built,
    _video_shape,
    _experts,
    _adapters,
    _expert_of_adapters,
    attention_rules,
    compile_rules,
    _sharding,
    _order,
    _resume,
    _guidance,
    _schedule,
    _evaluation,
    refl_rules,
)
GRPO_RULES: tuple[Rule, ...] = (_waves, _chunks, _noise, _delay, reward_rules)
"""Between keys that ReFL refuses as a whole."""
