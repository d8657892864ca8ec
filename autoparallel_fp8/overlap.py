"""How much communication really hides: the step is the larger of two sums, and never shorter than its communication.

    busy     = compute + exposed + share * hideable      hideable runs beside compute and still costs its share of it
    waiting  = exposed + hideable                        there is more of it than compute to run it beside
    step     = optimizer + max(busy, waiting)

Both sums are linear in the choices, so each is a `Problem`. For a weight w between 0 and 1 the least of
w * busy + (1 - w) * waiting is a lower bound of the step. The plan of w = 1 is optimal where its own busy sum is the
larger one, as it mostly is; else weights are tried where the lines of the plans seen so far cross (Kelley's cutting
planes in one dimension), the best plan seen is kept, and the best bound proves how good it is. What they leave open, an
integer program for the larger sum closes where it is small enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from .problem import OPTIMAL_GAP, Problem, Solution, evaluate
from .solver import mix, solve_larger

PROGRAM_SECONDS = 20.0  # for the program that closes what the weights leave open
GOOD_GAP = 1e-3  # where rows leave a gap at single weights, the weights end with this
MAX_WEIGHTS = 8  # after the first; the crossing is mostly met in three
BOUND_WEIGHTS = 4  # for a bound alone, all together


@dataclass(frozen=True)
class Overlap:
    """The two sums as problems with the same variables, edges, rows and restrictions."""

    busy: Problem
    waiting: Problem

    def step_us(self, choices: tuple[int, ...]) -> float:
        """Time of a step under these choices."""
        return max(evaluate(self.busy, choices), evaluate(self.waiting, choices))

    def at(self, weight: float) -> Problem:
        """weight * busy + (1 - weight) * waiting."""
        return self.busy if weight >= 1.0 else mix(self.busy, self.waiting, weight)


def solve_step(
    overlap: Overlap, solve: Callable[[Problem, float | None], Solution], time_limit: float | None = None
) -> tuple[Solution, float]:
    """The best choices for the step, and the weight that proves their bound.

    Args:
        overlap: the two sums.
        solve: (problem, seconds) -> solution.
        time_limit: seconds for all weights together.

    Returns:
        The solution, its objective the step's time; as `solve` gave it where that has no choices.
    """
    deadline = None if time_limit is None else time.monotonic() + time_limit
    first = solve(overlap.busy, time_limit)
    if not first.choices:
        return first, 1.0
    best, bound, proof = first.choices, first.lower_bound, 1.0
    lines = [_sums(overlap, first.choices)]
    is_open = first.status != "optimal"
    weight = 0.5  # the highest of one line is at an end, which tells little
    for _ in range(MAX_WEIGHTS):
        if lines[0][0] >= lines[0][1] or is_closed(overlap.step_us(best), bound):
            break
        if is_open and overlap.step_us(best) - bound <= GOOD_GAP * overlap.step_us(best):
            break
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        found = solve(overlap.at(weight), left)
        if found.lower_bound > bound:
            bound, proof = found.lower_bound, weight
        if not found.choices:
            break
        if overlap.step_us(found.choices) < overlap.step_us(best):
            best = found.choices
        is_open |= found.status != "optimal"
        line = _sums(overlap, found.choices)
        if line in lines:
            break
        lines.append(line)
        weight = _highest(lines)
    left = PROGRAM_SECONDS if deadline is None else min(PROGRAM_SECONDS, deadline - time.monotonic())
    if not is_closed(overlap.step_us(best), bound) and left > 0:
        exact = solve_larger(overlap.busy, overlap.waiting, proof, overlap.step_us(best), left)
        if exact is not None:
            bound = max(bound, exact.lower_bound)
            if exact.choices and exact.objective < overlap.step_us(best):
                best = exact.choices
    objective = overlap.step_us(best)
    bound = min(bound, objective)
    status = "optimal" if is_closed(objective, bound) else "feasible"
    return Solution(best, objective, bound, status), proof


def bound_step(overlap: Overlap, bound: Callable[[Problem], Solution]) -> float:
    """A lower bound of the step, without solving: the best of those at a few weights; inf where nothing is allowed.

    Args:
        overlap: the two sums.
        bound: problem -> lower bound and choices near it, which may break rows.
    """
    free = Overlap(*(replace(side, rows=()) for side in (overlap.busy, overlap.waiting)))
    lines: list[tuple[float, float]] = []
    best, weight = -math.inf, 1.0
    for _ in range(BOUND_WEIGHTS):
        found = bound(overlap.at(weight))
        best = max(best, found.lower_bound)
        if not found.choices:
            break
        line = _sums(free, found.choices)
        if line in lines or (not lines and line[0] >= line[1]):
            break
        lines.append(line)
        weight = 0.0 if len(lines) == 1 else _highest(lines)
    return best


def _sums(overlap: Overlap, choices: tuple[int, ...]) -> tuple[float, float]:
    return evaluate(overlap.busy, choices), evaluate(overlap.waiting, choices)


def is_closed(objective: float, bound: float) -> bool:
    """Whether a bound proves a plan optimal."""
    return objective - bound <= OPTIMAL_GAP * max(abs(objective), 1e-9)


def _highest(lines: list[tuple[float, float]]) -> float:
    """The weight at which the lowest of the lines w * busy + (1 - w) * waiting is highest."""
    weights = {0.0, 1.0}
    for a, b in lines:
        for c, d in lines:
            slope = (a - b) - (c - d)
            if slope:
                weights.add(min(1.0, max(0.0, (d - b) / slope)))
    return max(sorted(weights), key=lambda w: min(w * a + (1 - w) * b for a, b in lines))
