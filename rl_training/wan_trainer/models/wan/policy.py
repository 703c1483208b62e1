"""The policy: velocity prediction by one or two Wan transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import nn
from torch.distributed.fsdp import FSDPModule

from wan_trainer.config.specs import ModelSpec
from wan_trainer.models.wan.attention import configure_attention
from wan_trainer.models.wan.directory import WanDirectory, trained_experts
from wan_trainer.models.wan.load import WanComponents
from wan_trainer.models.wan.lora import apply_lora
from wan_trainer.sampling.dtypes import DTYPES
from wan_trainer.types import Condition

ExpertName = Literal["transformer", "transformer_2"]
TRAIN_TIMESTEPS = 1000


@dataclass(frozen=True)
class ParameterCount:
    """How many parameters of one kind an expert has. elements counts numbers, over all shards."""

    expert: str
    kind: Literal["base", "adapter"]
    trained: bool
    tensors: int
    elements: int


class WanPolicy(nn.Module):
    """The transformers and the one way to call them.

    Submodules: `transformer` (all sigmas, or the high-noise expert) and, with two experts, `transformer_2`
    (low noise). Parameter names are Diffusers' below these two prefixes, whatever `parallelize` does.
    `forward` is not defined: each expert is its own FSDP root, so that a step gathers one expert only.
    """

    transformer: WanTransformer3DModel
    transformer_2: WanTransformer3DModel | None

    def __init__(
        self,
        transformer: WanTransformer3DModel,
        transformer_2: WanTransformer3DModel | None,
        directory: WanDirectory,
        *,
        cfg_scale: float,
        compute_dtype: torch.dtype,
    ) -> None:
        """compute_dtype: what latents and text are cast to for the transformer (the FSDP parameter dtype)."""
        super().__init__()
        assert (transformer_2 is None) == (directory.boundary_ratio is None)
        self.transformer = transformer
        self.transformer_2 = transformer_2
        self.directory = directory
        self.cfg_scale = cfg_scale
        self.compute_dtype = compute_dtype

    @property
    def experts(self) -> dict[str, WanTransformer3DModel]:
        """The transformers by name, high-noise first."""
        experts = {"transformer": self.transformer, "transformer_2": self.transformer_2}
        return {name: expert for name, expert in experts.items() if expert is not None}

    @property
    def flow_shift(self) -> float | None:
        """The shift the model's scheduler names, None when it names none."""
        return self.directory.flow_shift

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, F, h, w) of a video's latent. That the sizes fit is checked with the configuration."""
        d = self.directory
        return (
            d.latent_channels,
            (num_frames - 1) // d.temporal_stride + 1,
            height // d.spatial_stride,
            width // d.spatial_stride,
        )

    def expert_for(self, sigma: float) -> ExpertName:
        """The expert that predicts at `sigma`: `transformer` at or above the boundary.

        Compared in float32, as Diffusers compares its float32 timestep tensor to `boundary_ratio * 1000`: a
        sigma on the boundary itself must go the same way in both.
        """
        ratio = self.directory.boundary_ratio
        if ratio is None or model_timestep(sigma) >= torch.tensor(
            ratio * TRAIN_TIMESTEPS, dtype=torch.float32
        ):
            return "transformer"
        return "transformer_2"

    def velocity(self, x_t: torch.Tensor, sigma: float, condition: Condition) -> torch.Tensor:
        """Predict the velocity of (N, C, F, h, w) float32 latents at one sigma; float32 of the same shape.

        It and its branches are the only transformer calls. The timestep 1000 * sigma stays float32 up to the
        sinusoid: bfloat16 would turn 998.4 into 1000. With `condition.first_frame_latent`, latent frame 0 of
        the input is that latent and its tokens' timestep is 0; the velocity returned there is meaningless and
        masked by the caller. Guidance (cfg_scale > 1) is `v_uncond + scale * (v_cond - v_uncond)`, both in
        one batched call.
        """
        if self.cfg_scale > 1.0:
            conditional, unconditional = self.branches(x_t, sigma, condition)
            return unconditional + self.cfg_scale * (conditional - unconditional)
        return self.branch(x_t, sigma, condition)

    def branch(
        self, x_t: torch.Tensor, sigma: float, condition: Condition, *, negative: bool = False
    ) -> torch.Tensor:
        """The velocity of one branch of guidance alone, the conditional or the `negative` prompt's."""
        text = condition.negative_text if negative else condition.text
        assert text is not None, "guidance needs the encoded negative prompt"
        hidden, timestep = self._model_input(x_t, condition), self._timestep(sigma, x_t, condition)
        return self._predict(sigma, hidden, timestep, text).to(x_t.dtype)

    def branches(
        self, x_t: torch.Tensor, sigma: float, condition: Condition
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The velocities of the conditional and of the negative branch, from one batched call."""
        assert condition.negative_text is not None, "guidance needs the encoded negative prompt"
        hidden, timestep = self._model_input(x_t, condition), self._timestep(sigma, x_t, condition)
        text = torch.cat([condition.text, condition.negative_text])
        output = self._predict(sigma, torch.cat([hidden] * 2), torch.cat([timestep] * 2), text)
        conditional, negative = output.to(x_t.dtype).chunk(2)
        return conditional, negative

    def _predict(
        self, sigma: float, hidden: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        expert = self.experts[self.expert_for(sigma)]
        # Through __call__, not .forward: FSDP gathers the expert's parameters in its pre-forward hook.
        output: torch.Tensor = expert(
            hidden_states=hidden.to(self.compute_dtype),
            timestep=timestep,
            encoder_hidden_states=text.to(self.compute_dtype),
            return_dict=False,
        )[0]
        if isinstance(expert, FSDPModule) and not output.requires_grad and not self.trains_at(sigma):
            # FSDP lists every forward until a backward clears its list; a frozen expert never has one.
            expert.reset_iter_state()
        return output

    def trains_at(self, sigma: float) -> bool:
        """Whether the velocity at `sigma` depends on a trained parameter.

        False where `train_experts` or the adapters leave the routed expert frozen: such a step has no
        gradient, its loss has no graph, and replaying it is wasted. The same on every rank.
        """
        return any(parameter.requires_grad for parameter in self.experts[self.expert_for(sigma)].parameters())

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters that are trained, in a fixed order."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def trainable_report(self) -> list[ParameterCount]:
        """Counts per expert and kind, for the start-up print."""
        counts: dict[tuple[str, Literal["base", "adapter"], bool], tuple[int, int]] = {}
        for name, parameter in self.named_parameters():
            kind: Literal["base", "adapter"] = "adapter" if "lora_" in name else "base"
            key = (name.split(".", 1)[0], kind, parameter.requires_grad)
            tensors, elements = counts.get(key, (0, 0))
            counts[key] = (tensors + 1, elements + parameter.numel())
        return [ParameterCount(*key, *count) for key, count in sorted(counts.items())]

    def _model_input(self, x_t: torch.Tensor, condition: Condition) -> torch.Tensor:
        """(N, channels, F, h, w): with the pinned first frame (5B) or the mask and image channels (A14B)."""
        if condition.first_frame_latent is not None:
            return torch.cat([condition.first_frame_latent.to(x_t.dtype), x_t[:, :, 1:]], dim=2)
        if condition.image_latent is not None:
            return torch.cat([x_t, condition.image_latent.to(x_t.dtype)], dim=1)
        return x_t

    def _timestep(self, sigma: float, x_t: torch.Tensor, condition: Condition) -> torch.Tensor:
        """(N,) float32, or (N, tokens) for TI2V-5B: 0 for the tokens of a pinned latent frame 0."""
        n, _, frames, height, width = x_t.shape
        timestep = model_timestep(sigma).to(x_t.device)
        if not self.directory.expand_timesteps:
            return timestep.expand(n)
        p_t, p_h, p_w = self.directory.patch_size
        tokens = timestep.repeat(frames // p_t, (height // p_h) * (width // p_w))
        if condition.first_frame_latent is not None:
            tokens[0] = 0.0
        return tokens.flatten().expand(n, -1)


def model_timestep(sigma: float) -> torch.Tensor:
    """1000 * sigma as a float32 scalar on the CPU, multiplied in float32 as Diffusers' schedulers do."""
    return torch.tensor(sigma, dtype=torch.float32) * TRAIN_TIMESTEPS


def build_policy(components: WanComponents, spec: ModelSpec, cfg_scale: float, seed: int) -> WanPolicy:
    """The policy of loaded components: attention set, adapters in place, requires_grad as the spec says.

    `seed` draws the adapters' first values. Raises UserError for an attention backend that is not available
    and for adapter targets that match nothing.
    """
    policy = WanPolicy(
        components.transformer,
        components.transformer_2,
        components.directory,
        cfg_scale=cfg_scale,
        compute_dtype=DTYPES[spec.param_dtype],
    )
    configure_attention(
        policy.experts.values(),
        spec.attention_backend,
        disable_cudnn_sdp=spec.disable_cudnn_sdp,
        device=components.device,
        dtype=DTYPES[spec.param_dtype],
    )
    trained = trained_experts(spec, components.directory.experts)
    policy.requires_grad_(False)
    if spec.lora is not None:
        apply_lora({name: policy.experts[name] for name in trained}, spec.lora, seed)
    else:
        for name in trained:
            policy.experts[name].requires_grad_(True)
    return policy
