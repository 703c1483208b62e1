"""What a run was made from: code, packages, environment, and digests of its inputs."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wan_trainer.digests import file_sha256, files_sha256
from wan_trainer.recording.jsonl import Json
from wan_trainer.recording.manifest import MANIFEST

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth"})
_CONFIG_SUFFIXES = frozenset({".json", ".txt", ".model"})
_DIFF_LIMIT_BYTES = 256 * 1024
_GIT_TIMEOUT_S = 20
_LAUNCHER_VARIABLES = re.compile(
    r"WAN_TRAINER_\w+|MASTER_\w+|(LOCAL_|GROUP_)?WORLD_SIZE|(LOCAL_|GROUP_)?RANK|NCCL_\w+|GLOO_\w+"
    r"|CUDA_\w+|CUBLAS_\w+|PYTORCH_\w+|TORCH_\w+|OMP_NUM_THREADS|TRITON_CACHE_DIR|CPATH|PYTHONPATH|WANDB_MODE"
)
_SECRET_NAME = re.compile(r"(^|_)(api_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
MASK = "***"


@dataclass(frozen=True)
class CodeIdentity:
    """The revision of the trainer. commit is None outside a git checkout, and `diff` is what HEAD lacks.

    sources: digest of the Python files, in a checkout or not. untracked: files git neither tracks nor
    ignores. diff_truncated: the difference was longer than 256 KiB.
    """

    commit: str | None
    dirty: bool
    sources: str = ""
    diff: str = ""
    diff_truncated: bool = False
    untracked: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelIdentity:
    """A model directory: sha256 of each small text file, size in bytes of each weight file; POSIX paths."""

    path: Path
    family: str
    configs: Mapping[str, str]
    weights: Mapping[str, int]


@dataclass(frozen=True)
class WeightsIdentity:
    """Weights a run starts from: a checkpoint by the sha256 of its manifest, else files by size in bytes."""

    path: Path
    manifest: str | None
    weights: Mapping[str, int]


@dataclass(frozen=True)
class DatasetIdentity:
    """A dataset descriptor and the manifests it names: path -> sha256. samples: how many it resolves to."""

    path: Path
    sha256: str
    manifests: Mapping[str, str]
    samples: int


@dataclass(frozen=True)
class EvaluatorIdentity:
    """The external evaluator a run was pinned to.

    runtime: fingerprint and versions of the libraries that its scores depend on beside its sources.
    """

    directory: Path
    source_sha256: str
    runtime: Mapping[str, Json] | None = None


@dataclass(frozen=True)
class AttentionIdentity:
    """The attention kernel by Diffusers' name of the backend.

    The rest is of a kernel from the Hub, None for PyTorch's own and for those of an installed package:
    repository, version asked for, commit in the cache, and build and its digest where they are on record.
    """

    backend: str
    repository: str | None = None
    version: int | None = None
    commit: str | None = None
    build: str | None = None
    sha256: str | None = None


def model_identity(path: Path, family: str) -> ModelIdentity:
    """Digest the configuration and tokenizer files and list the weight sizes, without reading any weights."""
    configs: dict[str, str] = {}
    weights: dict[str, int] = {}
    for file in sorted(path.rglob("*")):
        if not file.is_file():
            continue
        name = file.relative_to(path).as_posix()
        if file.suffix in _WEIGHT_SUFFIXES:
            weights[name] = file.stat().st_size
        elif file.suffix in _CONFIG_SUFFIXES:
            configs[name] = file_sha256(file)
    return ModelIdentity(path, family, configs, weights)


def weights_identity(path: Path) -> WeightsIdentity:
    """Identify a checkpoint, a directory of weights or one file, without reading any weights."""
    if (path / MANIFEST).is_file():
        return WeightsIdentity(path, file_sha256(path / MANIFEST), {})
    if path.is_file():
        return WeightsIdentity(path, None, {path.name: path.stat().st_size})
    return WeightsIdentity(path, None, model_identity(path, "").weights)


def _git(directory: Path, *arguments: str) -> str | None:
    """Output of a git command, or None when git is absent, refuses or takes too long."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace")


def code_identity(directory: Path, sources: str) -> CodeIdentity:
    """The revision of the checkout that tracks `directory` (the package's own, for a run).

    sources: its `code_digest`.
    """
    # A package installed below somebody else's checkout is not part of it: ask for a tracked file first.
    tracked = _git(directory, "ls-files", "--", ".")
    commit = _git(directory, "rev-parse", "HEAD") if tracked else None
    top = _git(directory, "rev-parse", "--show-toplevel") if commit else None
    if commit is None or top is None:
        return CodeIdentity(commit=None, dirty=False, sources=sources)
    root = Path(top.rstrip("\n"))
    diff = _git(root, "diff", "--no-color", "--no-ext-diff", "HEAD") or ""
    others = _git(root, "ls-files", "--others", "--exclude-standard") or ""
    untracked = tuple(others.splitlines()[:200])
    cut = diff.encode("utf-8")[:_DIFF_LIMIT_BYTES].decode("utf-8", errors="ignore")
    return CodeIdentity(
        commit=commit.strip(),
        dirty=bool(diff or untracked),
        sources=sources,
        diff=cut,
        diff_truncated=len(cut) < len(diff),
        untracked=untracked,
    )


def code_digest(package: Path) -> str:
    """Twelve digits that tell two versions of a package's Python sources apart, in a git checkout or not."""
    sources = sorted(package.rglob("*.py"))
    return files_sha256((path.relative_to(package).as_posix(), path) for path in sources)[:12]


def package_versions() -> dict[str, str]:
    """Version of every installed distribution, and of Python and the operating system.

    Names as their metadata directories spell them, in lower case with hyphens: opening the metadata of some
    hundred packages would take every start most of a second.
    """
    installed: dict[str, str] = {}
    for place in sys.path:
        for found in sorted(Path(place).glob("*.dist-info")):
            name, _, version = found.name.removesuffix(".dist-info").partition("-")
            # The first on the path is the one that is imported.
            installed.setdefault(name.replace("_", "-").lower(), version)
    system = {"python": platform.python_version(), "platform": platform.platform()}
    return system | dict(sorted(installed.items()))


def is_secret(name: str) -> bool:
    """True for a variable, config key or flag whose name says that its value is a secret."""
    return _SECRET_NAME.search(name.strip().lstrip("-").replace("-", "_")) is not None


def masked(name: str, value: Json) -> Json:
    """`value` without secrets: all of it when `name` says so, else what a URL carries before its host."""
    if isinstance(value, Mapping):
        return {key: masked(key, item) for key, item in value.items()}
    if value is not None and value != "" and is_secret(name):
        return MASK
    if isinstance(value, str):
        return _URL_LOGIN.sub(MASK, value)
    if isinstance(value, Sequence):
        return [masked("", item) for item in value]
    return value


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Command-line words without secrets, for both `--name value` and `--name=value`."""
    words: list[str] = []
    secret_follows = False
    for word in arguments:
        name, equals, value = word.partition("=")
        if secret_follows and not word.startswith("--"):
            words.append(MASK)
        elif equals and is_secret(name):
            words.append(f"{name}={MASK}" if value else word)
        else:
            words.append(_URL_LOGIN.sub(MASK, word))
        secret_follows = word.startswith("--") and not equals and is_secret(name)
    return words


def launcher_environment(environment: Mapping[str, str]) -> dict[str, Json]:
    """The variables that steer a run, sorted, secrets masked."""
    return {
        name: masked(name, environment[name])
        for name in sorted(environment)
        if _LAUNCHER_VARIABLES.fullmatch(name)
    }
