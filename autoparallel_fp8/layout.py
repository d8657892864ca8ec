"""How one tensor lies on the mesh: a placement per mesh axis, local shapes and strides, and how it all prints.

A dim is a product of *factors*, major to minor (tokens = batch x sequence, hidden = heads x head size), and an axis
splits one factor of one dim: `S(0)` is the leading factor of dim 0, `S(0.1)` the second. So batch over dp and
sequence over tp both survive the flattening before a GEMM. Several axes may split one factor; the *later* mesh axis
is then the major one (tp outside dp), so that giving up the earlier one is one plain gather. A split of a factor may
run on into the next factors of its dim (64 ways over heads 32 x size 128). Splits are even.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from .errors import UsageError
from .graph import TensorSpec

Factors = tuple[tuple[int, ...], ...]
"""Sizes of the factors of each dim, major to minor; () for a dim of size 1."""


class Placement(NamedTuple):
    """What one mesh axis does to a tensor.

    kind: "R" whole on every rank; "S" split at `factor` of `dim`; "P" partial, to be summed; "M" partial, to be
    maximised; "F" split and *frozen*: every rank's part is scaled by that rank's own scale; "V" such a scale: every
    rank has a value of its own, taken of the part that a split at `factor` of `dim` gives it. "Q" a part of a sum
    that is still to be multiplied by such scales. F, V and Q stay as they are: no collective moves them.
    """

    kind: str
    dim: int = -1
    factor: int = -1

    def __str__(self) -> str:
        where = f"{self.dim}" if self.factor == 0 else f"{self.dim}.{self.factor}"
        words = {
            "R": "R",
            "P": "P(sum)",
            "M": "P(max)",
            "S": f"S({where})",
            "F": f"Frozen({where})",
            "V": f"Own({where})",
            "Q": "Unscaled",
        }
        return words[self.kind]


R = Placement("R")
P = Placement("P")
M = Placement("M")
Q = Placement("Q")


def split(dim: int, factor: int = 0) -> Placement:
    return Placement("S", dim, factor)


def frozen(dim: int, factor: int = 0) -> Placement:
    return Placement("F", dim, factor)


def own(dim: int, factor: int = 0) -> Placement:
    return Placement("V", dim, factor)


Layout = tuple[Placement, ...]
"""One placement per mesh axis, in mesh order."""


def format_layout(layout: Layout) -> str:
    """`R, S(0)`, in mesh order.

    >>> format_layout((R, split(0)))
    'R, S(0)'
    """
    return ", ".join(str(p) for p in layout)


def parse_layout(text: str, num_axes: int, ndim: int) -> Layout:
    """The layout written as `"R, S(0)"`: one of R, S(dim), P(sum), P(max) for each mesh axis.

    Raises:
        UsageError: not one placement an axis, a dim out of range, or a word that is no placement.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != num_axes:
        raise UsageError(
            f"placement {text!r} has {len(parts)} parts where the mesh has {num_axes} axes",
            do="write one of R, S(dim) or P(sum) for each axis of the mesh, in mesh order",
        )
    return tuple(_parse_placement(part, ndim, text) for part in parts)


def _parse_placement(part: str, ndim: int, text: str) -> Placement:
    words = {"R": R, "P(sum)": P, "P": P, "P(max)": M}
    if part in words:
        return words[part]
    match = re.fullmatch(r"S\((-?\d+)(?:\.(\d+))?\)", part)
    if not match:
        raise UsageError(f"{part!r} in {text!r} is no placement", do="write R, S(dim), P(sum) or P(max)")
    dim = int(match[1])
    if not -ndim <= dim < ndim:
        raise UsageError(
            f"{part!r} in {text!r} names dim {dim} of a tensor with {ndim} dims", do=f"dims are 0 to {ndim - 1}"
        )
    return split(dim % ndim, int(match[2] or 0))


def is_moved(layout: Layout) -> bool:
    """Whether a collective may act on the layout: nothing frozen, no scale of one rank's own."""
    return all(p.kind not in "FVQ" for p in layout)


@cache
def local_factors(factors: Factors, layout: Layout, sizes: tuple[int, ...]) -> Factors | None:
    """What is left of each factor on one rank; None where the split is not even or does not fit.

    Args:
        factors: of the global tensor.
        layout: a placement per axis.
        sizes: size of each mesh axis.
    """
    ways: dict[tuple[int, int], int] = {}
    for placement, size in zip(layout, sizes, strict=True):
        if placement.kind in "SF":
            key = (placement.dim, placement.factor)
            ways[key] = ways.get(key, 1) * size
    local = [list(dim) for dim in factors]
    for (dim, start), count in ways.items():
        if count == 1:
            continue
        position = start
        while count > 1:
            if position >= len(local[dim]) or (position > start and (dim, position) in ways):
                return None
            size = local[dim][position]
            if size % count == 0:
                local[dim][position], count = size // count, 1
            elif count % size == 0:
                local[dim][position], count = 1, count // size
            else:
                return None
            position += 1
    return tuple(tuple(dim) for dim in local)


@cache
def local_shape(shape: tuple[int, ...], factors: Factors, layout: Layout, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one rank's part, all parts being equal.

    >>> local_shape((16, 8), ((16,), (8,)), (R, split(0)), (2, 4))
    (4, 8)
    """
    local = local_factors(factors, layout, sizes)
    assert local is not None, f"layout {format_layout(layout)} does not fit {shape}"
    result = []
    for size, dim in zip(shape, local, strict=True):
        product = 1
        for factor in dim:
            product *= factor
        result.append(product if dim else size)
    return tuple(result)


@cache
def local_stride(shape: tuple[int, ...], stride: tuple[int, ...], local: tuple[int, ...]) -> tuple[int, ...]:
    """Stride of one rank's part: the memory order of the global tensor, dense. Broadcast dims (stride 0) stay 0.

    >>> local_stride((8, 4), (1, 8), (8, 2))
    (1, 8)
    """
    order = sorted(range(len(shape)), key=lambda d: (stride[d], -d))
    result, step = [0] * len(shape), 1
    for dim in order:
        if stride[dim] == 0 and shape[dim] > 1:
            continue
        result[dim] = step
        step *= max(local[dim], 1)
    return tuple(result)


def local_spec(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """A part of this shape of a tensor, in the tensor's memory order."""
    return TensorSpec(shape, local_stride(spec.shape, spec.stride, shape), spec.dtype)


@dataclass(frozen=True)
class Universe:
    """Every layout that a tensor may have between ops: R, S of each factor that fits, P and M where it may be partial.

    Attributes:
        layouts: in a fixed order, all replicated first.
        index: layout -> its position.
    """

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]


@cache
def universe(
    factors: Factors, sizes: tuple[int, ...], splits: tuple[tuple[int, int], ...], partial_kinds: str
) -> Universe:
    """All movable layouts of a tensor with these factors on a mesh with axes of these sizes.

    Args:
        splits: (dim, factor) pairs that an axis may split.
        partial_kinds: "" (never partial), "P", "M" or "PM".
    """
    single = [R]
    single += [split(d, f) for d, f in splits]
    single += [Placement(kind) for kind in partial_kinds]
    layouts = []
    for layout in itertools.product(*([R] if size == 1 else single for size in sizes)):
        if not {P, M} <= set(layout) and local_factors(factors, layout, sizes) is not None:
            layouts.append(layout)
    return Universe(tuple(layouts), {layout: i for i, layout in enumerate(layouts)})


def split_order(layout: Layout, axis_names: tuple[str, ...]) -> dict[int, list[str]]:
    """Which axes split each dim, major to minor, for every dim that is split.

    >>> split_order((split(0), split(0)), ("dp", "tp"))
    {0: ['tp', 'dp']}
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for axis, placement in enumerate(layout):
        if placement.kind in "SF":
            found.setdefault(placement.dim, []).append((placement.factor, -axis))
    return {dim: [axis_names[-minus] for _, minus in sorted(items)] for dim, items in sorted(found.items())}
