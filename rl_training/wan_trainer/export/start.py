"""What an expert was before training: frozen weights and the base of adapters are in no checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from wan_trainer.models.wan.base_lora import BaseLora
from wan_trainer.models.wan.base_lora_files import base_lora_file
from wan_trainer.models.wan.starting_weights import check_starting_weights, starting_component
from wan_trainer.models.wan.weights import Weights
from wan_trainer.recording.manifest import verify_checkpoint
from wan_trainer.training.resume import starting_checkpoint
from wan_trainer.training.stored_state import StoredState
from wan_trainer.types import UserError

_ADAPTER = ".lora_"


class StartingWeights:
    """The tensors an expert started with: the model directory's, or those `resume_from` put in their place.

    model: its component in the model directory, whose names, shapes and files an export has.
    """

    def __init__(
        self, model: Path, name: str, started_from: Path | None, base_lora: Path | None = None
    ) -> None:
        """base_lora: merged into weights that are read from files; those of a checkpoint have it already.

        Raises UserError when `started_from` or `base_lora` is gone, damaged or of another model.
        """
        file = None if base_lora is None else base_lora_file(base_lora, name)
        self._base_lora = None if file is None else BaseLora(file)
        self.model = Weights(model, self._base_lora)
        self._state: StoredState | None = None
        self._files: Weights | None = None
        self._replaced: set[str] = set()
        self._prefix = f"{name}."
        if started_from is not None:
            self._open(name, started_from)

    @property
    def replaced(self) -> bool:
        """Whether they are other weights than the model directory's."""
        return bool(self._replaced) or self._base_lora is not None

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """These tensors, as they are stored, or in float32 where an adapter was merged into them."""
        tensors: dict[str, torch.Tensor] = {}
        if self._state is not None:
            wanted = [name for name in names if name in self._replaced]
            tensors = self._state.read("model", wanted, self._prefix)
        for name in names:
            if self._files is not None and name in self._replaced:
                tensors[name] = self._files.read(name)
            elif name not in tensors:
                tensors[name] = self.model.read(name)
        return tensors

    def _open(self, name: str, path: Path) -> None:
        checkpoint = starting_checkpoint(path) if path.exists() else None
        if checkpoint is not None:
            verify_checkpoint(checkpoint)
            self._state = StoredState(checkpoint)
            shapes = self._state.shapes("model", self._prefix)
            self._replaced = {key for key in shapes if _ADAPTER not in key}
        else:
            problems = check_starting_weights(path, (name,))
            if problems:
                raise UserError(
                    *(
                        f"the weights the run started from, which its checkpoint needs: {line}"
                        for line in problems
                    )
                )
            component = starting_component(path, name)
            if component is not None:
                self._files = Weights(component, self._base_lora)
                self._replaced = set(self._files.names)
        foreign = sorted(self._replaced - self.model.names)
        if foreign:
            raise UserError(
                f"{path} has {len(foreign)} tensors that {self.model.component} lacks (first: {foreign[0]}): "
                "name the model that was trained with --model"
            )
