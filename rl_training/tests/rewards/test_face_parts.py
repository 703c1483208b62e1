"""Parts of the face reward: SCRFD's outputs decoded, the largest face, alignment, and network files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from skimage.transform import SimilarityTransform
from torch import nn

from rl_training.tests.rewards.face_networks import (
    LARGE,
    SIZE,
    SMALL,
    put_face,
    tiny_iresnet,
    tiny_scrfd,
    video,
)
from wan_trainer.rewards.face.alignment import TEMPLATE, crop_faces, similarity_transforms
from wan_trainer.rewards.face.detection import (
    ScrfdDetector,
    anchor_centres,
    decode,
    largest_faces,
    letterbox,
)
from wan_trainer.rewards.face.embedding import FaceEmbedder
from wan_trainer.rewards.face.iresnet import IResNet, IResNetShape
from wan_trainer.rewards.face.scrfd import Scrfd, ScrfdShape
from wan_trainer.rewards.face.weights import load_network
from wan_trainer.types import UserError

CPU = torch.device("cpu")


def build_iresnet(state: dict[str, torch.Tensor]) -> nn.Module:
    return IResNet(IResNetShape.of(state))


def build_scrfd(state: dict[str, torch.Tensor]) -> nn.Module:
    return Scrfd(ScrfdShape.of(state))


def test_outputs_are_decoded_by_stride_position_and_anchor() -> None:
    # 64 x 64: 8 * 8 * 2 = 128 rows of stride 8, then 32 of stride 16, then 8 of stride 32.
    rows = (128, 32, 8)
    outputs = [torch.zeros(1, count, values) for values in (1, 4, 10) for count in rows]
    # Stride 16, third column, second row, second anchor: row (1 * 4 + 2) * 2 + 1; its centre is (32, 16).
    outputs[1][0, 13, 0] = 0.75
    outputs[4][0, 13] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    outputs[7][0, 13] = torch.arange(10) / 4
    scores, boxes, keypoints = decode(outputs, anchor_centres(64, CPU))
    assert scores.shape == (1, 168) and boxes.shape == (1, 168, 4) and keypoints.shape == (1, 168, 5, 2)
    assert scores[0, 128 + 13] == 0.75 and scores.sum() == 0.75
    assert boxes[0, 128 + 13].tolist() == [32 - 16, 16 - 32, 32 + 48, 16 + 64]
    assert keypoints[0, 128 + 13].tolist() == [[32 + 8 * i, 20 + 8 * i] for i in range(5)]
    # Rows without distances are their centres: stride 8 second row, first column; stride 32 last.
    assert boxes[0, 16].tolist() == [0, 8, 0, 8] and boxes[0, 167].tolist() == [32, 32, 32, 32]


def test_the_largest_face_that_is_not_suppressed_is_taken() -> None:
    boxes = torch.tensor(
        [
            # a good small face; a worse, larger box around it; a middling face elsewhere; a huge weak one
            [[10, 10, 30, 30], [8, 8, 32, 32], [60, 60, 85, 85], [0, 0, 90, 90]],
            # the largest has its keypoints in one place; two equally large ones; no score at the last
            [[0, 0, 80, 80], [0, 0, 10, 10], [50, 50, 60, 60], [20, 20, 90, 90]],
            [[0, 0, 50, 50]] * 4,
        ],
        dtype=torch.float32,
    )
    scores = torch.tensor([[0.9, 0.8, 0.6, 0.4], [0.9, 0.6, 0.7, 0.1], [0.4, torch.nan, 0.3, 0.0]])
    keypoints = torch.rand(3, 4, 5, 2, generator=torch.Generator().manual_seed(0)) * 20
    keypoints[1, 0] = 3.0
    faces = largest_faces(scores, boxes, keypoints, 0.5)
    assert faces.frame.tolist() == [0, 1]
    assert faces.boxes.tolist() == [[60, 60, 85, 85], [50, 50, 60, 60]]
    assert torch.equal(faces.keypoints, torch.stack([keypoints[0, 2], keypoints[1, 2]]))
    # The worse box around the small face would have been the largest but for its suppression.
    assert largest_faces(scores[:1, :2], boxes[:1, :2], keypoints[:1, :2], 0.5).boxes.tolist() == [
        [10, 10, 30, 30]
    ]


@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (50, 33)])
def test_a_frame_is_fitted_into_the_square_like_opencv(shape: tuple[int, int]) -> None:
    frame = np.random.default_rng(0).random((*shape, 3), dtype=np.float32)
    images, scale = letterbox(torch.from_numpy(frame).permute(2, 0, 1)[None], 64)
    height, width = (int(side * 64 / max(shape)) for side in shape)
    expected = np.full((64, 64, 3), -127.5 / 128, dtype=np.float32)
    expected[:height, :width] = (cv2.resize(frame, (width, height)) * 255 - 127.5) / 128
    np.testing.assert_allclose(images[0].permute(1, 2, 0).numpy(), expected, atol=1e-5)
    assert scale.tolist() == pytest.approx([width / shape[1], height / shape[0]])


def test_alignment_is_the_published_similarity_transform() -> None:
    generator = torch.Generator().manual_seed(1)
    template = torch.tensor(TEMPLATE, dtype=torch.float64)
    angle = torch.tensor(0.6)
    turn = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]], dtype=torch.float64)
    noise = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    turned = template @ turn.T * 0.7 + torch.tensor([30.0, 5.0]) + noise
    mirrored = template * torch.tensor([-1.0, 1.0]) * 2 + 150 + noise
    keypoints = torch.stack([turned, mirrored])
    transforms = similarity_transforms(keypoints)
    for points, transform in zip(keypoints, transforms, strict=True):
        reference = SimilarityTransform.from_estimate(points.numpy(), template.numpy())
        np.testing.assert_allclose(transform.numpy(), reference.params[:2], atol=1e-9)

    # Smooth frames, since OpenCV rounds places to 1/32 pixel; the face reaches over the frame's edge.
    x, y = torch.meshgrid(torch.arange(96.0), torch.arange(80.0), indexing="xy")
    frame = torch.stack([(x / 15).sin(), (y / 11).cos(), (x + y) / 170]).to(torch.float64) * 0.5 + 0.5
    crops = crop_faces(frame.expand(2, -1, -1, -1), transforms)
    for crop, transform in zip(crops, transforms, strict=True):
        warped = cv2.warpAffine(frame.permute(1, 2, 0).numpy(), transform.numpy(), (112, 112))
        off = np.abs(crop.permute(1, 2, 0).numpy() - warped)
        assert off.max() < 0.04 and off.mean() < 1e-3


class PositionFirst(nn.Module):
    """Rows as the published ONNX files have them: position, image, anchor, flattened."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        outputs: Sequence[torch.Tensor] = self.network(x)
        return [
            y.reshape(len(x), -1, 2, y.shape[-1]).transpose(0, 1).reshape(-1, y.shape[-1]) for y in outputs
        ]


class OneImage(nn.Module):
    """A graph that was traced with a fixed batch of one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [y.flatten(0, 1) for y in self.network(x.reshape(1, 3, SIZE, SIZE))]


def test_faces_of_a_batch_do_not_depend_on_how_the_network_lays_out_its_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    crowd = torch.zeros(5, 3, SIZE, SIZE)
    put_face(crowd[0], 40, 40, 0, SMALL)
    put_face(crowd[2], 24, 96, 1, SMALL)
    put_face(crowd[2], 80, 48, 2, LARGE)
    put_face(crowd[3], 48, 80, 0, LARGE)
    network = tiny_scrfd()
    detectors = [
        ScrfdDetector(part, SIZE, 0.5, CPU) for part in (network, PositionFirst(network), OneImage(network))
    ]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    for faces in (detector.detect(crowd) for detector in detectors):
        assert faces.frame.tolist() == [0, 2, 3]
        # A dot is found where its stride's grid has it: the boxes' middles.
        assert ((faces.boxes[:, :2] + faces.boxes[:, 2:]) / 2).tolist() == [[40, 40], [80, 48], [48, 80]]
        assert (faces.boxes[:, 2] - faces.boxes[:, 0]).tolist() == [SMALL, LARGE, LARGE]
        assert torch.allclose(
            faces.keypoints[1], (torch.tensor(TEMPLATE) - 56) / 112 * LARGE + torch.tensor([80.0, 48.0])
        )
    # Half-size frames of another shape: the same faces, in the frame's own pixels.
    half = nn.functional.interpolate(crowd, size=64, mode="nearest-exact")[:, :, :, :56]
    faces = detectors[0].detect(half)
    assert faces.frame.tolist() == [0, 2, 3]
    assert torch.allclose(faces.boxes[2], torch.tensor([8.0, 24.0, 40.0, 56.0]), atol=4)
    expected = (torch.tensor(TEMPLATE) - 56) / 112 * LARGE / 2 + torch.tensor([24.0, 40.0])
    assert torch.allclose(faces.keypoints[2], expected, atol=4)
    # More frames than one chunk has.
    many = crowd[[1, 0]].repeat(65, 1, 1, 1)
    assert detectors[1].detect(many).frame.tolist() == list(range(1, 130, 2))
    assert not detectors[0].detect(torch.zeros(2, 3, 50, 70)).frame.numel()


def test_full_size_networks_have_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        iresnet = IResNet(IResNetShape(64, (64, 128, 256, 512), (3, 13, 30, 3), 512))
        scrfd = Scrfd(ScrfdShape(56, (56, 88, 88, 224), (3, 4, 2, 3), 56, 80, 3))
    counts = [sum(p.numel() for p in network.parameters()) / 1e6 for network in (iresnet, scrfd)]
    assert counts == [pytest.approx(65.16, abs=0.01), pytest.approx(4.23, abs=0.01)]
    assert IResNetShape.of(iresnet.state_dict()).blocks == [3, 13, 30, 3]
    assert ScrfdShape.of(scrfd.state_dict()) == ScrfdShape(56, [56, 88, 88, 224], [3, 4, 2, 3], 56, 80, 3)
    keys = iresnet.state_dict().keys()
    assert {"layer3.29.bn3.running_var", "layer1.0.downsample.1.bias", "prelu.weight", "fc.bias"} <= keys
    keys = scrfd.state_dict().keys()
    assert {"bbox_head.stride_kps.(32, 32).weight", "neck.pafpn_convs.1.conv.bias"} <= keys


def test_a_state_dict_loads_from_either_kind_of_file(tmp_path: Path) -> None:
    network = tiny_iresnet()
    state = network.state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save({"meta": {"epoch": 20}, "state_dict": state}, tmp_path / "a.pth")
    counted = {key: value for key, value in state.items() if "num_batches_tracked" not in key}
    torch.save({key: value.half() for key, value in counted.items()}, tmp_path / "half.pt")
    crops = torch.rand(2, 3, 112, 112)
    for name, tolerance in (("a.safetensors", 0.0), ("a.pth", 0.0), ("half.pt", 0.02)):
        loaded = load_network(tmp_path / name, build_iresnet)
        assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
        with torch.no_grad():
            torch.testing.assert_close(loaded(crops), network(crops), rtol=tolerance, atol=tolerance)


def test_a_wrong_network_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(name: str, build: object = build_iresnet) -> str:
        with pytest.raises(UserError) as caught:
            load_network(tmp_path / name, build)  # pyright: ignore[reportArgumentType]
        (line,) = caught.value.problems
        assert "\n" not in line and line.startswith(f"Face: {tmp_path / name}")
        return line.removeprefix(f"Face: {tmp_path / name}")

    def save(**change: torch.Tensor | None) -> None:
        state = tiny_iresnet().state_dict() | {key: v for key, v in change.items() if v is not None}
        save_file(
            {key: v for key, v in state.items() if change.get(key, v) is not None}, tmp_path / "x.safetensors"
        )

    remedy = "; use a state dict of this network, unchanged"
    weight = torch.zeros(4)
    save(**{"layer1.0.bn2.weight": None})
    assert problem("x.safetensors") == " has no key layer1.0.bn2.weight" + remedy
    save(**{"layer1.0.bn2.weight": None, "layer1.0.bn2.weigth": weight})
    assert "no key layer1.0.bn2.weight, it has layer1.0.bn2.weigth instead" in problem("x.safetensors")
    save(**{"conv1.weight": None})
    assert problem("x.safetensors") == " has no key conv1.weight" + remedy
    save(**{"layer1.0.bn2.extra": weight, "more": weight + 1})
    assert " has the unknown key layer1.0.bn2.extra and 1 others; remove" in problem("x.safetensors")
    save(**{"layer1.0.bn2.weight": torch.zeros(5)})
    assert problem("x.safetensors") == " has layer1.0.bn2.weight of shape (5,), not (4,)" + remedy
    save()
    assert "has no key backbone.stem.6.weight" in problem("x.safetensors", build_scrfd)
    assert "is missing; put the file there" in problem("none.onnx")
    assert "a network is one of .onnx, .safetensors, .pt, .pth" in problem("none.bin")
    (tmp_path / "pointer.pth").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "is a Git LFS pointer, not a network" in problem("pointer.pth")
    (tmp_path / "noise.safetensors").write_bytes(bytes(range(200)))
    (tmp_path / "noise.pt").write_bytes(bytes(range(200)))
    assert "cannot be read: " in problem("noise.safetensors") and "cannot be read: " in problem("noise.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    assert "is no state dict" in problem("list.pt")
    (tmp_path / "y.onnx").write_bytes(b"\x08\x07")
    monkeypatch.setitem(sys.modules, "onnx2torch", None)
    assert problem("y.onnx").endswith("not installed; pip install -r requirements/reward-face.txt")


def test_networks_that_are_something_else_are_refused() -> None:
    class Reversed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, :8].flip(0)

    with pytest.raises(UserError, match="mixes the rows of a batch"):
        FaceEmbedder(Reversed(), CPU)
    with pytest.raises(UserError, match=r"must map \(N, 3, 112, 112\) to \(N, D\)"):
        FaceEmbedder(nn.Conv2d(3, 4, 3), CPU)
    with pytest.raises(UserError, match="does not take a batch of 112 x 112 crops"):
        FaceEmbedder(nn.Linear(64, 4), CPU)
    with pytest.raises(UserError, match=r"gives \(1, 4, 126, 126\), and scores, .* name an SCRFD"):
        ScrfdDetector(nn.Sequential(nn.Conv2d(3, 4, 3)), SIZE, 0.5, CPU)


def test_a_video_of_the_tiny_world_is_what_its_name_says() -> None:
    clip = video(3, frames=3)
    assert clip.shape == (3, 3, SIZE, SIZE) and video(None).abs().max() == 0
    assert not torch.equal(clip[2], video(4, frames=3)[2]) and torch.equal(clip[0], video(4, frames=3)[0])
