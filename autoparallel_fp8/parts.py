"""Which part of every dim one rank holds, as runs of positions within each factor.

Ranks are row-major over the mesh axes. Where several axes split one factor, the later axis is the major one; a split
that is finer than its factor runs on into the next factors of the dim (see `layout.py`, which counts what is left;
this file says which).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from .layout import Factors, Layout


@dataclass(frozen=True)
class Part:
    """One rank's part of a dim: of every factor, major to minor, `counts[k]` positions from `starts[k]` on.

    >>> Part((4, 3), (2, 0), (1, 3)).positions()
    (6, 7, 8)
    """

    factors: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many positions the rank holds."""
        return prod(self.counts)

    @property
    def full_size(self) -> int:
        """How many the dim has."""
        return prod(self.factors)

    @property
    def is_whole(self) -> bool:
        return self.counts == self.factors

    def positions(self) -> tuple[int, ...]:
        """Positions in the whole dim, in the order in which the rank holds them."""
        found = [0]
        for size, start, count in zip(self.factors, self.starts, self.counts, strict=True):
            found = [base * size + k for base in found for k in range(start, start + count)]
        return tuple(found)

    def find(self, index: Any) -> tuple[Any, Any]:
        """Where the rank holds these positions of the whole dim: (position in its part, whether it holds them).

        Args:
            index: an integer tensor. Positions that the rank does not hold get 0.
        """
        here, local = (index >= 0) & (index < self.full_size), index * 0
        below = self.full_size
        for size, start, count in zip(self.factors, self.starts, self.counts, strict=True):
            below //= size
            digit = index // below % size - start
            here = here & (digit >= 0) & (digit < count)
            local = local * count + digit
        return local * here, here


def cut(factors: Sequence[int], start: int, ways: int, index: int) -> tuple[list[int], list[int]]:
    """Piece `index` of `ways` equal pieces, from factor `start` of a dim on: (starts, counts) within each factor.

    >>> cut((4, 8), 0, 8, 3)
    ([1, 4], [1, 4])
    """
    starts, counts = [0] * len(factors), list(factors)
    position = start
    while ways > 1:
        size = factors[position]
        if size % ways == 0:
            counts[position] = size // ways
            starts[position] = index * counts[position]
            break
        ways //= size
        starts[position], counts[position] = index // ways, 1
        index %= ways
        position += 1
    return starts, counts


@cache
def coordinates(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Position of every rank on each mesh axis, in rank order.

    >>> coordinates((2, 2))
    ((0, 0), (0, 1), (1, 0), (1, 1))
    """
    return tuple(itertools.product(*(range(size) for size in sizes)))


def index_along(axes: Sequence[int], sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> int:
    """Number of a rank among those that differ along these axes only, the later axis being major.

    >>> index_along((0, 1), (2, 3), (1, 2))
    5
    """
    index = 0
    for axis in sorted(axes, reverse=True):
        index = index * sizes[axis] + coordinate[axis]
    return index


@cache
def parts(factors: Factors, layout: Layout, sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[Part, ...]:
    """The part of each dim that the rank at `coordinate` holds.

    Args:
        factors: of the global tensor; () for a dim of size 1.
        layout: one that fits the factors on this mesh.
        sizes: of the mesh axes.
        coordinate: the rank's position on each axis.
    """
    axes_of: dict[tuple[int, int], list[int]] = {}
    for axis, placement in enumerate(layout):
        if placement.kind in "SF":
            axes_of.setdefault((placement.dim, placement.factor), []).append(axis)
    starts = [[0] * len(dim) for dim in factors]
    counts = [list(dim) for dim in factors]
    for (d, factor), axes in axes_of.items():
        ways = prod(sizes[a] for a in axes)
        first, held = cut(factors[d], factor, ways, index_along(axes, sizes, coordinate))
        for k, size in enumerate(factors[d]):
            if held[k] < size:
                starts[d][k], counts[d][k] = first[k], held[k]
    return tuple(Part(dim, tuple(a), tuple(b)) for dim, a, b in zip(factors, starts, counts, strict=True))
