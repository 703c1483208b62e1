"""Text encoder and VAE rest in host memory and are on the device while they are used, whatever happens.

The meta device stands for the accelerator: what is on it can compute and can be told from host memory, and
nothing can be copied back from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from rl_training.tests.models.families import FRAMES, HEIGHT, WIDTH, Loaded, images, prompts
from wan_trainer.models.wan.conditioning import condition_prompts, first_frame_latents, image_latents
from wan_trainer.models.wan.load import WanComponents
from wan_trainer.models.wan.text import encode_prompts
from wan_trainer.models.wan.vae import decode
from wan_trainer.types import Condition


def places(module: nn.Module) -> set[str]:
    """Device types of the module's tensors."""
    return {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}


@contextmanager
def watched(module: nn.Module) -> Iterator[list[set[str]]]:
    """Where the module's tensors are each time one of its submodules computes."""
    seen: list[set[str]] = []
    handles = [
        part.register_forward_pre_hook(lambda *_: seen.append(places(module)))
        for part in module.modules()
        if not any(part.children())
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def content(module: nn.Module) -> list[tuple[int, torch.Tensor]]:
    """Address and value of every tensor."""
    return [(t.data_ptr(), t.detach().clone()) for t in (*module.parameters(), *module.buffers())]


def offloaded(load: Callable[..., Loaded], family: str) -> WanComponents:
    """A pipeline whose device is meta and whose text encoder and VAE rest on the CPU."""
    components = load(family, offload_inference_models=True).components
    return replace(components, device=torch.device("meta"))


def test_the_text_encoder_is_on_the_device_only_while_it_encodes(load: Callable[..., Loaded]) -> None:
    components = offloaded(load, "t2v-1.3b")
    before = content(components.text_encoder)
    # The encoder looks at the values of its attention mask, which the meta device has not.
    with (
        watched(components.text_encoder) as seen,
        watched(components.vae) as elsewhere,
        pytest.raises(RuntimeError, match="meta tensors"),
    ):
        encode_prompts(components, [sample.prompt for sample in prompts(2)])
    assert seen and all(place == {"meta"} for place in seen)
    assert elsewhere == [] and places(components.vae) == {"cpu"}
    after = content(components.text_encoder)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(before, after, strict=True))


def test_a_tied_embedding_is_copied_once(load: Callable[..., Loaded]) -> None:
    components = offloaded(load, "t2v-1.3b")
    encoder = components.text_encoder
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
    with components.resident(encoder):
        assert places(encoder) == {"meta"}
        assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
        assert not any(parameter.requires_grad for parameter in encoder.parameters())
    assert places(encoder) == {"cpu"}


@pytest.mark.parametrize("family", ["ti2v-5b", "i2v-a14b"])
def test_the_vae_is_on_the_device_only_while_it_encodes(family: str, load: Callable[..., Loaded]) -> None:
    components = offloaded(load, family)
    before = content(components.vae)
    with watched(components.vae) as seen, watched(components.text_encoder) as elsewhere:
        if family == "ti2v-5b":
            latents = first_frame_latents(components, images(1))
        else:
            latents = image_latents(components, images(1), FRAMES)
    assert latents.device.type == "meta"
    assert seen and all(place == {"meta"} for place in seen)
    assert elsewhere == []
    after = content(components.vae)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(before, after, strict=True))


def test_a_failed_decode_leaves_the_vae_in_host_memory(load: Callable[..., Loaded]) -> None:
    components = offloaded(load, "t2v-1.3b")
    before = content(components.vae)
    # Pixels of the meta device have no values to send to the scorer.
    with watched(components.vae) as seen, pytest.raises(NotImplementedError):
        decode(components, torch.zeros(1, 4, 3, 8, 8), batch_size=1)
    assert seen and all(place == {"meta"} for place in seen)
    after = content(components.vae)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(before, after, strict=True))


def test_a_device_without_room_leaves_the_module_whole(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    components = offloaded(load, "t2v-1.3b")
    before = content(components.vae)
    moves = 0
    move = torch.Tensor.to

    def full_after_three(tensor: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        nonlocal moves
        moves += 1
        if moves > 3:
            raise torch.OutOfMemoryError("the device is full")
        return move(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "to", full_after_three)
    with pytest.raises(torch.OutOfMemoryError), components.resident(components.vae):
        pass
    monkeypatch.undo()
    after = content(components.vae)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(before, after, strict=True))


def test_offloading_changes_no_result(load: Callable[..., Loaded]) -> None:
    def everything(components: WanComponents) -> tuple[Condition, object]:
        condition = condition_prompts(
            components, prompts(2), images(2), num_frames=FRAMES, guided=True, negative_prompt="blurred"
        )
        shape = (2, 4, 3, HEIGHT // 16, WIDTH // 16)
        x0 = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        return condition, decode(components, x0, batch_size=1).tolist()

    kept = everything(load("ti2v-5b").components)
    moved = everything(load("ti2v-5b", offload_inference_models=True).components)
    assert torch.equal(kept[0].text, moved[0].text)
    assert kept[0].negative_text is not None and moved[0].negative_text is not None
    assert torch.equal(kept[0].negative_text, moved[0].negative_text)
    assert kept[0].first_frame_latent is not None and moved[0].first_frame_latent is not None
    assert torch.equal(kept[0].first_frame_latent, moved[0].first_frame_latent)
    assert kept[1] == moved[1]
