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

from ..errors import SolveError, UsageError
from ..problem import Array, Problem, Row, Solution
from .conflict import find_conflict, without_costs
from .presolve import forbid_restricted
from .search import conclude, infeasible, search
from .tools import Outcome, Tools

CHECK_SECONDS = 20.0  # for one question of the conflict search


def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    program_seconds: float = 60.0,
    solver: str = "highs",
    progress: Callable[[str], None] | None = None,
) -> Solution:
    """The best choices found and what is proven about them.

    Args:
        problem: anything that `Problem.check` accepts.
        time_limit: seconds; at the limit the best choices in hand come back with their bound.
        program_seconds: without a time limit, how long one integer program may run before its gap is left open.
        solver: "highs", or "cbc" for PuLP's own.
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
    tools = Tools(_runner(solver), say=progress or (lambda text: None))
    tools = replace(tools, program_seconds=program_seconds) if time_limit is None else tools.within(time_limit)
    tools.say(f"presolve: {problem.num_variables} variables, {problem.num_options} options, {problem.num_pairs} pairs")
    solution = _search(problem, tools)
    return infeasible(_find_conflict(problem, tools)) if solution.status == "infeasible" else solution


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


def _find_conflict(problem: Problem, tools: Tools) -> tuple[str, ...]:
    """Names of what cannot hold together; a question that takes long counts as possible, so the set may be larger."""
    patient = replace(tools, deadline=math.inf)

    def is_possible(question: Problem) -> bool:
        return _search(question, patient.within(CHECK_SECONDS)).status != "infeasible"

    return find_conflict(problem, is_possible)


def _runner(solver: str) -> Callable[[Problem, float, bool], Outcome]:
    def run(problem: Problem, deadline: float, relaxed: bool) -> Outcome:
        return run_ilp(problem, deadline, solver, relaxed=relaxed)

    return run


def run_ilp(problem: Problem, deadline: float, solver: str, *, relaxed: bool) -> Outcome:
    """Build the program and run the solver until the deadline."""
    if any(not len(cost) for cost in problem.costs) or any(
        not row.terms and row.base > row.bound for row in problem.rows
    ):
        return Outcome(None, math.inf, True)
    if not problem.num_variables:
        return Outcome((), problem.offset, False)
    seconds = None if deadline == math.inf else max(0.01, deadline - time.monotonic())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3.3 announces the names of PuLP 4
        model = _Model(problem, relaxed)
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

    def __init__(self, problem: Problem, relaxed: bool) -> None:
        import pulp

        self.problem, self.relaxed = problem, relaxed
        self.scale = _objective_scale(problem)
        self.program = pulp.LpProblem("choices", pulp.LpMinimize)
        self.objective: list[tuple[Any, float]] = []
        self.options = [self._add_options(v, cost) for v, cost in enumerate(problem.costs)]
        for number, edge in enumerate(problem.edges):
            self._add_edge(number, self.options[edge.u], self.options[edge.w], problem.tables[edge.table])
        for row in problem.rows:
            self._add_row(row)
        self.program.setObjective(pulp.LpAffineExpression(self.objective))

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
        for i, j in np.argwhere(np.isfinite(table)).tolist():
            y = pulp.LpVariable(f"y{number}_{i}_{j}", 0)
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
