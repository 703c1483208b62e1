# ruff: noqa: T201
"""The face reward's networks: the ONNX run against the PyTorch modules that onnx2torch makes of them.

    pip install -r requirements/reward-face.txt
    python benchmarks/face_onnx.py --model-path DIR [--recognition NAME] [--detection NAME] [--size 640]
    python benchmarks/face_onnx.py                   # tiny networks, exported here as the published ones were

Eight noise images go through both sides, the ONNX side one by one as the published graphs demand, the PyTorch
side as one batch. Errors are relative to the largest value of the output, or to 1 where that is smaller. The
gradient of the embedding in the pixels is compared with finite differences in float64 along one direction. Of
the tiny networks, rewards and pixel gradients of `Face` with the exported files are also compared with those
of the PyTorch state dicts behind them. The last line is one JSON object; exit status 1 when a figure is above
its tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import onnxruntime
import torch
from safetensors.torch import save_file
from torch import nn

from rl_training.tests.rewards.face_networks import (
    LARGE,
    NAMES,
    SIZE,
    tiny_iresnet,
    tiny_scrfd,
    video,
    write_clip,
)
from wan_trainer.rewards.face import Face
from wan_trainer.rewards.face.detection import ScrfdDetector
from wan_trainer.rewards.face.iresnet import CROP, IResNet, IResNetShape
from wan_trainer.rewards.face.options import DETECTION, RECOGNITION
from wan_trainer.rewards.face.scrfd import Scrfd, ScrfdShape
from wan_trainer.rewards.face.weights import load_network
from wan_trainer.types import RewardContext, Sample

IMAGES = 8
TOLERANCE = 1e-4
GRADIENT_LIMITS = {"gradient_error": 1e-3, "reward_gradient_error": 1e-3}


class RowsFlattened(nn.Module):
    """An SCRFD with the outputs of the published files: position, image, anchor in one axis."""

    def __init__(self, network: Scrfd) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        head = self.network.bbox_head
        levels = self.network.neck(self.network.backbone(x))
        shared = [head.cls_stride_convs[name](level) for name, level in zip(head.names, levels, strict=True)]
        rows: list[torch.Tensor] = []
        for kind, size in (("cls", 1), ("reg", 4), ("kps", 10)):
            for name, level in zip(head.names, shared, strict=True):
                y = head.get_submodule(f"stride_{kind}")[name](level)
                y = y.permute(2, 3, 0, 1).reshape(-1, size)
                rows.append(y.sigmoid() if kind == "cls" else y)
        return tuple(rows)


def export_tiny(directory: Path) -> None:
    """Write tiny networks in the form of the published pair, and as state dicts."""
    torch.manual_seed(0)
    iresnet, scrfd = tiny_iresnet(), tiny_scrfd()
    for network, name in ((iresnet, NAMES["recognition"]), (scrfd, NAMES["detection"])):
        for value in network.state_dict().values():
            if value.is_floating_point():  # equal tensors would be shared, which onnx2torch cannot read
                value += 1e-4 * torch.rand_like(value)
        save_file(network.state_dict(), directory / name)
    sides = {"input.1": {2: "height", 3: "width"}}
    for name, network, size, axes in (
        (RECOGNITION, iresnet, CROP, {"input.1": {0: "batch"}}),
        (DETECTION, RowsFlattened(scrfd), 64, sides),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter that made the published files
            torch.onnx.export(
                network,
                (torch.zeros(1, 3, size, size),),
                str(directory / name),
                dynamo=False,
                opset_version=11,
                input_names=["input.1"],
                dynamic_axes=axes,
            )


def onnx_outputs(file: Path, images: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    """Outputs of each image, (N, ...) each, and the seconds that they took."""
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    started = time.perf_counter()
    singles = [session.run(None, {name: image[None].numpy()}) for image in images]
    seconds = time.perf_counter() - started
    return [torch.from_numpy(np.stack(parts)) for parts in zip(*singles, strict=True)], seconds


def timed(run: Callable[[], Sequence[torch.Tensor]]) -> tuple[list[torch.Tensor], float]:
    """What `run` gives without gradients, and the seconds that it took."""
    with torch.no_grad():
        started = time.perf_counter()
        outputs = list(run())
    return outputs, time.perf_counter() - started


def error(found: torch.Tensor, expected: torch.Tensor, least: float = 1.0) -> float:
    """Largest difference, relative to the largest value, or to `least` where that is smaller."""
    expected = expected.reshape(found.shape)
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), least)


def compare_recognition(file: Path, images: torch.Tensor) -> dict[str, float]:
    """Both sides' embeddings, and the gradient in the pixels."""
    network = load_network(file, lambda state: IResNet(IResNetShape.of(state)))
    (expected,), onnx_s = onnx_outputs(file, images)
    (found,), torch_s = timed(lambda: [network(images)])
    expected = expected.reshape(found.shape)
    cosine = float(nn.functional.cosine_similarity(found, expected).min())

    network = network.double()
    target = nn.functional.normalize(expected[:1].double())
    pixels = images[1:2].double().requires_grad_()

    def likeness(x: torch.Tensor) -> torch.Tensor:
        return (nn.functional.normalize(network(x)) * target).sum()

    (gradient,) = torch.autograd.grad(likeness(pixels), pixels)
    along = gradient.detach() / gradient.norm()
    with torch.no_grad():
        difference = (likeness(pixels + 1e-6 * along) - likeness(pixels - 1e-6 * along)) / 2e-6
    return {
        "recognition_error": error(found, expected),
        "recognition_cosine_gap": 1 - cosine,
        "gradient_error": float((difference / gradient.norm() - 1).abs()),
        "recognition_onnx_s": onnx_s,
        "recognition_torch_s": torch_s,
    }


def compare_detection(file: Path, images: torch.Tensor) -> dict[str, float]:
    """Both sides' nine outputs; PyTorch's of one batch, its rows brought into order as the reward does."""
    network = load_network(file, lambda state: Scrfd(ScrfdShape.of(state)))
    detector = ScrfdDetector(network, images.shape[-1], 0.5, torch.device("cpu"))
    expected, onnx_s = onnx_outputs(file, images)
    found, torch_s = timed(lambda: detector.outputs(images))
    errors = [error(a, b) for a, b in zip(found, expected, strict=True)]
    return {
        "detection_error": max(errors),
        "detection_batched": float(detector.batched),
        "detection_onnx_s": onnx_s,
        "detection_torch_s": torch_s,
    }


def compare_reward(directory: Path) -> dict[str, float]:
    """`Face` with the exported tiny networks and with their state dicts: largest differences."""
    reference = write_clip(directory / "reference.mp4", video(1))
    samples = [Sample("people/0", "people", "somebody", reference_video=reference)] * 2
    scores: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for names in ({}, NAMES):
        reward = Face(
            RewardContext(torch.device("cpu"), 16), model_path=directory, detection_size=SIZE, **names
        )
        videos = torch.stack([video(0), video(2, size=LARGE, start=48)]).requires_grad_()
        found = reward.score(videos, samples).reward
        scores.append(found.detach())
        gradients += torch.autograd.grad(found.sum(), videos)
    return {
        "reward": float(scores[0].mean()),
        "reward_error": float((scores[0] - scores[1]).abs().max()),
        "reward_gradient_error": error(gradients[0], gradients[1], least=0.0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--recognition", default=RECOGNITION)
    parser.add_argument("--detection", default=DETECTION)
    parser.add_argument("--size", type=int, default=640, help="side of the detector's images, in pixels")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.model_path or Path(scratch)
        if args.model_path is None:
            export_tiny(directory)
        draw = torch.Generator().manual_seed(1)
        crops = torch.rand(IMAGES, 3, CROP, CROP, generator=draw) * 2 - 1
        images = torch.rand(IMAGES, 3, args.size, args.size, generator=draw) * 2 - 1
        result = compare_recognition(directory / args.recognition, crops)
        result |= compare_detection(directory / args.detection, images)
        if args.model_path is None:
            result |= compare_reward(directory)
    for name, value in result.items():
        print(f"{name:24} {value:.3g}")
    print(json.dumps(result))
    limits = {name: TOLERANCE for name in result if name.endswith("_error")} | GRADIENT_LIMITS
    return int(not all(result[name] <= limit for name, limit in limits.items() if name in result))


if __name__ == "__main__":
    sys.exit(main())
