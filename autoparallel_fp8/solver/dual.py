"""A lower bound by dual ascent, and what it rules out.

Costs are moved between variables and edges so that the sum of all separate minima, which is a lower bound whatever was
moved, goes up. A sweep visits the variables in order, forward and then backward: each collects what its edges on one
side can give and spreads it over the edges of the other side (SRMP: Kolmogorov, PAMI 2015; for pairs this is TRW-S).
Variables of the same role in equal layers are visited together, as one batch of numpy operations.

For edge e = (u, w): table seen by the bound = T_e[i, j] - moved_u[i] - moved_w[j], variable v: c_v + sum of moved_v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..problem import Array, Problem

Index = npt.NDArray[np.int64]

MANY = 8  # edges of one table in a batch that are handled together rather than beside others of that shape


@dataclass(frozen=True)
class _Group:
    """Edge ends of one shape, handled together. `own`, `other`: positions [edges, options] of their moved costs."""

    tables: Array  # [edges or 1, options of other, options of own]
    own: Index
    other: Index
    variable: Index  # positions [edges, options of own] in `theta`
    weight: Array  # [edges, 1] share of the variable's cost that is spread into the edge


@dataclass(frozen=True)
class _Batch:
    """Variables without edges among them, visited together: `collect` from one side, then `spread` to the other."""

    collect: list[_Group]
    spread: list[_Group]
    keep: list[tuple[Index, float]]  # positions in theta, share that stays


class Dual:
    """The moved costs of a problem without restrictions whose options are all possible on each edge.

    Rows are not looked at: the bound holds with them, as it does without.

    Attributes:
        theta: cost of each option of each variable after moving, one after the other; `start[v]` is where v begins.
        order: the variables as a sweep visits them; by default in batches of equal roles, else in those given, each
            without edges inside.
        moved: for each edge the moved costs of its u end, then of its w end; `ends[e]` says where the two begin.
    """

    def __init__(self, problem: Problem, batches: list[list[int]] | None = None) -> None:
        self.problem = problem
        sizes = [len(cost) for cost in problem.costs]
        self.start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.theta: Array = np.concatenate([*problem.costs, np.zeros(0)])
        lengths = np.array([(sizes[e.u], sizes[e.w]) for e in problem.edges], dtype=np.int64).reshape(-1)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.moved: Array = np.zeros(int(offsets[-1]))
        self.ends = offsets[:-1].reshape(-1, 2)
        self._has_given_batches = batches is not None
        batches = order_in_batches(problem) if batches is None else batches
        self.order = [v for batch in batches for v in batch]
        self._passes = self._plan(batches)

    def sweep(self) -> None:
        """One pass forward and one backward. The bound never falls, up to rounding."""
        for batches in self._passes:
            for batch in batches:
                self._visit(batch)

    def _visit(self, batch: _Batch) -> None:
        self.collect(batch)
        self.spread(batch)

    def collect(self, batch: _Batch) -> None:
        """Take what the edges on one side can give."""
        theta, moved = self.theta, self.moved
        for group in batch.collect:
            gained = (group.tables - moved[group.other][:, :, None]).min(axis=1)
            np.add.at(theta, group.variable, gained - moved[group.own])
            moved[group.own] = gained

    def spread(self, batch: _Batch) -> None:
        """Hand it on over the edges on the other side."""
        theta, moved = self.theta, self.moved
        for group in batch.spread:
            moved[group.own] -= group.weight * theta[group.variable]
        for positions, share in batch.keep:
            theta[positions] *= share

    def replace_costs(self, problem: Problem) -> None:
        """Go on with a problem that differs in variables' costs and the offset only."""
        self.theta += np.concatenate([*problem.costs, np.zeros(0)]) - np.concatenate([*self.problem.costs, np.zeros(0)])
        self.problem = problem

    def bound(self) -> float:
        """The lower bound, from the moved costs as they are: no assumption about how they came about."""
        total = self.problem.offset
        for v in range(self.problem.num_variables):
            total += float(self.theta[self.start[v] : self.start[v + 1]].min())
        return total + sum(float(table.min()) for table in self.edge_tables())

    def edge_tables(self) -> Iterator[Array]:
        """Each edge's table after moving."""
        for edge, (at_u, at_w) in zip(self.problem.edges, self.ends, strict=True):
            table = self.problem.tables[edge.table]
            n, m = table.shape
            yield table - self.moved[at_u : at_u + n, None] - self.moved[None, at_w : at_w + m]

    def _plan(self, batches: list[list[int]]) -> tuple[list[_Batch], list[_Batch]]:
        """Index arrays of the forward and of the backward pass."""
        rank = np.zeros(self.problem.num_variables, dtype=np.int64)
        for position, batch in enumerate(batches):
            rank[batch] = position
        lower: list[list[tuple[int, int]]] = [[] for _ in self.problem.names]  # (edge, own end) to earlier variables
        upper: list[list[tuple[int, int]]] = [[] for _ in self.problem.names]
        for e, edge in enumerate(self.problem.edges):
            first_u = rank[edge.u] < rank[edge.w]
            (upper if first_u else lower)[edge.u].append((e, 0))
            (lower if first_u else upper)[edge.w].append((e, 1))
        self._stacks: dict[tuple[int, ...], Array] = {}
        forward = [self._make_batch(batch, lower, upper) for batch in batches]
        backward = [self._make_batch(batch, upper, lower) for batch in reversed(batches)]
        return forward, backward

    def _make_batch(
        self, batch: list[int], sources: list[list[tuple[int, int]]], targets: list[list[tuple[int, int]]]
    ) -> _Batch:
        weights = {v: 1.0 / max(len(sources[v]), len(targets[v]), 1) for v in batch}
        keeps: dict[float, list[Index]] = {}
        for v in batch:
            share = 1.0 - weights[v] * len(targets[v])
            keeps.setdefault(share, []).append(np.arange(self.start[v], self.start[v + 1]))
        return _Batch(
            self._make_groups([(v, e, end) for v in batch for e, end in sources[v]], weights),
            self._make_groups([(v, e, end) for v in batch for e, end in targets[v]], weights),
            [(np.concatenate(positions), share) for share, positions in keeps.items() if share != 1.0],
        )

    def _make_groups(self, ends: list[tuple[int, int, int]], weights: dict[int, float]) -> list[_Group]:
        by_table: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for v, e, end in ends:
            by_table.setdefault((self.problem.edges[e].table, end), []).append((v, e, end))
        groups: dict[object, list[tuple[int, int, int]]] = {}
        for (number, end), members in by_table.items():
            is_own_group = self._has_given_batches and len(members) >= MANY  # one table for all, or a copy for each
            key = (number, end, "table") if is_own_group else self._shape_of(members[0])
            groups.setdefault(key, []).extend(members)
        return [self._make_group(self._shape_of(members[0]), members, weights) for members in groups.values()]

    def _shape_of(self, member: tuple[int, int, int]) -> tuple[int, int]:
        """Options of the other end, options of the own end."""
        _, e, end = member
        n, m = self.problem.tables[self.problem.edges[e].table].shape
        return (n, m) if end else (m, n)

    def _make_group(
        self, shape: tuple[int, int], members: list[tuple[int, int, int]], weights: dict[int, float]
    ) -> _Group:
        others, owns = shape
        keys = {(self.problem.edges[e].table, end) for _, e, end in members}
        shown = members[:1] if len(keys) == 1 else members
        tables = [self.problem.tables[self.problem.edges[e].table] for _, e, _ in shown]
        vs, es, ends = (np.array(column, dtype=np.int64) for column in zip(*members, strict=True))
        return _Group(
            np.stack([t if end else t.T for t, (_, _, end) in zip(tables, shown, strict=True)]),
            self.ends[es, ends][:, None] + np.arange(owns),
            self.ends[es, 1 - ends][:, None] + np.arange(others),
            self.start[vs][:, None] + np.arange(owns),
            np.array([[weights[int(v)]] for v in vs]),
        )


def order_in_batches(problem: Problem, rounds: int = 4) -> list[list[int]]:
    """All variables as batches without edges inside: those of one role together, roles by their first variable.

    A role is what a variable and its surroundings up to `rounds` edges away look like. In a repeated layer each
    position is a role of its own, so a sweep goes through all layers side by side.
    """
    around: list[list[tuple[int, int, int]]] = [[] for _ in problem.names]
    for edge in problem.edges:
        around[edge.u].append((edge.table, 0, edge.w))
        around[edge.w].append((edge.table, 1, edge.u))
    numbers: dict[object, int] = {}
    roles = [numbers.setdefault(cost.tobytes(), len(numbers)) for cost in problem.costs]
    for _ in range(rounds):
        numbers = {}
        roles = [
            numbers.setdefault((roles[v], tuple(sorted((t, s, roles[w]) for t, s, w in around[v]))), len(numbers))
            for v in range(problem.num_variables)
        ]
    members: dict[int, list[int]] = {}
    for v, role in enumerate(roles):
        members.setdefault(role, []).append(v)
    return [batch for group in members.values() for batch in _independent(group, around)]


def _independent(group: list[int], around: list[list[tuple[int, int, int]]]) -> list[list[int]]:
    """The group in as few parts without edges inside as going through it once gives."""
    parts: list[list[int]] = []
    part_of: dict[int, int] = {}
    for v in group:
        taken = {part_of[w] for _, _, w in around[v] if w in part_of}
        part = next(k for k in range(len(parts) + 1) if k not in taken)
        if part == len(parts):
            parts.append([])
        parts[part].append(v)
        part_of[v] = part
    return parts
