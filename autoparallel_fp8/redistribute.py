"""From one layout of a tensor to another: which collectives, of which sizes, over which axes.

`steps` lists what one collective can do to a layout; `Routes` finds the cheapest sequence between any two layouts of a
tensor. The plan stores these steps, costs add them up and the lowered program runs them: what is priced is what runs.

Only the minor axis of a split factor can be given up or taken in one plain collective (`layout.py` says which is
minor); several axes that split the same factor can go together. A slice moves nothing. Partial sums are reduced,
never made. Frozen splits and own scales have no steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .graph import TensorSpec
from .layout import Factors, Layout, Placement, R, Universe, local_factors, local_shape, universe
from .reach import Reach


@dataclass(frozen=True)
class Step:
    """One collective (or a slice) that turns `source` into `target`.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "slice".
        axes: numbers of the mesh axes it runs over, together.
        num_bytes: the gathered tensor (all_gather, all_to_all) or the unreduced one (reduce_scatter, all_reduce) on
            one device; what is kept for a slice. Bytes of the tensor's own dtype.
        reduction: "sum", "max" or "".
    """

    kind: str
    axes: tuple[int, ...]
    source: Layout
    target: Layout
    num_bytes: int
    reduction: str = ""


Price = Callable[[Step, TensorSpec], float]
"""(step, global tensor) -> microseconds."""


def steps(
    spec: TensorSpec, factors: Factors, layout: Layout, sizes: tuple[int, ...], splits: tuple[tuple[int, int], ...]
) -> Iterator[Step]:
    """Everything one collective can do to a tensor in this layout.

    Args:
        spec: the global tensor.
        factors: of its dims.
        splits: (dim, factor) pairs that may be split.
        layout: where it starts; no frozen split, no own scale.
        sizes: of the mesh axes.
    """
    wanted = [Placement("S", d, f) for d, f in splits]
    for axes in _axis_groups(layout, sizes):
        old = layout[axes[0]]
        targets = [R, *wanted] if old.kind != "R" else wanted
        for new in targets:
            if new == old or (len(axes) > 1 and new.kind == "S" and old.kind == "S"):
                continue
            target = tuple(new if a in axes else p for a, p in enumerate(layout))
            if old.kind == new.kind == "S" and not _is_exchange(factors, layout, new, axes[0], sizes):
                continue
            if _is_minor(target, axes, new) and local_factors(factors, target, sizes) is not None:
                yield _step(spec, factors, layout, target, axes, old, new, sizes)


def _axis_groups(layout: Layout, sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Axes with one placement that may change together: any one that is minor, or several that are the minor ones."""
    real = [a for a, size in enumerate(sizes) if size > 1]
    for count in range(1, len(real) + 1):
        for axes in itertools.combinations(real, count):
            same = layout[axes[0]]
            if all(layout[a] == same for a in axes) and _is_minor(layout, axes, same):
                yield axes


def _is_minor(layout: Layout, axes: tuple[int, ...], placement: Placement) -> bool:
    """Whether no other axis splits the same factor more finely: the minor axes of a factor are the earliest ones."""
    if placement.kind != "S":
        return True
    return all(a in axes or layout[a] != placement or a > max(axes) for a in range(len(layout)))


def _is_exchange(factors: Factors, layout: Layout, new: Placement, axis: int, sizes: tuple[int, ...]) -> bool:
    """Whether each rank can cut what it holds the new way too, so that every rank sends every other an equal piece.

    It cannot where the old split runs on into the new one's factor, or the other way round.
    """
    return local_factors(factors, (*layout, new), (*sizes, sizes[axis])) is not None


def _step(
    spec: TensorSpec,
    factors: Factors,
    source: Layout,
    target: Layout,
    axes: tuple[int, ...],
    old: Placement,
    new: Placement,
    sizes: tuple[int, ...],
) -> Step:
    before = _local_bytes(spec, factors, source, sizes)
    after = _local_bytes(spec, factors, target, sizes)
    if old.kind == "R":
        return Step("slice", axes, source, target, after)
    if old.kind == "S":
        ranks = int(np.prod([sizes[a] for a in axes]))
        kind, size = ("all_gather", after) if new.kind == "R" else ("all_to_all", before * ranks)
        return Step(kind, axes, source, target, size)
    reduction = "sum" if old.kind == "P" else "max"
    return Step("all_reduce" if new.kind == "R" else "reduce_scatter", axes, source, target, before, reduction)


def _local_bytes(spec: TensorSpec, factors: Factors, layout: Layout, sizes: tuple[int, ...]) -> int:
    count = 1
    for size in local_shape(spec.shape, factors, layout, sizes):
        count *= size
    return count * spec.dtype.itemsize


class Routes:
    """Cheapest sequences of steps between all layouts of one tensor.

    Attributes:
        layouts: the tensor's `Universe`.
        cost_us: [layouts, layouts]; inf where no sequence leads there (into a partial sum).
    """

    def __init__(self, spec: TensorSpec, factors: Factors, reach: Reach, sizes: tuple[int, ...], price: Price) -> None:
        self.spec, self.factors, self.reach, self.sizes = spec, factors, reach, sizes
        self.layouts: Universe = universe(factors, sizes, reach.splits, reach.partials)
        self._price = price

    @cached_property
    def _solved(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32], dict[tuple[int, int], Step]]:
        count = len(self.layouts.layouts)
        cost = np.full((count, count), np.inf)
        np.fill_diagonal(cost, 0.0)
        direct: dict[tuple[int, int], Step] = {}
        for i, layout in enumerate(self.layouts.layouts):
            for step in steps(self.spec, self.factors, layout, self.sizes, self.reach.splits):
                j = self.layouts.index[step.target]
                us = self._price(step, self.spec)
                if us < cost[i, j]:
                    cost[i, j] = us
                    direct[i, j] = step
        via = np.full((count, count), -1, dtype=np.int32)
        for k in range(count):  # Floyd-Warshall
            through = cost[:, k, None] + cost[None, k, :]
            better = through < cost - 1e-12
            cost[better] = through[better]
            via[better] = k
        return cost, via, direct

    @property
    def cost_us(self) -> npt.NDArray[np.float64]:
        return self._solved[0]

    def step_us(self, step: Step) -> float:
        """What one of the steps costs."""
        return self._price(step, self.spec)

    def path(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The cheapest steps from one layout to another; () where they are equal."""
        if source == target:
            return ()
        return tuple(self._path(self.layouts.index[source], self.layouts.index[target]))

    def _path(self, i: int, j: int) -> Iterator[Step]:
        _, via, direct = self._solved
        if i == j:
            return
        k = int(via[i, j])
        if k < 0:
            yield direct[i, j]
        else:
            yield from self._path(i, k)
            yield from self._path(k, j)
