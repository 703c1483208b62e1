"""Where files named in a configuration are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from wan_trainer.types import UserError

PACKAGE_PARENT = Path(__file__).resolve().parents[2]


def trainer_root(environment: Mapping[str, str] = os.environ) -> Path:
    """The trainer's directory (`rl_training` in the repository), where a configuration's paths start.

    WAN_TRAINER_ROOT names it for an installation that is not editable.
    """
    stated = environment.get("WAN_TRAINER_ROOT")
    if not stated:
        if not (PACKAGE_PARENT / "configs").is_dir():
            raise UserError(
                f"WAN_TRAINER_ROOT: is not set, and the package is in {PACKAGE_PARENT}, outside the "
                "repository; name the rl_training directory"
            )
        return PACKAGE_PARENT
    root = Path(stated).expanduser()
    if not root.is_dir():
        raise UserError(
            f"WAN_TRAINER_ROOT: {stated} is not a directory; name the rl_training directory of the repository"
        )
    return root.resolve()


def trainer_path(value: str) -> Path:
    """An absolute path from a value of the configuration or an override."""
    return Path(os.path.normpath(trainer_root() / Path(value).expanduser()))


def caller_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the user stood when typing the command; a launcher that changes directory says so."""
    return Path(environment.get("WAN_TRAINER_CALLER_DIR") or Path.cwd())


def find_config(name: str | Path, environment: Mapping[str, str] = os.environ) -> Path:
    """The file that `--config` names.

    Tried in order: absolute; relative to the trainer; relative to the repository; relative to the caller. A
    name that starts with `./` or `../` is the caller's. Raises UserError naming the places that were tried.
    """
    given = Path(name).expanduser()
    root = trainer_root(environment)
    caller = caller_directory(environment)
    if given.is_absolute():
        places = [given]
    elif str(name).startswith(("./", "../")):
        places = [caller / given]
    else:
        places = [root / given, caller / given]
        if given.parts[:1] == ("rl_training",):
            places.insert(1, root.joinpath(*given.parts[1:]))
    for place in places:
        if place.is_file():
            return Path(os.path.normpath(place))
    tried = ", ".join(dict.fromkeys(os.path.normpath(place) for place in places))
    raise UserError(f"--config: {name} is not a file; looked for {tried}")
