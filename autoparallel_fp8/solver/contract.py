"""A `TimedProblem` made small without losing a solution: variables that a neighbour decides are merged into it.

Most edges of a traced program say that two ops lie alike, so one variable stands for hundreds in the end. What is left
are its costs and tables, and for each left variable the usages of all that it stands for, each over its own time.
Steps are remembered in order; replayed backwards they lead from choices of what is left to choices of everything.

No optimum is lost: an option without a partner on some edge is in no solution; where each option of b allows just one
of a, every solution has the pair (f(x_b), x_b), whose costs and usages b takes over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..problem import Array, Edge, Problem
from ..timed import Index, TimedProblem
from .network import Pool

Step = tuple[int, int, Index]  # (v, v, options kept) or (variable gone, its decider, option for each of the decider's)


class Shared(Pool):
    """A pool that also remembers which options are possible and which are decided; these are shared as well."""

    def turned(self, table: Array) -> Array:
        """The transposed table, one object with whatever table is like it."""
        return self.memo(("turn", id(table)), lambda: self.share(table.T))

    def possible(self, vector: Array) -> Index | None:
        """Options that are not forbidden; None where all are."""
        return self.memo(("possible", id(vector)), lambda: self._where(np.isfinite(vector)))

    def partnered(self, table: Array) -> Index | None:
        """Options of the first side that have a partner; None where all have."""
        return self.memo(("partner", id(table)), lambda: self._where(np.asarray(np.isfinite(table).any(axis=1))))

    def decided(self, table: Array) -> Index | None:
        """For each option of the second side the only one of the first that goes with it; None where there are more."""
        return self.memo(("decided", id(table)), lambda: self._decided(table))

    def along(self, table: Array, decided: Index) -> Array:
        """For each option of the second side the cost of the pair that it makes."""
        key = ("along", id(table), id(decided))
        return self.memo(key, lambda: self.share(table[decided, np.arange(len(decided))]))

    def _where(self, mask: npt.NDArray[np.bool_]) -> Index | None:
        return None if mask.all() else self.share(np.flatnonzero(mask), np.int64)

    def _decided(self, table: Array) -> Index | None:
        finite = np.isfinite(table)
        return self.share(finite.argmax(axis=0), np.int64) if (finite.sum(axis=0) <= 1).all() else None


class Contraction:
    """The problem as it shrinks; `run` makes it as small as this file can.

    Attributes:
        costs: of each variable as its options are now.
        links: for each variable its neighbours with the table [own options, the neighbour's options].
        alive: whether a variable is still there.
        steps: what was done, in order.
        dead: whether a variable ran out of options: nothing is allowed.
    """

    def __init__(self, problem: TimedProblem) -> None:
        self.problem, self.shared = problem, Shared()
        self.costs = [self.shared.share(cost) for cost in problem.costs]
        tables = [self.shared.share(table) for table in problem.tables]
        self.links: list[dict[int, Array]] = [{} for _ in self.costs]
        for edge in problem.edges:
            self._link(edge.u, edge.w, tables[edge.table])
        self.alive = np.ones(len(self.costs), dtype=bool)
        self.steps: list[Step] = []
        self.dead = False
        self._queue: deque[int] = deque()
        self._is_queued = np.zeros(len(self.costs), dtype=bool)

    def run(self) -> None:
        """Drop what is impossible and merge what is decided, until nothing more is."""
        for v, cost in enumerate(self.costs):
            self._push(v)
            keep = self.shared.possible(cost)
            if keep is not None:
                self._keep(v, keep)
        while self._queue and not self.dead:
            v = self._queue.popleft()
            self._is_queued[v] = False
            for w in list(self.links[v]):
                if w in self.links[v] and not self.dead:
                    self._look(v, w)

    def _look(self, v: int, w: int) -> None:
        """One edge: options without a partner go, then one variable goes where the other decides it."""
        for a, b in ((v, w), (w, v)):
            keep = self.shared.partnered(self.links[a][b])
            if keep is not None:
                self._keep(a, keep)
        if self.dead:
            return
        small, large = (v, w) if len(self.links[v]) <= len(self.links[w]) else (w, v)
        for gone, stays in ((small, large), (large, small)):
            decided = self.shared.decided(self.links[gone][stays])
            if decided is not None:
                self._merge(gone, stays, decided)
                return

    def _merge(self, gone: int, stays: int, decided: Index) -> None:
        shared = self.shared
        paid = shared.along(self.links[gone][stays], decided)
        self.costs[stays] = shared.add(shared.add(self.costs[stays], shared.take(self.costs[gone], decided)), paid)
        del self.links[gone][stays], self.links[stays][gone]
        for x, table in self.links[gone].items():
            del self.links[x][gone]
            table = shared.take(table, decided)
            known = self.links[stays].get(x)
            self._link(stays, x, table if known is None else shared.add(known, table))
            self._push(x)
        self.links[gone] = {}
        self.alive[gone] = False
        self.steps.append((gone, stays, decided))
        self._push(stays)

    def _keep(self, v: int, keep: Index) -> None:
        self.costs[v] = self.shared.take(self.costs[v], keep)
        for w, table in self.links[v].items():
            self._link(v, w, self.shared.take(table, keep))
            self._push(w)
        self.steps.append((v, v, keep))
        self._push(v)
        self.dead |= not len(keep)

    def _link(self, v: int, w: int, table: Array) -> None:
        self.links[v][w] = table
        self.links[w][v] = self.shared.turned(table)

    def _push(self, v: int) -> None:
        if not self._is_queued[v]:
            self._is_queued[v] = True
            self._queue.append(v)

    def expand(self, choices: Sequence[int]) -> list[int]:
        """Choices of everything from choices of what is left, in the order of `left`."""
        full = np.zeros(len(self.costs), dtype=np.int64)
        full[self.left] = choices
        for v, decider, options in reversed(self.steps):
            full[v] = options[full[decider]]
        return full.tolist()

    def stands_for(self) -> list[tuple[int, Index]]:
        """For each variable the left one that decides it, and its option for each option of that one."""
        found: list[tuple[int, Index]] = [(v, np.arange(len(cost))) for v, cost in enumerate(self.costs)]
        for v, decider, options in reversed(self.steps):
            root, of_root = found[decider]
            found[v] = root, options[of_root]
        return found

    @property
    def left(self) -> Index:
        return np.flatnonzero(self.alive)

    def pairwise(self) -> Problem:
        """What is left, without the limit."""
        left = self.left.tolist()
        position = {v: i for i, v in enumerate(left)}
        numbers: dict[int, int] = {}
        tables: list[Array] = []
        edges = []
        for v in left:
            for w, table in self.links[v].items():
                if v < w:
                    number = numbers.setdefault(id(table), len(tables))
                    if number == len(tables):
                        tables.append(table)
                    edges.append(Edge(position[v], position[w], number))
        names = tuple(map(str, left))
        return Problem(names, tuple(self.costs[v] for v in left), tuple(edges), tuple(tables))
