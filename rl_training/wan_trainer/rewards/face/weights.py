"""The user's network files: ONNX as published, converted to PyTorch, or a PyTorch state dict."""

from __future__ import annotations

import difflib
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from wan_trainer.rewards.face.files import ONNX, SAFETENSORS, file_problem
from wan_trainer.types import UserError, first_line

_REMEDY = "use a state dict of this network, unchanged"

State = Mapping[str, torch.Tensor]


def load_network(file: Path, build: Callable[[State], nn.Module]) -> nn.Module:
    """The frozen network of a file, in evaluation mode and float32, on the CPU.

    build: the network, with any weights, whose structure a state dict has; it raises KeyError for a key
    that it misses. Raises UserError when the file cannot be used; a state dict must have exactly the
    network's keys and shapes.
    """
    if problem := file_problem(file):
        raise UserError(f"Face: {problem}")
    network = _converted(file) if file.suffix == ONNX else _from_state(file, build)
    return network.float().eval().requires_grad_(False)


def _converted(file: Path) -> nn.Module:
    # Optional packages: a state dict needs neither.
    import onnx  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    import onnx2torch  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    # Its slices index with a list, which PyTorch announces to read otherwise some day; it does not yet.
    warnings.filterwarnings("ignore", "Using a non-tuple sequence", UserWarning, r"onnx2torch\.")
    try:
        return onnx2torch.convert(onnx.load(str(file)))
    except Exception as error:  # the converter raises whatever an unknown node makes it
        said = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f"Face: {file} cannot be converted to PyTorch ({said}); use the published file"
        ) from error


def _from_state(file: Path, build: Callable[[State], nn.Module]) -> nn.Module:
    state = _read_state(file)
    try:
        network = build(state)
    except KeyError as error:
        raise UserError(f"Face: {file} has no key {error.args[0]}; {_REMEDY}") from None
    own = {key: value for key, value in network.state_dict().items() if not _is_counter(key)}
    missing = [key for key in own if key not in state]
    unknown = [key for key in state if key not in own]
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        near = difflib.get_close_matches(missing[0], unknown, 1)
        instead = f", it has {near[0]} instead" if near else ""
        raise UserError(f"Face: {file} has no key {missing[0]}{more}{instead}; {_REMEDY}")
    if unknown:
        more = f" and {len(unknown) - 1} others" if len(unknown) > 1 else ""
        raise UserError(
            f"Face: {file} has the unknown key {unknown[0]}{more}; remove it, or use another network"
        )
    for key, value in own.items():
        if state[key].shape != value.shape:
            shapes = f"{tuple(state[key].shape)}, not {tuple(value.shape)}"
            raise UserError(f"Face: {file} has {key} of shape {shapes}; {_REMEDY}")
    network.load_state_dict(state, strict=False)  # strict but for the counters, as was just checked
    return network


def _read_state(file: Path) -> State:
    try:
        if file.suffix == SAFETENSORS:
            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise UserError(f"Face: {file} cannot be read: {first_line(error)}; download it again") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]  # a training checkpoint keeps other things beside it
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"Face: {file} is no state dict; save the network's state_dict()")
    return {key: value for key, value in cast("State", state).items() if not _is_counter(key)}


def _is_counter(key: str) -> bool:
    """Whether a key is a batch norm's count of training steps, which some files leave out."""
    return key.endswith("num_batches_tracked")
