"""The problem while presolve works on it: a graph of variables that shrinks in place, and the record of how.

A `Network` is made from a `Problem` and turned back into a smaller one. Its arrays live in a `Pool`: equal arrays are
one object, and a result computed from pooled arrays is computed once, whoever asks: 32 equal layers cost as much
as one. Every change goes through a few methods (`keep`, `add_cost`, `link`, `remove`, `join`) that keep both directions
of an edge, the rows and the record in step, and wake the reductions that watch the variables concerned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..problem import Array, Edge, Problem, Row

T = TypeVar("T")
Options = npt.NDArray[np.intp]  # numbers of options, or of pairs of options


class Pool:
    """Equal arrays as one object, and a memory of what was computed from them.

    Memo keys name pooled arrays by `id`; the pool keeps every array it handed out, so an id never changes its meaning.
    """

    def __init__(self) -> None:
        self._arrays: dict[Hashable, Array] = {}
        self._ids: dict[int, Array] = {}
        self._flips: dict[int, Array] = {}
        self._memo: dict[Hashable, Any] = {}

    def share(self, array: npt.NDArray[Any], dtype: Any = np.float64) -> npt.NDArray[Any]:
        """The one object that stands for all arrays of this content."""
        if id(array) in self._ids:
            return array
        array = np.ascontiguousarray(array, dtype=dtype)
        if not array.flags.owndata:
            array = array.copy()
        content = hashlib.blake2b(array.tobytes(), digest_size=16).digest()
        shared = self._arrays.setdefault((array.shape, array.dtype.char, content), array)
        self._ids[id(shared)] = shared
        return shared

    def flip(self, table: Array) -> Array:
        """The transposed table, itself pooled; flipping twice gives the first object."""
        flipped = self._flips.get(id(table))
        if flipped is None:
            flipped = table.T
            self._ids[id(flipped)] = flipped
            self._flips[id(table)] = flipped
            self._flips[id(flipped)] = table
        return flipped

    def memo(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, once a key. The key holds all that the result depends on."""
        try:
            return self._memo[key]
        except KeyError:
            value = self._memo[key] = make()
            return value

    def add(self, a: Array, b: Array) -> Array:
        """a + b."""
        return self.memo(("add", id(a), id(b)), lambda: self.share(a + b))

    def take(self, array: Array, options: Options) -> Array:
        """The rows `options` of a table or vector."""
        return self.memo(("take", id(array), options.tobytes()), lambda: self.share(array[options]))


@dataclass(frozen=True)
class Kept:
    """Options of a variable that were kept: new option k is old option `options[k]`."""

    variable: int
    options: Options

    def restore(self, choices: list[int]) -> None:
        choices[self.variable] = int(self.options[choices[self.variable]])


@dataclass(frozen=True)
class Removed:
    """A variable that takes its best option once its neighbours have chosen. `tables[k]`: [own, of neighbours[k]]."""

    variable: int
    cost: Array
    neighbours: tuple[int, ...]
    tables: tuple[Array, ...]

    def restore(self, choices: list[int]) -> None:
        total = self.cost
        for neighbour, table in zip(self.neighbours, self.tables, strict=True):
            total = total + table[:, choices[neighbour]]
        choices[self.variable] = int(np.argmin(total))


@dataclass(frozen=True)
class Joined:
    """Variable `gone` was made part of `kept`: option k of the pair is options `pairs[k]` of (kept, gone)."""

    kept: int
    gone: int
    pairs: Options

    def restore(self, choices: list[int]) -> None:
        kept, gone = self.pairs[choices[self.kept]]
        choices[self.kept], choices[self.gone] = int(kept), int(gone)


Record = Kept | Removed | Joined


@dataclass(frozen=True)
class Undo:
    """Leads from choices of the smaller problem to choices of the bigger one, at the same objective.

    Attributes:
        num_variables: of the bigger problem.
        kept: for each variable of the smaller problem, its number in the bigger one.
        records: what was done, in order.
    """

    num_variables: int
    kept: tuple[int, ...]
    records: tuple[Record, ...]

    def __call__(self, choices: Sequence[int]) -> tuple[int, ...]:
        full = [0] * self.num_variables
        for variable, choice in zip(self.kept, choices, strict=True):
            full[variable] = int(choice)
        for record in reversed(self.records):
            record.restore(full)
        return tuple(full)


class Network:
    """A `Problem` without restrictions as a graph that is changed in place; see the module.

    Attributes:
        costs: one pooled vector a variable.
        links: links[v][w] is the table [options of v, options of w]; links[w][v] is its flip.
        terms: terms[v][r] is the coefficient vector of v in row r.
        rows: the problem's rows; `bases` the constant of each, `members` the variables left in each.
        alive: which variables are left.
        held: variables that stay, with every option that is possible, whatever it costs.
        dead: a variable that ran out of options: the problem has no solution.
    """

    def __init__(self, problem: Problem, pool: Pool | None = None, held: frozenset[int] = frozenset()) -> None:
        assert not problem.restrictions, "restrictions are applied before a network is made"
        self.pool = pool or Pool()
        self.held = held
        self.names = problem.names
        self.costs = [self.pool.share(cost) for cost in _shared_once(self.pool, problem.costs)]
        self.links: list[dict[int, Array]] = [{} for _ in problem.names]
        self.rows = problem.rows
        self.bases = [row.base for row in problem.rows]
        self.terms: list[dict[int, Array]] = [{} for _ in problem.names]
        self.members: list[dict[int, None]] = [{} for _ in problem.rows]
        self.alive = [True] * len(problem.names)
        self.dead: int | None = None
        self.offset = problem.offset
        self.records: list[Record] = []
        self._watches: list[dict[int, None]] = []
        tables = _shared_once(self.pool, problem.tables)
        for edge in problem.edges:
            self.links[edge.u][edge.w] = tables[edge.table]
            self.links[edge.w][edge.u] = self.pool.flip(tables[edge.table])
        for r, row in enumerate(problem.rows):
            for v, coefficients in row.terms.items():
                if coefficients.any():
                    self.terms[v][r] = self.pool.share(coefficients)
                    self.members[r][v] = None
        for v, cost in enumerate(self.costs):
            if not len(cost):
                self.dead = v

    def watch(self) -> dict[int, None]:
        """A queue of variables to look at: all of them now, later each one that something changed around."""
        queue = dict.fromkeys(v for v, alive in enumerate(self.alive) if alive)
        self._watches.append(queue)
        return queue

    def touch(self, v: int) -> None:
        for queue in self._watches:
            queue[v] = None

    def keep(self, v: int, options: Options) -> None:
        """Keep these options of v only, in this order."""
        pool = self.pool
        self.costs[v] = pool.take(self.costs[v], options)
        for w, table in self.links[v].items():
            self.links[v][w] = table = pool.take(table, options)
            self.links[w][v] = pool.flip(table)
            self.touch(w)
        for r, coefficients in self.terms[v].items():
            self.terms[v][r] = pool.take(coefficients, options)
        self.records.append(Kept(v, options))
        self.touch(v)
        if not len(options) and self.dead is None:
            self.dead = v

    def add_cost(self, v: int, cost: Array) -> None:
        self.costs[v] = self.pool.add(self.costs[v], cost)
        self.touch(v)

    def link(self, u: int, w: int, table: Array) -> None:
        """Add a table [options of u, options of w] to what the two have already."""
        if w in self.links[u]:
            table = self.pool.add(self.links[u][w], table)
        self.links[u][w] = table
        self.links[w][u] = self.pool.flip(table)
        self.touch(u)
        self.touch(w)

    def unlink(self, u: int, w: int) -> None:
        del self.links[u][w], self.links[w][u]
        self.touch(u)
        self.touch(w)

    def remove(self, v: int) -> None:
        """Take v out; its part of the objective must have gone into its neighbours or the offset."""
        neighbours = tuple(self.links[v])
        self.records.append(Removed(v, self.costs[v], neighbours, tuple(self.links[v].values())))
        for w in neighbours:
            self.unlink(v, w)
        self._forget(v)

    def join(self, kept: int, gone: int, pairs: Options) -> None:
        """Make the two one variable in the place of `kept`, with an option for each of `pairs` [number, 2]."""
        pool, first, second = self.pool, pairs[:, 0].copy(), pairs[:, 1].copy()
        table = self.links[kept][gone]
        key = ("join", id(self.costs[kept]), id(self.costs[gone]), id(table))
        cost_kept, cost_gone = self.costs[kept], self.costs[gone]
        self.unlink(kept, gone)
        self.costs[kept] = pool.memo(
            key, lambda: pool.share(cost_kept[first] + cost_gone[second] + table[first, second])
        )
        for x, old in list(self.links[kept].items()):
            self.unlink(kept, x)
            self.link(kept, x, pool.take(old, first))
        for x, old in list(self.links[gone].items()):
            self.unlink(gone, x)
            self.link(kept, x, pool.take(old, second))
        for r, coefficients in self.terms[kept].items():
            self.terms[kept][r] = pool.take(coefficients, first)
        for r, coefficients in self.terms[gone].items():
            more = pool.take(coefficients, second)
            self.terms[kept][r] = pool.add(self.terms[kept][r], more) if r in self.terms[kept] else more
            self.members[r][kept] = None
        self.records.append(Joined(kept, gone, pairs))
        self._forget(gone)
        self.touch(kept)

    def leave_rows(self, v: int) -> None:
        """Move the row terms of a variable with one option into the rows' constants."""
        assert len(self.costs[v]) == 1, "only a settled variable has a constant share of a row"
        for r, coefficients in self.terms[v].items():
            self.bases[r] += float(coefficients[0])
            del self.members[r][v]
        self.terms[v] = {}

    def drop_row(self, r: int) -> None:
        """Forget a row that no choice can break."""
        for v in self.members[r]:
            del self.terms[v][r]
            self.touch(v)
        self.members[r] = {}

    def _forget(self, v: int) -> None:
        for r in self.terms[v]:
            del self.members[r][v]
        self.terms[v] = {}
        self.alive[v] = False
        for queue in self._watches:
            queue.pop(v, None)

    def undo(self) -> Undo:
        kept = tuple(v for v, alive in enumerate(self.alive) if alive)
        return Undo(len(self.names), kept, tuple(self.records))

    def problem(self) -> Problem:
        """What is left, with variables and edges in the order of the first problem."""
        kept = [v for v, alive in enumerate(self.alive) if alive]
        number = {v: k for k, v in enumerate(kept)}
        tables: dict[int, int] = {}
        values: list[Array] = []
        edges = []
        for v in kept:
            for w in sorted(self.links[v]):
                if v < w:
                    table = self.links[v][w]
                    if id(table) not in tables:
                        tables[id(table)] = len(values)
                        values.append(table)
                    edges.append(Edge(number[v], number[w], tables[id(table)]))
        rows = tuple(
            Row(row.name, row.limit, {number[v]: self.terms[v][r] for v in sorted(self.members[r])}, self.bases[r])
            for r, row in enumerate(self.rows)
            if self.members[r] or self.bases[r] > row.bound
        )
        return Problem(
            names=tuple(self.names[v] for v in kept),
            costs=tuple(self.costs[v] for v in kept),
            edges=tuple(edges),
            tables=tuple(values),
            rows=rows,
            offset=self.offset,
        )


def _shared_once(pool: Pool, arrays: Sequence[Array]) -> list[Array]:
    """Pooled arrays; an object that stands several times is hashed once."""
    seen: dict[int, Array] = {}
    return [seen.setdefault(id(a), pool.share(a)) if id(a) not in seen else seen[id(a)] for a in arrays]
