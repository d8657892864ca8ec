"""Explanations as text: of one parameter a table of alternatives, then what kernels refuse; of all a line each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..explain import Explanation, Overview
from ..plan_text import fold, numbers_of, pattern_of
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


def format_overview(overview: Overview) -> str:
    """What `print(plan.explain())` shows: of each parameter the cheapest alternative; equal layers in one line."""
    folded: dict[tuple[str, ...], list[str]] = {}
    for name, alternatives in overview.alternatives.items():
        chosen = next((a.placements for a in alternatives if a.chosen), "")
        possible = [a for a in alternatives if not a.chosen and a.regret_us[0] < math.inf]
        cheapest = min(possible, key=lambda a: (a.regret_us[1], a.regret_us[0]), default=None)
        next_best = (cheapest.placements, _regret(cheapest.regret_us)) if cheapest else ("-", "-")
        folded.setdefault((pattern_of(name), chosen, *next_best, str(len(possible))), []).append(name)
    rows: list[Sequence[str]] = [
        ("parameter", f"placement ({', '.join(overview.axes)})", "next best", "slower by", "alternatives")
    ]
    for (pattern, *cells), names in folded.items():
        rows.append((fold(pattern, [numbers_of(name) for name in names]), *cells))
    return format_table(rows)


def _signed(us: float) -> str:
    return "0" if abs(us) < 0.05 else ("-" if us < 0 else "+") + format_us(abs(us))


def _regret(interval: tuple[float, float]) -> str:
    low, high = interval
    if math.isinf(low):
        return "-"
    if high - low <= 1e-6 * max(high, 1.0) or format_us(low) == format_us(high):
        return format_us(high)
    return f"{format_us(low)} to {format_us(high)}" if math.isfinite(high) else f"at least {format_us(low)}"
