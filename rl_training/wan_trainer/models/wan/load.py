"""Loading a Wan pipeline directory, component by component."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors import SafetensorError
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, UMT5EncoderModel
from transformers.utils.logging import disable_progress_bar

from wan_trainer.config.specs import ModelSpec
from wan_trainer.models.wan.directory import WanDirectory, read_directory, trained_experts
from wan_trainer.models.wan.lora import target_layers
from wan_trainer.models.wan.weights import Weights, check_names, expert_weights, fill
from wan_trainer.sampling.dtypes import DTYPES
from wan_trainer.types import UserError, first_line

_LOADING = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
_LOADING_ERRORS = (OSError, ValueError, RuntimeError, TypeError, SafetensorError)


@dataclass
class WanComponents:
    """The parts of a pipeline. Text encoder and VAE are frozen, in eval mode and in the checkpoint's dtype.

    device: where they compute. offload: they rest in host memory between uses. text_cache: recent prompt
    encodings.
    """

    directory: WanDirectory
    device: torch.device
    offload: bool
    tokenizer: PreTrainedTokenizerBase
    text_encoder: UMT5EncoderModel
    vae: AutoencoderKLWan
    transformer: WanTransformer3DModel
    transformer_2: WanTransformer3DModel | None
    text_cache: OrderedDict[str, torch.Tensor] = field(default_factory=OrderedDict[str, torch.Tensor])

    @property
    def experts(self) -> dict[str, WanTransformer3DModel]:
        """The transformers by component name, high-noise first."""
        experts = {"transformer": self.transformer}
        return experts if self.transformer_2 is None else {**experts, "transformer_2": self.transformer_2}

    @contextmanager
    def resident(self, module: torch.nn.Module) -> Iterator[None]:
        """Within, `module` (text encoder or VAE) is on the device; after, offloaded to where it rests.

        Its tensors in host memory are kept and put back: the module is frozen, so nothing has to be copied
        from the device. They are put back whatever happens within, and when the device had no room for it.
        """
        if not self.offload:
            yield
            return
        resting = [
            (part, name, tensor)
            for part in module.modules()
            for name, tensor in chain(part.named_parameters(recurse=False), part.named_buffers(recurse=False))
        ]
        # By identity: a tied tensor (the text encoder's embedding) is copied once.
        placed: dict[int, torch.Tensor] = {}
        try:
            for part, name, tensor in resting:
                if id(tensor) not in placed:
                    copy = tensor.detach().to(self.device)
                    parameter = isinstance(tensor, nn.Parameter)
                    placed[id(tensor)] = nn.Parameter(copy, requires_grad=False) if parameter else copy
                setattr(part, name, placed[id(tensor)])
            yield
        finally:
            for part, name, tensor in resting:
                setattr(part, name, tensor)


def load_wan(spec: ModelSpec, device: torch.device | str, *, materialize: bool = True) -> WanComponents:
    """Load the pipeline at `spec.path` from local files only.

    With `materialize` the experts are whole on `device`. Without, they are shapes on the meta device, their
    weights checked by header; `parallelize` then reads each rank's shard, so that no rank needs room for a
    whole expert. Raises UserError for a wrong family, a missing component, missing, foreign or corrupt
    weights, and, before any is read, for adapters that have no place in them.
    """
    device = torch.device(device)
    directory = read_directory(spec.path, spec.family)
    trained = trained_experts(spec, directory.experts)
    weights = {name: expert_weights(spec, name) for name in directory.experts}
    experts = {
        name: meta_expert(
            spec.path / name, weights[name], _expert_dtype(spec, weights[name], name in trained)
        )
        for name in directory.experts
    }
    if spec.lora is not None:
        target_layers({name: experts[name] for name in trained}, spec.lora)
    if materialize:
        for name, expert in experts.items():
            fill(expert, weights[name], device)
    rest = torch.device("cpu") if spec.offload_inference_models else device
    return WanComponents(
        directory=directory,
        device=device,
        offload=spec.offload_inference_models,
        tokenizer=_load_tokenizer(spec.path / "tokenizer"),
        text_encoder=_load_text_encoder(spec.path / "text_encoder", rest),
        vae=_load_vae(spec.path / "vae", rest),
        transformer=experts["transformer"],
        transformer_2=experts.get("transformer_2"),
    )


def meta_expert(component: Path, weights: Weights, dtype: torch.dtype) -> WanTransformer3DModel:
    """The expert of `component` on the meta device, in the dtype it is to be stored in.

    `weights`, which it will be filled with, are checked to be of its shapes.
    """
    config: Any = WanTransformer3DModel.load_config(component, local_files_only=True)
    try:
        with torch.device("meta"):
            expert: Any = WanTransformer3DModel.from_config(config)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{component / 'config.json'} describes no Wan transformer ({error}): fetch it again"
        ) from None
    check_names(expert, weights)
    nn.Module.to(expert, dtype=dtype)
    # As Diffusers loads them. The time embedder also decides the sinusoid's dtype, by the dtype it is stored
    # in.
    kept = set(WanTransformer3DModel._keep_in_fp32_modules)
    for path, parameter in expert.named_parameters():
        if kept.intersection(path.split(".")):
            parameter.data = parameter.data.to(torch.float32)
    return expert


def _expert_dtype(spec: ModelSpec, weights: Weights, trained: bool) -> torch.dtype:
    fully_trained = trained and spec.lora is None
    if spec.load_dtype == "auto":
        return torch.float32 if fully_trained else weights.dtype
    if fully_trained and spec.load_dtype != "float32":
        raise UserError(
            f"transformer_load_dtype {spec.load_dtype} would train weights in which most AdamW updates "
            "round to nothing: use auto or float32 (param_dtype sets the compute dtype), or train LoRA"
        )
    return DTYPES[spec.load_dtype]


def _load_tokenizer(component: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(component, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - tokenizers raises a bare Exception on a damaged file
        raise UserError(
            f"{component} holds no tokenizer that loads ({first_line(error)}): fetch it again"
        ) from None


def _load_text_encoder(component: Path, device: torch.device) -> UMT5EncoderModel:
    arguments: dict[str, Any] = {**_LOADING, "dtype": Weights(component).dtype}
    # transformers draws a progress bar whatever its verbosity; in a log of many ranks it is only noise.
    disable_progress_bar()
    try:
        loaded: Any = UMT5EncoderModel.from_pretrained(component, **arguments)
    except _LOADING_ERRORS as error:
        raise UserError(
            f"{component} does not load ({first_line(error)}): fetch the component again"
        ) from None
    return _frozen(loaded[0], loaded[1], component).to(device=device)


def _load_vae(component: Path, device: torch.device) -> AutoencoderKLWan:
    arguments: dict[str, Any] = {**_LOADING, "torch_dtype": Weights(component).dtype}
    try:
        loaded: Any = AutoencoderKLWan.from_pretrained(component, **arguments)
    except _LOADING_ERRORS as error:
        raise UserError(
            f"{component} does not load ({first_line(error)}): fetch the component again"
        ) from None
    return _frozen(loaded[0], loaded[1], component).to(device=device)


def _frozen(module: Any, info: Mapping[str, Collection[object]], component: Path) -> Any:
    """The module ready for inference, unless its checkpoint did not have exactly its tensors."""
    for verb, names in (("lacks", info["missing_keys"]), ("misshapes", info["mismatched_keys"])):
        if names:
            first = sorted(str(name) for name in names)[0]
            raise UserError(
                f"{component} {verb} {len(names)} tensors ({first}): "
                "weights and config.json are of different models, fetch the component again"
            )
    return module.eval().requires_grad_(False)
