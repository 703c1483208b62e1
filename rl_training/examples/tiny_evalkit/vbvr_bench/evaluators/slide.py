"""Did the square slide the right way? One smooth number from what the frames show."""

import cv2
import numpy as np

from vbvr_bench.evaluators.base_evaluator import (
    BaseEvaluator,
    colours,
    follow,
    get_video_frames,
    presence,
)


def unit(value):
    """`value` held within [0, 1]."""
    return float(np.clip(value, 0.0, 1.0))


class SlideEvaluator(BaseEvaluator):
    """The square of the first frame has to slide along `direction` as far as in the ground truth.

    The score is a product of five smooth terms:
    progress  how far it is at the end, along the direction; standing still earns a third, and moving half
              the way backwards nothing;
    start     the clip begins where the ground truth begins;
    straight  it leaves the line of the ground truth as little as possible;
    steady    it takes no way round and does not jump back and forth;
    keep      its mass stays that of the ground truth.
    """

    direction = (1.0, 0.0)

    def evaluate(self, video_path, gt_info):
        frames = get_video_frames(video_path)
        truth = get_video_frames(gt_info["gt_video_path"])
        first = cv2.imread(str(gt_info["gt_first_frame"]))
        details = {"video_frame_count": len(frames), "gt_frame_count": len(truth)}
        if not frames or not truth or first is None:
            return {"score": 0.0, "dimensions": {"task_specific": 0.0}, "details": details}
        ground, square = colours(first)
        terms = self.compare(
            *follow(presence(np.stack(frames), ground, square)),
            *follow(presence(np.stack(truth), ground, square)),
        )
        score = unit(np.prod(list(terms.values())))
        return {"score": score, "dimensions": {"task_specific": score}, "details": details | terms}

    def compare(self, centres, masses, truth_centres, truth_masses):
        """The five terms, from the tracks of the clip and of the ground truth."""
        ahead = np.array(self.direction)
        aside = ahead[::-1]
        way = float((truth_centres[-1] - truth_centres[0]) @ ahead)
        assert way > 0, "the ground truth does not move in the direction of its task"
        track = (centres - truth_centres[0]) / way
        along, across = track @ ahead, track @ aside
        end = max(1, round(len(along) / 4))
        detour = np.abs(np.diff(along)).sum() - abs(along[-1] - along[0])
        expected = np.interp(
            np.linspace(0, 1, len(masses)), np.linspace(0, 1, len(truth_masses)), truth_masses
        )
        alike = np.minimum(masses, expected) / np.maximum(np.maximum(masses, expected), 1e-9)
        # The last quarter of a steady slide is, on average, a little short of its end.
        reach = 1.0 - (end - 1) / 2 / (len(along) - 1) if len(along) > 1 else 1.0
        return {
            "progress": unit((along[-end:].mean() / reach + 0.5) / 1.5),
            "start": float(np.exp(-4.0 * (along[0] ** 2 + across[0] ** 2))),
            "straight": float(np.exp(-np.mean(across**2))),
            "steady": float(np.exp(-2.0 * max(0.0, detour - 0.15))),
            "keep": float(alike.mean()),
        }


class SlideRightEvaluator(SlideEvaluator):
    """T-1: the square slides right."""

    direction = (1.0, 0.0)


class SlideDownEvaluator(SlideEvaluator):
    """T-2: the square slides down."""

    direction = (0.0, 1.0)
