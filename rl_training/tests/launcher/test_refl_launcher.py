"""ReFL's launcher: GRPO's in all but its name, and only for a ReFL recipe."""

from __future__ import annotations

from rl_training.tests.launcher.conftest import LAUNCHER

REFL = LAUNCHER.with_name("refl_multinode.fish")
WORDS = ("--nproc", "3", "--config", "configs/quickstart_refl.yaml", "--negative_prompt", "two words")


def facts(launch, *lines: str) -> None:
    common = ("device=cpu", f"output_dir={launch.output_dir}", "rendezvous_timeout_s=30")
    (launch.out / "facts").write_text("".join(f"{line}\n" for line in (*common, *lines)))


def test_it_starts_what_the_grpo_launcher_starts(launch):
    facts(launch, "algorithm=refl")
    records = []
    for launcher in (LAUNCHER, REFL):
        done = launch.run(*WORDS, launcher=launcher, STUB_TORCHRUN_STATUS="1")
        assert done.returncode == 1, done.stderr
        records.append((launch.record("torchrun")["argv"], launch.record("validate")["argv"]))
    (training, checks), (as_grpo, checked) = records
    assert training == as_grpo

    def without_facts(argv: list[str]) -> list[str]:
        return [word for word in argv if "wan-trainer-facts" not in word]

    assert without_facts(checks) == without_facts(checked)


def test_a_recipe_of_another_trainer_is_one_line(launch):
    facts(launch)
    done = launch.run(*WORDS, launcher=REFL)
    assert done.returncode == 2 and not launch.called("torchrun")
    (line,) = done.stderr.strip().splitlines()
    assert "trainer: refl" in line and "grpo_multinode.fish" in line


def test_help_is_its_own_usage(launch):
    done = launch.run("--help", launcher=REFL)
    assert done.returncode == 0 and "refl_multinode.fish --nproc 8 --config" in done.stdout
    assert not launch.called("validate")
