"""Presolve: each step and all together keep the optimum, lead back to it, and leave alone what they must."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from random_problems import exhaustive, layers, problems

from autoparallel_fp8.problem import Array, Edge, Problem, Restriction, Row, evaluate
from autoparallel_fp8.solver.descent import descend
from autoparallel_fp8.solver.dual import Dual, order_in_batches
from autoparallel_fp8.solver.eliminate import eliminate_few_neighbours, join_determined, settle_single
from autoparallel_fp8.solver.narrow import decode, narrow
from autoparallel_fp8.solver.network import Network, Pool
from autoparallel_fp8.solver.presolve import STEPS, Step, forbid_restricted, presolve
from autoparallel_fp8.solver.prices import priced
from autoparallel_fp8.solver.prune import drop_dominated, drop_impossible, drop_row_breakers, drop_separable_edges

INF = math.inf


def array(*values: float | list[float]) -> Array:
    return np.array(values, dtype=float)


def pair(table: Array, first: Array, second: Array, *rows: Row) -> Problem:
    """Two variables and the edge between them."""
    return Problem(("a", "b"), (first, second), (Edge(0, 1, 0),), (table,), rows)


def assert_same(one: Problem, other: Problem) -> None:
    assert one.names == other.names and one.edges == other.edges and one.offset == other.offset
    assert [c.tolist() for c in one.costs] == [c.tolist() for c in other.costs]
    assert [t.tolist() for t in one.tables] == [t.tolist() for t in other.tables]
    assert [(r.name, r.base, sorted(r.terms)) for r in one.rows] == [
        (r.name, r.base, sorted(r.terms)) for r in other.rows
    ]


@pytest.mark.parametrize("step", [presolve, *STEPS], ids=["presolve", *(step.reduce.__name__ for step in STEPS)])
@settings(max_examples=150, deadline=None)
@given(problem=problems())
def test_keeps_the_optimum_and_leads_back(step: Step, problem: Problem) -> None:
    """The smaller problem has the same least objective, and undo gives choices of the bigger one that have it."""
    least, _ = exhaustive(problem)
    small, undo = step(problem)
    small.check()
    small_least, choices = exhaustive(small)
    assert small_least == pytest.approx(least)
    if math.isfinite(least):
        assert evaluate(problem, undo(choices)) == pytest.approx(least)


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_undo_keeps_every_objective(problem: Problem) -> None:
    """Undo of any choices of the smaller problem has the same objective, not of the best ones only."""
    small, undo = presolve(problem)
    choices = [0] * small.num_variables
    if all(len(cost) for cost in small.costs) and math.isfinite(evaluate(small, choices)):
        assert evaluate(problem, undo(choices)) == pytest.approx(evaluate(small, choices))


@settings(max_examples=80, deadline=None)
@given(problems())
def test_held_variable_can_be_pinned_afterwards(problem: Problem) -> None:
    """Each possible option of a held variable is still there, and the best with it is the best with it before."""
    small, undo = presolve(problem, held=(0,))
    if any(not len(cost) for cost in small.costs):
        assert exhaustive(problem)[0] == INF
        return
    where = small.names.index(problem.names[0])
    start = [0] * small.num_variables
    left = {undo((*start[:where], k, *start[where + 1 :]))[0]: k for k in range(len(small.costs[where]))}
    for option in range(len(problem.costs[0])):
        pin = Restriction("pin", 0, (option,))
        least = exhaustive(replace(problem, restrictions=(*problem.restrictions, pin)))[0]
        if option not in left:
            assert least == INF
        else:
            pinned = replace(small, restrictions=(Restriction("pin", where, (left[option],)),))
            assert exhaustive(pinned)[0] == pytest.approx(least)


STRICT = array([0.0, 9.0], [9.0, 0.0])  # neither option beats the other, the parts do not separate
LEFT_ALONE = {
    "drop_impossible": (drop_impossible, pair(array([0.0, INF], [INF, 0.0]), array(0.0, 1.0), array(1.0, 0.0))),
    "drop_row_breakers": (
        drop_row_breakers,  # 3 + 0 and 0 + 3 fit, 3 + 3 does not: no option breaks the row alone
        pair(STRICT, array(0.0, 1.0), array(1.0, 0.0), Row("r", 5.0, {0: array(0.0, 3.0), 1: array(0.0, 3.0)})),
    ),
    "drop_separable_edges": (
        drop_separable_edges,  # 1 + 2 != 4
        pair(array([0.0, 1.0], [2.0, 4.0]), array(0.0, 0.0), array(0.0, 0.0)),
    ),
    "drop_separable_edges, forbidden pair": (
        drop_separable_edges,
        pair(array([0.0, 1.0], [2.0, INF]), array(0.0, 0.0), array(0.0, 0.0)),
    ),
    "drop_dominated": (drop_dominated, pair(STRICT, array(0.0, 8.0), array(8.0, 0.0))),
    "drop_dominated, cheaper but larger in a row": (
        drop_dominated,
        Problem(("a",), (array(0.0, 5.0),), (), (), (Row("r", 1.0, {0: array(2.0, 1.0)}),)),
    ),
    "settle_single": (settle_single, pair(STRICT, array(0.0, 1.0), array(1.0, 0.0))),
    "eliminate_few_neighbours, in a row": (
        eliminate_few_neighbours,
        Problem(("a",), (array(0.0, 5.0),), (), (), (Row("r", 1.0, {0: array(2.0, 1.0)}),)),
    ),
    "eliminate_few_neighbours, three neighbours": (
        eliminate_few_neighbours,
        Problem(
            tuple("abcd"),
            (array(0.0, 1.0),) * 4,
            tuple(Edge(u, w, 0) for u in range(4) for w in range(u + 1, 4)),
            (STRICT,),
        ),
    ),
    "join_determined, pairs would grow": (
        join_determined,  # 5 pairs beside two neighbours of 4 options: 40 pairs for the 9 + 12 + 12 there are
        Problem(
            tuple("abcd"),
            (np.zeros(3), np.zeros(3), np.zeros(4), np.zeros(4)),
            (Edge(0, 1, 0), Edge(0, 2, 1), Edge(1, 3, 1)),
            (array([0.0, 1.0, INF], [INF, 0.0, 1.0], [INF, INF, 0.0]), np.arange(12.0).reshape(3, 4)),
        ),
    ),
    "join_determined": (join_determined, pair(np.arange(9.0).reshape(3, 3), np.zeros(3), np.zeros(3))),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_step_leaves_alone(name: str) -> None:
    """What a step's reasoning does not cover stays as it is."""
    reduce, problem = LEFT_ALONE[name]
    small, undo = Step(reduce)(problem)
    assert_same(small, problem)
    assert undo([1] * problem.num_variables) == (1,) * problem.num_variables


def test_impossible_options_fall_one_after_another() -> None:
    """b's option 1 is forbidden, so a's option 1 has no partner left; the rest of the chain follows."""
    identity = array([0.0, INF], [INF, 0.0])
    chain = Problem(
        tuple("abc"), (array(0, 0), array(0, INF), array(0, 0)), (Edge(0, 1, 0), Edge(1, 2, 0)), (identity,)
    )
    small, _ = Step(drop_impossible)(chain)
    assert [len(cost) for cost in small.costs] == [1, 1, 1]


def test_of_two_equal_options_the_first_stays() -> None:
    small, undo = Step(drop_dominated)(Problem(("a",), (array(2.0, 1.0, 1.0),), (), ()))
    assert small.costs[0].tolist() == [1.0] and undo((0,)) == (1,)


def test_row_that_cannot_be_broken_is_dropped() -> None:
    small, _ = Step(drop_row_breakers)(
        Problem(("a",), (array(1.0, 2.0),), (), (), (Row("r", 5.0, {0: array(5.0, 1.0)}),))
    )
    assert small.rows == () and len(small.costs[0]) == 2


def test_option_that_breaks_a_row_beside_the_smallest_others_is_dropped() -> None:
    rows = (Row("r", 5.0, {0: array(5.0, 1.0), 1: array(1.0, 4.0)}),)
    small, _ = Step(drop_row_breakers)(Problem(("a", "b"), (array(0.0, 0.0), array(0.0, 0.0)), (), (), rows))
    assert [len(cost) for cost in small.costs] == [1, 2]


def test_chain_folds_by_min_plus() -> None:
    """a - b - c with b in the middle: min over b of a's, b's and c's parts, worked out by hand.

    (a, c) = (0, 0): min(0+1+0, 4+0+4) = 1; (0, 1): min(0+1+4, 4+0+0) = 4; (1, 0): 4; (1, 1): min(4+1+4, 0) = 0.
    """
    table = array([0.0, 4.0], [4.0, 0.0])
    net = Network(
        Problem(tuple("abc"), (array(0, 0), array(1, 0), array(0, 0)), (Edge(0, 1, 0), Edge(1, 2, 0)), (table,))
    )
    eliminate_few_neighbours(net, {1: None})
    assert net.links[0][2].tolist() == [[1.0, 4.0], [4.0, 0.0]]


def test_variable_that_another_decides_is_joined() -> None:
    """Three options of b each allow one of a: one variable with b's options, costs 1 + 5, 2 + 6, 1 + 7."""
    table = array([0.0, INF, 0.0], [INF, 0.0, INF])
    small, undo = Step(join_determined)(pair(table, array(1.0, 2.0), array(5.0, 6.0, 7.0)))
    assert small.num_variables == 1 and sorted(small.costs[0].tolist()) == [6.0, 8.0, 8.0]
    assert {undo((k,)) for k in range(3)} == {(0, 0), (1, 1), (0, 2)}


def test_restriction_becomes_forbidden_options() -> None:
    problem = Problem(("a",), (array(1.0, 2.0, 3.0),), (), (), (), (Restriction("pin", 0, (1, 2)),))
    assert forbid_restricted(problem).costs[0].tolist() == [INF, 2.0, 3.0]
    assert evaluate(problem, (0,)) == INF and evaluate(problem, (1,)) == 2.0


def test_equal_layers_cost_once() -> None:
    """From 8 to 16 layers the number of distinct arrays that presolve computes hardly grows."""

    def num_arrays(num_layers: int) -> int:
        net = Network(layers(num_layers), pool := Pool())
        for step in STEPS:
            step.reduce(net, net.watch())
        return len(pool._arrays)

    assert num_arrays(16) <= num_arrays(8) + 5


def test_equal_tables_become_one() -> None:
    """Tables of equal content are one table afterwards, wherever they came from."""
    edges = tuple(Edge(u, w, 6 if (u, w) == (0, 1) else 0) for u in range(4) for w in range(u + 1, 4))
    problem = Problem(tuple("abcd"), (array(0.0, 1.0),) * 4, edges, tuple(STRICT.copy() for _ in range(7)))
    assert len(Step(drop_impossible)(problem)[0].tables) == 1


def test_presolve_is_deterministic() -> None:
    """Same problem in, same numbers and records out, though other arrays in other places."""
    first, undo_first = presolve(layers())
    second, undo_second = presolve(layers())
    assert_same(first, second)
    choices = [0] * first.num_variables
    assert undo_first(choices) == undo_second(choices)


@settings(max_examples=150, deadline=None)
@given(problem=problems(max_restrictions=0))
def test_dual_bound_is_below_the_optimum_and_never_falls(problem: Problem) -> None:
    """Also with prices on the rows: no solution costs less than the bound."""
    least, _ = exhaustive(problem)
    small, _ = Step(drop_impossible)(problem)
    if not all(len(cost) for cost in small.costs):
        return
    for price in (0.0, 0.3):
        dual = Dual(priced(small, [price] * len(small.rows)))
        bounds = [dual.bound()]
        for _ in range(5):
            dual.sweep()
            bounds.append(dual.bound())
        assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(bounds))
        assert bounds[-1] <= least + 1e-8


@settings(max_examples=150, deadline=None)
@given(problem=problems(max_restrictions=0))
def test_narrowed_problem_keeps_solutions_within_the_slack(problem: Problem) -> None:
    """With a slack that reaches the optimum the optimum stays; slack 0 may drop it."""
    least, _ = exhaustive(problem)
    small, _ = Step(drop_impossible)(problem)
    if not all(len(cost) for cost in small.costs) or least == INF:
        return
    dual = Dual(priced(small, [0.1] * len(small.rows)))
    dual.sweep()
    narrowed, widen = narrow(small, dual, max(0.0, least - dual.bound()))
    narrowed_least, choices = exhaustive(narrowed)
    assert narrowed_least == pytest.approx(least)
    assert evaluate(small, widen(choices)) == pytest.approx(least)


def test_narrowing_drops_what_exceeds_the_slack() -> None:
    """A chain's dual bound is exact: 0 at (0, 0). Half a unit rules out option 1 of both; 2 keeps (1, 1)."""
    problem = pair(STRICT, array(0.0, 1.0), array(0.0, 1.0))
    dual = Dual(problem)
    dual.sweep()
    assert dual.bound() == 0.0 and decode(dual) == (0, 0)
    for slack, kept in ((0.5, [1, 1]), (2.0, [2, 2])):
        narrowed, _ = Step(drop_impossible)(narrow(problem, dual, slack)[0])
        assert [len(cost) for cost in narrowed.costs] == kept


def test_guess_from_the_dual_follows_the_choices_made_before() -> None:
    """Both options of both variables tie; only unequal pairs are allowed."""
    problem = pair(array([INF, 0.0], [0.0, INF]), array(0.0, 0.0), array(0.0, 0.0))
    dual = Dual(problem)
    dual.sweep()
    assert evaluate(problem, decode(dual)) == 0.0


def test_narrowing_drops_options_of_excess_by_itself() -> None:
    dual = Dual(Problem(("a",), (array(0.0, 5.0, 1.0),), (), ()))
    narrowed, widen = narrow(dual.problem, dual, 1.0)
    assert narrowed.costs[0].tolist() == [0.0, 1.0] and widen((1,)) == (2,)


def test_dual_bound_of_a_tree_is_its_optimum() -> None:
    problem = Problem(
        tuple("abcd"),
        (array(3.0, 0.0), array(0.0, 1.0), array(2.0, 2.0), array(0.0, 7.0)),
        (Edge(0, 1, 0), Edge(1, 2, 1), Edge(1, 3, 0)),
        (STRICT, array([1.0, 4.0], [0.0, 6.0])),
    )
    dual = Dual(problem)
    for _ in range(3):
        dual.sweep()
    assert dual.bound() == pytest.approx(exhaustive(problem)[0])


def test_batches_hold_equal_roles_without_edges_inside() -> None:
    """Layers go side by side: few batches for many variables."""
    problem = layers(num_layers=16)
    batches = order_in_batches(problem)
    assert sorted(v for batch in batches for v in batch) == list(range(problem.num_variables))
    together = {(u, w) for batch in batches for u in batch for w in batch}
    assert not any((edge.u, edge.w) in together for edge in problem.edges)
    assert len(batches) < problem.num_variables / 2


def test_batches_of_equal_variables_in_a_row() -> None:
    """All but a chain's ends have one role at first sight; neighbours go into different batches all the same."""
    edges = tuple(Edge(v, v + 1, 0) for v in range(11))
    problem = Problem(tuple("abcdefghijkl"), (np.zeros(2),) * 12, edges, (STRICT,))
    batches = order_in_batches(problem, rounds=1)
    assert [0] in batches and [11] in batches
    assert [1, 3, 5, 7, 9] in batches and [2, 4, 6, 8, 10] in batches


def test_batches_tell_tables_apart() -> None:
    """Three pairs of equal costs; the first and the third share their table and go together."""
    edges = (Edge(0, 1, 0), Edge(2, 3, 1), Edge(4, 5, 0))
    problem = Problem(tuple("abcdef"), (np.zeros(2),) * 6, edges, (STRICT, STRICT + 1))
    assert order_in_batches(problem) == [[0, 4], [1, 5], [2], [3]]


@settings(max_examples=100, deadline=None)
@given(problem=problems(max_rows=0, max_restrictions=0))
def test_descent_ends_where_no_single_change_helps(problem: Problem) -> None:
    for start in (None, [0] * problem.num_variables):
        choices = list(descend(problem, start))
        value = evaluate(problem, choices)
        for v, cost in enumerate(problem.costs):
            for option in range(len(cost)):
                assert evaluate(problem, [*choices[:v], option, *choices[v + 1 :]]) >= value - 1e-9
