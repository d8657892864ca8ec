"""Problems with a limit over time: what the solver finds is the best of all choices, and its bound holds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_problems import evaluate_file, exhaustive_file, random_file

from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.iopddl import parse_iopddl
from autoparallel_fp8.problem import Edge, evaluate
from autoparallel_fp8.solver import priced_dual, timed_search
from autoparallel_fp8.solver.contract import Contraction
from autoparallel_fp8.solver.flat import Flat
from autoparallel_fp8.solver.narrow import narrow
from autoparallel_fp8.solver.priced_dual import Ascent, PricedDual
from autoparallel_fp8.solver.room import Room
from autoparallel_fp8.solver.solve_timed import solve_timed
from autoparallel_fp8.solver.timeline import make_timeline
from autoparallel_fp8.solver.tools import Outcome, Tools
from autoparallel_fp8.timed import TimedProblem

PATIENT = Tools(lambda problem, deadline, relaxed: Outcome(None, -math.inf))
files = st.builds(
    random_file,
    st.integers(0, 10**6),
    st.integers(2, 7),
    st.integers(2, 4),
    st.sampled_from([0.0, 0.2, 0.4, 0.7, 1.0]),
    st.booleans(),
)


def read(data: dict[str, object]) -> TimedProblem:
    return parse_iopddl(data, "file")


def contracted(problem: TimedProblem) -> Contraction:
    contraction = Contraction(problem)
    contraction.run()
    return contraction


def all_choices(sizes: list[int]) -> list[np.ndarray]:
    return [np.array(choices, dtype=np.int64) for choices in itertools.product(*map(range, sizes))]


@settings(max_examples=40, deadline=None)
@given(files)
def test_solving_agrees_with_exhaustive_search(data: dict[str, object]) -> None:
    """The least cost, proven, by an evaluator that knows the file only; or no choices where none are allowed."""
    best = exhaustive_file(data)
    solution = solve_timed(read(data), time_limit=60)
    if best is None:
        assert solution.status == "infeasible" and solution.choices == ()
    else:
        assert evaluate_file(data, list(solution.choices)) == best == solution.objective
        assert solution.status == "optimal" and solution.lower_bound <= best


@settings(max_examples=20, deadline=None)
@given(files, st.integers(0, 40))
def test_what_a_time_limit_cuts_short_is_still_allowed_and_its_bound_holds(data: dict[str, object], steps: int) -> None:
    """A clock that ends the search anywhere."""
    best = exhaustive_file(data)
    with pytest.MonkeyPatch.context() as patch:
        ticks = itertools.count()
        patch.setattr(Tools, "is_late", property(lambda self: next(ticks) > steps))
        solution = solve_timed(read(data), time_limit=60)
    if solution.choices:
        assert evaluate_file(data, list(solution.choices)) == solution.objective
    assert best is None or solution.lower_bound <= best + 1e-9
    assert best is not None or solution.status in ("infeasible", "unknown")


@settings(max_examples=30, deadline=None)
@given(files)
def test_contracting_loses_no_choices(data: dict[str, object]) -> None:
    """Choices of what is left, expanded, cost and hold the same; the best of all is among them."""
    problem = read(data)
    contraction = contracted(problem)
    costs = []
    if not contraction.dead:
        core, timeline = contraction.pairwise(), make_timeline(contraction)
        for choices in all_choices([len(cost) for cost in core.costs]):
            full = contraction.expand(choices.tolist())
            cost = evaluate(core, choices.tolist())
            is_kept = bool((timeline.load(choices) <= timeline.limit).all())
            wanted = evaluate_file(data, full)
            assert (cost if is_kept and math.isfinite(cost) else None) == wanted
            costs += [] if wanted is None else [wanted]
    assert min(costs, default=None) == exhaustive_file(data)


def test_nodes_that_lie_alike_become_one() -> None:
    """A chain whose neighbours decide each other is one variable; a free choice between two is left alone."""
    alike, free = np.array([[0.0, np.inf], [np.inf, 1.0]]), np.array([[0.0, 1.0], [2.0, 3.0]])
    costs, usages = (np.array([1.0, 2.0]),) * 4, (np.array([5.0, 1.0]),) * 4
    starts, ends = np.array([0, 1, 2, 3]), np.array([2, 3, 4, 5])
    edges = (Edge(0, 1, 0), Edge(1, 2, 0), Edge(2, 3, 1))
    contraction = contracted(TimedProblem(costs, edges, (alike, free), usages, starts, ends, 20.0))
    core = contraction.pairwise()
    assert core.num_variables == 2 and len(core.edges) == 1
    assert sorted(cost.tolist() for cost in core.costs) == [[1.0, 2.0], [3.0, 8.0]]


def test_times_that_cannot_be_too_full_are_left_out() -> None:
    """Without a limit there are none; with one, those whose largest usages break it, whatever they hold anyway."""
    costs, usages = (np.array([1.0, 2.0]),) * 3, (np.array([5.0, 1.0]), np.array([3.0, 3.0]), np.array([1.0, 2.0]))
    starts, ends = np.array([0, 0, 4]), np.array([2, 6, 6])
    for limit, room in ((math.inf, []), (8.0, []), (7.0, [3.0]), (4.5, [0.5, 0.5])):
        timeline = make_timeline(contracted(TimedProblem(costs, (), (), usages, starts, ends, limit)))
        assert timeline.limit.tolist() == room


@settings(max_examples=30, deadline=None)
@given(files, st.integers(0, 10**6))
def test_the_bound_of_any_prices_holds(data: dict[str, object], seed: int) -> None:
    """Every step of the ascent, and prices that make no sense; what narrowing drops is dearer than its slack."""
    best, contraction = exhaustive_file(data), contracted(read(data))
    if contraction.dead or best is None:
        return
    core, timeline = contraction.pairwise(), make_timeline(contraction)
    ascent = Ascent.begin(core, timeline, PATIENT)
    random = np.random.default_rng(seed)
    for _ in range(15):
        assert ascent.step() <= best + 1e-6
    ascent.best_prices = random.random(timeline.num_times) * 3
    ascent.settle()
    assert ascent.bound <= best + 1e-6 and ascent.at_best() <= best + 1e-6
    excess = ascent.dual.excess()
    for choices in all_choices([len(cost) for cost in core.costs]):
        cost = evaluate(core, choices.tolist())
        if math.isfinite(cost) and (timeline.load(choices) <= timeline.limit).all():
            of_choices = excess[np.cumsum([0, *map(len, core.costs[:-1])]) + choices]
            assert of_choices.max() <= cost - ascent.at_best() + 1e-6
    part, _ = narrow(core, ascent.dual, best - ascent.at_best() + 1e-6)
    assert all(len(cost) for cost in part.costs)


@settings(max_examples=30, deadline=None)
@given(files, st.integers(0, 10**6))
def test_room_is_what_choices_leave(data: dict[str, object], seed: int) -> None:
    """After any changes: what is left, what fits, and what a variable holds, against sums from scratch."""
    contraction = contracted(read(data))
    if contraction.dead:
        return
    core, timeline = contraction.pairwise(), make_timeline(contraction)
    flat, random = Flat(core), np.random.default_rng(seed)
    room = Room(timeline, np.zeros(core.num_variables, dtype=np.int64), flat.sizes)
    for _ in range(10):
        v = int(random.integers(core.num_variables))
        before = timeline.limit - timeline.load(room.choices)
        for x in range(int(flat.sizes[v])):
            other = room.choices.copy()
            other[v] = x
            after = timeline.limit - timeline.load(other)
            assert room.fits(v)[x] == bool((after >= np.minimum(before, 0.0)).all())
        room.change(v, int(random.integers(flat.sizes[v])))
        assert np.array_equal(room.left, timeline.limit - timeline.load(room.choices))
        times = np.arange(timeline.num_times)
        held = [room.held_at(w, times)[:, room.choices[w]] for w in range(core.num_variables)]
        assert np.array_equal(sum(held), timeline.load(room.choices))
        assert np.array_equal(room.held_at_all(v), held[v])


@settings(max_examples=30, deadline=None)
@given(files, st.integers(0, 10**6))
def test_flat_costs_and_descent(data: dict[str, object], seed: int) -> None:
    """Costs as the problem has them; a descent never goes up and ends where no single change helps."""
    contraction = contracted(read(data))
    if contraction.dead:
        return
    core = contraction.pairwise()
    flat, random = Flat(core), np.random.default_rng(seed)
    start = random.integers(0, flat.sizes)
    assert flat.cost(start) == evaluate(core, start.tolist())
    for colour in flat.colours:
        total = flat.beside(colour, start, flat.costs)
        for v, begin in zip(colour.variables.tolist(), colour.segment.tolist(), strict=True):
            wanted = core.costs[v].copy()
            for edge in core.edges:
                table = core.tables[edge.table]
                wanted += table[:, start[edge.w]] if edge.u == v else 0.0
                wanted += table[start[edge.u]] if edge.w == v else 0.0
            assert total[begin : begin + len(wanted)].tolist() == wanted.tolist()
    end = flat.descend(start, flat.costs, 100)
    assert flat.cost(end) <= flat.cost(start)
    for v, size in enumerate(flat.sizes.tolist()):
        for x in range(size):
            other = end.copy()
            other[v] = x
            assert flat.cost(other) >= flat.cost(end)


@settings(max_examples=30, deadline=None)
@given(files)
def test_closing_alone_proves_the_optimum(data: dict[str, object]) -> None:
    """From a bound that nothing raised and without choices in hand: programs within wider and wider slacks."""

    def stay(search: timed_search._Search, tools: Tools) -> None:
        search.bound = search.ascent.at_best()

    best = exhaustive_file(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priced_dual, "SETTLE", 0)
        patch.setattr(timed_search._Search, "_raise", stay)
        solution = solve_timed(read(data), time_limit=60)
    if best is None:
        assert solution.status == "infeasible"
    else:
        assert evaluate_file(data, list(solution.choices)) == best and solution.lower_bound <= best
        assert solution.status == "optimal"


@settings(max_examples=15, deadline=None)
@given(files)
def test_regions_reach_what_programs_prove(data: dict[str, object]) -> None:
    """Without programs for the whole, regions find choices that are allowed, and the bound still holds."""
    best = exhaustive_file(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed_search, "SMALL_VARIABLES", 0)
        solution = solve_timed(read(data), time_limit=1.2)
    if solution.choices:
        assert evaluate_file(data, list(solution.choices)) == solution.objective
    assert best is None or solution.lower_bound <= best + 1e-9 <= solution.objective + 1e-9


def test_the_same_problem_gives_the_same_choices() -> None:
    data = random_file(5, 7, 4, 0.6)
    assert solve_timed(read(data)) == solve_timed(read(data))


def test_nothing_to_choose() -> None:
    empty = np.zeros(0, dtype=np.int64)
    solution = solve_timed(TimedProblem((), (), (), (), empty, empty, 1.0))
    assert (solution.status, solution.objective, solution.choices) == ("optimal", 0.0, ())


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_time_limit_is_positive(limit: float) -> None:
    with pytest.raises(UsageError, match=r"time limit of .* s"):
        solve_timed(read(random_file(1)), time_limit=limit)


def test_sweeps_raise_the_bound_and_summing_up_anew_changes_nothing() -> None:
    """Without prices a sweep never lowers the bound; costs from scratch are those that sweeps arrived at."""
    contraction = contracted(read(random_file(4, 12, 4, 1.0)))
    assert not contraction.dead
    dual = PricedDual(contraction.pairwise())
    before = dual.bound()
    for _ in range(20):
        dual.sweep()
        assert dual.bound() >= before - 1e-9
        before = dual.bound()
    swept = dual.theta.copy()
    dual.rebuild()
    assert np.allclose(swept, dual.theta, rtol=0, atol=1e-9)
