"""`wan-trainer plan` against numbers worked out by hand, and against what a run refuses."""

import json
import subprocess
import sys

import pytest

from wan_trainer.cli.main import main
from wan_trainer.config import load_config
from wan_trainer.planning.plan import make_plan
from wan_trainer.planning.text import describe
from wan_trainer.planning.workload import expected_latents
from wan_trainer.sampling.schedule import replay_steps

GIB = 1 << 30


def recipe(name: str) -> str:
    return f"configs/train_rl_{name}.yaml"


def plan_of(name: str, nodes: int, *flags: str):
    return make_plan(load_config(recipe(name), flags), nodes, 8)


def printed(capsys, *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def refused(capsys, *words: str) -> list[str]:
    assert main(["plan", *words]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    return out.err.splitlines()


def test_the_reference_arithmetic_of_the_5b_recipe_is_printed(capsys):
    out = printed(capsys, "--config", recipe("5b_cps"), "--nodes", "16", "--nproc", "8")
    for words in (
        "16 nodes x 8 processes = 128; data parallel 128: 16 x 8 (replicas x shards)",
        "4,999,787,712 parameters",
        "latent 48 x 21 x 32 x 32, 5,376 tokens",
        "32 prompts x 32 rollouts = 1,024 rollouts a step, in one wave; expected_global_prompts 32",
        "8 rollouts a step (4 ranks share a prompt), 8 a wave in 1 chunk of 8",
        "30 forward calls",
        "17 of 29 noisy steps, 1 step late; 17 forward and backward calls",
        "7,812 batches, 7,812 updates",
        "32 scorer processes, 128 threads a node; up to 16 rollouts",
    ):
        assert words in out, words
    assert " 1 waves" not in out and "1 chunks" not in out


def test_the_reference_arithmetic_of_the_a14b_recipe_is_printed(capsys):
    out = printed(capsys, "--config", recipe("a14b_rule"), "--nodes", "1", "--nproc", "8")
    for words in (
        "1 node x 8 processes = 8; tensor parallel 2, data parallel 4: 1 x 4",
        "2 experts of 14,288,901,184 parameters",
        "16 prompts x 16 rollouts = 256 rollouts a step, in one wave; expected_global_prompts 16",
        "64 rollouts a step (4 prompts), 64 a wave in 64 chunks of 1",
        "4 scorer processes, 64 threads a node",
    ):
        assert words in out, words


@pytest.mark.parametrize(("nodes", "waiting"), [(4, 64), (8, 32), (16, 16)])
def test_the_judge_recipe_fits_its_three_sizes_and_counts_the_judges_share(nodes, waiting):
    plan = plan_of("5b_vlm", nodes)
    assert plan.work.pending == waiting and plan.topology.waves == 2
    assert plan.memory.judge_share == 0.5
    assert f"GPUs of at least {2 * plan.memory.peak / GIB:,.1f} GiB" in describe(plan)
    elsewhere = plan_of("5b_vlm", nodes, "--vlm_reward_base_url", "http://10.0.0.9:18080/v1")
    assert elsewhere.memory.judge_share == 0 and "judge on the same" not in describe(elsewhere)


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["a14b_rule", "4", "8"], ["expected_global_prompts: 16", "gives 64", "--batch_size 1"]),
        (["a14b_rule", "1", "7"], ["tensor_parallel_size: 2 does not divide the 7 processes"]),
        (
            ["a14b_rule", "1", "9", "--tensor_parallel_size", "9", "--batch_size", "16"],
            ["tensor_parallel_size: 9 does not divide the 40 attention heads", "use 8"],
        ),
        (["5b_cps", "16", "8", "--num_frames", "80"], ["num_frames (command line): 80", "77 or 81"]),
        (["5b_cps", "16", "8", "--height", "500"], ["height (command line): 500", "480 or 512"]),
        (
            ["5b_cps", "16", "8", "--vbvr_reward_max_pending_jobs", "15"],
            ["vbvr_reward_max_pending_jobs: 15", "use --vbvr_reward_max_pending_jobs 16"],
        ),
        (
            ["5b_vlm", "2", "8", "--vlm_reward_max_pending_jobs", "64"],
            ["the 64 rollouts of a rank and 1 step of delay", "use --vlm_reward_max_pending_jobs 128"],
        ),
        (
            ["5b_cps", "3", "8", "--grpo_shared_prompt_microbatch_size", "null"],
            ["batch_size: 32 prompts x 32 rollouts do not spread evenly over 24", "--batch_size 30 or 33"],
        ),
        (
            ["5b_cps", "16", "8", "--gradient_accumulation_steps", "9000"],
            ["num_epochs: 5 of 50000 samples", "7,812 batches", "(9000)"],
        ),
    ],
)
def test_what_the_run_would_refuse_is_one_line(capsys, words, fragments):
    name, nodes, nproc, *flags = words
    lines = refused(
        capsys, "--config", recipe(name), "--nodes", nodes, "--nproc", nproc, *flags, *_quiet(flags)
    )
    assert len(lines) == 1, lines
    for fragment in fragments:
        assert fragment in lines[0]


def _quiet(flags: list[str]) -> list[str]:
    """Without the checkpoint interval, which would be refused for not being a multiple of the window."""
    return ["--save_steps", "0"] if "--gradient_accumulation_steps" in flags else []


def test_all_problems_are_printed_at_once(capsys):
    flags = ["--tensor_parallel_size", "3", "--model_family", "t2v-a14b"]
    lines = refused(capsys, "--config", recipe("a14b_rule"), "--nodes", "4", "--nproc", "8", *flags)
    assert [line.partition(":")[0] for line in lines] == ["tensor_parallel_size", "tensor_parallel_size"]


def test_batches_are_whole_accumulation_windows():
    plan = plan_of("5b_cps", 16, "--gradient_accumulation_steps", "5")
    assert (plan.work.batches, plan.work.updates) == (7810, 1562)
    endless = ["--dataset_size", "null"]
    assert plan_of("5b_cps", 16, *endless).work.batches is None
    assert plan_of("5b_cps", 16, *endless, "--max_steps", "7").work.batches == 7


@pytest.mark.parametrize(("steps", "ratio"), [(30, 0.6), (10, 0.6), (8, 1.0), (3, 0.1), (2, 1.0)])
def test_the_expected_number_of_stored_latents(steps, ratio):
    draws = [replay_steps(steps, ratio, seed=1, step=step) for step in range(2000)]
    counts = [len({index for i in draw for index in (i, i + 1)}) for draw in draws]
    assert expected_latents(steps, len(draws[0])) == pytest.approx(sum(counts) / len(counts), rel=0.01)


def test_memory_of_the_5b_reference_by_hand():
    memory = plan_of("5b_cps", 16).memory
    elements = 4_999_787_712
    assert memory.items["parameters"] == 4 * elements / 8
    assert memory.items["AdamW"] == 8 * elements / 8 and memory.items["gradients"] == 4 * elements / 8
    assert memory.items["text encoder"] == 2 * 5_680_910_336
    assert memory.items["EMA"] == memory.items["reference"] == 0
    latent = 4 * 48 * 21 * 32 * 32
    assert memory.items["trajectories"] == pytest.approx(16 * 24.6 * latent, rel=0.002)
    assert memory.items["conditions"] == 16 * (512 * 4096 * 2 + 4 * 48 * 32 * 32)
    assert memory.host["frames that wait for a verdict"] == 8 * 16 * 81 * 512 * 512 * 3
    # Without recomputation, 30 blocks keep what one does.
    kept = plan_of("5b_cps", 16, "--no-gradient_checkpointing").memory
    assert kept.items["replay activations"] > 10 * memory.items["replay activations"]


def test_each_choice_moves_its_own_item():
    base = plan_of("5b_cps", 16).memory
    elements = 4 * 4_999_787_712
    whole = plan_of("5b_cps", 16, "--no-grpo_fsdp_sync_each_backward").memory
    # Whole gradients instead of a shard of them.
    assert whole.phases["replay"] - base.phases["replay"] == pytest.approx(elements * 7 / 8, rel=1e-6)
    assert plan_of("5b_cps", 16, "--ema_decay", "0.9").memory.items["EMA"] == elements / 8
    assert plan_of("5b_cps", 16, "--grpo_kl_coeff", "0.1").memory.items["reference"] == elements / 16
    plain = plan_of("5b_cps", 16, "--no-fsdp", "--no-hsdp").memory
    assert plain.items["parameters"] == elements
    guided = plan_of("5b_cps", 16, "--grpo_cfg_scale", "5").memory
    assert guided.items["replay activations"] > 1.9 * base.items["replay activations"]
    offload = plan_of("5b_cps", 16, "--grpo_offload_inference_models").memory
    assert base.phases["replay"] - offload.phases["replay"] == 2 * 5_680_910_336 + 4 * 704_688_668
    assert offload.host["text encoders and VAEs"] == 8 * (2 * 5_680_910_336 + 4 * 704_688_668)
    late = plan_of("5b_cps", 16, "--grpo_delayed_replay", "null", "--max_off_policy_steps", "0").memory
    assert base.items["trajectories"] == pytest.approx(2 * late.items["trajectories"], abs=1)
    lora = plan_of("5b_cps", 16, "--lora_rank", "32", "--transformer_load_dtype", "auto").memory
    adapters = 30 * 8 * 2 * 32 * 3072
    assert lora.items["AdamW"] == 8 * adapters / 8
    assert lora.items["parameters"] == (2 * 4_999_787_712 + 4 * adapters) / 8


def test_adapters_of_one_expert_are_counted_by_any_of_its_names():
    words = ("--lora_rank", "32", "--transformer_load_dtype", "auto")
    both = plan_of("a14b_rule", 1, *words).memory.items["AdamW"]
    for prefix in ("low_noise", "transformer_2", "transformer"):
        one = plan_of("a14b_rule", 1, *words, "--lora_module_prefix", prefix).memory.items["AdamW"]
        assert both == 2 * one > 0, prefix
    block = plan_of("a14b_rule", 1, *words, "--lora_module_prefix", "transformer_2.blocks.3").memory
    assert both == 2 * 40 * block.items["AdamW"]


@pytest.mark.parametrize(
    "words",
    [
        ("5b_cps", "--lora_target_modules", "to_q", "nope"),
        ("5b_cps", "--lora_module_prefix", "low_noise"),
        ("a14b_rule", "--train_experts", "high", "--lora_module_prefix", "transformer_2"),
    ],
)
def test_adapters_that_match_nothing_are_refused(words, capsys):
    name, *flags = words
    nodes = "16" if name == "5b_cps" else "1"
    lora = ["--lora_rank", "4", "--transformer_load_dtype", "auto"]
    lines = refused(capsys, "--config", recipe(name), "--nodes", nodes, *lora, *flags)
    key = next(flag for flag in reversed(flags) if flag.startswith("--lora"))
    assert len(lines) == 1 and lines[0].startswith(key.removeprefix("--")), lines


def test_tensor_parallel_ranks_hold_half_of_what_is_cut():
    one = plan_of("a14b_rule", 1, "--tensor_parallel_size", "1", "--batch_size", "2").memory
    two = plan_of("a14b_rule", 1).memory
    # 8 ranks either way: the parts that are not cut are the only ones held twice.
    assert 1.0 < two.items["parameters"] / one.items["parameters"] < 1.02
    high = plan_of("a14b_rule", 1, "--train_experts", "high").memory
    assert high.items["AdamW"] == two.items["AdamW"] / 2


def test_traffic_by_hand():
    plan = plan_of("5b_cps", 16)
    traffic, elements = plan.traffic, 4_999_787_712
    assert traffic.forward_gather == pytest.approx(7 / 8 * 2 * elements, rel=1e-6)
    assert traffic.reduce_scatter == pytest.approx(7 / 8 * 4 * elements, rel=1e-6)
    assert traffic.replica_reduce == pytest.approx(2 * 15 / 16 * 4 * elements / 8, rel=1e-6)
    assert (traffic.reductions, traffic.replica_reductions) == (17, 1)
    once = plan_of("5b_cps", 16, "--no-grpo_fsdp_sync_each_backward").traffic
    assert once.reductions == 1
    saved = 16 * traffic.reduce_scatter
    assert traffic.step - once.step == pytest.approx(saved, rel=1e-6)
    pair = plan_of("a14b_rule", 1).traffic
    assert pair.tensor_forward == 40 * 3 * 2 * 10_496 * 5120
    assert pair.tensor_backward == 40 * (3 * 10_496 + 512) * 2 * 5120
    alone = make_plan(
        load_config(recipe("5b_cps"), ["--no-hsdp", "--vbvr_reward_max_pending_jobs", "null"]), 1, 1
    )
    assert alone.traffic.step == 0


def test_json_holds_the_same_numbers(capsys):
    out = printed(
        capsys,
        "--config",
        recipe("5b_vlm"),
        "--nodes",
        "4",
        "--format",
        "json",
        "--phase_times",
        "rollout=40,reward=30,replay=60",
    )
    data = json.loads(out)
    plan = plan_of("5b_vlm", 4)
    assert data["memory"]["peak"] == plan.memory.peak and data["model"]["parameters"] == 4_999_787_712
    assert data["topology"]["ranks_per_prompt"] == "2" and data["traffic"]["step"] == plan.traffic.step
    assert data["times"]["delayed"] == 100


def test_plan_imports_no_torch():
    code = (
        "import sys, wan_trainer.cli.main as m; "
        f"assert m.main(['plan', '--config', {recipe('5b_cps')!r}, '--nodes', '16']) == 0; "
        "heavy = {'torch', 'numpy', 'diffusers', 'transformers'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
