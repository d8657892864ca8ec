"""Sweeps of a dual until its bound stands still."""

from __future__ import annotations

from .dual import Dual
from .tools import Tools

FIRST_GAIN, LAST_GAIN = 1e-5, 1e-8  # shares of the bound that five sweeps must gain to go on, at first and in the end
MAX_SWEEPS = 200


def ascend(dual: Dual, tools: Tools, least_gain: float = FIRST_GAIN) -> float:
    """Sweep until the bound stands still: five sweeps gain less than a share `least_gain` of it. The bound."""
    bound = dual.bound()
    for _ in range(MAX_SWEEPS // 5):
        if tools.is_late:
            break
        for _ in range(5):
            dual.sweep()
        before, bound = bound, dual.bound()
        if bound - before <= least_gain * max(1e-9, abs(bound - dual.problem.offset)):
            break
    return bound
