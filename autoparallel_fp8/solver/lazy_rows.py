"""The limit at the times where it binds, as rows of a program, and more of them where a solution breaks it.

A program with the rows of some times only is a relaxation: its bound holds, and its solution is one of the whole
problem as soon as it keeps the limit at all times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..problem import Array, Problem, Row
from ..timed import Index
from .presolve import presolve
from .room import Room
from .search import has_dead_end
from .timeline import Timeline
from .tools import Outcome, Tools

FIRST_TIMES = 40
FIRST_PRICE = 1e-3  # of all prices: times that cost less are not among the first
MORE_TIMES = 8  # a round
APART = 0.01  # of all times: how far the broken times of one round lie apart
ROUNDS = 12


@dataclass(frozen=True)
class Closed:
    """What programs said of a part of the problem: choices within the limit (None: none found), and a lower bound.

    `is_infeasible`: the part has no solution at all.
    """

    choices: Index | None
    bound: float
    is_infeasible: bool = False


def first_times(prices: Array) -> Index:
    """The times that cost most."""
    order = np.argsort(-prices, kind="stable")[:FIRST_TIMES]
    return np.sort(order[prices[order] > FIRST_PRICE * prices.sum()])


def broken_times(over: Array) -> Index:
    """The times where the limit is broken most, some way apart."""
    over, found = over.copy(), list[int]()
    width = max(1, int(APART * len(over)))
    while len(found) < MORE_TIMES and over.max(initial=0.0) > 0:
        found.append(int(over.argmax()))
        over[max(0, found[-1] - width) : found[-1] + width + 1] = 0.0
    return np.array(found, dtype=np.int64)


def rows_at(times: Index, room: Room, variables: Index, limit: Array) -> tuple[Row, ...]:
    """The limit at these times for variables 0, 1, ... of a program, which are `variables` of the problem."""
    terms: list[dict[int, Array]] = [{} for _ in times]
    for position, v in enumerate(variables.tolist()):
        held = room.held_at(v, times)
        for k in np.flatnonzero(held.any(axis=1)).tolist():
            terms[k][position] = held[k]
    return tuple(Row(f"time {t}", float(limit[t]), terms[k]) for k, t in enumerate(times.tolist()))


def close(
    make: Callable[[Index], Problem],
    widen: Callable[[tuple[int, ...]], Index],
    times: Index,
    timeline: Timeline,
    tools: Tools,
    max_pairs: int,
) -> Closed | None:
    """Solve a part of the problem with as few rows as do; None where it is too large.

    Args:
        make: times -> the part with a row for each of them.
        widen: choices of the part -> choices of the whole problem.
        times: to begin with.
        timeline: what must be kept in the end.
        max_pairs: table entries of a program at most.
    """
    bound = -math.inf
    for _ in range(ROUNDS):
        small, undo = presolve(make(times))
        if has_dead_end(small):
            return Closed(None, math.inf, True)
        if small.num_pairs > max_pairs:
            return None if bound == -math.inf else Closed(None, bound)
        outcome = tools.run(small, relaxed=False) if small.num_variables else Outcome((), small.offset)
        if outcome.is_infeasible:
            return Closed(None, math.inf, True)
        bound = max(bound, outcome.bound)
        if outcome.choices is None:
            return Closed(None, bound)
        choices = widen(undo(outcome.choices))
        new = np.setdiff1d(broken_times(timeline.load(choices) - timeline.limit), times)
        if not len(new) or tools.is_late:
            is_kept = bool((timeline.load(choices) <= timeline.limit).all())
            return Closed(choices if is_kept else None, bound)
        times = np.sort(np.concatenate([times, new]))
    return Closed(None, bound)
