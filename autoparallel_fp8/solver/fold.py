"""A problem with a long row of equal layers made short, and what is found there led back.

Between the first and last three of the layers that names number, all layers are alike: same options, costs and tables.
The short problem has those six, the third tied to the fourth as it was to its own neighbour. Its moved costs, copied to
every layer that is missing, are moved costs of the long problem: they bound it whatever they are (`dual`), and where
the short one has settled in its middle, they bound it as well as sweeps over all layers would. Choices are copied
likewise. 126 layers then cost what six cost, and one look at the whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..problem import Array, Edge, Problem, Row
from .dual import Dual

KEPT = 3  # layers on each side
LEAST = 12  # layers; fewer are not worth it
_NUMBERED = re.compile(r"^(.*?\.)(\d+)(\..*)$")

Place = tuple[int, str] | None  # layer and name in it; None outside of the layers


@dataclass(frozen=True)
class Fold:
    """A long problem and its short version.

    Attributes:
        long, short: the problems; the short one's rows have the terms of its own variables alone.
        variables: for each variable of the long problem the one of the short problem that it is like.
        edges: the same for edges.
        layers: of each variable of the long problem; -1 outside of the layers.
    """

    long: Problem
    short: Problem
    variables: tuple[int, ...]
    edges: tuple[int, ...]
    layers: tuple[int, ...]

    def lift_choices(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the long problem: every layer as the one it is like."""
        return tuple(choices[v] for v in self.variables)

    def lift(self, found: Dual, problem: Problem) -> Dual:
        """A dual of the long problem with the moved costs of a dual of the short one.

        Args:
            found: of the short problem, at any costs.
            problem: the long problem without rows, at the same costs.
        """
        dual = Dual(problem)
        for e, (source, ends) in enumerate(zip(self.edges, dual.ends, strict=True)):
            edge = problem.edges[e]
            for v, start, at in zip((edge.u, edge.w), ends, found.ends[source], strict=True):
                size = len(problem.costs[v])
                dual.moved[start : start + size] = found.moved[at : at + size]
                where = int(dual.start[v])
                dual.theta[where : where + size] += found.moved[at : at + size]
        return dual


def fold(problem: Problem) -> Fold | None:
    """The short version of a problem without restrictions; None where its layers are few or not alike."""
    places, depth = _places(problem.names)
    if depth < LEAST:
        return None
    _place_the_rest(problem.edges, places)
    at: dict[Place | str, int] = {
        place or name: v for v, (place, name) in enumerate(zip(places, problem.names, strict=True))
    }
    kept = [v for v, place in enumerate(places) if place is None or not KEPT <= place[0] < depth - KEPT]
    number = {v: k for k, v in enumerate(kept)}
    variables = []
    for v, place in enumerate(places):
        like = v if v in number else at.get((KEPT - 1, place[1]))  # type: ignore[index]
        if like is None or not _is_alike(problem.costs[v], problem.costs[like]):
            return None
        variables.append(number[like])
    folded = _fold_edges(problem, places, depth, at, number, variables)
    if folded is None:
        return None
    edges, sources = folded
    short = Problem(
        tuple(problem.names[v] for v in kept),
        tuple(problem.costs[v] for v in kept),
        edges,
        problem.tables,
        tuple(_short_row(row, number) for row in problem.rows),
        offset=problem.offset,
    )
    layers = tuple(-1 if place is None else place[0] for place in places)
    return Fold(problem, short, tuple(variables), sources, layers)


def num_layers(problem: Problem) -> int:
    """How many layers names number; 0 where numbers are missing."""
    return _places(problem.names)[1]


def _places(names: Sequence[str]) -> tuple[list[Place], int]:
    """Where each variable stands, and how many layers there are: of the prefix with the most of them."""
    found = [_NUMBERED.match(name) for name in names]
    numbers: dict[str, set[int]] = {}
    for match in found:
        if match:
            numbers.setdefault(match[1], set()).add(int(match[2]))
    prefix = max(sorted(numbers), key=lambda p: len(numbers[p]), default="")
    depth = len(numbers.get(prefix, ()))
    if numbers.get(prefix) != set(range(depth)):
        return [None] * len(names), 0
    return [(int(m[2]), m[3]) if m and m[1] == prefix else None for m in found], depth


def _place_the_rest(edges: Sequence[Edge], places: list[Place]) -> None:
    """Gives a variable without a number the layer of its neighbours, where all that have one are of one layer."""
    around: dict[int, set[tuple[int, str]]] = {}
    for edge in edges:
        for v, w in ((edge.u, edge.w), (edge.w, edge.u)):
            place = places[w]
            if places[v] is None and place is not None:
                around.setdefault(v, set()).add(place)
    taken: dict[Place, int] = {}
    for v, near in sorted(around.items()):
        layers = {layer for layer, _ in near}
        place = (min(layers), f"beside {sorted(name for _, name in near)}")
        if len(layers) == 1 and taken.setdefault(place, v) == v:
            places[v] = place


def _is_alike(a: Array, b: Array) -> bool:
    return a is b or (a.shape == b.shape and bool((a == b).all()))


def _fold_edges(
    problem: Problem,
    places: list[Place],
    depth: int,
    at: dict[Place | str, int],
    number: dict[int, int],
    variables: list[int],
) -> tuple[tuple[Edge, ...], tuple[int, ...]] | None:
    """Edges of the short problem, and for each edge of the long one the one it is like; None where one is like none."""

    def like(edge: Edge) -> tuple[int, int] | None:
        """The two variables of the short problem."""
        u, w = places[edge.u], places[edge.w]
        first, second = variables[edge.u], variables[edge.w]
        if u is not None and w is not None and abs(u[0] - w[0]) == 1:
            low = min(u[0], w[0])
            if KEPT - 1 <= low < depth - KEPT:  # over the seam
                ends = [at.get((KEPT - 1 if p[0] == low else depth - KEPT, p[1])) for p in (u, w)]
                if ends[0] is None or ends[1] is None:
                    return None
                first, second = number[ends[0]], number[ends[1]]
        return first, second

    known: dict[tuple[int, int], int] = {}
    edges: list[Edge] = []
    sources = []
    order = sorted(range(len(problem.edges)), key=lambda e: not _is_kept(problem.edges[e], places, depth))
    chosen: dict[int, int] = {}
    for e in order:
        edge = problem.edges[e]
        ends = like(edge)
        if ends is None or ends[0] >= ends[1]:
            return None
        if ends not in known:
            if not _is_kept(edge, places, depth):
                return None
            known[ends] = len(edges)
            edges.append(Edge(*ends, edge.table))
        source = known[ends]
        if not _is_alike(problem.tables[edges[source].table], problem.tables[edge.table]):
            return None
        chosen[e] = source
    sources = [chosen[e] for e in range(len(problem.edges))]
    return tuple(edges), tuple(sources)


def _is_kept(edge: Edge, places: list[Place], depth: int) -> bool:
    """Whether an edge makes one of the short problem: between what is kept, or from the third layer to the next."""
    layers = sorted(-1 if place is None else place[0] for place in (places[edge.u], places[edge.w]))
    if layers == [KEPT - 1, KEPT]:
        return True
    return not any(KEPT <= layer < depth - KEPT for layer in layers)


def _short_row(row: Row, number: dict[int, int]) -> Row:
    return replace(row, terms={number[v]: c for v, c in row.terms.items() if v in number})


def mixed(
    fold: Fold, cheap: Sequence[int], small: Sequence[int], is_allowed: Callable[[tuple[int, ...]], bool]
) -> tuple[int, ...]:
    """Choices of the long problem: as many layers as are allowed as in the cheap choices, the rest as in the others.

    Args:
        fold: of the problem.
        cheap, small: choices of the long problem.
        is_allowed: of choices; true of the small ones, and the less likely the more layers are cheap.
    """

    def first(count: int) -> tuple[int, ...]:
        return tuple(a if -1 < layer < count else b for a, b, layer in zip(cheap, small, fold.layers, strict=True))

    low, high = 0, max(fold.layers) + 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_allowed(first(middle)) else (low, middle - 1)
    return first(low)
