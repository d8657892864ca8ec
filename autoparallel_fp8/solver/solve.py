"""Solves a `Problem`: presolve, search, and programs for what is left, which PuLP hands to HiGHS.

    minimise   sum_v,i c_v[i] x_v,i + sum_e,ij T_e[i, j] y_e,ij
    subject to sum_i x_v,i = 1,  sum_j y_e,ij = x_u,i,  sum_i y_e,ij = x_w,j,  rows over x,  x binary, y >= 0

The linear relaxation (the local polytope) is mostly integral and is tried first; branching takes the rest. Forbidden
pairs have no y. HiGHS's own gap of 1e-4 is switched off: `optimal` means a gap of at most 1e-6, with the solver's
bound. This is the only file that knows PuLP or a solver.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SolveError, UsageError
from ..problem import Array, Problem, Row, Solution, evaluate
from .ascent import LAST_GAIN, ascend
from .conflict import find_conflict, without_costs
from .dual import Dual
from .narrow import narrow
from .presolve import forbid_restricted
from .search import bound_only, conclude, infeasible, search
from .tools import Outcome, Tools

Index = npt.NDArray[np.int64]

LARGER_BEFORE = 10_000_000  # pairs of a problem that is narrowed to such a program
LARGER_PAIRS = 60_000  # pairs in a program for the larger of two sums
CHECK_SECONDS = 20.0  # for one question of the conflict search


def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    program_seconds: float = 60.0,
    solver: str = "highs",
    with_conflict: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Solution:
    """The best choices found and what is proven about them.

    Args:
        problem: anything that `Problem.check` accepts.
        time_limit: seconds; at the limit the best choices in hand come back with their bound.
        program_seconds: without a time limit, how long one integer program may run before its gap is left open.
        solver: "highs", or "cbc" for PuLP's own.
        with_conflict: where nothing is allowed, look for what cannot hold together.
        progress: called with a line of text when a phase begins.

    Raises:
        UsageError: no such solver, or a time limit that is not positive.
        SolveError: the solver is not installed or failed.

    Example:
        >>> import numpy as np
        >>> from autoparallel_fp8.problem import Problem
        >>> solve(Problem(("a",), (np.array([3.0, 2.0]),), (), ()))
        Solution(choices=(1,), objective=2.0, lower_bound=2.0, status='optimal', conflict=())
    """
    if time_limit is not None and not time_limit > 0:
        raise UsageError(
            f"time limit of {time_limit} s", at="time_limit", do="give a positive number of seconds, or None"
        )
    tools = Tools(program_runner(solver), say=progress or (lambda text: None))
    tools = replace(tools, program_seconds=program_seconds) if time_limit is None else tools.within(time_limit)
    tools.say(f"presolve: {problem.num_variables} variables, {problem.num_options} options, {problem.num_pairs} pairs")
    solution = _search(problem, tools)
    if solution.status == "infeasible" and with_conflict:
        return infeasible(_find_conflict(problem, tools))
    return solution


def bound(problem: Problem, *, time_limit: float | None = None) -> Solution:
    """A lower bound and choices near it, in a part of the time of `solve` and without its program.

    Args:
        problem: as `solve` takes it.
        time_limit: seconds, after which the bound stays where it is.

    Returns:
        Choices that may break rows and their objective without rows; status "infeasible" where that shows at once.
    """
    tools = Tools(program_runner("highs"), deadline=math.inf if time_limit is None else time.monotonic() + time_limit)
    return bound_only(forbid_restricted(problem), tools)


def _search(problem: Problem, tools: Tools) -> Solution:
    found = search(forbid_restricted(problem), tools)
    return conclude(problem, [found.choices] if found.objective < math.inf else [], found.lower_bound)


def solve_raw(problem: Problem, time_limit: float | None = None, solver: str = "highs") -> Solution:
    """As `solve`, with the whole problem as one integer program: slow, and free of presolve's reasoning."""
    plain = forbid_restricted(problem)
    deadline = math.inf if time_limit is None else time.monotonic() + time_limit
    outcome = run_ilp(plain, deadline, solver, relaxed=False)
    return infeasible() if outcome.is_infeasible else conclude(problem, [outcome.choices], outcome.bound)


def min_row(problem: Problem, row_name: str, *, solver: str = "highs") -> float:
    """The least that the left side of a row can be under everything else; inf where nothing satisfies the rest.

    Raises:
        UsageError: no row of this name.
    """
    row = next((row for row in problem.rows if row.name == row_name), None)
    if row is None:
        raise UsageError(f"no row called {row_name!r}", do=f"use one of {[row.name for row in problem.rows]}")
    allowed = without_costs(problem)
    costs = tuple(cost + row.terms[v] if v in row.terms else cost for v, cost in enumerate(allowed.costs))
    others = tuple(other for other in problem.rows if other is not row)
    return solve(replace(allowed, costs=costs, rows=others, offset=row.base), solver=solver).objective


def solve_larger(
    first: Problem, second: Problem, weight: float, known: float, seconds: float, *, solver: str = "highs"
) -> Solution | None:
    """The choices whose larger one of two sums is least; None where the program would be too large.

    Args:
        first, second: the same variables, edges, rows and restrictions at different costs.
        weight: weight * first + (1 - weight) * second is the bound that rules choices out.
        known: the larger sum of choices in hand; the result is better or there is none better.
        seconds: for the program.

    Returns:
        A solution whose bound holds for the larger sum; its choices are empty where nothing better was found.
    """
    if first.num_pairs > LARGER_BEFORE:
        return None
    first, second = forbid_restricted(first), forbid_restricted(second)
    kept = _possible_options(first)
    first, second = _only(first, kept), _only(second, kept)
    mixed = mix(first, second, weight)
    tools = Tools(program_runner(solver), time.monotonic() + seconds, seconds, lambda text: None)
    dual = Dual(replace(mixed, rows=()))
    ascend(dual, tools, LAST_GAIN)
    slack = known - dual.bound()
    (one, undo), (two, _) = narrow(first, dual, slack), narrow(second, dual, slack)
    if any(not len(cost) for cost in one.costs):
        return Solution((), math.inf, known, "unknown")
    if sum(int(np.isfinite(one.tables[edge.table]).sum()) for edge in one.edges) > LARGER_PAIRS:
        return None
    outcome = run_ilp(one, time.monotonic() + seconds, solver, relaxed=False, other=two)
    bound = min(outcome.bound, known)
    if outcome.choices is None:
        return Solution((), math.inf, max(bound, dual.bound()), "unknown")
    choices = undo(outcome.choices)
    larger = max(evaluate(first, choices), evaluate(second, choices))
    full = tuple(int(kept[v][x]) for v, x in enumerate(choices))
    return Solution(full, larger, min(bound, larger), "feasible")


def _possible_options(problem: Problem) -> list[Index]:
    """For each variable the options that have a partner on every edge; a dual bound is made of such options."""
    possible = [np.isfinite(cost) for cost in problem.costs]
    finite = [np.isfinite(table) for table in problem.tables]
    changed = True
    while changed:
        changed = False
        for edge in problem.edges:
            allowed = finite[edge.table] & possible[edge.u][:, None] & possible[edge.w][None, :]
            sides = ((edge.u, np.asarray(allowed.any(axis=1))), (edge.w, np.asarray(allowed.any(axis=0))))
            for v, left in sides:
                if (left != possible[v]).any():
                    possible[v], changed = left, True
    return [np.flatnonzero(mask) for mask in possible]


def _only(problem: Problem, kept: list[Index]) -> Problem:
    """The problem with these options of each variable, in their order; edges and variables stay as they are."""
    tables = tuple(problem.tables[e.table][np.ix_(kept[e.u], kept[e.w])] for e in problem.edges)
    return replace(
        problem,
        costs=tuple(cost[k] for cost, k in zip(problem.costs, kept, strict=True)),
        edges=tuple(replace(edge, table=i) for i, edge in enumerate(problem.edges)),
        tables=tables,
        rows=tuple(replace(row, terms={v: c[kept[v]] for v, c in row.terms.items()}) for row in problem.rows),
    )


def mix(first: Problem, second: Problem, weight: float) -> Problem:
    """weight * first + (1 - weight) * second, for problems with the same variables and edges."""
    known: dict[tuple[int, int], Array] = {}

    def mixed(pair: tuple[Array, Array]) -> Array:
        key = (id(pair[0]), id(pair[1]))
        if key not in known:
            with np.errstate(invalid="ignore"):
                value = weight * pair[0] + (1 - weight) * pair[1]
            known[key] = np.where(np.isinf(pair[0]) | np.isinf(pair[1]), np.inf, value)
        return known[key]

    return replace(
        first,
        costs=tuple(map(mixed, zip(first.costs, second.costs, strict=True))),
        tables=tuple(map(mixed, zip(first.tables, second.tables, strict=True))),
        offset=weight * first.offset + (1 - weight) * second.offset,
    )


def _find_conflict(problem: Problem, tools: Tools) -> tuple[str, ...]:
    """Names of what cannot hold together; a question that takes long counts as possible, so the set may be larger."""
    patient = replace(tools, deadline=math.inf)

    def is_possible(question: Problem) -> bool:
        return _search(question, patient.within(CHECK_SECONDS)).status != "infeasible"

    return find_conflict(problem, is_possible)


def program_runner(solver: str) -> Callable[[Problem, float, bool], Outcome]:
    def run(problem: Problem, deadline: float, relaxed: bool) -> Outcome:
        return run_ilp(problem, deadline, solver, relaxed=relaxed)

    return run


def run_ilp(problem: Problem, deadline: float, solver: str, *, relaxed: bool, other: Problem | None = None) -> Outcome:
    """Build the program and run the solver until the deadline.

    Args:
        problem: what to minimise.
        deadline: on the monotonic clock.
        solver: "highs" or "cbc".
        relaxed: the linear relaxation.
        other: the same choices at other costs; the larger of both sums is minimised.
    """
    if any(not len(cost) for cost in problem.costs) or any(
        not row.terms and row.base > row.bound for row in problem.rows
    ):
        return Outcome(None, math.inf, True)
    if not problem.num_variables:
        return Outcome((), problem.offset, False)
    seconds = None if deadline == math.inf else max(0.01, deadline - time.monotonic())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3.3 announces the names of PuLP 4
        model = _Model(problem, relaxed, other)
        model.run(_make_solver(solver, seconds, relaxed))
    return model.outcome()


def _make_solver(name: str, seconds: float | None, relaxed: bool) -> Any:
    import pulp

    if name == "highs" and importlib.util.find_spec("highspy") is not None:
        _start_highs_quietly()
        options = {"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9, "random_seed": 0}
        return pulp.HiGHS(mip=not relaxed, msg=False, gapRel=1e-9, gapAbs=0.0, threads=1, timeLimit=seconds, **options)
    if name in ("highs", "cbc"):
        cbc = pulp.PULP_CBC_CMD(mip=not relaxed, msg=False, gapRel=1e-9, gapAbs=0.0, threads=1, timeLimit=seconds)
        if cbc.available():
            return cbc
        raise SolveError("neither HiGHS nor CBC is installed", do="pip install highspy")
    raise UsageError(f"no solver called {name!r}", at="solver", do="use 'highs' or 'cbc'")


@functools.cache
def _start_highs_quietly() -> None:
    """Make the first HiGHS of the process without standard output: 1.16 prints its name then, whatever its options."""
    import highspy

    sys.stdout.flush()
    try:
        shown, hidden = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # no standard output: nothing to hide
        return
    try:
        os.dup2(hidden, 1)
        highspy.Highs()
    finally:
        os.dup2(shown, 1)
        os.close(shown)
        os.close(hidden)


class _Model:
    """The integer program of a problem, as PuLP objects."""

    def __init__(self, problem: Problem, relaxed: bool, other: Problem | None = None) -> None:
        import pulp

        self.problem, self.relaxed = problem, relaxed
        self.scale = _objective_scale(problem)
        self.program = pulp.LpProblem("choices", pulp.LpMinimize)
        self.objective: list[tuple[Any, float]] = []
        self.options = [self._add_options(v, cost) for v, cost in enumerate(problem.costs)]
        self.pairs: list[dict[tuple[int, int], Any]] = []
        for number, edge in enumerate(problem.edges):
            self._add_edge(number, self.options[edge.u], self.options[edge.w], problem.tables[edge.table])
        for row in problem.rows:
            self._add_row(row)
        if other is None:
            self.program.setObjective(pulp.LpAffineExpression(self.objective))
        else:
            self._add_larger(other)

    def _add_larger(self, other: Problem) -> None:
        """Minimise what neither sum exceeds."""
        import pulp

        second: list[tuple[Any, float]] = []
        for options, cost in zip(self.options, other.costs, strict=True):
            second += [(x, c * self.scale) for x, c in zip(options, cost.tolist(), strict=True) if math.isfinite(c)]
        for found, edge in zip(self.pairs, other.edges, strict=True):
            table = other.tables[edge.table]
            second += [(y, float(table[i, j]) * self.scale) for (i, j), y in found.items()]
        larger = pulp.LpVariable("larger", None)
        shift = (other.offset - self.problem.offset) * self.scale
        self._add_sum([*self.objective, (larger, -1.0)], -1, 0.0)
        self._add_sum([*second, (larger, -1.0)], -1, -shift)
        self.program.setObjective(pulp.LpAffineExpression([(larger, 1.0)]))

    def _add_options(self, v: int, cost: Array) -> list[Any]:
        import pulp

        category = pulp.LpContinuous if self.relaxed else pulp.LpInteger
        finite = np.isfinite(cost)
        options = [pulp.LpVariable(f"x{v}_{i}", 0, 1 if finite[i] else 0, category) for i in range(len(cost))]
        self.objective += [(x, c * self.scale) for x, c in zip(options, cost.tolist(), strict=True) if math.isfinite(c)]
        self._add_sum([(x, 1.0) for x in options], 0, 1.0)
        return options

    def _add_edge(self, number: int, first: list[Any], second: list[Any], table: Array) -> None:
        import pulp

        by_first: list[list[tuple[Any, float]]] = [[(x, -1.0)] for x in first]
        by_second: list[list[tuple[Any, float]]] = [[(x, -1.0)] for x in second]
        found: dict[tuple[int, int], Any] = {}
        self.pairs.append(found)
        for i, j in np.argwhere(np.isfinite(table)).tolist():
            y = found[i, j] = pulp.LpVariable(f"y{number}_{i}_{j}", 0)
            by_first[i].append((y, 1.0))
            by_second[j].append((y, 1.0))
            if table[i, j]:
                self.objective.append((y, float(table[i, j]) * self.scale))
        for terms in (*by_first, *by_second):
            self._add_sum(terms, 0, 0.0)

    def _add_row(self, row: Row) -> None:
        largest = max([float(c.max()) for c in row.terms.values()], default=0.0)
        if largest == 0.0:
            return
        terms = [
            (self.options[v][i], c / largest)
            for v, coefficients in row.terms.items()
            for i, c in enumerate(coefficients.tolist())
            if c
        ]
        self._add_sum(terms, -1, (row.bound - row.base) / largest)

    def _add_sum(self, terms: list[tuple[Any, float]], sense: int, value: float) -> None:
        import pulp

        self.program.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=value))

    def run(self, solver: Any) -> None:
        import pulp

        try:
            self.program.solve(solver)
        except pulp.PulpSolverError as error:
            raise SolveError(f"the solver failed: {error}") from error

    def outcome(self) -> Outcome:
        import pulp

        highs = getattr(self.program, "solverModel", None)
        if highs is not None and "Error" in highs.getModelStatus().name:
            raise SolveError(f"HiGHS stopped with {highs.getModelStatus().name}", do="try solver='cbc'")
        if self.program.status == pulp.LpStatusInfeasible:
            return Outcome(None, math.inf, True)
        bound = self._bound()
        values = [[x.varValue for x in options] for options in self.options]
        if any(value is None for options in values for value in options):
            return Outcome(None, bound, False)
        return Outcome(tuple(int(np.argmax(options)) for options in values), bound, False)

    def _bound(self) -> float:
        """The solver's own lower bound, never the objective of an unfinished run."""
        import pulp

        finished = self.program.sol_status == pulp.LpSolutionOptimal
        highs = getattr(self.program, "solverModel", None)
        if highs is not None and not self.relaxed:
            bound = highs.getInfo().mip_dual_bound
        elif finished and self.program.objective is not None:
            bound = float(pulp.value(self.program.objective))
        else:
            bound = -math.inf
        return bound / self.scale + self.problem.offset


def _objective_scale(problem: Problem) -> float:
    """A power of two that brings the largest cost near 2**10: the solver's tolerances are absolute."""
    largest = max(
        (float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in (*problem.costs, *problem.tables)), default=0.0
    )
    return 2.0 ** (10 - math.frexp(largest)[1]) if largest else 1.0
