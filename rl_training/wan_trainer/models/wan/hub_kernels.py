"""Attention kernels of the Hugging Face Hub: fetched on a networked machine, loaded from the cache alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx
from diffusers.models import attention_dispatch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from kernels._rust import KernelDependency, KernelVersion, Metadata
from kernels.hf_hub import _check_trust_remote_code, _get_hf_api
from kernels.load import get_kernel_with_resolver
from kernels.resolver import _BYTECODE_IGNORE_PATTERNS, LocalKernel, resolve_local_kernel
from kernels.validate import AllValidator, ArchValidator, default_metadata_validators
from kernels.variants import get_variants, parse_variant, resolve_variant

from wan_trainer.config.attention import HUB_KERNELS, HubKernel
from wan_trainer.models.wan.kernel_cache import (
    Receipt,
    find_snapshot,
    no_kernel,
    receipt_path,
    write_receipt,
)
from wan_trainer.types import UserError, first_line


@dataclass(frozen=True)
class CacheResolver:
    """Finds kernels, and the kernels they depend on, in the offline cache only."""

    cache: Path

    def resolve(self, *, api: HfApi, backend: str | None, kernel: KernelDependency) -> LocalKernel:
        """The build for this system. Raises FileNotFoundError."""
        match kernel.version:
            case KernelVersion.Version(version=version):
                snapshot = find_snapshot(self.cache, HubKernel(kernel.repo_id, version))
            case other:
                raise FileNotFoundError(f"{kernel.repo_id} is asked for by commit ({other}), not by version")
        return resolve_local_kernel(snapshot, backend=backend)


def load_hub_kernel(backend: str, cache: Path) -> None:
    """Import the Hub kernel of `backend` from `cache` and hand its functions to Diffusers' dispatcher.

    Diffusers asks the Hub only for what its table does not hold yet, so nothing goes to the network
    afterwards. Raises UserError when the kernel is not in the cache, has no build for this torch, CUDA and
    GPU, or does not import.
    """
    kernel = HUB_KERNELS[backend]
    entry = attention_dispatch._HUB_KERNELS_REGISTRY[attention_dispatch.AttentionBackendName(backend)]
    try:
        module = get_kernel_with_resolver(
            api=_get_hf_api(),
            backend=None,
            kernel=KernelDependency(kernel.repo_id, KernelVersion.Version(kernel.version)),
            resolver=CacheResolver(cache),
            metadata_validator=AllValidator([*default_metadata_validators(), ArchValidator()]),
        )
        found = {
            name: None if attribute is None else attention_dispatch._resolve_kernel_attr(module, attribute)
            for name, attribute in (
                ("kernel_fn", entry.function_attr),
                ("wrapped_forward_fn", entry.wrapped_forward_attr),
                ("wrapped_backward_fn", entry.wrapped_backward_attr),
            )
        }
    except Exception as error:  # noqa: BLE001 - it is the kernel's own code that is imported
        raise no_kernel(backend, first_line(error)) from None
    for name, function in found.items():
        setattr(entry, name, function)


class Hub(Protocol):
    """What a fetch needs of the Hub."""

    def check_publisher(self, repo_id: str) -> None:
        """Raise ValueError unless the repository's publisher is trusted with code that runs here."""
        ...

    def variants(self, repo_id: str, revision: str) -> list[str]:
        """Names of the builds at `revision`."""
        ...

    def download(self, repo_id: str, revision: str, variant: str, cache: Path) -> Path:
        """Fetch one build into `cache`; the snapshot, `<cache>/.../snapshots/<commit>`."""
        ...


class HuggingFaceHub:
    """The Hub itself."""

    def __init__(self) -> None:
        self._api = _get_hf_api()

    def check_publisher(self, repo_id: str) -> None:
        """As Diffusers and the kernels package ask before they download."""
        _check_trust_remote_code(repo_id, local_files_only=False, trust_remote_code=False)

    def variants(self, repo_id: str, revision: str) -> list[str]:
        """Names of the builds at `revision`."""
        return [v.variant_str for v in get_variants(self._api, repo_id=repo_id, revision=revision)]

    def download(self, repo_id: str, revision: str, variant: str, cache: Path) -> Path:
        """By the branch's name, not its commit: only so the cache remembers which commit the version is."""
        return Path(
            self._api.snapshot_download(
                repo_id,
                repo_type="kernel",
                revision=revision,
                allow_patterns=[f"build/{variant}/*"],
                ignore_patterns=_BYTECODE_IGNORE_PATTERNS,
                cache_dir=cache,
            )
        )


def fetch_hub_kernel(backend: str, cache: Path, hub: Hub | None = None) -> list[Receipt]:
    """Download what `backend` needs, dependencies first, for this Python environment; what was fetched.

    The build is chosen by the torch and CUDA versions installed here: run it in the environment that trains.
    Raises UserError when the Hub cannot be reached or has no build for this system.
    """
    if backend not in HUB_KERNELS:
        names = ", ".join(HUB_KERNELS)
        raise UserError(f"--attention_backend {backend} needs no kernel of the Hub; those that do: {names}")
    if hub is None:
        if constants.HF_HUB_OFFLINE:
            raise UserError("HF_HUB_OFFLINE is set: unset it to fetch a kernel")
        hub = HuggingFaceHub()
    receipts: list[Receipt] = []
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _fetch(HUB_KERNELS[backend], cache, hub, receipts)
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        raise UserError(
            f"{HUB_KERNELS[backend].repo_id} cannot be fetched ({first_line(error)}): run on a machine that "
            "reaches the Hugging Face Hub and may write the cache"
        ) from None
    return receipts


def _fetch(kernel: HubKernel, cache: Path, hub: Hub, receipts: list[Receipt]) -> None:
    if any((done.repo_id, done.version) == (kernel.repo_id, kernel.version) for done in receipts):
        return
    hub.check_publisher(kernel.repo_id)
    revision = f"v{kernel.version}"
    names = hub.variants(kernel.repo_id, revision)
    chosen, _ = resolve_variant([parse_variant(name) for name in names], None)
    if chosen is None:
        raise UserError(
            f"{kernel.repo_id} {revision} has no build for the torch and CUDA of this environment; it has "
            f"{', '.join(sorted(names))}: use --attention_backend native"
        )
    # A fetch that is cut short must not leave the receipt of the one before.
    receipt_path(cache, kernel).unlink(missing_ok=True)
    snapshot = hub.download(kernel.repo_id, revision, chosen.variant_str, cache)
    variant = snapshot / "build" / chosen.variant_str
    for dependency in Metadata.read_from_file(variant / "metadata.json").kernel_depends:
        match dependency.version:
            case KernelVersion.Version(version=version):
                _fetch(HubKernel(dependency.repo_id, version), cache, hub, receipts)
            case other:
                raise ValueError(f"{dependency.repo_id} is asked for by commit ({other}), not by version")
    receipts.append(write_receipt(cache, kernel, snapshot.name, variant))
