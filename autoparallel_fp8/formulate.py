"""From prices to the `Problem`: cost vectors, shared tables, rows and restrictions; from here on plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from .layout import Layout
from .problem import Edge, Problem, Restriction, Row
from .structure import Link, Structure

Array = npt.NDArray[np.float64]

LinkTable = Callable[[Link, tuple[Layout, ...], tuple[Layout, ...]], tuple[object, Callable[[], Array]]]
"""(link, layouts it starts from, layouts it ends at) -> a key that equal tables share, and how to make the table."""


def formulate(
    shape: Structure,
    costs: Sequence[Array],
    table_of: LinkTable,
    rows: Sequence[Row],
    restrictions: Sequence[Restriction],
) -> Problem:
    """The problem in numbers.

    Args:
        shape: variables and links.
        costs: of each option of each variable, in microseconds.
        table_of: prices links; equal keys are made once.
        rows, restrictions: as `Problem` takes them.
    """
    pairs: dict[tuple[int, int], list[tuple[object, bool]]] = {}
    makers: dict[object, Callable[[], Array]] = {}
    for link in shape.links:
        starts = shape.sources[link.source][link.source_slot]
        ends = shape.targets[link.target][link.target_slot]
        key, make = table_of(link, starts, ends)
        makers.setdefault(key, make)
        u, w = link.source, link.target
        pairs.setdefault((min(u, w), max(u, w)), []).append((key, u > w))
    made: dict[object, Array] = {}
    numbers: dict[tuple[tuple[object, bool], ...], int] = {}
    tables: list[Array] = []
    edges = []
    for (u, w), parts in sorted(pairs.items()):
        combined = tuple(parts)
        if combined not in numbers:
            for key, _ in parts:
                if key not in made:
                    made[key] = makers[key]()
            numbers[combined] = len(tables)
            tables.append(np.sum([made[key].T if flipped else made[key] for key, flipped in parts], axis=0))
        edges.append(Edge(u, w, numbers[combined]))
    names = tuple(v.name for v in shape.variables)
    return Problem(names, tuple(costs), tuple(edges), tuple(tables), tuple(rows), tuple(restrictions))
