"""Intervals of regrets hold what exhaustive search and exact re-solves find, with and without a row that binds."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import layers, problems
from test_overlap import other_costs

from autoparallel_fp8 import regrets
from autoparallel_fp8.overlap import Overlap, solve_step
from autoparallel_fp8.problem import Edge, Problem, Row, evaluate
from autoparallel_fp8.regrets import Neighbourhood
from autoparallel_fp8.solver import presolve, solve
from autoparallel_fp8.solver.nearby import added_costs, added_terms, back_to, lead_back


def solved(overlap: Overlap) -> Neighbourhood | None:
    """The neighbourhood of the best plan, every variable in question; None where there is no plan."""
    solution, weight = solve_step(overlap, lambda problem, seconds: solve(problem, time_limit=seconds))
    if not solution.choices:
        return None
    return Neighbourhood(overlap, weight, solution, range(overlap.busy.num_variables))


def regret_of_each(overlap: Overlap, least: float) -> dict[tuple[int, int], float]:
    """By trying all choices."""
    sizes = [len(cost) for cost in overlap.busy.costs]
    found = {(v, x): math.inf for v, size in enumerate(sizes) for x in range(size)}
    for choices in itertools.product(*map(range, sizes)):
        step = overlap.step_us(choices)
        for key in enumerate(choices):
            found[key] = min(found[key], step - least)
    return found


@pytest.mark.parametrize("near", [(2, 1), regrets.NEAR])
@settings(max_examples=60, deadline=None)
@given(problem=problems(), seed=st.integers(0, 2**16))
def test_each_interval_holds_what_exhaustive_search_finds(near: tuple[int, int], problem: Problem, seed: int) -> None:
    overlap = Overlap(problem, other_costs(problem, seed))
    here = solved(overlap)
    if here is None:
        return
    exact = regret_of_each(overlap, here.solution.objective)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regrets, "NEAR", near)
        found = here.intervals(exact)
    tolerance = 1e-5 * max(1.0, here.solution.objective)
    for key, interval in found.items():
        assert interval.low <= exact[key] + tolerance, (key, interval, exact[key])
        assert interval.high >= exact[key] - tolerance, (key, interval, exact[key])
        if interval.changes is not None:
            choices = here.choices(interval)
            assert choices[key[0]] == key[1]
            assert overlap.step_us(choices) - here.solution.objective <= interval.high + tolerance


@settings(max_examples=60, deadline=None)
@given(problem=problems(max_rows=1, max_restrictions=1), seed=st.integers(0, 2**16))
def test_trials_are_led_back_and_added_up_as_one_by_one(problem: Problem, seed: int) -> None:
    """`lead_back` is `undo` of each trial, and what is added is what `evaluate` finds."""
    small, undo = presolve(replace(problem, rows=()))
    if any(not len(cost) for cost in small.costs):
        return
    random = np.random.default_rng(seed)
    base = [int(random.integers(len(cost))) for cost in small.costs]
    changes = [
        {v: int(random.integers(len(cost))) for v, cost in enumerate(small.costs) if random.random() < 0.4}
        for _ in range(4)
    ]
    full, changed = lead_back(undo, base, changes)
    assert tuple(full) == undo(base)
    free = replace(problem, rows=(), restrictions=())
    if not math.isfinite(evaluate(free, full)):
        return
    more = added_costs(free, full, changed, len(changes))
    for k, change in enumerate(changes):
        choices = undo([change.get(v, x) for v, x in enumerate(base)])
        assert evaluate(free, full) + more[k] == pytest.approx(evaluate(free, choices))
        for row in problem.rows:
            added = sum(float(c[choices[v]] - c[full[v]]) for v, c in row.terms.items())
            assert added_terms(row.terms, full, changed, len(changes))[k] == pytest.approx(added, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(problem=problems(max_rows=0, max_restrictions=0))
def test_choices_go_to_the_smaller_problem_and_back(problem: Problem) -> None:
    """What presolve keeps of an optimum costs the same there; options that are gone are chosen by the caller."""
    solution = solve(problem)
    if not solution.choices:
        return
    small, undo = presolve(problem, held=range(problem.num_variables))
    there = back_to(undo, solution.choices, lambda k: pytest.fail("a held variable keeps every possible option"))
    assert undo(there) == solution.choices
    assert evaluate(small, there) == pytest.approx(solution.objective)


def test_room_is_not_made_by_giving_the_option_up() -> None:
    """The plan (0, 0) costs 16 and holds 6 of 7. b's option 0, already taken, is cheapest with a's option 1: 6, but
    that holds 9. Of the changes that save memory b's own option 1 may not be taken, though (1, 1) holds 7."""
    costs, held = (np.array([8.0, 2.0]), np.array([1.0, 8.0])), {0: np.array([3.0, 6.0]), 1: np.array([3.0, 1.0])}
    table = np.array([[7.0, 0.0], [3.0, 8.0]])
    problem = Problem(("a", "b"), costs, (Edge(0, 1, 0),), (table,), (Row("memory", 7.0, held),))
    here = solved(Overlap(problem, problem))
    assert here is not None and here.solution.choices == (0, 0)
    for (v, x), interval in here.intervals(itertools.product(range(2), repeat=2)).items():
        assert interval.changes is None or here.choices(interval)[v] == x


def test_intervals_of_equal_layers_are_as_narrow_as_the_dual_is_tight() -> None:
    """On a chain of equal layers with a hub most are no wider than what the dual leaves of the plan's own bound."""
    problem = layers()
    here = solved(Overlap(problem, problem))
    assert here is not None
    asked = [(v, x) for v in range(1, problem.num_variables, 7) for x in range(len(problem.costs[v]))]
    found = here.intervals(asked)
    gap = here.solution.objective - here.dual.bound()
    narrow = [i for i in found.values() if i.low == math.inf or i.width <= gap + 1e-6 * here.solution.objective]
    assert len(narrow) >= 0.8 * len(found)
