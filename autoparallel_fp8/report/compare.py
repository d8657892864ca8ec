"""The chosen plan beside the hand-written ones as text: a table of times, then where each loses."""

from __future__ import annotations

from collections.abc import Iterator

from ..compare import Comparison, HandWritten, differences
from ..memory import format_need
from ..plan import Plan
from .text import format_bytes, format_table, format_us


def format_comparison(comparison: Comparison) -> str:
    """What `print(planner.compare())` shows."""
    rows = [("plan", "step", "compute", "exposed", "hidden", "memory", "slower by"), _row("chosen", comparison.chosen)]
    for one in comparison.others:
        if one.plan is not None:
            ratio = one.plan.objective_us / comparison.chosen.objective_us
            rows.append(_row(one.name, one.plan, f"{ratio - 1:.1%}"))
    found = [format_table(rows), _where(comparison), "\n".join(_all_remarks(comparison))]
    return "\n\n".join(part for part in found if part)


def _where(comparison: Comparison) -> str:
    """The largest differences of each plan, a line each."""
    rows = [("plan", "where the difference lies", "more")]
    for one in comparison.others:
        found = differences(comparison.chosen, one.plan) if one.plan is not None else ()
        for k, d in enumerate(found):
            rows.append((one.name if k == 0 else "", d.what, ("+" if d.us > 0 else "-") + format_us(abs(d.us))))
    return format_table(rows) if len(rows) > 1 else ""


def _all_remarks(comparison: Comparison) -> Iterator[str]:
    for one in comparison.others:
        yield from _remarks(comparison.chosen, one)


def _row(name: str, plan: Plan, slower: str = "") -> tuple[str, ...]:
    t = plan.step_time_us
    times = (format_us(t[part]) for part in ("total", "compute", "exposed_comm", "hidden_comm"))
    return (name, *times, format_bytes(plan.memory_bytes["total"]), slower)


def _remarks(chosen: Plan, one: HandWritten) -> Iterator[str]:
    if one.plan is None:
        yield f"note: {one.name}: {one.why}"
        return
    if one.needs:
        yield f"note: {one.name}: does not fit: needs {format_need(one.needs)}, and the limit is {_limit(chosen)}"
    if one.whole:
        yield f"note: {one.name}: {len(one.whole)} parameters do not divide and stay whole"
    if one.plan.status != "optimal":
        yield f"note: {one.name}: within {one.plan.gap:.1%} of the best of its kind"


def _limit(plan: Plan) -> str:
    return format_bytes(plan.memory_bytes["limit"])
