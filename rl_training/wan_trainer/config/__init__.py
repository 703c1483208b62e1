"""The public configuration: schema, loading, rules, and the specifications that components take.

Names load on first use: scorer processes import `config.specs` alone and should not pay for the schema.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wan_trainer.config.contract import (
        common_values,
        contract_changes,
        contract_digests,
        contract_values,
        group_digests,
        public_values,
    )
    from wan_trainer.config.device import resolve_device
    from wan_trainer.config.family import known_family, read_family
    from wan_trainer.config.load import LoadedConfig, load_config, load_with_sources, settle_device
    from wan_trainer.config.paths import caller_directory, find_config, trainer_path, trainer_root
    from wan_trainer.config.resolution import replay_depth, resolve, topology_of
    from wan_trainer.config.schema import SECTIONS, TrainConfig, keys

__all__ = [
    "SECTIONS",
    "LoadedConfig",
    "TrainConfig",
    "caller_directory",
    "common_values",
    "contract_changes",
    "contract_digests",
    "contract_values",
    "find_config",
    "group_digests",
    "keys",
    "known_family",
    "load_config",
    "load_with_sources",
    "public_values",
    "read_family",
    "replay_depth",
    "resolve",
    "resolve_device",
    "settle_device",
    "topology_of",
    "trainer_path",
    "trainer_root",
]

_HOMES = {
    "contract": (
        "common_values",
        "contract_changes",
        "contract_digests",
        "contract_values",
        "group_digests",
        "public_values",
    ),
    "device": ("resolve_device",),
    "family": ("known_family", "read_family"),
    "load": ("LoadedConfig", "load_config", "load_with_sources", "settle_device"),
    "paths": ("caller_directory", "find_config", "trainer_path", "trainer_root"),
    "resolution": ("replay_depth", "resolve", "topology_of"),
    "schema": ("SECTIONS", "TrainConfig", "keys"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
