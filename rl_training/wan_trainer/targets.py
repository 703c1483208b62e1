"""Parts that a configuration names by `_target_`: found, imported and called in one place.

The target is called once in each process, with the other keys of its mapping as keyword arguments; what it
returns is the part. It is the user's code: whatever goes wrong in it ends in one line that names the key.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from wan_trainer.config.specs import RunSpec, Target
from wan_trainer.config.suggest import suggest
from wan_trainer.digests import files_sha256
from wan_trainer.types import UserError


def make_importable(directory: Path) -> None:
    """Let the modules in `directory`, where the configuration is, be targets.

    It is searched after PYTHONPATH and the installed packages: no file beside a recipe may hide a library.
    """
    place = os.path.abspath(directory)
    if place not in sys.path:
        sys.path.append(place)


def construct(key: str, target: Target, *leading: object) -> object:
    """What the target returns for `leading` and its keyword arguments.

    key: the configuration key that names it. Raises UserError when it cannot be found, imported or called.
    """
    factory = checked_call(key, target, *leading)
    with user_code(key, target):
        return factory(*leading, **target.arguments)


def checked_call(key: str, target: Target, *leading: object) -> Callable[..., object]:
    """The target, once it is known to take `leading` and its keyword arguments; it is not called."""
    factory = locate(key, target)
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return factory  # some callables written in C tell nothing
    try:
        signature.bind(*leading, **target.arguments)
    except TypeError as error:
        name = target.path.rpartition(".")[2]
        raise UserError(
            f"{key}: {target.path} cannot be called so: {error}; it is {name}{signature}, and the keys "
            "beside _target_ are its keyword arguments"
        ) from None
    return factory


def locate(key: str, target: Target) -> Callable[..., object]:
    """The callable that the path names."""
    module_name, _, attribute = target.path.rpartition(".")
    module = _import(key, target, module_name)
    found = getattr(module, attribute, None)
    if found is None:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise UserError(
            f"{key}: {module_name} ({module.__file__}) has no {attribute}"
            f"{suggest(attribute, public) or '; name what it defines: ' + ', '.join(public)}"
        )
    if not callable(found):
        raise UserError(
            f"{key}: {target.path} is {type(found).__name__}, which cannot be called; name a class or "
            "function that returns the part"
        )
    return found


def _import(key: str, target: Target, name: str) -> ModuleType:
    try:
        # A directory that got a module since it was last looked into is looked into again.
        importlib.invalidate_caches()
        with user_code(key, target, f"importing {name}"):
            return importlib.import_module(name)
    except UserError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise
        searched = ", ".join(_places()) or "nothing"
        raise UserError(
            f"{key}: no module {missing} for {target.path}; searched the installed packages and {searched}: "
            "put it beside the configuration, or its directory (absolute) in PYTHONPATH, on every node"
        ) from None


def _places() -> list[str]:
    """Where modules are searched, Python's own directories and the installed packages aside."""
    own = tuple(os.path.abspath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    places = dict.fromkeys(os.path.abspath(place) for place in sys.path)
    return [place for place in places if not place.startswith(own) and not place.endswith(zipped)]


@contextmanager
def user_code(key: str, target: Target, doing: str = "") -> Iterator[None]:
    """Turn whatever the user's code raises into one line. A UserError of its own passes as it is.

    So does an exit: a module that leaves while it is imported must not end the command with its own status.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(str(error).split()) or "no message"
        what = f"{doing} for {target.path}" if doing else target.path
        raise UserError(
            f"{key}: {what} raised {type(error).__name__}: {said} ({frame.filename} line {frame.lineno}); "
            "mend it or its arguments"
        ) from error


def require(key: str, target: Target, holds: bool, rule: str) -> None:
    """Raise UserError unless what the target returned `holds` to its interface; rule: what it must do."""
    if not holds:
        raise UserError(f"{key}: {target.path} {rule}; see docs/extending.md")


def require_methods(key: str, target: Target, part: object, names: Sequence[str]) -> None:
    """Raise UserError unless `part` has these methods."""
    missing = [name for name in names if not callable(getattr(part, name, None))]
    require(
        key,
        target,
        not missing,
        f"returned {type(part).__name__} without {' and '.join(missing)}, and needs {', '.join(names)}",
    )


def source_digest(target: Target) -> str:
    """Twelve digits that tell two versions of a target's sources apart: its top package, or its one file.

    "missing" when there is no such module: construction says more about that.
    """
    top = target.path.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return "missing"
    if spec is None:
        return "missing"
    roots = [Path(root) for root in spec.submodule_search_locations or []]
    files = [(file.relative_to(root).as_posix(), file) for root in roots for file in root.rglob("*.py")]
    if not roots and spec.origin is not None and Path(spec.origin).is_file():
        files = [(Path(spec.origin).name, Path(spec.origin))]
    return files_sha256(sorted(files))[:12]


def named_targets(spec: RunSpec) -> dict[str, Target]:
    """The targets of a run by the configuration key that names them."""
    choices = {
        "trainer": spec.algorithm,
        "lr_scheduler": spec.optimizer.lr_schedule,
        "grpo_sde_formula": spec.sampler.kind,
        "grpo_loss": spec.grpo.loss,
        **{key: own.target for key, own in spec.reward.own.items()},
        **({} if spec.refl is None else spec.refl.roles.targets),
    }
    return {key: choice for key, choice in choices.items() if isinstance(choice, Target)}


def source_digests(spec: RunSpec) -> dict[str, str]:
    """`source_digest` of every target by the key that names it."""
    return {key: source_digest(target) for key, target in named_targets(spec).items()}
