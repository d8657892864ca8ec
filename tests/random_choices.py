"""Choices drawn at random among all that a problem allows, without solving it.

Each choice narrows what its neighbours may take, and theirs in turn (arc consistency), so that dead ends are rare;
from one, the last choices are taken back.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from autoparallel_fp8.problem import Array, Problem

Mask = npt.NDArray[np.bool_]
MOST_DEAD_ENDS = 200


def random_choices(problem: Problem, order: list[int], seed: int, stay: float) -> tuple[int, ...] | None:
    """A choice for every variable that no table, cost or restriction forbids; None where none was found.

    Args:
        problem: its rows are not looked at.
        order: in which variables are chosen.
        seed: of the draw.
        stay: how often the option is one of the cheapest beside what is chosen already, instead of any.
    """
    draw = _Draw(problem, np.random.default_rng(seed), stay)
    return draw.choices(order) if draw.narrow(range(problem.num_variables)) else None


class _Table:
    """Which pairs a table allows, its rows and columns grouped by what they allow."""

    def __init__(self, table: Array) -> None:
        fine = np.isfinite(table)
        rows, self.row_group = np.unique(fine, axis=0, return_inverse=True)
        _, first, self.column_group = np.unique(fine, axis=1, return_index=True, return_inverse=True)
        self.row_group, self.column_group = self.row_group.reshape(-1), self.column_group.reshape(-1)
        self.allowed: Mask = rows[:, first]

    def columns(self, rows: Mask) -> Mask:
        """Columns that go with one of the rows."""
        groups = np.zeros(self.allowed.shape[0], bool)
        groups[self.row_group[rows]] = True
        return self.allowed[groups].any(0)[self.column_group]

    def rows(self, columns: Mask) -> Mask:
        """Rows that go with one of the columns."""
        groups = np.zeros(self.allowed.shape[1], bool)
        groups[self.column_group[columns]] = True
        return self.allowed[:, groups].any(1)[self.row_group]


class _Draw:
    """What each variable may still take."""

    def __init__(self, problem: Problem, random: np.random.Generator, stay: float) -> None:
        self.problem, self.random, self.stay = problem, random, stay
        self.left: list[Mask] = [np.isfinite(cost) for cost in problem.costs]
        for restriction in problem.restrictions:
            mask = np.zeros(len(self.left[restriction.variable]), bool)
            mask[list(restriction.allowed)] = True
            self.left[restriction.variable] &= mask
        self.tables = [_Table(table) for table in problem.tables]
        self.edges: list[list[tuple[int, int, bool]]] = [[] for _ in problem.costs]
        for edge in problem.edges:
            self.edges[edge.u].append((edge.w, edge.table, True))
            self.edges[edge.w].append((edge.u, edge.table, False))

    def choices(self, order: list[int]) -> tuple[int, ...] | None:
        saved: list[tuple[int, int, list[Mask]]] = []  # (variable, its option, what others had left before)
        dead_ends = 0
        while len(saved) < len(order):
            v = order[len(saved)]
            option = self._option(v, {w for w, _, _ in saved})
            before = list(self.left)
            self.left[v] = np.arange(len(self.left[v])) == option
            if self.narrow([v]):
                saved.append((v, option, before))
                continue
            dead_ends += 1
            self.left = list(before)
            self.left[v] = self.left[v] & (np.arange(len(self.left[v])) != option)
            while not self.narrow([v]):
                if not saved or dead_ends > MOST_DEAD_ENDS:
                    return None
                v, option, before = saved.pop()
                self.left = list(before)
                self.left[v] = self.left[v] & (np.arange(len(self.left[v])) != option)
        return tuple(int(np.flatnonzero(mask)[0]) for mask in self.left)

    def narrow(self, changed: Iterable[int]) -> bool:
        """Takes away what goes with nothing of a neighbour; False where a variable is left with nothing."""
        waiting = dict.fromkeys(changed)
        if not all(self.left[v].any() for v in waiting):
            return False
        while waiting:
            v = next(iter(waiting))
            del waiting[v]
            for w, number, is_row in self.edges[v]:
                table = self.tables[number]
                support = table.columns(self.left[v]) if is_row else table.rows(self.left[v])
                kept = self.left[w] & support
                if not kept.any():
                    return False
                if (kept != self.left[w]).any():
                    self.left[w] = kept
                    waiting[w] = None
        return True

    def _option(self, v: int, chosen: set[int]) -> int:
        options = np.flatnonzero(self.left[v])
        if self.random.random() < self.stay:
            price = np.zeros(len(options))
            for w, number, is_row in self.edges[v]:
                if w in chosen:
                    other, table = int(np.flatnonzero(self.left[w])[0]), self.problem.tables[number]
                    price += table[options, other] if is_row else table[other, options]
            options = options[price <= price.min() + 1e-9]
        return int(self.random.choice(options))
