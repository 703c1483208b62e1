"""A plan as aligned lines for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from wan_trainer.planning import refl
from wan_trainer.planning.plan import Plan
from wan_trainer.topology import FAMILIES, counted, describe_ranks

_MARGIN = 11


def describe(plan: Plan) -> str:
    """The whole plan."""
    topology = plan.topology
    ranks = describe_ranks(
        topology.nodes, topology.nproc, topology.tp, topology.dp_replicate, topology.dp_shard
    )
    rows = [
        ("ranks", ranks),
        ("model", _model(plan)),
        ("video", _video(plan)),
        *_step(plan),
        ("length", _length(plan)),
        *([("scoring", _scoring(plan))] if plan.spec.refl is None else []),
        ("memory", _memory(plan)),
        *(("", line) for line in _table(plan.memory.items)),
        ("host", _host(plan)),
        *(("", line) for line in _table(plan.memory.host)),
        ("traffic", _traffic(plan)),
        *(("", line) for line in _collectives(plan)),
        ("step time", _times(plan)),
        *(("note", note) for note in plan.notes),
    ]
    return "\n".join(f"{name:<{_MARGIN}}{text}" for name, text in rows)


def _step(plan: Plan) -> list[tuple[str, str]]:
    """What each rank does in a step."""
    spec, topology = plan.spec, plan.topology
    if spec.refl is None:
        return [
            ("batch", _batch(plan)),
            ("each rank", _share(plan)),
            ("rollout", _rollout(plan)),
            ("replay", _replay(plan)),
        ]
    work = refl.count_refl(spec, spec.refl, topology)
    return [
        ("roles", refl.describe_roles(spec.refl, topology)),
        ("batch", refl.describe_batch(spec, topology)),
        ("each rank", refl.describe_share(spec.refl, topology)),
        ("rollout", refl.describe_sampling(spec, spec.refl, work)),
        ("gradient", refl.describe_gradient(spec, spec.refl, work)),
    ]


def _model(plan: Plan) -> str:
    shape, model = plan.model.transformer, plan.model
    experts = "" if model.experts == 1 else f"{model.experts} experts of "
    text, vae = plan.model.text_encoder.elements, plan.model.vae.elements
    return (
        f"{plan.spec.model.family}: {experts}{shape.elements:,} parameters ({shape.num_layers} blocks, width "
        f"{shape.dim:,}, {shape.num_attention_heads} heads); text encoder {text:,}, VAE {vae:,}"
    )


def _video(plan: Plan) -> str:
    data, family = plan.spec.data, FAMILIES[plan.spec.model.family]
    _, *sizes = family.latent_shape(data.num_frames, data.height, data.width)
    latent = " x ".join(str(n) for n in (plan.model.transformer.out_channels, *sizes))
    tokens = family.tokens(data.num_frames, data.height, data.width)
    return (
        f"{data.num_frames} frames, {data.width} x {data.height} pixels, {data.fps} fps; latent {latent}, "
        f"{counted(tokens, 'token')}"
    )


def _batch(plan: Plan) -> str:
    topology = plan.topology
    waves = (
        "one wave" if topology.waves == 1 else f"{topology.waves} waves of {counted(topology.wave, 'prompt')}"
    )
    expected = plan.spec.batch.expected_global_prompts
    return (
        f"{counted(topology.prompts, 'prompt')} x {topology.group_size} rollouts = "
        f"{topology.rollouts_per_step:,} rollouts a step, in {waves}"
        + ("" if expected is None else f"; expected_global_prompts {expected}")
    )


def _share(plan: Plan) -> str:
    topology, chunk = plan.topology, plan.spec.grpo.sample_batch_size
    ratio = topology.ranks_per_prompt
    if ratio > 1:
        spread = f"{float(ratio):g} {'ranks' if topology.tp == 1 else 'model copies'} share a prompt"
    else:
        spread = "one prompt" if ratio == 1 else f"{float(1 / ratio):g} prompts"
    wave = topology.rollouts_per_rank_wave
    calls = math.ceil(wave / chunk)
    return (
        f"{counted(topology.rollouts_per_rank, 'rollout')} a step ({spread}), {wave} a wave in "
        f"{counted(calls, 'chunk')} of {min(wave, chunk)}"
    )


def _rollout(plan: Plan) -> str:
    sampler = plan.spec.sampler
    bounds = sampler.eta_range
    eta = f"{sampler.eta:g}" if bounds is None else f"drawn from {list(bounds)} for each prompt"
    guidance = "" if sampler.cfg_scale == 1 else f", guidance {sampler.cfg_scale:g} doubles a batch"
    return (
        f"{counted(sampler.num_steps, 'denoising step')} ({sampler.kind}, eta {eta}){guidance}; "
        f"{counted(plan.work.rollout_calls, 'forward call')} a rank and step"
    )


def _replay(plan: Plan) -> str:
    grpo = plan.spec.grpo
    age = "on-policy" if grpo.depth == 0 else f"{counted(grpo.depth, 'step')} late"
    again = "" if grpo.updates_per_rollout == 1 else f", {grpo.updates_per_rollout} passes"
    noisy = counted(plan.spec.sampler.num_steps - 1, "noisy step")
    calls = counted(plan.work.replay_calls, "forward and backward call")
    return f"{plan.work.replayed_steps} of {noisy}{again}, {age}; {calls} a rank and step"


def _length(plan: Plan) -> str:
    work, save = plan.work, plan.spec.output.save_steps
    if work.batches is None or work.updates is None:
        return "unknown: neither dataset_size nor max_steps is set"
    saves = f"a checkpoint every {save}" if save else "one checkpoint at the end"
    return f"{counted(work.batches, 'batch')}, {counted(work.updates, 'update')}, {saves}"


def _scoring(plan: Plan) -> str:
    work, reward = plan.work, plan.spec.reward
    texts: list[str] = []
    if reward.rule is not None:
        threads = counted(work.scorer_threads, "thread")
        texts.append(f"vbvr_rule: {counted(work.scorers, 'scorer process')}, {threads} a node")
    if reward.judge is not None:
        texts.append(f"vbvr_vlm: {counted(work.requests, 'request')} in flight a node")
    for own in reward.own.values():
        texts.append(f"{own.target}: its own processes and memory are not counted")
    texts.append(f"up to {counted(work.pending, 'rollout')} of a rank wait for a verdict")
    return "; ".join(texts)


def _memory(plan: Plan) -> str:
    memory = plan.memory
    phases = ", ".join(f"{name} {_size(count)}" for name, count in memory.phases.items())
    text = f"{_size(memory.peak)} a rank at most, in {memory.peak_phase} ({phases})"
    if memory.judge_share:
        share = memory.judge_share
        text += (
            f"; a judge on the same GPUs takes {share:.0%} of each: GPUs of at least "
            f"{_size(memory.peak / (1 - share))}"
        )
    return text


def _host(plan: Plan) -> str:
    return f"{_size(sum(plan.memory.host.values()))} of main memory a node, beside the ranks themselves"


def _table(items: Mapping[str, int]) -> Iterator[str]:
    for name, count in items.items():
        if count:
            yield f"  {name:<32}{_size(count):>10}"


def _traffic(plan: Plan) -> str:
    return f"{_size(plan.traffic.step)} sent by a rank in a step"


def _collectives(plan: Plan) -> Iterator[str]:
    traffic, work = plan.traffic, plan.work
    calls = counted(work.replay_calls, "replay call")
    rows = (
        (
            "all-gather, a forward",
            traffic.forward_gather,
            f"{counted(work.rollout_calls, 'rollout call')}, {calls}",
        ),
        ("all-gather, a backward", traffic.backward_gather, calls),
        ("reduce-scatter of gradients", traffic.reduce_scatter, _count(traffic.reductions)),
        ("all-reduce of replicas", traffic.replica_reduce, _count(traffic.replica_reductions)),
        ("tensor parallel, a forward", traffic.tensor_forward, "recomputed blocks once more"),
        ("tensor parallel, a backward", traffic.tensor_backward, calls),
    )
    for name, count, times in rows:
        if count:
            yield f"  {name:<32}{_size(count):>10}  {times}"


def _count(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"


def _times(plan: Plan) -> str:
    if plan.times is None:
        return "unknown: give --phase_times rollout=S,reward=S,replay=S, or --from_run RUN_DIR"
    times, phases = plan.times, plan.times.phases
    if plan.spec.refl is not None:
        return f"{times.synchronous:.4g} s (rollout {phases.rollout:.4g} s, the rest {phases.replay:.4g} s)"
    return (
        f"on-policy {times.synchronous:.4g} s, delayed {times.delayed:.4g} s, {times.speedup:.2f}x faster "
        f"(rollout {phases.rollout:.4g} s, reward {phases.reward:.4g} s, replay {phases.replay:.4g} s)"
    )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
