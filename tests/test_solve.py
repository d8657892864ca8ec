"""Solve: exhaustive search, the raw program and the whole chain agree; statuses, bounds and conflicts are honest."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from random_problems import exhaustive, layers, problems

from autoparallel_fp8.errors import SolveError, UsageError
from autoparallel_fp8.problem import Array, Edge, Problem, ProblemError, Restriction, Row, Solution, evaluate, row_value
from autoparallel_fp8.solver.dual import Dual
from autoparallel_fp8.solver.presolve import forbid_restricted, presolve
from autoparallel_fp8.solver.solve import bound, min_row, run_ilp, solve, solve_raw
from autoparallel_fp8.solver.tools import Outcome, Tools

search_module = importlib.import_module("autoparallel_fp8.solver.search")
solve_module = importlib.import_module("autoparallel_fp8.solver.solve")  # the package has a function of that name

INF = math.inf


def array(*values: float | list[float]) -> Array:
    return np.array(values, dtype=float)


def assert_solves(problem: Problem, least: float) -> None:
    for solution in (solve(problem), solve_raw(problem)):
        assert solution.objective == pytest.approx(least, rel=1e-6, abs=1e-9)
        if least == INF:
            assert solution.status == "infeasible" and solution.choices == ()
        else:
            assert solution.status == "optimal" and solution.gap <= 1e-6
            assert solution.lower_bound <= least + 1e-6 * max(1.0, abs(least))
            assert evaluate(problem, solution.choices) == solution.objective


@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_agrees_with_exhaustive_search(problem: Problem) -> None:
    """Objective, status and bound, infeasible problems included."""
    assert_solves(problem, exhaustive(problem)[0])


@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_the_bound_alone_never_exceeds_the_least(problem: Problem) -> None:
    """With rows, which it prices, and restrictions; what it calls infeasible is."""
    least = exhaustive(problem)[0]
    found = bound(problem)
    assert found.lower_bound <= least + 1e-9 * max(1.0, abs(least) if least < INF else 1.0)
    assert (found.status == "infeasible") == (found.choices == ())
    if found.choices:
        assert len(found.choices) == problem.num_variables
        assert found.objective == evaluate(replace(forbid_restricted(problem), rows=()), found.choices)
    else:
        assert least == INF


def test_the_bound_alone_is_the_least_of_equal_layers() -> None:
    """Up to a hair, without a program; a row that binds is priced, and lifts it."""
    problem = layers()
    least = solve(problem).objective
    assert bound(problem).lower_bound == pytest.approx(least, rel=0.02)
    taken = Row("row", 0.0, {v: (cost < cost.max()).astype(float) for v, cost in enumerate(problem.costs)})
    tight = replace(problem, rows=(replace(taken, limit=0.7 * row_value(taken, solve(problem).choices)),))
    assert bound(problem).lower_bound < bound(tight).lower_bound <= solve(tight).objective + 1e-6
    assert bound(problem, time_limit=1e-9).lower_bound <= least


@settings(max_examples=150, deadline=None)
@given(problem=problems())
def test_agrees_by_way_of_the_dual_bound(problem: Problem) -> None:
    """The same when even the smallest problem is bounded, narrowed and widened before a program sees it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "SMALL_PAIRS", 0)
        assert_solves(problem, exhaustive(problem)[0])


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_program_gives_its_own_bound(problem: Problem) -> None:
    """The finished program's bound is the optimum, the relaxation's is not above it."""
    least, _ = exhaustive(problem)
    plain = forbid_restricted(problem)
    exact = run_ilp(plain, INF, "highs", relaxed=False)
    assert exact.is_infeasible == (least == INF)
    assert exact.bound == pytest.approx(least, rel=1e-6, abs=1e-9)
    assert run_ilp(plain, INF, "highs", relaxed=True).bound <= least + 1e-6


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_undo_of_the_solved_presolved_problem(problem: Problem) -> None:
    small, undo = presolve(problem)
    solution = solve(small)
    assert solution.objective == pytest.approx(exhaustive(problem)[0], rel=1e-6, abs=1e-9)
    if solution.objective < INF:
        assert evaluate(problem, undo(solution.choices)) == pytest.approx(solution.objective)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equal_layers_agree_with_the_raw_program(seed: int) -> None:
    """8 layers of 20 variables that share tables, with a hub: too many for exhaustive search."""
    problem = layers(seed=seed)
    solution, raw = solve(problem), solve_raw(problem)
    assert (solution.status, raw.status) == ("optimal", "optimal")
    assert solution.objective == pytest.approx(raw.objective, rel=1e-6)


def test_binding_row_over_equal_layers_agrees_with_the_raw_program() -> None:
    """A row that the cheapest choices break; prices, repair and the program with rows come into play."""
    problem = layers()
    random = np.random.default_rng(0)
    terms = {v: 1e9 * random.integers(1, 50, len(problem.costs[v])).astype(float) for v in range(1, 160, 4)}
    free = solve(problem)
    used = row_value(Row("memory", INF, terms), free.choices)
    least = min_row(replace(problem, rows=(Row("memory", INF, terms),)), "memory")
    bound = replace(problem, rows=(Row("memory", 0.5 * (used + least), terms),))
    solution, raw = solve(bound), solve_raw(bound)
    assert (solution.status, raw.status) == ("optimal", "optimal")
    assert solution.objective == pytest.approx(raw.objective, rel=1e-6)
    assert solution.objective > free.objective


def test_two_layer_mlp_by_hand() -> None:
    """Column then row split: 10 + 2 + 10, and 6 to reduce-scatter the partial sums into a split output: 28.

    Whole everywhere costs 20 + 4 + 20 = 44; the split of k first needs a reduction before relu: 10 + 6 + 2 + 10 + 6.
    """
    problem = Problem(
        ("matmul1", "relu", "matmul2", "output"),
        (array(20.0, 10.0, 10.0), array(4.0, 2.0), array(20.0, 10.0), array(0.0, 0.0)),
        (Edge(0, 1, 0), Edge(1, 2, 1), Edge(2, 3, 2)),
        (
            array([0.0, 1.0], [6.0, 0.0], [12.0, 6.0]),  # matmul1's R, S, P to relu's R, S
            array([0.0, 1.0], [6.0, 0.0]),  # relu's R, S to matmul2's whole, split k
            array([0.0, 1.0], [12.0, 6.0]),  # matmul2's R, P to the output's R, S
        ),
    )
    solution = solve(problem)
    assert solution.choices == (1, 1, 1, 1)
    assert solution.objective == solution.lower_bound == 28.0


def test_conflict_names_only_what_cannot_hold_together() -> None:
    """Two pins that an edge forbids together; the third pin and the row have no part in it."""
    identity = array([0.0, INF], [INF, 0.0])
    costs = (array(0.0, 0.0),) * 3
    problem = Problem(
        tuple("abc"),
        costs,
        (Edge(0, 1, 0),),
        (identity,),
        (Row("memory", 100.0, {0: array(1.0, 1.0), 2: array(1.0, 2.0)}),),
        (Restriction("pin a", 0, (0,)), Restriction("pin c", 2, (1,)), Restriction("pin b", 1, (1,))),
    )
    solution = solve(problem)
    assert solution.status == "infeasible" and solution.objective == solution.lower_bound == INF
    assert sorted(solution.conflict) == ["pin a", "pin b"]


def test_conflict_of_a_row_with_a_pin() -> None:
    rows = (Row("memory", 5.0, {0: array(1.0, 9.0)}), Row("other", 50.0, {0: array(1.0, 9.0)}))
    problem = Problem(("a",), (array(0.0, 0.0),), (), (), rows, (Restriction("pin a", 0, (1,)),))
    assert sorted(solve(problem).conflict) == ["memory", "pin a"]


def test_conflict_of_rows_that_no_single_option_breaks() -> None:
    """One of two variables must be large for each row; the rows exclude each other."""
    first, second = array(0.0, 3.0), array(3.0, 0.0)
    rows = (Row("one", 3.0, {0: first, 1: first}), Row("two", 2.0, {0: second, 1: second}))
    problem = Problem(("a", "b"), (array(0.0, 0.0),) * 2, (), (), rows)
    assert sorted(solve(problem).conflict) == ["one", "two"]


def test_conflict_without_wishes_names_the_variable() -> None:
    problem = Problem(("a", "b"), (array(0.0, INF), array(0.0)), (Edge(0, 1, 0),), (array([INF], [0.0]),))
    assert solve(problem).conflict in (("a",), ("b",))


@settings(max_examples=60, deadline=None)
@given(problem=problems(max_rows=2, max_restrictions=3))
def test_conflict_is_minimal(problem: Problem) -> None:
    """What a conflict names cannot hold; without any one of them the rest can."""
    solution = solve(problem)
    wishes: list[Row | Restriction] = [*problem.rows, *problem.restrictions]
    named = [wish for wish in wishes if wish.name in solution.conflict]
    if solution.status != "infeasible" or not named:
        return

    def least(wishes: list[Row | Restriction]) -> float:
        rows = tuple(w for w in wishes if isinstance(w, Row))
        restrictions = tuple(w for w in wishes if isinstance(w, Restriction))
        return exhaustive(replace(problem, rows=rows, restrictions=restrictions))[0]

    assert least(named) == INF
    assert all(least([other for other in named if other is not wish]) < INF for wish in named)


@settings(max_examples=60, deadline=None)
@given(problem=problems(max_rows=2))
def test_min_row_is_the_least_left_side_under_everything_else(problem: Problem) -> None:
    if not problem.rows:
        return
    row = problem.rows[0]
    values = replace(
        problem,
        costs=tuple(
            np.where(np.isfinite(c), row.terms.get(v, np.zeros(len(c))), INF) for v, c in enumerate(problem.costs)
        ),
        tables=tuple(np.where(np.isfinite(t), 0.0, INF) for t in problem.tables),
        rows=problem.rows[1:],
        offset=row.base,
    )
    assert min_row(problem, row.name) == pytest.approx(exhaustive(values)[0])


def test_min_row_without_such_a_row() -> None:
    with pytest.raises(UsageError, match="no row called 'memory'"):
        min_row(layers(2, 4), "memory")


def frustrated(num_variables: int = 40) -> Problem:
    """Every pair wants to differ: the relaxation is far from the optimum and branching takes long."""
    random = np.random.default_rng(0)
    pairs = [(u, w) for u in range(num_variables) for w in range(u + 1, num_variables)]
    tables = tuple(random.permutation(16).reshape(4, 4).astype(float) for _ in pairs)
    edges = tuple(Edge(u, w, k) for k, (u, w) in enumerate(pairs))
    return Problem(tuple(f"v{v}" for v in range(num_variables)), (np.zeros(4),) * num_variables, edges, tables)


def test_best_of_a_narrowed_problem_proves_nothing_beyond_the_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrowing left out the optimum of 3; the 5 found instead must not end the search, though proven for its part."""
    slacks: list[float] = []

    def solve_within(problem: Problem, dual: Dual, slack: float, tools: Tools, gap: float) -> Solution:
        slacks.append(slack)
        return Solution((1,), 5.0, 5.0, "optimal") if len(slacks) == 1 else Solution((0,), 3.0, 3.0, "optimal")

    monkeypatch.setattr(search_module, "_solve_within", solve_within)
    problem = Problem(("a",), (array(3.0, 5.0),), (), ())
    known = Solution((), INF, 1.0, "unknown")
    best = search_module._widen(problem, Dual(problem), 1.0, known, Tools(lambda *args: Outcome(None, -INF)))
    assert slacks == [1e-4, 4.0]
    assert best == Solution((0,), 3.0, 3.0, "optimal")


@pytest.mark.parametrize("time_limit", [1e-3, 1.0])
def test_time_limit_gives_choices_with_an_honest_gap(time_limit: float) -> None:
    problem = frustrated()
    solution = solve(problem, time_limit=time_limit)
    assert solution.status == "feasible" and solution.gap > 1e-6
    assert evaluate(problem, solution.choices) == solution.objective
    assert solution.lower_bound <= solution.objective


def test_program_seconds_leave_the_gap_open() -> None:
    solution = solve(frustrated(), program_seconds=0.5)
    assert solution.status == "feasible" and solution.lower_bound > 0


def test_unfinished_program_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that gives up at once: choices from descent, a bound from the dual, no claim of an optimum."""
    monkeypatch.setattr(solve_module, "run_ilp", lambda *args, **kwargs: Outcome(None, -INF))
    problem = frustrated(12)
    solution = solve(problem)
    assert solution.status == "feasible" and solution.lower_bound < solution.objective < INF


def test_solve_is_deterministic() -> None:
    assert solve(layers(seed=1)) == solve(layers(seed=1))


def test_progress_is_told_and_nothing_printed() -> None:
    """HiGHS prints its name when it starts; a library does not print. In a process of its own: it prints once."""
    script = (
        "import numpy as np\n"
        "from autoparallel_fp8.problem import Problem, Edge\n"
        "from autoparallel_fp8.solver.solve import solve_raw\n"
        "p = Problem(('a', 'b'), (np.arange(2.0),) * 2, (Edge(0, 1, 0),), (np.eye(2),))\n"
        "assert solve_raw(p).status == 'optimal'\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == ""
    lines: list[str] = []
    solve(layers(), progress=lines.append)
    assert lines[0].startswith("presolve: 161 variables")


def test_cbc_solves_too() -> None:
    problem = layers(2, 8)
    assert solve(problem, solver="cbc").objective == pytest.approx(solve(problem).objective)


def test_cbc_stands_in_for_a_missing_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    import pulp

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert solve_raw(layers(2, 8)).status == "optimal"
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "available", lambda self: False)
    with pytest.raises(SolveError, match=r"neither HiGHS nor CBC[\s\S]*pip install highspy"):
        solve_raw(layers(2, 8))


def test_problem_without_variables() -> None:
    assert solve(Problem((), (), (), (), offset=3.0)).objective == 3.0
    assert solve(Problem((), (), (), (), (Row("r", 1.0, {}, base=2.0),))).conflict == ("r",)


def test_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="no solver called 'gurobi'"):
        solve_raw(layers(2, 8), solver="gurobi")
    with pytest.raises(UsageError, match="time limit of 0 s"):
        solve(layers(2, 8), time_limit=0)


def test_large_and_small_numbers_in_one_problem() -> None:
    """Costs from 1e-3 to 1e7 us, bytes of 1e11: the small difference decides, the row holds to a part in 1e9."""
    costs = (array(1e7, 1e7 + 1e-3), array(1e-3, 0.0))
    rows = (Row("memory", 1.5e11, {0: array(1e11, 5e10), 1: array(5e10, 1e11)}),)
    solution = solve(Problem(("a", "b"), costs, (), (), rows))
    assert solution.choices == (0, 0) and solution.status == "optimal"


def test_problem_check_refuses_a_restriction_to_a_missing_option() -> None:
    problem = Problem(("a",), (array(0.0),), (), (), (), (Restriction("pin", 0, (1,)),))
    with pytest.raises(ProblemError, match=r"not there[\s\S]*pin"):
        problem.check()
