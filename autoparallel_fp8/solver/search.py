"""The search for the best choices: bound, guess, narrow, and a program for what is left.

Presolve; raise the dual bound, with rows priced; guess choices from it; drop what cannot be in a solution within a
small slack of the bound and solve that; widen the slack until the choices found lie within it. What is left after
narrowing is small, and goes to the solver as a linear relaxation and then as an integer program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..problem import OPTIMAL_GAP, Problem, Solution, evaluate, keeps_rows
from .ascent import FIRST_GAIN, LAST_GAIN, ascend
from .descent import descend
from .dual import Dual
from .fold import LEAST, fold, num_layers
from .narrow import decode, narrow
from .presolve import presolve
from .prices import Priced, find_prices, find_prices_short, repair
from .tools import Tools

SMALL_PAIRS = 20_000  # pairs that go to the solver without further ado
FIRST_SLACK = 1e-4  # of the bound; solutions are mostly this close
PROGRAM_PAIRS = 400_000  # more than these would take the solver minutes and gigabytes: the gap stays open instead
FREE_SHARE = 0.7  # of the time, for the search without rows; mostly they do not bind
FOLD_PAIRS = 1_000_000  # fewer are swept as they are
GOOD_GAP = 1e-3  # where rows bind and more than a program's worth of pairs is left, the search ends with this
MAX_REPAIRS = 8  # of the last guesses; earlier ones were made at worse prices
MAX_WIDENINGS = 5  # then nothing is ruled out any more


def conclude(problem: Problem, candidates: Sequence[tuple[int, ...] | None], bound: float) -> Solution:
    """The best of the candidates that is allowed, with the status that the bound gives it."""
    best: tuple[int, ...] = ()
    objective = math.inf
    for choices in candidates:
        if choices is not None and (value := evaluate(problem, choices)) < objective:
            best, objective = choices, value
    if objective == math.inf:
        return infeasible() if bound == math.inf else Solution((), math.inf, bound, "unknown")
    solution = Solution(best, objective, min(bound, objective), "feasible")
    return replace(solution, status="optimal") if solution.gap <= OPTIMAL_GAP else solution


def infeasible(conflict: tuple[str, ...] = ()) -> Solution:
    return Solution((), math.inf, math.inf, "infeasible", conflict)


def has_dead_end(problem: Problem) -> bool:
    """Whether a variable has no option left, or a row is broken whatever is chosen."""
    return any(not len(cost) for cost in problem.costs) or any(
        row.base + sum(float(c.min()) for c in row.terms.values()) > row.bound for row in problem.rows
    )


def bound_only(problem: Problem, tools: Tools) -> Solution:
    """A lower bound and choices near it, without a program: presolve and dual ascent, rows priced where they bind.

    The choices may break rows; the objective is that without rows.
    """
    rowless = replace(problem, rows=())
    free, undo = presolve(rowless)
    if has_dead_end(free):
        return infeasible()
    found = _bounded(free, tools)
    bound = found.dual.bound()
    choices = undo(descend(free, decode(found.dual)))
    if not keeps_rows(problem, choices):
        small, undo = presolve(problem)
        if has_dead_end(small):
            return infeasible()
        prices = _bounded(small, tools)
        bound = max(bound, prices.dual.bound())
        choices = undo(repair(small, decode(prices.dual), prices.prices))
    return Solution(choices, evaluate(rowless, choices), bound, "feasible")


def search(problem: Problem, tools: Tools) -> Solution:
    """The best choices for a problem without restrictions, and what is proven in the time there is.

    Rows are left out at first: where the best choices without them keep them, the problem is solved. Not so where
    layers fold: prices are cheap to find there, and begin at nothing.
    """
    floor = -math.inf
    if problem.rows and not _may_fold(problem):
        free = search(replace(problem, rows=()), tools.share(FREE_SHARE))
        if free.status == "infeasible":
            return free
        kept = conclude(problem, [free.choices] if free.choices else [], free.lower_bound)
        if kept.status == "optimal" or (free.status != "optimal" and kept.objective == free.objective < math.inf):
            return kept  # time or the program's limit ended the search, not the rows
        floor = free.lower_bound
        tools.say(f"rows bind: at least {floor:.6g}")
    small, undo = presolve(problem)
    if has_dead_end(small):
        return infeasible()
    if not small.num_variables:
        return conclude(problem, [undo(())], small.offset)
    inner = _search_presolved(small, tools)
    if inner.status == "infeasible":
        return inner
    return conclude(problem, [undo(inner.choices)] if inner.choices else [], max(floor, inner.lower_bound))


def _search_presolved(problem: Problem, tools: Tools) -> Solution:
    if problem.num_pairs <= SMALL_PAIRS and not problem.rows:
        return solve_program(problem, tools)
    tools.say(f"bound: {problem.num_variables} variables, {problem.num_options} options, {problem.num_pairs} pairs")
    prices = _bounded(problem, tools)
    return _search_narrowed(problem, prices, tools)


def _may_fold(problem: Problem) -> bool:
    return problem.num_pairs > FOLD_PAIRS and len(problem.rows) <= 1 and num_layers(problem) >= LEAST


def _bounded(problem: Problem, tools: Tools) -> Priced:
    """A dual at good prices, its bound as high as sweeps bring it; by way of the short version of many equal layers."""
    short = fold(problem) if _may_fold(problem) else None
    if short is not None:
        tools.say(f"bound: layers folded, {short.short.num_variables} variables, {short.short.num_pairs} pairs")
        return find_prices_short(short, tools)
    prices = find_prices(problem, tools)
    ascend(prices.dual, tools)
    return prices


def _search_narrowed(problem: Problem, prices: Priced, tools: Tools) -> Solution:
    """Narrow and solve; where that does not settle it and the dual bound still rises, raise it and do so again."""
    dual, least_gain = prices.dual, FIRST_GAIN
    bound = dual.bound()
    guesses = (
        prices.candidates[-MAX_REPAIRS:] if prices.is_folded else (descend(problem), *prices.candidates[-MAX_REPAIRS:])
    )
    best = conclude(problem, [repair(problem, guess, prices.prices) for guess in guesses], bound)
    while True:
        if not tools.is_late and best.status != "optimal":
            guess = repair(problem, decode(dual), prices.prices)
            best = conclude(problem, [best.choices or None, guess], max(best.lower_bound, bound))
        best = _widen(problem, dual, bound, best, tools)
        is_good = prices.is_folded and problem.rows and best.gap <= GOOD_GAP
        if best.status in ("optimal", "infeasible") or tools.is_late or least_gain <= LAST_GAIN or is_good:
            return best
        least_gain *= 0.1
        before, bound = bound, ascend(dual, tools, least_gain)
        if bound - before <= LAST_GAIN * abs(bound):
            return best


def _widen(problem: Problem, dual: Dual, bound: float, best: Solution, tools: Tools) -> Solution:
    """Solve within a slack of the dual bound, wider until the best choices lie inside; `best` is what is known."""
    lower = best.lower_bound
    slack = max(FIRST_SLACK * abs(bound - dual.problem.offset), 1e-12)
    for widening in range(MAX_WIDENINGS + 1):
        if best.status == "optimal" or tools.is_late:
            break
        slack = min(slack if widening < MAX_WIDENINGS else math.inf, best.objective - bound)
        inner = _solve_within(problem, dual, slack, tools, best.gap)
        lower = max(lower, min(bound + slack, inner.lower_bound))
        best = conclude(problem, [best.choices or None, inner.choices or None], lower)
        if best.status == "infeasible" or best.objective <= bound + slack or inner.status == "unknown":
            break
        slack = best.objective - bound if inner.choices else slack * 8
    return best


def _solve_within(problem: Problem, dual: Dual, slack: float, tools: Tools, gap: float) -> Solution:
    """The best choices whose excess is at most `slack`; "unknown" where that is much work for little of a `gap`."""
    narrowed, widen = narrow(problem, dual, slack)
    small, undo = presolve(narrowed)
    tools.say(f"within {slack:.4g} of the bound: {small.num_variables} variables, {small.num_pairs} pairs")
    if has_dead_end(small):
        return infeasible()
    if not small.num_variables:
        return conclude(problem, [widen(undo(()))], small.offset)
    if small.rows and small.num_pairs > PROGRAM_PAIRS and gap <= GOOD_GAP:
        return Solution((), math.inf, -math.inf, "unknown")
    is_smaller = SMALL_PAIRS < small.num_pairs <= problem.num_pairs // 2
    inner = (_search_presolved if is_smaller else solve_program)(small, tools)
    if inner.status == "infeasible":
        return inner
    return conclude(problem, [widen(undo(inner.choices))] if inner.choices else [], inner.lower_bound)


def solve_program(problem: Problem, tools: Tools) -> Solution:
    """The relaxation, and where that is fractional the integer program; rows are welcome."""
    candidates: list[tuple[int, ...] | None] = [descend(problem)]
    bound = -math.inf
    if not problem.rows:
        dual = Dual(problem)
        bound = ascend(dual, tools)
        candidates.append(descend(problem, decode(dual)))
    if problem.num_pairs > PROGRAM_PAIRS:
        return conclude(problem, candidates, bound)
    if problem.num_pairs > SMALL_PAIRS // 4:
        relaxed = tools.run(problem, relaxed=True)
        if relaxed.is_infeasible:
            return infeasible()
        bound = max(bound, relaxed.bound)
        if relaxed.choices is not None:
            candidates.append(descend(problem, relaxed.choices))
    solution = conclude(problem, candidates, bound)
    if solution.status == "optimal" or tools.is_late:
        return solution
    exact = tools.run(problem, relaxed=False)
    if exact.is_infeasible:
        return infeasible()
    return conclude(problem, [*candidates, exact.choices], max(bound, exact.bound))
