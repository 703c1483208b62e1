"""A minimal valid configuration to vary."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from wan_trainer.config import LoadedConfig, load_with_sources

RULE = {
    "model_path": "storage/models/wan",
    "model_family": "ti2v-5b",
    "dataset_json": "storage/data/dataset.json",
    "output_dir": "storage/runs/a",
    "vbvr_reward_evalkit_dir": "storage/evalkits/a",
    "vbvr_reward_evalkit_source_sha256": "0" * 64,
}
JUDGE = {
    **{key: value for key, value in RULE.items() if not key.startswith("vbvr_")},
    "grpo_reward_fn": "vbvr_vlm",
    "vlm_reward_model": "judge",
    "vlm_reward_prompt_mode": "custom",
}
REFL = {
    "trainer": "refl",
    "model_path": "storage/models/wan",
    "model_family": "t2v-1.3b",
    "dataset_json": "storage/data/prompts.txt",
    "output_dir": "storage/runs/a",
    "roles": {"reward": {"_target_": "mine.rewards.Look"}},
}
FLAT = {key: value for key, value in REFL.items() if key != "roles"}
BASES = {"rule": RULE, "judge": JUDGE, "refl": REFL, "refl_flat": FLAT}

Load = Callable[..., LoadedConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """load(*flags, reward="rule", text="", env={}, **values): a file of base, values and text, then flags.

    reward: which base, "rule", "judge", "refl", or "refl_flat" without roles.
    """

    def run(*flags: str, reward: str = "rule", text: str = "", env=None, **values) -> LoadedConfig:
        path = tmp_path / "recipe.yaml"
        path.write_text(
            yaml.safe_dump({**BASES[reward], **values}, sort_keys=False) + text,
            encoding="utf-8",
        )
        return load_with_sources(path, flags, env or {})

    return run
