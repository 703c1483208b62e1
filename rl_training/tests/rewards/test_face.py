"""The face reward from network files to a gradient in the pixels."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates
from skimage.transform import SimilarityTransform

from rl_training.tests.rewards.face_networks import (
    LARGE,
    NAMES,
    SIZE,
    SMALL,
    put_face,
    tiny_iresnet,
    video,
    write_clip,
    write_networks,
)
from wan_trainer.media.video import read_frames
from wan_trainer.rewards.face import Face
from wan_trainer.rewards.face.alignment import TEMPLATE
from wan_trainer.rewards.face.embedding import FaceEmbedder
from wan_trainer.types import DifferentiableReward, RewardContext, Sample, UserError

CPU = torch.device("cpu")
CONTEXT = RewardContext(device=CPU, fps=16)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_networks(tmp_path_factory.mktemp("antelopev2"))


@pytest.fixture(scope="module")
def face(networks: Path) -> Face:
    return Face(CONTEXT, model_path=networks, **NAMES, detection_size=SIZE)


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Samples whose reference video shows person 0, 1, 2."""
    root = tmp_path_factory.mktemp("references")
    clips = [write_clip(root / f"{person}.mp4", video(person)) for person in range(3)]
    return [sample(f"people/{person}", clip) for person, clip in enumerate(clips)]


def sample(sample_id: str, reference: Path | None) -> Sample:
    return Sample(sample_id=sample_id, task="people", prompt="somebody", reference_video=reference)


def embedding(frame: np.ndarray, x: float, y: float, size: int) -> np.ndarray:
    """The unit embedding of a face with its middle at x, y: float64, with other libraries' alignment.

    frame: (H, W, 3) in [0, 1].
    """
    template = np.array(TEMPLATE)
    transform = SimilarityTransform.from_estimate((template - 56) / 112 * size + [x, y], template)
    columns, rows = np.meshgrid(np.arange(112), np.arange(112))
    places = transform.inverse(np.stack([columns.ravel(), rows.ravel()], 1))
    values = [map_coordinates(frame[..., c], places.T[::-1], order=1, mode="grid-constant") for c in range(3)]
    crop = np.stack(values).reshape(1, 3, 112, 112) * 2 - 1
    with torch.no_grad():
        found = tiny_iresnet().double()(torch.from_numpy(crop))[0].numpy()
    return found / np.linalg.norm(found)


def test_the_reward_is_the_mean_cosine_over_frames_with_a_face(face: Face, people: list[Sample]) -> None:
    clip = torch.rand(3, 4, SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 0.1
    frames = [frame.clone() for frame in clip.unbind(1)]
    put_face(frames[0], 40, 64, 1, SMALL)
    put_face(frames[1], 96, 24, 2, SMALL)  # the large one counts, though it is not the only one
    put_face(frames[1], 48, 80, 1, LARGE)
    put_face(frames[3], 112, 112, 0, SMALL)  # reaches over the edge
    clip = torch.stack(frames, 1)
    scores = face.score(clip[None], people[:1])

    assert people[0].reference_video is not None
    reference_frames = read_frames(people[0].reference_video) / 255
    places = ((40, 64), (48, 64), (56, 64), (64, 64))
    seen = [embedding(f, *place, SMALL) for f, place in zip(reference_frames, places, strict=True)]
    reference = np.mean(seen, axis=0) / np.linalg.norm(np.mean(seen, axis=0))
    shown = ((0, 40, 64, SMALL), (1, 48, 80, LARGE), (3, 112, 112, SMALL))
    own = [embedding(frames[f].permute(1, 2, 0).double().numpy(), x, y, s) for f, x, y, s in shown]
    expected = np.mean([vector @ reference for vector in own])
    assert scores.reward.dtype == torch.float32 and scores.reward.shape == (1,)
    assert scores.reward.item() == pytest.approx(expected, abs=2e-4)
    assert scores.components["face_frames"].tolist() == [0.75]
    assert torch.equal(scores.components["similarity"], scores.reward.detach())


def test_a_person_is_most_like_themselves(face: Face, people: list[Sample]) -> None:
    videos = torch.stack([video(person) for person in range(3)])
    table = torch.stack([face.score(videos, [person] * 3).reward for person in people])
    assert table.argmax(1).tolist() == [0, 1, 2] and table.diagonal().min() > 0.95
    assert table.max() <= 1


def test_batches_of_any_order_and_size_agree(face: Face, people: list[Sample]) -> None:
    def score(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        videos = torch.stack([clips[row] for row in rows]).requires_grad_()
        scores = face.score(videos, [samples[row] for row in rows])
        scores.reward[~scores.reward.isnan()].sum().backward()
        assert videos.grad is not None
        return scores.reward.detach(), videos.grad

    clips = [video(0, 7), video(2, 7), video(None, 7), video(1, 7, LARGE, 48)]  # 21 faces, two chunks
    samples = [people[1], people[0], people[0], people[2]]
    rewards, gradients = score([0, 1, 2, 3])
    assert rewards.isnan().tolist() == [False, False, True, False]
    order = [3, 1, 2, 0]
    permuted, permuted_gradients = score(order)
    torch.testing.assert_close(permuted, rewards[order], rtol=0, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(permuted_gradients, gradients[order], rtol=1e-4, atol=1e-6)
    for row in range(4):
        single, gradient = score([row])
        torch.testing.assert_close(single, rewards[row : row + 1], rtol=0, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(gradient, gradients[row : row + 1], rtol=1e-4, atol=1e-6)
    assert gradients[2].abs().max() == 0 and gradients[[0, 1, 3]].abs().amax((1, 2, 3, 4)).min() > 0


def test_the_gradient_in_the_pixels_is_that_of_finite_differences(face: Face, people: list[Sample]) -> None:
    generator = torch.Generator().manual_seed(3)
    clip = torch.stack([video(1), video(0)]) * 0.8 + 0.1 * torch.rand(
        2, 3, 4, SIZE, SIZE, generator=generator
    )
    scorer = face._scorer
    faces = scorer._detector.detect(clip.transpose(1, 2).flatten(0, 1))
    assert faces.frame.tolist() == list(range(8))
    embedder = FaceEmbedder(tiny_iresnet().double().requires_grad_(False), CPU)
    target = torch.stack([scorer._references.embedding(person) for person in people[:2]]).double()

    def cosines(pixels: torch.Tensor) -> torch.Tensor:
        found = embedder.embed(pixels, faces.frame, faces.keypoints.double())
        return (found * target.repeat_interleave(4, 0)).sum(1).reshape(2, 4).mean(1)

    pixels = clip.double().requires_grad_()
    weights = torch.tensor([1.0, -0.3], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(cosines(pixels) @ weights, pixels)
    with torch.no_grad():
        for _ in range(4):
            along = torch.randn(pixels.shape, generator=generator, dtype=torch.float64)
            step = 1e-8 * along
            difference = (cosines(pixels + step) - cosines(pixels - step)) @ weights / 2e-8
            assert (gradient * along).sum().item() == pytest.approx(difference.item(), rel=1e-5)
    # The reward itself, in float32, has the same value and gradient.
    videos = clip.requires_grad_()
    reward = face.score(videos, people[:2]).reward
    torch.testing.assert_close(reward, cosines(pixels).float(), rtol=0, atol=1e-5)
    (single,) = torch.autograd.grad(reward @ weights.float(), videos)
    assert (single - gradient).norm() < 1e-4 * gradient.norm()


def test_a_step_along_the_gradient_makes_the_face_more_alike(face: Face, people: list[Sample]) -> None:
    clip = video(1)[None].requires_grad_()
    before = face.score(clip, people[:1]).reward
    (gradient,) = torch.autograd.grad(before.sum(), clip)
    moved = (clip + gradient * 0.02 / gradient.abs().max()).clamp(0, 1).detach()
    assert face.score(moved, people[:1]).reward.item() > before.item() + 1e-3


def test_no_face_is_honoured(networks: Path, people: list[Sample]) -> None:
    videos = torch.stack([video(None), video(0), video(None)]).requires_grad_()
    samples = [people[0], people[0], people[1]]
    made = {
        policy: Face(CONTEXT, model_path=networks, **NAMES, detection_size=SIZE, no_face=policy)
        for policy in ("missing", "error", -0.25)
    }
    for policy, faceless in (("missing", torch.nan), (-0.25, -0.25)):
        reward: DifferentiableReward = made[policy]
        scores = reward.score(videos, samples)
        expected = torch.tensor([faceless, 0.0, faceless])
        torch.testing.assert_close(scores.reward[[0, 2]], expected[[0, 2]], equal_nan=True)
        assert scores.reward[1] > 0.9
        assert scores.components["similarity"].isnan().tolist() == [True, False, True]
        assert scores.components["face_frames"].tolist() == [0, 1, 0]
        used = torch.where(scores.reward.isnan(), 0.0, scores.reward)
        (gradient,) = torch.autograd.grad(used.sum(), videos)
        assert gradient.isfinite().all() and gradient[1].abs().max() > 0
        assert gradient[[0, 2]].abs().max() == 0
    # A batch without any face still has a graph.
    assert made[-0.25].score(videos[:1], people[:1]).reward.requires_grad
    with pytest.raises(UserError) as caught:
        made["error"].score(videos, samples)
    assert caught.value.problems == (
        "Face: no_face: error, and the generated video of people/0, people/1 shows no face; set no_face to "
        "missing or a number to go on",
    )
    assert made["error"].score(videos[1:2], people[:1]).reward > 0.9


def test_a_reference_is_read_once_and_again_when_it_changed(
    networks: Path, people: list[Sample], tmp_path: Path
) -> None:
    face = Face(CONTEXT, model_path=networks, **NAMES, detection_size=SIZE)
    path = write_clip(tmp_path / "reference.mp4", video(0))
    videos, samples = video(0)[None], [sample("own/0", path)]
    first = face.score(videos, samples).reward
    stat = path.stat()
    path.write_bytes(bytes(stat.st_size))  # no video any more, but the file looks unchanged
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert torch.equal(face.score(videos, samples).reward, first)
    write_clip(path, video(1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert face.score(videos, samples).reward < first - 0.05
    # Long videos: the first and the last frame are among those that are read.
    write_clip(path, torch.cat([video(2, 1), video(None, 40), video(2, 1)], 1))
    assert face.score(video(2, 1)[None], samples).reward > 0.95


def test_a_reference_that_cannot_be_used_is_one_line(face: Face, tmp_path: Path) -> None:
    def problem(reference: Path | None) -> str:
        with pytest.raises(UserError) as caught:
            face.score(video(0)[None], [sample("own/7", reference)])
        (line,) = caught.value.problems
        return line

    nobody = write_clip(tmp_path / "nobody.mp4", video(None))
    assert problem(nobody).startswith(
        f"sample own/7: no face is found in its reference_video {nobody}; use a"
    )
    assert problem(None).startswith("sample own/7: has no reference_video, which the face reward needs; name")
    gone = tmp_path / "gone.mp4"
    assert problem(gone).startswith(f"sample own/7: reference_video {gone} cannot be read: No such file")
    gone.write_text("text")
    assert str(gone) in problem(gone)


def test_settings_and_files_are_checked_without_loading_anything(networks: Path, tmp_path: Path) -> None:
    Face.check_files(model_path=str(networks), **NAMES)

    def problems(**config: object) -> list[str]:
        with pytest.raises(UserError) as caught:
            Face.check_files(**config)
        return [line.removeprefix("Face: ") for line in caught.value.problems]

    def setting(**config: object) -> str:
        (line,) = problems(model_path=networks, **NAMES, **config)
        return line

    assert (
        setting(no_face="mising")
        == "no_face: mising, must be missing, error or a number; did you mean missing?"
    )
    assert setting(no_face="skip") == "no_face: skip, must be missing, error or a number; choose one"
    assert setting(no_face=float("nan")).startswith("no_face: nan, must be")
    assert setting(no_face=True).startswith("no_face: True, must be")
    assert setting(no_face=None).startswith("no_face: None, must be")
    assert setting(detection_size=100) == "detection_size: 100, must be a multiple of 32 pixels; 640 is usual"
    assert setting(detection_threshold=1.5).startswith("detection_threshold: 1.5, must be between 0 and 1")
    none = tmp_path / "none"
    remedy = "must be the directory of the face networks; unpack antelopev2 there"
    assert problems(model_path=none) == [f"model_path: {none}, {remedy}"]
    missing = "is missing; put the file there, or name the directory and the files that you have"
    published = ("scrfd_10g_bnkps.onnx", "glintr100.onnx")
    assert problems(model_path=tmp_path, no_face="x")[1:] == [
        f"model_path: {tmp_path / name} {missing}" for name in published
    ]
    with pytest.raises(UserError, match="no_face: x, must be"):
        Face(CONTEXT, model_path=networks, **NAMES, no_face="x")  # pyright: ignore[reportArgumentType]
