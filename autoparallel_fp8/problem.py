"""The planning problem as plain numbers: choose one option per variable at the least sum of costs.

    minimise   sum_v costs[v][x_v]  +  sum_e tables[edges[e].table][x_u, x_w]        (edge e joins u and w)
    subject to rows[r].base + sum_v rows[r].terms[v][x_v] <= rows[r].limit             for each row r
               x_v in restrictions[k].allowed                                          for each restriction k on v

The objective adds the constant `offset`, which presolve uses for what it has settled already. `inf` forbids an option
or a pair. Costs are in microseconds, row terms in the row's unit (bytes for memory). Tables are shared: a repeated
layer refers to the same table, so it costs once in time and memory. No torch here.
`evaluate` is the only place that adds a solution up; presolve, solve and the tests all use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .errors import ProblemError

Array = npt.NDArray[np.float64]
OPTIMAL_GAP = 1e-6  # the largest gap that is called optimal


@dataclass(frozen=True)
class Edge:
    """A pair of variables (u < w) and the number of its table, shape [options of u, options of w]."""

    u: int
    w: int
    table: int


@dataclass(frozen=True)
class Row:
    """`base + sum of terms <= limit`, up to one part in 1e9 of the limit.

    `terms`: variable -> one coefficient per option, none negative. `base`: what settled variables take already.
    """

    name: str
    limit: float
    terms: Mapping[int, Array]
    base: float = 0.0

    @property
    def bound(self) -> float:
        """The largest left side that counts as within the limit."""
        return self.limit + 1e-9 * abs(self.limit)


@dataclass(frozen=True)
class Restriction:
    """A wish that a variable takes one of some options; kept apart from costs so that a conflict can name it."""

    name: str
    variable: int
    allowed: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """Variables with option costs, pairwise tables, linear rows. See the module's formulas.

    Attributes:
        names: one a variable, unique.
        costs: one vector a variable; equal vectors may be the same object.
        edges: at most one a pair, u < w.
        tables: referred to by `Edge.table`.
        rows: memory and user limits.
        restrictions: pins and other wishes of the user.
        offset: constant part of the objective.
    """

    names: tuple[str, ...]
    costs: tuple[Array, ...]
    edges: tuple[Edge, ...]
    tables: tuple[Array, ...]
    rows: tuple[Row, ...] = field(default=())
    restrictions: tuple[Restriction, ...] = field(default=())
    offset: float = 0.0

    @property
    def num_variables(self) -> int:
        return len(self.names)

    @property
    def num_options(self) -> int:
        return sum(len(cost) for cost in self.costs)

    @property
    def num_pairs(self) -> int:
        return sum(self.tables[edge.table].size for edge in self.edges)

    def check(self) -> None:
        """Raise ProblemError where shapes, names or edges do not fit together."""
        if len(set(self.names)) != len(self.names) or len(self.names) != len(self.costs):
            raise ProblemError("variable names must be unique, one a cost vector")
        seen: set[tuple[int, int]] = set()
        for edge in self.edges:
            shape = (len(self.costs[edge.u]), len(self.costs[edge.w]))
            if not edge.u < edge.w or (edge.u, edge.w) in seen:
                raise ProblemError(
                    "edges must join u < w, once a pair", at=f"{self.names[edge.u]}, {self.names[edge.w]}"
                )
            if self.tables[edge.table].shape != shape:
                raise ProblemError(
                    f"table of shape {self.tables[edge.table].shape} where the options give {shape}",
                    at=f"{self.names[edge.u]}, {self.names[edge.w]}",
                )
            seen.add((edge.u, edge.w))
        for row in self.rows:
            for v, coefficients in row.terms.items():
                if coefficients.shape != self.costs[v].shape or (coefficients < 0).any():
                    raise ProblemError("a row term needs one non-negative coefficient an option", at=f"row {row.name}")
        for restriction in self.restrictions:
            if not all(0 <= x < len(self.costs[restriction.variable]) for x in restriction.allowed):
                raise ProblemError("a restriction allows an option that is not there", at=restriction.name)


@dataclass(frozen=True)
class Solution:
    """A choice per variable and what is proven about it.

    Attributes:
        choices: option index of each variable; empty where status is "infeasible" or nothing was found.
        objective: `evaluate(problem, choices)`; inf where there is none.
        lower_bound: no solution costs less.
        status: "optimal" (gap <= 1e-6), "feasible", "infeasible" or "unknown" (time ran out with nothing in hand).
        conflict: names of rows and variables that cannot hold together, for status "infeasible".
    """

    choices: tuple[int, ...]
    objective: float
    lower_bound: float
    status: str
    conflict: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """(objective - lower_bound) / max(|objective|, 1e-9); inf without a solution."""
        if not np.isfinite(self.objective):
            return float("inf")
        return max(0.0, self.objective - self.lower_bound) / max(abs(self.objective), 1e-9)


def evaluate(problem: Problem, choices: Sequence[int]) -> float:
    """Cost of a full choice in microseconds; inf where an option, a pair or a row forbids it."""
    total = problem.offset + float(sum(cost[x] for cost, x in zip(problem.costs, choices, strict=True)))
    total += float(sum(problem.tables[e.table][choices[e.u], choices[e.w]] for e in problem.edges))
    if not keeps_rows(problem, choices):
        return float("inf")
    if any(choices[restriction.variable] not in restriction.allowed for restriction in problem.restrictions):
        return float("inf")
    return total


def keeps_rows(problem: Problem, choices: Sequence[int]) -> bool:
    """Whether a full choice is within every row."""
    return all(row_value(row, choices) <= row.bound for row in problem.rows)


def row_value(row: Row, choices: Sequence[int]) -> float:
    """Left side of the row for a full choice."""
    return row.base + float(sum(coefficients[choices[v]] for v, coefficients in row.terms.items()))
