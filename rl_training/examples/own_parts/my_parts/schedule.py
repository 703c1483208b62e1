"""A learning-rate schedule: inverse power of the update, after a warm-up."""

from __future__ import annotations

from collections.abc import Callable


def inverse_power(power: float = 0.5, warmup: int = 1) -> Callable[[int, int], float]:
    """Linear to 1 over `warmup` updates, then ((update + 1) / warmup)^-power; the horizon plays no part."""
    if power <= 0 or warmup < 1:
        raise ValueError(f"power {power} and warmup {warmup} must be above 0")

    def factor(update: int, horizon: int) -> float:
        position = (update + 1) / warmup
        return min(position, position**-power)

    return factor
