"""The difference of two plans as text: a table for each part that differs; equal layers in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..plan_diff import Change, PlanDiff, Traffic
from ..plan_text import fold, numbers_of, pattern_of
from .text import format_bytes, format_table, format_us, short_dtype

Show = Callable[[float], str]
WIDEST = 30  # characters of an op's layouts; JSON has all
MOST = 20  # lines of ops; there may be thousands


def format_diff(diff: PlanDiff) -> str:
    """What `print(plan.diff(other))` shows; A is the plan, B the other."""
    if not diff:
        return "the plans are the same"
    parts = [
        _changes("setting", diff.settings),
        _numbers("step time", diff.step_time_us, format_us),
        _numbers("memory", diff.memory_bytes, format_bytes),
        _changes("parameter", diff.parameters, f" of {diff.num_parameters} parameters lie otherwise"),
        _traffic(diff.collectives),
        _changes("op", tuple(map(_results, diff.ops)), f" of {diff.num_ops} ops have other layouts", MOST),
        "\n".join(f"note: {note}" for note in diff.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def _changes(what: str, changes: Sequence[Change], count: str = "", most: int | None = None) -> str:
    if not changes:
        return ""
    folded: dict[tuple[str, str, str], list[str]] = {}
    for change in changes:
        folded.setdefault((pattern_of(change.name), change.first, change.second), []).append(change.name)
    lines = [
        (fold(pattern, map(numbers_of, names)), first or "-", second or "-")
        for (pattern, first, second), names in folded.items()
    ]
    text = format_table([(what, "A", "B"), *lines[:most]])
    if most is not None and len(lines) > most:
        text += f"\n... and {len(lines) - most} lines more"
    return f"{len(changes)}{count}\n{text}" if count else text


def _results(change: Change) -> Change:
    """Of an op whose results lie otherwise, these alone; long ones cut."""
    first, second = (text.rpartition(" -> ")[2] for text in (change.first, change.second))
    if first == second:
        first, second = change.first, change.second
    return replace(change, first=_cut(first), second=_cut(second))


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def _numbers(what: str, values: Mapping[str, tuple[float, float]], show: Show) -> str:
    if not values:
        return ""
    rows = [(what, "A", "B", "B - A")]
    for part, (first, second) in values.items():
        rows.append((part.replace("_comm", " communication"), show(first), show(second), _signed(second - first, show)))
    return format_table(rows)


def _traffic(traffic: Iterable[Traffic]) -> str:
    rows = [("collective", "axis", "dtype", "count A", "B", "bytes A", "B", "time A", "B", "B - A")]
    for t in traffic:
        a, b = t.first, t.second
        rows.append(
            (t.kind.replace("_", "-"), t.axis, short_dtype(t.dtype), str(a.count), str(b.count), format_bytes(a.bytes),
             format_bytes(b.bytes), format_us(a.us), format_us(b.us), _signed(b.us - a.us, format_us))
        )  # fmt: skip
    return format_table(rows) if len(rows) > 1 else ""


def _signed(change: float, show: Show) -> str:
    text = show(abs(change))
    return "0" if text == show(0.0) else ("-" if change < 0 else "+") + text
