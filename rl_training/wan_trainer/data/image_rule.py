"""Whether a run is conditioned on the first frames of its samples. Free of torch: preflight asks, too."""

from __future__ import annotations

from collections.abc import Sequence

from wan_trainer.config.specs import Family
from wan_trainer.data.dataset import Dataset
from wan_trainer.topology import FAMILIES
from wan_trainer.types import Sample, UserError


def takes_first_frames(
    samples: Dataset | Sequence[Sample], family: Family, key: str = "dataset_json"
) -> bool:
    """Whether a run of `family` is conditioned on the first frames of `samples`; opens no file.

    key: the configuration key that names the samples, for messages. Raises UserError when the family needs
    first frames and a sample has none, and when it takes them and only some samples have one: a batch is
    conditioned on first frames or it is not.
    """
    shape = FAMILIES[family]
    if not shape.takes_image:
        return False
    if isinstance(samples, Dataset):
        without = samples.without_image()
    else:
        without = [sample.sample_id for sample in samples if sample.first_frame is None]
    if not without:
        return True
    if len(without) == len(samples) and not shape.needs_image:
        return False
    rule = "needs one of each" if shape.needs_image else "takes one of each or none at all"
    raise UserError(
        f"{key}: {len(without)} of {len(samples)} samples have no first frame (first: {without[0]}), and "
        f"{family} {rule}; add an `image` to their lines, or use a text-to-video model"
    )
