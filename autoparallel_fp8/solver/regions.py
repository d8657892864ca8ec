"""Better choices by solving one region at a time: some variables free, the others as they are.

A region grows from a variable, or from a few that hold something at one time, over their edges until its tables are as
large as a program solves in about a second. The room that the fixed variables leave is its limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ..problem import Array, Edge, Problem
from ..timed import Index
from .flat import Flat
from .lazy_rows import Closed, close, rows_at
from .room import Room
from .timeline import Timeline
from .tools import Tools

REGION_PAIRS = 12_000  # table entries inside a region before its programs' presolve
PROGRAM_PAIRS = 20_000
TIGHT = 0.02  # of the limit: times with less room than this get a row from the start
MAX_TIMES = 30


class Regions:
    """Regions of a problem around full choices that keep the limit."""

    def __init__(self, flat: Flat, room: Room, timeline: Timeline, excess: Array) -> None:
        self.flat, self.room, self.timeline, self.excess = flat, room, timeline, excess
        problem = flat.problem
        self.around: list[list[tuple[int, int, bool]]] = [[] for _ in problem.names]  # neighbour, table, is own first
        for edge in problem.edges:
            self.around[edge.u].append((edge.w, edge.table, True))
            self.around[edge.w].append((edge.u, edge.table, False))

    def options_of(self, v: int, slack: float) -> Index:
        """The options of v whose excess is at most the slack, and the one chosen."""
        begin = int(self.flat.start[v])
        allowed = self.excess[begin : begin + int(self.flat.sizes[v])] <= slack
        allowed[self.room.choices[v]] = True
        return np.flatnonzero(allowed)

    def grow(self, seeds: Iterable[int], slack: float) -> dict[int, Index]:
        """Variables, breadth first from the seeds, with the options they may take; one with a single one stays."""
        queue = deque(seeds)
        seen, free, pairs = set(queue), {}, 0
        while queue and pairs < REGION_PAIRS:
            v = queue.popleft()
            options = self.options_of(v, slack)
            if len(options) > 1:
                free[v] = options
                pairs += sum(len(options) * len(free[w]) for w, _, _ in self.around[v] if w in free)
            if len(self.around[v]) > 100 and len(free) > 1:
                continue  # a hub may change, but does not lead everywhere
            for w, _, _ in self.around[v]:
                if w not in seen:
                    seen.add(w)
                    queue.append(w)
        return free

    def solve(self, free: dict[int, Index], tools: Tools) -> Closed | None:
        """The best choices of the region within the limit, as full choices; what is fixed stays."""
        if not free:
            return None
        variables = np.array(sorted(free), dtype=np.int64)
        part, current = self._part(variables, free), self.room.choices.copy()
        taken = sum((self.room.held_at_all(int(v)) for v in variables), np.zeros(self.timeline.num_times))
        limit = self.room.left + taken

        def widen(chosen: tuple[int, ...]) -> Index:
            full = current.copy()
            for v, x in zip(variables.tolist(), chosen, strict=True):
                full[v] = free[v][x]
            return full

        def make(times: Index) -> Problem:
            made = rows_at(times, self.room, variables, limit)
            options = [free[v] for v in variables.tolist()]
            return replace(
                part, rows=tuple(replace(r, terms={k: c[options[k]] for k, c in r.terms.items()}) for r in made)
            )

        return close(make, widen, self._tight(taken), self.timeline, tools, PROGRAM_PAIRS)

    def _tight(self, taken: Array) -> Index:
        """Times with little room, the tightest of each stretch, where the region holds something."""
        size = float(np.abs(self.timeline.limit).max(initial=0.0))
        left = np.where(taken > 0, self.room.left, np.inf)
        found: list[int] = []
        width = max(1, len(left) // 200)
        while len(found) < MAX_TIMES and left.min(initial=np.inf) < TIGHT * size:
            found.append(int(left.argmin()))
            left[max(0, found[-1] - width) : found[-1] + width + 1] = np.inf
        return np.array(sorted(found), dtype=np.int64)

    def _part(self, variables: Index, free: dict[int, Index]) -> Problem:
        problem, choices = self.flat.problem, self.room.choices
        position = {v: k for k, v in enumerate(variables.tolist())}
        costs, tables = list[Array](), list[Array]()
        edges: list[Edge] = []
        for v in variables.tolist():
            own = free[v]
            cost = problem.costs[v][own]
            for w, number, is_first in self.around[v]:
                table = problem.tables[number] if is_first else problem.tables[number].T
                if w not in position:
                    cost = cost + table[own, choices[w]]
                elif is_first:
                    edges.append(Edge(position[v], position[w], len(tables)))
                    tables.append(np.ascontiguousarray(table[np.ix_(own, free[w])]))
            costs.append(cost)
        return Problem(tuple(map(str, variables.tolist())), tuple(costs), tuple(edges), tuple(tables))
