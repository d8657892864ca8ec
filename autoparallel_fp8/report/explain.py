"""An explanation as text: a table of alternatives, then what kernels refuse."""

from __future__ import annotations

import math

from ..explain import Explanation
from .text import format_table, format_us


def format_explanation(explanation: Explanation) -> str:
    """What `print(plan.explain(name))` shows."""
    rows = [("placement", "local", "slower by", "")]
    for a in explanation.alternatives:
        rows.append((a.placements, str(list(a.local_shape)), _regret(a.regret_us), "chosen" if a.chosen else a.note))
    lines = [f"{explanation.name} {list(explanation.shape)}", format_table(rows)]
    if explanation.refused:
        lines.append("refused by kernels:")
        lines += [f"  {sentence}\n    {option}" for option, sentence in explanation.refused]
    return "\n".join(lines)


def _regret(interval: tuple[float, float]) -> str:
    low, high = interval
    if math.isinf(low):
        return "-"
    if high - low <= 1e-6 * max(high, 1.0):
        return format_us(high)
    return f"{format_us(low)} to {format_us(high)}" if math.isfinite(high) else f"at least {format_us(low)}"
