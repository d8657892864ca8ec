"""A pairwise problem as flat arrays: what each option costs beside the others' choices, for all variables at once.

Variables of one colour have no edges among them, so all of them may take their best option at the same time: a pass
over the colours is a pass of coordinate descent in a few numpy operations, whatever the number of variables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..problem import Array, Problem
from ..timed import Index


@dataclass(frozen=True)
class _Colour:
    """Variables of one colour. Their options follow each other; `segment` is where each variable's begin."""

    variables: Index
    options: Index  # places among all options of the problem
    segment: Index
    owner: Index  # for each option the variable's place in `variables`
    place: Index  # for each (edge end, option): which of `options`
    entry: Index  # for each (edge end, option): place in `pool` where the neighbour takes its first option
    stride: Index  # for each (edge end, option): step in `pool` from one option of the neighbour to the next
    neighbour: Index  # for each (edge end, option)


class Flat:
    """Options of all variables one after the other; those of v begin at `start[v]`."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        sizes = np.array([len(cost) for cost in problem.costs], dtype=np.int64)
        self.sizes = sizes
        self.start: Index = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.costs: Array = np.concatenate([*problem.costs, np.zeros(0)])
        self.pool: Array = np.concatenate([*(t.ravel() for t in problem.tables), np.zeros(0)])
        table_sizes = [t.size for t in problem.tables]
        begin = np.concatenate([[0], np.cumsum(table_sizes)]).astype(np.int64)
        self.u = np.array([e.u for e in problem.edges], dtype=np.int64)
        self.w = np.array([e.w for e in problem.edges], dtype=np.int64)
        self.begin: Index = begin[np.array([e.table for e in problem.edges], dtype=np.int64)]
        self.batches = colours(problem)
        self.colours = [self._make(batch) for batch in self.batches]

    def cost(self, choices: Index) -> float:
        """Sum of costs of full choices, without the offset."""
        own = self.costs[self.start[:-1] + choices].sum()
        return float(own + self.pool[self.begin + choices[self.u] * self.sizes[self.w] + choices[self.w]].sum())

    def beside(self, colour: _Colour, choices: Index, costs: Array) -> Array:
        """For each option of the colour's variables its cost while the others stay."""
        paid = self.pool[colour.entry + choices[colour.neighbour] * colour.stride]
        return costs[colour.options] + np.bincount(colour.place, paid, len(colour.options))

    def descend(self, choices: Index, costs: Array, passes: int) -> Index:
        """Choices that are no dearer at these costs of options: passes of coordinate descent."""
        choices = choices.copy()
        for _ in range(passes):
            is_changed = False
            for colour in self.colours:
                total = self.beside(colour, choices, costs)
                least = np.minimum.reduceat(total, colour.segment)
                now = total[colour.segment + choices[colour.variables]]
                better = np.flatnonzero(least < now)
                if len(better):
                    is_changed = True
                    is_least = np.flatnonzero(total == least[colour.owner])
                    owners, at = np.unique(colour.owner[is_least], return_index=True)
                    best = is_least[at] - colour.segment[owners]
                    choices[colour.variables[better]] = best[better]
            if not is_changed:
                break
        return choices

    def _make(self, batch: list[int]) -> _Colour:
        variables = np.array(batch, dtype=np.int64)
        sizes = self.sizes[variables]
        segment = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)[:-1]
        position = np.full(len(self.sizes), -1, dtype=np.int64)
        position[variables] = np.arange(len(variables))
        as_u, as_w = np.flatnonzero(position[self.u] >= 0), np.flatnonzero(position[self.w] >= 0)
        parts = [self._ends(as_u, self.u, self.w, True), self._ends(as_w, self.w, self.u, False)]
        own, option, entry, stride, neighbour = (np.concatenate(column) for column in zip(*parts, strict=True))
        owner = np.repeat(np.arange(len(variables)), sizes)
        options = self.start[variables][owner] + np.arange(len(owner)) - segment[owner]
        place = segment[position[own]] + option
        return _Colour(variables, options, segment, owner, place, entry, stride, neighbour)

    def _ends(self, edges: Index, own: Index, other: Index, is_first: bool) -> tuple[Index, ...]:
        """Of these edge ends, for each option: own variable, option, entry, stride, neighbour."""
        sizes = self.sizes[own[edges]]
        repeated = np.repeat(edges, sizes)
        option = np.arange(len(repeated)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        width = self.sizes[self.w[repeated]]
        entry = self.begin[repeated] + (option * width if is_first else option)
        stride = np.ones_like(width) if is_first else width
        return own[repeated], option, entry, stride, other[repeated]


def colours(problem: Problem) -> list[list[int]]:
    """All variables in few batches without edges inside: those with many neighbours are given a colour first."""
    around: list[list[int]] = [[] for _ in problem.names]
    for edge in problem.edges:
        around[edge.u].append(edge.w)
        around[edge.w].append(edge.u)
    colour = [-1] * problem.num_variables
    batches: list[list[int]] = []
    for v in sorted(range(problem.num_variables), key=lambda v: (-len(around[v]), v)):
        taken = {colour[w] for w in around[v]}
        colour[v] = next(c for c in range(len(batches) + 1) if c not in taken)
        if colour[v] == len(batches):
            batches.append([])
        batches[colour[v]].append(v)
    return [sorted(batch) for batch in batches]
