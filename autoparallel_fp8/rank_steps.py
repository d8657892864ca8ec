"""What one rank of a process group runs for a step of a redistribution: a collective between two permutations.

A step cuts one dim into equal pieces, one a member of the group. Seen along that dim a tensor is `[before, pieces,
after]`; a gather puts the pieces between, a scatter takes one out. Pieces travel in the tensor's own memory order, so a
column-major tensor stays column-major, and a gather along its major dim copies nothing. One-byte floats travel as
bytes; they are never summed. `shards.run_step` does the same for all ranks in one process, by positions.

Functional collectives (torch.ops._c10d_functional) are used rather than torch.distributed's public ones, which write
into a buffer: Inductor and autograd know the functional ones, torch 2.11 to 2.14.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .graph import TensorSpec
from .layout import Factors, Layout, local_factors, local_shape, local_stride
from .parts import index_along
from .redistribute import Step
from .shards import as_bytes

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Cut:
    """Where the pieces of a dim lie: `dim` seen as [before, pieces, after].

    Attributes:
        order: sizes of the mesh axes that the pieces go over, in mesh order. Members of a group are numbered row-major
            over them, pieces with the later axis major.
    """

    dim: int
    before: int
    after: int
    order: tuple[int, ...]

    @property
    def pieces(self) -> int:
        return prod(self.order)


@dataclass(frozen=True)
class RankStep:
    """A step as one rank runs it, with everything but the group worked out.

    Attributes:
        kind, reduction: as in `Step`.
        source_cut, target_cut: of the dim that is gathered, and of the one that is cut.
        shape, stride: of the result.
        index: number of the rank's own piece (for a slice).
    """

    kind: str
    reduction: str
    source_cut: Cut | None
    target_cut: Cut | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    index: int
    dtype: torch.dtype


def rank_step(
    step: Step, spec: TensorSpec, factors: Factors, sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> RankStep:
    """The step on the rank at a coordinate.

    Args:
        step: from `redistribute`.
        spec: the global tensor.
        factors: of its dims.
        sizes: of the mesh axes.
        coordinate: of the rank.
    """
    shape = local_shape(spec.shape, factors, step.target, sizes)
    return RankStep(
        step.kind,
        step.reduction,
        _cut(step, step.source, factors, step.target, sizes),
        _cut(step, step.target, factors, step.source, sizes),
        shape,
        local_stride(spec.shape, spec.stride, shape),
        index_along(step.axes, sizes, coordinate),
        spec.dtype,
    )


def _cut(step: Step, layout: Layout, factors: Factors, whole: Layout, sizes: tuple[int, ...]) -> Cut | None:
    """Where `layout` cuts, along the step's axes, what is there under `whole`."""
    placement = layout[step.axes[0]]
    if placement.kind != "S":
        return None
    held = local_factors(factors, whole, sizes)
    assert held is not None
    dim, order = held[placement.dim], tuple(sizes[a] for a in step.axes)
    before = prod(dim[: placement.factor])
    return Cut(placement.dim, before, prod(dim) // before // prod(order), order)


def run_rank_step(x: Tensor, step: RankStep, group: str) -> Tensor:
    """The rank's tensor after the step.

    Args:
        x: the rank's tensor before.
        step: what to do.
        group: name of the process group of the step's axes.
    """
    if step.kind == "slice":
        assert step.target_cut is not None
        return _in_order(_piece(x, step.target_cut, step.index), step)
    moved = as_bytes(x)
    if step.kind == "all_reduce":
        sent, order = _dense(moved)
        made = _c10d.wait_tensor(_c10d.all_reduce(sent, step.reduction, group))
        return _in_order(_undense(made, moved.shape, order), step)
    if step.kind == "all_gather":
        assert step.source_cut is not None
        count = step.source_cut.pieces
        sent, order = _dense(moved)
        made = _c10d.wait_tensor(_c10d.all_gather_into_tensor(sent, count, group))
        return _in_order(_joined(made, moved.shape, order, step.source_cut), step)
    assert step.target_cut is not None
    pieces = _pieces(moved, step.target_cut)
    sent, order = _dense(pieces, first=1)
    count = step.target_cut.pieces
    if step.kind == "reduce_scatter":
        made = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(sent, step.reduction, count, group))
        return _in_order(_undense(made, pieces.shape[1:], order), step)
    assert step.kind == "all_to_all" and step.source_cut is not None
    each = [sent.shape[0] // count] * count
    made = _c10d.wait_tensor(_c10d.all_to_all_single(sent, each, each, group))
    return _in_order(_joined(made, pieces.shape[1:], order, step.source_cut), step)


def _dense(x: Tensor, first: int = 0) -> tuple[Tensor, tuple[int, ...]]:
    """The elements in memory order as one dim, and that order of the dims; the first `first` dims go first."""
    rest = sorted(range(first, x.ndim), key=lambda d: (-x.stride()[d], d))
    order = (*range(first), *rest)
    return x.permute(order).reshape(-1), tuple(d - first for d in rest)


def _undense(flat: Tensor, shape: torch.Size, order: tuple[int, ...]) -> Tensor:
    """The tensor of that shape whose elements in this order of dims are `flat`."""
    stored = flat.view([shape[d] for d in order])
    return stored.permute([order.index(d) for d in range(len(shape))])


def _joined(flat: Tensor, shape: torch.Size, order: tuple[int, ...], cut: Cut) -> Tensor:
    """Pieces of that shape, one after the other, put together along the cut's dim."""
    stored = flat.view([*cut.order, *(shape[d] for d in order)])
    axes = len(cut.order)
    places = [axes + order.index(d) for d in range(len(shape))]
    pieces = list(range(axes))[::-1]  # the later axis is major
    split = stored.permute([*places[: cut.dim], places[cut.dim], *places[cut.dim + 1 :], *pieces])
    opened = split.unflatten(cut.dim, (cut.before, cut.after))  # [..., before, after, ..., pieces]
    n = len(shape) + 1
    moved = opened.permute([*range(cut.dim + 1), *range(n, n + axes), *range(cut.dim + 1, n)])
    whole = [*shape[: cut.dim], shape[cut.dim] * cut.pieces, *shape[cut.dim + 1 :]]
    return moved.reshape(whole)


def _pieces(x: Tensor, cut: Cut) -> Tensor:
    """[pieces, ...]: what goes to each member, in the order of the members."""
    axes = len(cut.order)
    opened = x.unflatten(cut.dim, (cut.before, *cut.order[::-1], cut.after))
    moved = opened.permute(
        [*range(cut.dim + axes, cut.dim, -1), *range(cut.dim + 1), *range(cut.dim + axes + 1, opened.ndim)]
    )
    shape = [*x.shape[: cut.dim], cut.before * cut.after, *x.shape[cut.dim + 1 :]]
    return moved.reshape([cut.pieces, *shape])


def _piece(x: Tensor, cut: Cut, index: int) -> Tensor:
    opened = as_bytes(x).unflatten(cut.dim, (cut.before, cut.pieces, cut.after)).select(cut.dim + 1, index)
    return opened.flatten(cut.dim, cut.dim + 1)


def _in_order(x: Tensor, step: RankStep) -> Tensor:
    """In the result's memory order, and its own dtype."""
    x = x.view(step.dtype) if x.dtype != step.dtype else x
    if x.stride() == step.stride:
        return x
    order = sorted(range(x.ndim), key=lambda d: (-step.stride[d], d))
    back = [order.index(d) for d in range(x.ndim)]
    return x.permute(order).contiguous().permute(back)
