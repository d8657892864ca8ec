"""An explanation as text: a table of alternatives, then what kernels refuse."""

from __future__ import annotations

import math

from ..explain import Explanation
from .text import format_table, format_us


def format_explanation(explanation: Explanation) -> str:
    """What `print(plan.explain(name))` shows."""
    rows = [("placement", "local", "slower by", "more compute", "more communication", "")]
    for a in explanation.alternatives:
        words = "chosen" if a.chosen else a.note
        more = ("", "") if words else (_signed(a.compute_us), _signed(a.communication_us))
        rows.append((a.placements, str(list(a.local_shape)), _regret(a.regret_us), *more, words))
    lines = [f"{explanation.name} {list(explanation.shape)}", format_table(rows)]
    if explanation.refused:
        lines.append("refused by kernels:")
        lines += [f"  {sentence}\n    {option}" for option, sentence in explanation.refused]
    return "\n".join(lines)


def _signed(us: float) -> str:
    return "0" if abs(us) < 0.05 else ("-" if us < 0 else "+") + format_us(abs(us))


def _regret(interval: tuple[float, float]) -> str:
    low, high = interval
    if math.isinf(low):
        return "-"
    if high - low <= 1e-6 * max(high, 1.0):
        return format_us(high)
    return f"{format_us(low)} to {format_us(high)}" if math.isfinite(high) else f"at least {format_us(low)}"
