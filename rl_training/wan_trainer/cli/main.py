"""`wan-trainer COMMAND`: finds the command, runs it, and turns its outcome into an exit status.

Exit status: 0 done, 1 failure, 2 bad input, 75 stopped by a signal after saving, 130 interrupted.
A command's module is imported when that command runs: `--help` must answer without PyTorch or pydantic.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn, Protocol, cast

from wan_trainer import __version__
from wan_trainer.types import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_INTERRUPTED, UserError


class Command(NamedTuple):
    """Where a command lives, its one line of help, and whether unknown flags are configuration overrides."""

    module: str
    help: str
    takes_overrides: bool = False


COMMANDS = {
    "train": Command("train", "train on this rank; what torchrun starts", takes_overrides=True),
    "validate": Command("validate", "check that a run can start here, without weights", takes_overrides=True),
    "plan": Command("plan", "ranks, batches and replays of a recipe at a topology", takes_overrides=True),
    "config": Command("config", "every value of a configuration and its source", takes_overrides=True),
    "check-recipes": Command("check_recipes", "check that recipes load and that every _target_ is there"),
    "unpack": Command("unpack", "turn downloaded task archives into a dataset"),
    "make-tiny": Command("make_tiny", "write a tiny model directory for tests and trials"),
    "evalkit-digest": Command("evalkit_digest", "print the digest that pins an evaluator checkout"),
    "scorer-runtime": Command("scorer_runtime", "compare the libraries that evaluators use with the lock"),
    "score": Command("score", "score existing video files as a run would", takes_overrides=True),
    "probe-reward": Command(
        "probe_reward", "score clips whose worth is known with the rule evaluator", takes_overrides=True
    ),
    "probe-judge": Command(
        "probe_judge", "ask the judge about clips whose worth is known", takes_overrides=True
    ),
    "prefetch-attention-kernel": Command(
        "prefetch_attention_kernel", "fetch an attention kernel for machines without a network"
    ),
    "verify": Command("verify", "compare the files of a checkpoint, or of a run's, with their manifest"),
    "export": Command("export", "turn a checkpoint into a Diffusers directory or LoRA files"),
    "record-diff": Command("record_diff", "print what differs between two runs"),
    "report": Command("report", "write the HTML report of a run directory"),
}


class _CommandModule(Protocol):
    def configure(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace, rest: list[str]) -> int: ...


class _Parser(argparse.ArgumentParser):
    """argparse with the errors of this program: one line, raised instead of printed under a usage text."""

    given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        advice = f"{self.prog} --help shows the usage"
        flags = [word.partition("=")[0] for word in self.given if word.startswith("-")]
        for option in self.option_names():
            near = difflib.get_close_matches(option, flags, 1, cutoff=0.7)
            if f"required: {option}" in message and near and near[0] != option:
                advice = f"did you mean {option} for {near[0]}?"
        raise UserError(f"{self.prog}: {message}; {advice}")

    def option_names(self) -> list[str]:
        """Every option that the command declares."""
        return list(self._option_string_actions)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status. Errors of the user are lines on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except UserError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; without this the interpreter complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except SystemExit as end:
        # argparse leaves so after printing help.
        return end.code if isinstance(end.code, int) else 0


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(usage(), file=sys.stderr)
        return EXIT_BAD_INPUT
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version", "version"):
        print(f"wan-trainer {__version__}")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        advice = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise UserError(f"wan-trainer: {name} is not a command; {advice}")
    return _run(name, command, rest)


def _run(name: str, command: Command, arguments: list[str]) -> int:
    module = cast("_CommandModule", importlib.import_module(f"wan_trainer.cli.{command.module}"))
    parser = _Parser(prog=f"wan-trainer {name}", description=command.help, allow_abbrev=False)
    if command.takes_overrides:
        parser.usage = f"wan-trainer {name} [options] [--KEY VALUE ...]"
        parser.epilog = (
            "Every configuration key is a flag too: --batch_size 4, --shuffle or --no-shuffle, "
            "--adam_betas 0.9 0.95. wan-trainer config --keys lists the keys with their meaning."
        )
    module.configure(parser)
    parser.given = arguments
    # `--` may set overrides apart from the launcher's own flags; to argparse it would mean positionals.
    args, rest = parser.parse_known_args([argument for argument in arguments if argument != "--"])
    if rest and not command.takes_overrides:
        # The values after an unknown flag are no errors of their own.
        wrong = [word for word in rest if word.startswith("-")] or rest
        raise UserError(*(_unexpected(name, word, parser.option_names()) for word in wrong))
    return module.run(args, rest)


def _unexpected(name: str, word: str, options: list[str]) -> str:
    near = difflib.get_close_matches(word.partition("=")[0], options, 1) if word.startswith("-") else []
    advice = f"did you mean {near[0]}?" if near else f"wan-trainer {name} --help shows the usage"
    return f"wan-trainer {name}: unexpected argument {word}; {advice}"


def usage() -> str:
    """The text of `wan-trainer --help`."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: wan-trainer COMMAND [options]",
            "",
            "Reinforcement learning for Wan video models.",
            "",
            *lines,
            "",
            "wan-trainer COMMAND --help shows the options of a command; --version prints the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
