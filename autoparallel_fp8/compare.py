"""The chosen plan beside the plans people write by hand, under the same costs and the same memory limit.

Each hand-written plan goes through the same solver, with what its style fixes held (`by_hand.py`): so the chosen plan
is never slower. One that does not fit in memory is priced without the limit, and what it would need is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .plan import Plan
from .plan_diff import diff

MOST = 3  # differences that are shown of a plan


@dataclass(frozen=True)
class HandWritten:
    """One plan of the comparison.

    Attributes:
        name: "DDP", "FSDP", ...
        plan: None where it cannot be made.
        why: what is in the way then, in a sentence.
        needs: bytes a device that it takes at least, where it does not fit; 0 where it does.
        whole: parameters that do not divide as the style has it, and stay whole.
    """

    name: str
    plan: Plan | None
    why: str = ""
    needs: int = 0
    whole: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """Where a plan loses time, or gains it: `us` more than the chosen one."""

    what: str
    us: float


@dataclass(frozen=True)
class Comparison:
    """The chosen plan and the others. `print(comparison)` shows it."""

    chosen: Plan
    others: tuple[HandWritten, ...]

    def __str__(self) -> str:
        from .report.compare import format_comparison

        return format_comparison(self)


def differences(chosen: Plan, other: Plan) -> tuple[Difference, ...]:
    """Collectives by kind, axes and dtype, and ops by name, of which the times differ most, largest first."""
    found = [*_of_collectives(chosen, other), *_of_ops(chosen, other)]
    found.sort(key=lambda d: (-abs(d.us), d.what))
    return tuple(d for d in found if abs(d.us) >= 1e-3 * chosen.objective_us)[:MOST]


def _of_collectives(chosen: Plan, other: Plan) -> Iterator[Difference]:
    for t in diff(chosen, other).collectives:
        yield Difference(f"{t.kind.replace('_', '-')} {t.dtype} over {t.axis}", t.second.us - t.first.us)


def _of_ops(chosen: Plan, other: Plan) -> Iterator[Difference]:
    times: list[Counter[str]] = []
    for plan in (chosen, other):
        times.append(Counter())
        for node in plan.nodes:
            times[-1][node.op.removeprefix("aten.").partition(".")[0]] += node.compute_us  # type: ignore[assignment]
    for op in dict.fromkeys((*times[0], *times[1])):
        yield Difference(f"op {op}", float(times[1][op] - times[0][op]))
