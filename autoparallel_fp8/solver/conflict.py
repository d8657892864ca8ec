"""Why a problem has no solution: a small set of rows and restrictions that cannot hold together.

The set is minimal: without any one of its members the rest can hold. Found by QuickXplain (Junker, AAAI 2004), which
needs about k log(n / k) checks for k of n. Where the problem is impossible even without rows and restrictions, the
variable that runs out of options is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..problem import Problem, Restriction, Row
from .network import Network
from .presolve import forbid_restricted, presolve
from .prune import drop_impossible

Wish = Row | Restriction
MAX_NAMES = 8  # variables named where no single one is to blame


def find_conflict(problem: Problem, is_possible: Callable[[Problem], bool]) -> tuple[str, ...]:
    """Names of a minimal set of rows and restrictions that cannot hold together, or of variables without options.

    Args:
        problem: has no solution.
        is_possible: whether a problem without costs has a solution; where it does not know, it says yes.
    """
    feasibility = without_costs(problem)

    def holds(wishes: list[Wish]) -> bool:
        return is_possible(
            replace(
                feasibility,
                rows=tuple(w for w in wishes if isinstance(w, Row)),
                restrictions=tuple(w for w in wishes if isinstance(w, Restriction)),
            )
        )

    if not holds([]):
        return _without_options(replace(problem, rows=(), restrictions=()))
    return tuple(w.name for w in _quick_explain([], [*problem.restrictions, *problem.rows], False, holds))


def _quick_explain(
    given: list[Wish], wishes: list[Wish], is_new: bool, holds: Callable[[list[Wish]], bool]
) -> list[Wish]:
    """A minimal part of `wishes` that cannot hold beside `given`; `is_new`: `given` grew since it was last checked."""
    if is_new and not holds(given):
        return []
    if len(wishes) <= 1:
        return wishes
    first, second = wishes[: len(wishes) // 2], wishes[len(wishes) // 2 :]
    from_second = _quick_explain([*given, *first], second, bool(first), holds)
    from_first = _quick_explain([*given, *from_second], first, bool(from_second), holds)
    return [*from_first, *from_second]


def without_costs(problem: Problem) -> Problem:
    """The same question of what is allowed, with every finite cost zero."""
    return replace(
        problem,
        costs=tuple(np.where(np.isfinite(cost), 0.0, np.inf) for cost in problem.costs),
        tables=tuple(np.where(np.isfinite(table), 0.0, np.inf) for table in problem.tables),
        offset=0.0,
    )


def without_options(problem: Problem) -> tuple[str, ...]:
    """Names of variables that the restrictions, and they alone, leave without options; not many, and not always all.

    Where a neighbour of a restricted variable has no option that goes with it, the neighbour is named.
    """
    forbidden = replace(forbid_restricted(problem), rows=())
    restricted = {r.variable for r in problem.restrictions}
    neighbours: list[str] = []
    for edge in forbidden.edges:
        ends = np.isfinite(forbidden.costs[edge.u])[:, None] & np.isfinite(forbidden.costs[edge.w])[None, :]
        if restricted & {edge.u, edge.w} and not (ends & np.isfinite(forbidden.tables[edge.table])).any():
            neighbours += [problem.names[v] for v in (edge.u, edge.w) if v not in restricted]
    return tuple(neighbours[:MAX_NAMES]) or _without_options(forbidden)


def is_impossible(problem: Problem) -> bool:
    """Whether restrictions alone leave a variable without an option on some edge; rows are not looked at."""
    net = Network(forbid_restricted(problem))
    drop_impossible(net, net.watch())
    return net.dead is not None


def _without_options(problem: Problem) -> tuple[str, ...]:
    """The variable that arc consistency leaves without options, or the variables that presolve is left with."""
    net = Network(problem)
    drop_impossible(net, net.watch())
    if net.dead is not None:
        return (problem.names[net.dead],)
    small, _ = presolve(problem)
    empty = tuple(name for name, cost in zip(small.names, small.costs, strict=True) if not len(cost))
    return (empty or small.names)[:MAX_NAMES]
