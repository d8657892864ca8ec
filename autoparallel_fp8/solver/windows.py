"""Bounds and choices for many pinned options at once, each from a small window around its variable.

A window is a centre and the variables near it. Whatever the others choose, a solution with an option of the centre
costs at least the bound of the dual, less the window's share of it, plus the least of the window with the option taken:

    share    = sum of min theta_v (v inside) + sum of min of the moved table (edges inside or on the border)
    window   = costs and tables inside + on each border edge (v, j) the least over j of table[x_v, j] - moved_j

which holds for any moved costs. With the others at choices in hand instead of at their least, the window's best choices
are choices for the whole. The windows of all options together are one problem without edges between them, and one
`Dual`, which goes through them side by side: what equal layers share is one table for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..problem import Array, Edge, Problem
from .descent import descend
from .dual import Dual
from .narrow import decode

HUB = 12  # neighbours: a window reaches such a variable and does not go on from it


@dataclass(frozen=True)
class Window:
    """Variables around a centre, which comes first, and how they hang together.

    Attributes:
        variables: of the problem, nearest first.
        inside: (edge, local u, local w) with u < w in local numbers; `flipped` where that turns the table around.
        flipped: one an edge inside.
        border: (edge, local end, side of the end: 0 or 1, variable outside).
    """

    variables: tuple[int, ...]
    inside: tuple[tuple[int, int, int], ...]
    flipped: tuple[bool, ...]
    border: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class Task:
    """An option of the centre of a window; `number` is the window's."""

    number: int
    window: Window
    option: int


@dataclass(frozen=True)
class Found:
    """What is known of one option: no solution with it costs less than `bound`; `changes` leads to choices with it.

    Attributes:
        bound: on the problem's objective; inf where nothing allows the option.
        changes: variable -> option, where it is another than in the choices in hand.
    """

    bound: float
    changes: dict[int, int]


class Surroundings:
    """Windows of one problem, whose dual is known and for which there are choices in hand."""

    def __init__(self, dual: Dual, choices: Sequence[int], size: int) -> None:
        self.dual, self.problem, self.choices, self.size = dual, dual.problem, tuple(choices), size
        self.bound = dual.bound()
        self.slack = 1e-9 * max(1.0, abs(self.bound))
        self.around: list[list[tuple[int, int, int]]] = [[] for _ in self.problem.names]  # neighbour, edge, own side
        for e, edge in enumerate(self.problem.edges):
            self.around[edge.u].append((edge.w, e, 0))
            self.around[edge.w].append((edge.u, e, 1))
        self.least = np.array([float(part.min()) for part in self._parts()])
        self.least_of_edge = np.array([float(table.min()) for table in dual.edge_tables()])

    def _parts(self) -> list[Array]:
        return np.split(self.dual.theta, self.dual.start[1:-1]) if self.problem.num_variables else []

    def window(self, centre: int) -> Window:
        """The nearest variables, as many as `size`; those at one distance in their own order."""
        local, ring = {centre: 0}, [centre]
        while ring and len(local) < self.size:
            reached = {w for v in ring if v == centre or len(self.around[v]) <= HUB for w, _, _ in self.around[v]}
            ring = sorted(reached - local.keys())[: self.size - len(local)]
            local.update(zip(ring, range(len(local), len(local) + len(ring)), strict=True))
        inside, border = [], []
        for v, a in local.items():
            for w, e, side in self.around[v]:
                if w not in local:
                    border.append((e, a, side, w))
                elif a < local[w]:
                    inside.append((e, a, local[w], side == 1))
        return Window(tuple(local), tuple(i[:3] for i in inside), tuple(i[3] for i in inside), tuple(border))

    def at_least(self, window: Window) -> list[Array]:
        """Costs inside, with the least that each border edge can add."""
        costs = [self.problem.costs[v] for v in window.variables]
        spent: set[int] = set()
        for e, a, side, w in window.border:
            table = self._table(e, side)
            start, other = self.dual.ends[e][1 - side], len(self.problem.costs[w])
            rest = table - self.dual.moved[start : start + other]
            if w not in spent:  # what the variable outside has above its least counts once
                spent.add(w)
                theta = self.dual.theta[self.dual.start[w] : self.dual.start[w + 1]]
                rest = rest + (theta - self.least[w])
            costs[a] = costs[a] + rest.min(axis=1)
        return costs

    def as_chosen(self, window: Window) -> list[Array]:
        """Costs inside, with the variables outside as they are chosen."""
        costs = [self.problem.costs[v] for v in window.variables]
        for e, a, side, w in window.border:
            costs[a] = costs[a] + self._table(e, side)[:, self.choices[w]]
        return costs

    def rest_of_bound(self, window: Window) -> float:
        """The bound less the window's share of it."""
        edges = [e for e, *_ in (*window.inside, *window.border)]
        return self.bound - float(self.least[list(window.variables)].sum()) - float(self.least_of_edge[edges].sum())

    def _table(self, e: int, side: int) -> Array:
        table = self.problem.tables[self.problem.edges[e].table]
        return table.T if side else table

    def moved_inside(self, window: Window) -> list[tuple[Array, Array]]:
        """For each edge inside, the moved costs of its two ends, in local order."""
        found = []
        for (e, *_), flipped in zip(window.inside, window.flipped, strict=True):
            edge = self.problem.edges[e]
            ends = [
                self.dual.moved[start : start + len(self.problem.costs[v])]
                for start, v in zip(self.dual.ends[e], (edge.u, edge.w), strict=True)
            ]
            found.append((ends[1], ends[0]) if flipped else (ends[0], ends[1]))
        return found


def look_around(
    dual: Dual, choices: Sequence[int], options: Mapping[int, Sequence[int]], *, size: int, sweeps: int
) -> dict[tuple[int, int], Found]:
    """A bound and changed choices for each of the options.

    Args:
        dual: of the problem, raised as far as it goes.
        choices: in hand.
        options: centre -> those of its options that are asked about.
        size: variables in a window.
        sweeps: of the windows' dual.

    Returns:
        (centre, option) -> what was found.
    """
    space = Surroundings(dual, choices, size)
    windows = [space.window(centre) for centre in options]
    rests = [space.rest_of_bound(window) - space.slack for window in windows]
    tasks = [Task(n, window, x) for n, window in enumerate(windows) for x in options[window.variables[0]]]
    union = _Union(space, windows, tasks)
    for _ in range(sweeps):
        union.dual.sweep()
    found = {}
    for task, least, picked in zip(tasks, union.bounds(), union.choose(), strict=True):
        bound = math.inf if least >= union.barrier / 2 else rests[task.number] + float(least)
        changes = {v: x for v, x in zip(task.window.variables, picked, strict=True) if x != choices[v]}
        found[task.window.variables[0], task.option] = Found(bound, changes)
    return found


class _Union:
    """The windows of all tasks, each with its centre's option taken, as one problem.

    What the option forbids altogether costs `barrier` instead of `inf`, so that moved costs stay finite.
    """

    def __init__(self, space: Surroundings, windows: Sequence[Window], tasks: Sequence[Task]) -> None:
        self.space, self.windows, self.tasks = space, windows, tasks
        self.barrier = 1e4 * max(1.0, abs(space.bound))
        self.sizes = [len(task.window.variables) for task in tasks]
        self.first = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self._numbers: dict[tuple[int, bool, int], int] = {}
        self._tables: list[Array] = []
        edges: list[Edge] = []
        owner: list[int] = []
        for k, task in enumerate(tasks):
            for (e, a, b), flipped in zip(task.window.inside, task.window.flipped, strict=True):
                table = self._table(space.problem.edges[e].table, flipped, task.option if a == 0 else -1)
                edges.append(Edge(int(self.first[k]) + a, int(self.first[k]) + b, table))
                owner.append(k)
        self.owner = np.array(owner, dtype=np.int64)
        costs = self._costs([space.at_least(window) for window in windows])
        names = tuple(map(str, range(len(costs))))
        self.problem = Problem(names, costs, tuple(edges), tuple(self._tables))
        self.dual = Dual(self.problem, self._batches())
        self._start_from_whole()

    def _batches(self) -> list[list[int]]:
        """The centres, the variables next to them, and so on: one of each window."""
        first, sizes = self.first[:-1], np.array(self.sizes, dtype=np.int64)
        return [(first[sizes > k] + k).tolist() for k in range(max(self.sizes, default=0))]

    def _costs(self, costs: Sequence[list[Array]]) -> tuple[Array, ...]:
        """The windows' costs for each task, of the centre the option's alone."""
        found: list[Array] = []
        for task in self.tasks:
            own = costs[task.number]
            found += [np.minimum(own[0][task.option : task.option + 1], self.barrier), *own[1:]]
        return tuple(found)

    def _table(self, number: int, flipped: bool, option: int) -> int:
        """Number of a table here; with an option of its first end taken, of that row alone."""
        key = (number, flipped, option)
        if key not in self._numbers:
            table = self.space.problem.tables[number]
            table = table.T if flipped else table
            if option >= 0:
                table = np.minimum(table[option : option + 1], self.barrier)
            self._numbers[key] = len(self._tables)
            self._tables.append(np.ascontiguousarray(table))
        return self._numbers[key]

    def _start_from_whole(self) -> None:
        """The moved costs of the whole problem are where the windows' own begin."""
        dual, e = self.dual, 0
        moves = [self.space.moved_inside(window) for window in self.windows]
        for k, task in enumerate(self.tasks):
            for (_, a, b), (at_a, at_b) in zip(task.window.inside, moves[task.number], strict=True):
                at_a = at_a[task.option : task.option + 1] if a == 0 else at_a
                for end, local, moved in ((0, a, at_a), (1, b, at_b)):
                    start, v = dual.ends[e, end], int(self.first[k]) + local
                    dual.moved[start : start + len(moved)] = moved
                    dual.theta[dual.start[v] : dual.start[v + 1]] += moved
                e += 1

    def bounds(self) -> Array:
        """Each task's window, at least."""
        found = np.zeros(len(self.tasks))
        if len(self.problem.costs):
            least = np.minimum.reduceat(self.dual.theta, self.dual.start[:-1])
            np.add.at(found, np.repeat(np.arange(len(self.tasks)), self.sizes), least)
        of_edges = np.array([float(table.min()) for table in self.dual.edge_tables()])
        np.add.at(found, self.owner, of_edges)
        return found

    def choose(self) -> list[list[int]]:
        """Each task's choices inside its window, the others as chosen; the best of two beginnings."""
        costs = self._costs([self.space.as_chosen(window) for window in self.windows])
        costs = tuple(np.minimum(cost, self.barrier) for cost in costs)
        problem = Problem(self.problem.names, costs, self.problem.edges, self.problem.tables)
        stay: list[int] = []
        for task in self.tasks:
            stay += [0, *(self.space.choices[v] for v in task.window.variables[1:])]
        tries = [descend(problem, start) for start in (decode(self.dual), stay)]
        values = [self._values(problem, choices) for choices in tries]
        found = []
        for k, task in enumerate(self.tasks):
            best = tries[int(values[1][k] < values[0][k])]
            found.append([task.option, *best[int(self.first[k]) + 1 : int(self.first[k + 1])]])
        return found

    def _values(self, problem: Problem, choices: Sequence[int]) -> Array:
        """What each task's window costs under these choices."""
        found = np.zeros(len(self.tasks))
        own = np.array([cost[x] for cost, x in zip(problem.costs, choices, strict=True)])
        np.add.at(found, np.repeat(np.arange(len(self.tasks)), self.sizes), own)
        pairs = [problem.tables[edge.table][choices[edge.u], choices[edge.w]] for edge in problem.edges]
        np.add.at(found, self.owner, np.array(pairs))
        return found
