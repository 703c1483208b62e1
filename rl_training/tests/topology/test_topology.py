"""Topology arithmetic against numbers worked out by hand."""

import itertools
from fractions import Fraction

import pytest

from wan_trainer.config import TrainConfig, topology_of
from wan_trainer.topology import (
    FAMILIES,
    assign,
    check_pending,
    check_video_shape,
    counted,
    describe_ranks,
    divisors,
    pending_rewards_needed,
    replay_step_count,
    total_batches,
)
from wan_trainer.types import UserError


def config(**values) -> TrainConfig:
    base = {
        "model_path": "m",
        "model_family": "ti2v-5b",
        "dataset_json": "d",
        "output_dir": "o",
        "vbvr_reward_evalkit_dir": "e",
        "vbvr_reward_evalkit_source_sha256": "0" * 64,
    }
    return TrainConfig.model_validate({**base, **values})


SHARED = {"grpo_shared_prompt_batch": True}


@pytest.mark.parametrize(
    ("values", "nodes", "nproc", "expected"),
    [
        # dp, prompts, rollouts a step, rollouts a rank, waves, ranks a prompt, replicas, shards
        ({"batch_size": 2, "grpo_group_size": 4}, 1, 2, (2, 4, 16, 8, 1, Fraction(1, 2), 1, 2)),
        ({"batch_size": 1, "grpo_group_size": 4}, 1, 1, (1, 1, 4, 4, 1, Fraction(1), 1, 1)),
        ({**SHARED, "batch_size": 2, "grpo_group_size": 4}, 1, 8, (8, 2, 8, 1, 1, Fraction(4), 1, 8)),
        ({**SHARED, "batch_size": 3, "grpo_group_size": 4}, 1, 2, (2, 3, 12, 6, 1, Fraction(2, 3), 1, 2)),
        (
            {**SHARED, "batch_size": 8, "grpo_group_size": 4, "grpo_shared_prompt_microbatch_size": 2},
            *(2, 2),
            (4, 8, 32, 8, 4, Fraction(2), 1, 4),
        ),
        ({"grpo_group_size": 2, "hsdp": True}, 3, 4, (12, 12, 24, 2, 1, Fraction(1), 3, 4)),
        ({"grpo_group_size": 2, "hsdp": True}, 1, 4, (4, 4, 8, 2, 1, Fraction(1), 1, 4)),
        (
            {"grpo_group_size": 2, "hsdp": True, "tensor_parallel_size": 2},
            *(2, 8),
            (8, 8, 16, 2, 1, Fraction(1), 2, 4),
        ),
        ({"grpo_group_size": 2, "fsdp": False}, 2, 2, (4, 4, 8, 2, 1, Fraction(1), 4, 1)),
    ],
)
def test_a_topology(values, nodes, nproc, expected):
    topology = topology_of(config(**values), nodes, nproc)
    assert expected == (
        topology.dp,
        topology.prompts,
        topology.rollouts_per_step,
        topology.rollouts_per_rank,
        topology.waves,
        topology.ranks_per_prompt,
        topology.dp_replicate,
        topology.dp_shard,
    )
    assert topology.world == nodes * nproc == topology.dp * topology.tp
    assert topology.dp == topology.dp_replicate * topology.dp_shard


@pytest.mark.parametrize(
    ("values", "nodes", "nproc", "fragments"),
    [
        ({"tensor_parallel_size": 3}, 1, 8, ["tensor_parallel_size: 3", "use 2 or 4", "--nproc 9"]),
        ({}, 0, 8, ["nodes: 0"]),
        ({"batch_size": 4, "expected_global_prompts": 16}, 2, 8, ["gives 64", "--batch_size 1"]),
        (
            {"batch_size": 1, "expected_global_prompts": 6},
            *(1, 4),
            ["gives 4", "use 3 or 6 replicas", "--expected_global_prompts 4"],
        ),
        ({**SHARED, "batch_size": 8, "expected_global_prompts": 4}, 1, 8, ["--batch_size 4"]),
        (
            {**SHARED, "batch_size": 4, "grpo_group_size": 3, "grpo_shared_prompt_microbatch_size": 2},
            *(1, 4),
            [
                "2 prompts x 3 rollouts do not spread evenly over 4",
                "--grpo_group_size 2 or 4",
                "--grpo_shared_prompt_microbatch_size 4",
                "3 or 6 data-parallel ranks",
            ],
        ),
        (
            {**SHARED, "batch_size": 3, "grpo_group_size": 2},
            *(1, 4),
            [
                "batch_size: 3 prompts x 2 rollouts",
                "--grpo_group_size 4",
                "--batch_size 2 or 4",
                "3 or 6 data",
            ],
        ),
    ],
)
def test_numbers_that_do_not_fit_are_one_line_with_values_that_do(values, nodes, nproc, fragments):
    with pytest.raises(UserError) as caught:
        topology_of(config(**values), nodes, nproc)
    (line,) = caught.value.problems
    for fragment in fragments:
        assert fragment in line


def test_the_values_that_an_error_offers_work():
    base = {**SHARED, "batch_size": 4, "grpo_group_size": 3, "grpo_shared_prompt_microbatch_size": 2}
    for mend in ({"grpo_group_size": 2}, {"grpo_group_size": 4}, {"grpo_shared_prompt_microbatch_size": 4}):
        topology_of(config(**{**base, **mend}), 1, 4)
    for nproc in (3, 6):
        topology_of(config(**base), 1, nproc)
    whole = {**SHARED, "batch_size": 3, "grpo_group_size": 2}
    for mend in ({"grpo_group_size": 4}, {"batch_size": 2}, {"batch_size": 4}):
        topology_of(config(**{**whole, **mend}), 1, 4)


@pytest.mark.parametrize(
    ("prompts", "group", "world"), [(4, 4, 1), (4, 4, 2), (4, 4, 8), (2, 6, 4), (3, 2, 6)]
)
def test_assign_gives_every_pair_to_one_rank_in_equal_contiguous_shares(prompts, group, world):
    shares = [assign(prompts, group, rank, world) for rank in range(world)]
    assert list(itertools.chain(*shares)) == list(itertools.product(range(prompts), range(group)))
    assert {len(share) for share in shares} == {prompts * group // world}


def test_assign_gives_a_replica_its_own_prompts_in_standard_mode():
    assert {prompt for prompt, _ in assign(8, 4, 2, 4)} == {4, 5}


@pytest.mark.parametrize(
    ("rank", "world", "text"), [(0, 5, "use 4 or 8 ranks"), (4, 4, "rank: 4"), (-1, 4, "rank")]
)
def test_assign_refuses_uneven_shares_and_ranks_outside(rank, world, text):
    with pytest.raises(UserError, match=text):
        assign(4, 2, rank, world)


@pytest.mark.parametrize(
    ("family", "latent", "tokens"),
    [
        ("ti2v-5b", (48, 21, 32, 32), 21 * 16 * 16),
        ("i2v-a14b", (16, 21, 64, 64), 21 * 32 * 32),
        ("t2v-1.3b", (16, 21, 64, 64), 21 * 32 * 32),
        ("t2v-a14b", (16, 21, 64, 64), 21 * 32 * 32),
    ],
)
def test_latent_shapes_of_the_families(family, latent, tokens):
    shape = FAMILIES[family]
    assert shape.latent_shape(81, 512, 512) == latent
    assert shape.tokens(81, 512, 512) == tokens
    assert check_video_shape(family, 81, 512, 512) == []


def test_the_family_tables():
    assert {family: shape.pixel_multiple for family, shape in FAMILIES.items()} == {
        "ti2v-5b": 32,
        "i2v-a14b": 16,
        "t2v-1.3b": 16,
        "t2v-a14b": 16,
    }
    assert {family for family, shape in FAMILIES.items() if shape.experts == 2} == {"i2v-a14b", "t2v-a14b"}
    assert {family for family, shape in FAMILIES.items() if shape.takes_image} == {"ti2v-5b", "i2v-a14b"}
    assert {family for family, shape in FAMILIES.items() if shape.needs_image} == {"i2v-a14b"}


@pytest.mark.parametrize("family", [None, *FAMILIES])
@pytest.mark.parametrize("shape", [(80, 512, 512), (81, 500, 512), (2, 17, 33), (1, 16, 16)])
def test_offered_shapes_are_valid(family, shape):
    for line in check_video_shape(family, *shape):
        name, _, rest = line.partition(":")
        offered = [int(word) for word in rest.rpartition("use ")[2].split(" or ")]
        for value in offered:
            mended = dict(zip(("num_frames", "height", "width"), shape, strict=True)) | {name: value}
            assert not any(other.startswith(name) for other in check_video_shape(family, **mended))


@pytest.mark.parametrize(
    ("epochs", "most", "size", "batch", "window", "expected"),
    [
        (5.0, None, 50_000, 32, 1, 7812),
        (5.0, None, 50_000, 16, 1, 15_625),
        (0.3, None, 10, 1, 1, 3),
        (1.0, None, 10, 3, 1, 3),
        (5.0, None, 50_000, 32, 5, 7810),
        (5.0, 100, 50_000, 32, 3, 99),
        (5.0, 8000, 50_000, 32, 1, 7812),
    ],
)
def test_total_batches(epochs, most, size, batch, window, expected):
    assert total_batches(epochs, most, size, batch, window) == expected


@pytest.mark.parametrize(("epochs", "window", "made"), [(0.05, 1, "0 batches"), (0.1, 2, "1 batch,")])
def test_a_run_of_less_than_one_update_is_refused(epochs, window, made):
    with pytest.raises(UserError, match=f"num_epochs: {epochs}.* {made}"):
        total_batches(epochs, None, 10, 1, window)


@pytest.mark.parametrize(
    ("steps", "ratio", "expected"), [(30, 0.6, 17), (10, 0.6, 5), (2, 0.1, 1), (30, 1.0, 29)]
)
def test_replayed_steps(steps, ratio, expected):
    assert replay_step_count(steps, ratio) == expected


def test_a_delayed_run_holds_the_verdicts_of_more_than_one_step():
    topology = topology_of(config(grpo_group_size=8, batch_size=2), 1, 2)
    assert [pending_rewards_needed(topology, depth) for depth in (0, 1, 2)] == [16, 32, 48]
    assert check_pending("queue", 32, topology, 1) is None
    assert check_pending("queue", 31, topology, 1) == (
        "queue: 31 cannot hold the 16 rollouts of a rank and 1 step of delay; use --queue 32"
    )


def test_words_follow_their_number():
    assert [counted(n, "wave") for n in (0, 1, 2)] == ["0 waves", "1 wave", "2 waves"]
    assert [counted(n, "batch") for n in (1, 1024)] == ["1 batch", "1,024 batches"]
    assert describe_ranks(1, 1, 1, 1, 1).startswith("1 node x 1 process = 1; data parallel 1: 1 x 1")


def test_divisors_also_of_numbers_too_large_to_count_up_to():
    for number in range(1, 200):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    assert divisors(10**12 + 39) == [1, 10**12 + 39]
