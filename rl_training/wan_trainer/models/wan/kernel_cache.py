"""The offline cache of Hub kernels: where it is, what it holds, whether it arrived whole. Torch-free.

Its layout is the Hugging Face Hub's: `kernels--<org>--<name>/refs/v<version>` names a commit, and
`snapshots/<commit>/build/<variant>/` holds a build. Beside each repository stands the receipt of its fetch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from wan_trainer.config.attention import HUB_KERNELS, HubKernel
from wan_trainer.digests import files_sha256
from wan_trainer.recording.identity import AttentionIdentity
from wan_trainer.types import UserError

DEFAULT_CACHE = "~/.cache/wan-trainer/kernels"


@dataclass(frozen=True)
class Receipt:
    """What a fetch left: the commit behind the version, the build for this system, and its digest."""

    repo_id: str
    version: int
    commit: str
    variant: str
    files: int
    bytes: int
    sha256: str


def kernels_cache(env: Mapping[str, str]) -> Path:
    """WAN_TRAINER_KERNELS_CACHE, else the default. KERNELS_CACHE is ignored: who knows what it holds."""
    return Path(env.get("WAN_TRAINER_KERNELS_CACHE") or DEFAULT_CACHE).expanduser().absolute()


def prefetch_command(backend: str) -> str:
    """What fills the cache, on a machine with a network."""
    return f"wan-trainer prefetch-attention-kernel --attention_backend {backend}"


def repository_dir(cache: Path, repo_id: str) -> Path:
    """The directory of a kernel repository in the cache."""
    return cache / f"kernels--{repo_id.replace('/', '--')}"


def receipt_path(cache: Path, kernel: HubKernel) -> Path:
    """Where the receipt of a kernel's fetch is kept."""
    return cache / f"{repository_dir(cache, kernel.repo_id).name}-v{kernel.version}.json"


def find_snapshot(cache: Path, kernel: HubKernel) -> Path:
    """The files of `kernel` in the cache. Raises FileNotFoundError, its text saying what is not there."""
    repository = repository_dir(cache, kernel.repo_id)
    try:
        commit = (repository / "refs" / f"v{kernel.version}").read_text(encoding="utf-8").strip()
    except OSError:
        raise FileNotFoundError(f"{kernel.repo_id} version {kernel.version} is not in {cache}") from None
    snapshot = repository / "snapshots" / commit
    if not commit or not (snapshot / "build").is_dir():
        raise FileNotFoundError(f"{cache} holds no build of {kernel.repo_id} version {kernel.version}")
    return snapshot


def check_cached(backend: str, cache: Path) -> list[str]:
    """What keeps the kernel of `backend` from being used offline, a line each; nothing for other backends.

    The digest is compared where there is a receipt: a build that was copied in part can end a process
    without a word.
    """
    kernel = HUB_KERNELS.get(backend)
    if kernel is None:
        return []
    remedy = f"run {prefetch_command(backend)} where there is a network, and copy the cache here"
    try:
        snapshot = find_snapshot(cache, kernel)
        receipt = read_receipt(cache, kernel)
        if receipt is not None:
            found = hash_tree(snapshot / "build" / receipt.variant)
            if found != receipt.sha256:
                raise FileNotFoundError(
                    f"{kernel.repo_id} in {cache} differs from what was fetched (sha256 {found}, not "
                    f"{receipt.sha256})"
                )
    except OSError as error:
        return [f"attention_backend {backend}: {error}: {remedy} (WAN_TRAINER_KERNELS_CACHE names another)"]
    return []


def read_receipt(cache: Path, kernel: HubKernel) -> Receipt | None:
    """The receipt, None when the kernel was put here by other means. Raises OSError when it is damaged."""
    path = receipt_path(cache, kernel)
    if not path.is_file():
        return None
    try:
        return Receipt(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise FileNotFoundError(f"{path} is damaged") from None


def attention_identity(backend: str, cache: Path) -> AttentionIdentity:
    """What computes attention, for the record of a run whose kernel was found usable."""
    kernel = HUB_KERNELS.get(backend)
    if kernel is None:
        return AttentionIdentity(backend)
    receipt = read_receipt(cache, kernel)
    return AttentionIdentity(
        backend=backend,
        repository=kernel.repo_id,
        version=kernel.version,
        commit=find_snapshot(cache, kernel).name,
        build=None if receipt is None else receipt.variant,
        sha256=None if receipt is None else receipt.sha256,
    )


def write_receipt(cache: Path, kernel: HubKernel, commit: str, variant: Path) -> Receipt:
    """Digest the build directory `variant` and keep the receipt."""
    files = [path for path in variant.rglob("*") if path.is_file()]
    receipt = Receipt(
        repo_id=kernel.repo_id,
        version=kernel.version,
        commit=commit,
        variant=variant.name,
        files=len(files),
        bytes=sum(path.stat().st_size for path in files),
        sha256=hash_tree(variant),
    )
    receipt_path(cache, kernel).write_text(json.dumps(asdict(receipt), indent=1) + "\n", encoding="utf-8")
    return receipt


def hash_tree(directory: Path) -> str:
    """The digest of the sorted files below `directory`.

    Bytecode is left out: importing the kernel writes it.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not there")
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return files_sha256((path.relative_to(directory).as_posix(), path) for path in files)


def no_kernel(backend: str, reason: str) -> UserError:
    """The one line about a backend whose kernel cannot be used here."""
    return UserError(
        f"attention_backend {backend}: {reason}: run {prefetch_command(backend)} where there is a network, "
        "or use --attention_backend native"
    )
