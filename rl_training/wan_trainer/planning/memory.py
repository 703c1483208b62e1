"""Memory of one rank, item by item and phase by phase, and of a node's host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from wan_trainer.config.specs import Dtype, RunSpec
from wan_trainer.models.wan.architecture import ModelShape, TransformerShape, adapter_prefix
from wan_trainer.models.wan.directory import EXPERTS, trained_experts
from wan_trainer.planning.activations import (
    FLOAT,
    Activations,
    Call,
    text_encode_bytes,
    transformer_activations,
    vae_decode_bytes,
)
from wan_trainer.planning.workload import Workload
from wan_trainer.topology import FAMILIES, Topology

ELEMENT: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
# Positions of a rotary table, in each direction.
ROTARY_ROWS = 1024

# What one scorer process is counted at, and one that reads text (docs/rewards.md). Evaluators differ: look at
# a running one.
SCORER_BYTES = 800_000_000
OCR_SCORER_BYTES = SCORER_BYTES + 1_400_000_000
# What a judge that is served beside the trainer takes of each GPU.
JUDGE_SHARE = 0.5


@dataclass(frozen=True)
class Sizes:
    """Elements on one rank. trained, frozen: of all experts, sharded. block, root: of one expert's block and
    of its other parts, gathered over the shards, adapters included; trained_block, trained_root: those with a
    gradient. experts: how many are trained. frozen_bytes: of one frozen element."""

    trained: float
    frozen: float
    frozen_bytes: int
    block: float
    root: float
    trained_block: float
    trained_root: float
    experts: int


@dataclass(frozen=True)
class Memory:
    """Bytes. items: what each rank holds, and what its largest phase adds, in the order of a table.

    phases: the peak of each phase; the largest is the peak of the rank. host: per item, of a whole node.
    judge_share: of each GPU, for a co-hosted judge.
    """

    items: Mapping[str, int]
    phases: Mapping[str, int]
    host: Mapping[str, int]
    judge_share: float

    @property
    def peak(self) -> int:
        """The most one rank holds at once."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """Where that is."""
        return max(self.phases, key=lambda name: self.phases[name])


def estimate_memory(spec: RunSpec, topology: Topology, model: ModelShape, work: Workload) -> Memory:
    """The memory of each rank and node.

    Not in it: the CUDA context, buffers of the collective library, workspaces of kernels and what the
    allocator leaves unused between blocks, a few GiB of a real GPU together.
    """
    sizes = local_sizes(spec, topology, model)
    element, reduce = ELEMENT[spec.model.param_dtype], ELEMENT[spec.model.reduce_dtype]
    held = _resident(spec, topology, model, work, sizes)
    base = sum(held.values())
    frozen = model.text_encoder_bytes + model.vae_bytes
    offload = spec.model.offload_inference_models
    if not offload:
        base += frozen
    gathered = math.ceil(element * (sizes.root + (2 if topology.dp_shard > 1 else 1) * sizes.block))
    # What is outside the blocks of a trained expert stays gathered from a call without gradients to the next
    # backward. A frozen expert gathers it for every call.
    root = math.ceil(element * sizes.root)
    roots = root * sizes.experts
    counted_twice = root if sizes.experts == model.experts else 0
    grpo = spec.grpo
    rollout = inference_bytes(spec, call_activations(spec, topology, model, grpo.sample_batch_size))
    decode = min(spec.decode_batch_size, grpo.sample_batch_size, topology.rollouts_per_rank_wave)
    shape = model.vae
    data = spec.data
    # That of ReFL runs over all frames at once and has a gradient: `planning.refl.NOT_COUNTED`.
    decoding = (
        decode * vae_decode_bytes(shape, model.vae_element_bytes, data.num_frames, data.height, data.width)
        if spec.refl is None
        else 0
    )
    encoding = text_encode_bytes(model.text_encoder, model.text_element_bytes, model.text_length)
    replay = _replay(spec, topology, model, sizes, element, reduce)
    gradients = math.ceil(FLOAT * sizes.trained)
    # Whole gradients become shards in the last backward only, unless a batch of the same window came before.
    reduced = gradients
    if not grpo.sync_each_backward and spec.optimizer.gradient_accumulation_steps == 1:
        reduced = 0
    largest = math.ceil(FLOAT * _largest_tensor(model.transformer, topology))
    phases = {
        "condition": base + roots + encoding + (model.text_encoder_bytes if offload else 0),
        "rollout": base + roots + gathered - counted_twice + rollout,
        "decode": base + roots + decoding + (model.vae_bytes if offload else 0),
        "replay": base + reduced + gathered + replay,
        "optimizer": base + gradients + 3 * largest,
    }
    if spec.refl is not None:
        del phases["decode"]
    while_used = " while it is used" if offload else ""
    items = {
        **held,
        f"text encoder{while_used}": model.text_encoder_bytes,
        f"VAE{while_used}": model.vae_bytes,
        "gathered weights": gathered,
        "gradients": gradients,
        "replay activations": replay,
        "rollout activations": rollout,
        "decoding": decoding,
    }
    judge = spec.reward.judge
    share = JUDGE_SHARE if judge is not None and judge.is_local else 0.0
    return Memory(items=items, phases=phases, host=_host(spec, topology, model, work), judge_share=share)


def local_sizes(spec: RunSpec, topology: Topology, model: ModelShape) -> Sizes:
    """Elements of the transformers on one rank."""
    shape, tp, shards = model.transformer, topology.tp, topology.dp_shard
    names = EXPERTS[: model.experts]
    trained = trained_experts(spec.model, names)
    whole = shape.local_elements(tp)
    block, root = shape.local_block_elements(tp), shape.root_elements
    lora = spec.model.lora
    stored = model.checkpoint_bytes if spec.model.load_dtype == "auto" else ELEMENT[spec.model.load_dtype]
    if lora is None:
        return Sizes(
            trained=len(trained) * whole / shards,
            frozen=(len(names) - len(trained)) * whole / shards,
            frozen_bytes=stored,
            block=block,
            root=root,
            trained_block=block,
            trained_root=root,
            experts=len(trained),
        )
    prefix = adapter_prefix(lora)
    counts = {
        name: shape.adapter_elements(lora.rank, lora.target_modules, prefix, tp, name) for name in trained
    }
    # The prefix of one expert leaves the other without adapters.
    trained = tuple(name for name, count in counts.items() if count)
    adapters = max(counts.values())
    outside = replace(shape, num_layers=0)
    in_root = max(
        outside.adapter_elements(lora.rank, lora.target_modules, prefix, tp, name) for name in counts
    )
    in_block = (adapters - in_root) / shape.num_layers
    return Sizes(
        trained=len(trained) * adapters / shards,
        frozen=len(names) * whole / shards,
        frozen_bytes=stored,
        block=block + in_block,
        root=root + in_root,
        trained_block=in_block,
        trained_root=in_root,
        experts=len(trained),
    )


def call_activations(spec: RunSpec, topology: Topology, model: ModelShape, chunk: int) -> Activations:
    """The working memory of a transformer call on `chunk` rollouts."""
    rows = min(chunk, topology.rollouts_per_rank_wave) * branches_of_call(spec)
    data, family = spec.data, FAMILIES[spec.model.family]
    call = Call(
        rows=rows,
        tokens=family.tokens(data.num_frames, data.height, data.width),
        text_tokens=model.text_length,
        latent=_latent_elements(spec, model),
        element=ELEMENT[spec.model.param_dtype],
        tp=topology.tp,
        token_time=family.pins_first_frame,
        fused_norm=spec.device == "cuda" and topology.tp == 1,
    )
    return transformer_activations(model.transformer, call)


def branches_of_call(spec: RunSpec) -> int:
    """Guidance doubles the rows of a call, unless ReFL asks for each branch by itself."""
    together = spec.refl is None or spec.refl.cfg_grad == "both"
    return 2 if spec.sampler.cfg_scale > 1 and together else 1


def inference_bytes(spec: RunSpec, act: Activations) -> int:
    """Of a call without gradients: a compiled block runs the graph of replay, so that rounding is the
    same."""
    return act.inference if spec.model.compile_backend is None else act.traced


def _resident(
    spec: RunSpec, topology: Topology, model: ModelShape, work: Workload, sizes: Sizes
) -> dict[str, int]:
    """What stays from step to step, and from the rollout to its replay."""
    rollouts = topology.rollouts_per_rank * (spec.grpo.depth + 1)
    latent = ELEMENT[spec.sampler.trajectory_dtype] * _latent_elements(spec, model)
    # Stored as it computes. Adapters are switched off instead.
    reference = ELEMENT[spec.model.param_dtype] * sizes.trained if _has_reference(spec) else 0
    rotary = 2 * FLOAT * ROTARY_ROWS * model.transformer.attention_head_dim * model.experts
    return {
        "parameters": math.ceil(FLOAT * sizes.trained + sizes.frozen_bytes * sizes.frozen),
        "AdamW": math.ceil(2 * FLOAT * sizes.trained),
        "EMA": math.ceil(FLOAT * sizes.trained) if spec.optimizer.ema_decay > 0 else 0,
        "reference": math.ceil(reference),
        "rotary tables": rotary,
        "trajectories": math.ceil(rollouts * work.stored_latents * latent),
        "conditions": rollouts * _condition_bytes(spec, model),
    }


def _has_reference(spec: RunSpec) -> bool:
    """Whether a frozen copy of what is trained is kept for the KL term."""
    return spec.grpo.kl_coeff > 0 and spec.model.lora is None


def _replay(
    spec: RunSpec, topology: Topology, model: ModelShape, sizes: Sizes, element: int, reduce: int
) -> int:
    """What replay adds to weights and sharded gradients at its fullest moment.

    Either at the loss; or when the backward of a block begins, with all that the block saved; or when it
    ends, with the block's whole gradient beside the buffer it is reduced in; or the same for what is outside
    the blocks.
    """
    act = call_activations(spec, topology, model, spec.grpo.train_sample_batch_size)
    layers = model.transformer.num_layers
    if spec.model.gradient_checkpointing:
        between, block = layers * act.given, act.saved
    else:
        between, block = (layers - 1) * act.saved, act.saved
    around = between + act.stem
    # CUDA reduces beside the next block's backward, and the buffer lives until then.
    in_flight = reduce * sizes.trained_block if spec.device == "cuda" else 0
    begins = around + block + act.backward + in_flight
    ends = around + (element + reduce) * sizes.trained_block + in_flight
    if spec.grpo.kl_coeff > 0 and spec.refl is None:
        # The reference is asked while the policy's graph waits for its backward; ReFL asks it before.
        layers_kept = between if spec.model.gradient_checkpointing else between + block
        begins = max(begins, layers_kept + act.stem + act.head + inference_bytes(spec, act))
    first = layers * (act.given if spec.model.gradient_checkpointing else act.saved) + act.stem + act.head
    last = act.stem + (element + reduce) * sizes.trained_root + in_flight
    kept = 0.0
    if not spec.grpo.sync_each_backward:
        # Whole gradients in the reduce dtype wait on every rank for the last backward.
        kept = sizes.experts * reduce * (layers * sizes.trained_block + sizes.trained_root)
    return math.ceil(max(first, begins, ends, last) + kept)


def _largest_tensor(shape: TransformerShape, topology: Topology) -> float:
    """Elements of the largest parameter on one rank: AdamW steps through them one by one."""
    d = shape.dim
    cut = max(d * d, d * shape.ffn_dim) / topology.tp
    return max(cut, 6 * d * d) / topology.dp_shard


def _latent_elements(spec: RunSpec, model: ModelShape) -> int:
    data = spec.data
    _, *sizes = FAMILIES[spec.model.family].latent_shape(data.num_frames, data.height, data.width)
    return model.transformer.out_channels * math.prod(sizes)


def _condition_bytes(spec: RunSpec, model: ModelShape) -> int:
    """Text, and the image where there is one, of one rollout."""
    branches = 2 if spec.sampler.cfg_scale > 1 else 1
    text = branches * model.text_length * model.text_encoder.d_model * model.text_element_bytes
    data = spec.data
    _, frames, height, width = FAMILIES[spec.model.family].latent_shape(
        data.num_frames, data.height, data.width
    )
    channels = model.transformer.in_channels - model.transformer.out_channels
    image = FLOAT * channels * frames * height * width
    if FAMILIES[spec.model.family].pins_first_frame:
        image = FLOAT * model.transformer.out_channels * height * width
    return text + image


def _host(spec: RunSpec, topology: Topology, model: ModelShape, work: Workload) -> dict[str, int]:
    """Main memory of one node."""
    data = spec.data
    frame = 3 * data.height * data.width
    submitting = topology.nproc // topology.tp
    offloaded = topology.nproc * (model.text_encoder_bytes + model.vae_bytes)
    scoring = 0
    rule = spec.reward.rule
    if rule is not None:
        each = SCORER_BYTES if rule.easyocr_module_path is None else OCR_SCORER_BYTES
        scoring = work.scorers * each
    return {
        "frames that wait for a verdict": submitting * work.pending * data.num_frames * frame,
        "scorer processes": scoring,
        "text encoders and VAEs": offloaded if spec.model.offload_inference_models else 0,
    }
