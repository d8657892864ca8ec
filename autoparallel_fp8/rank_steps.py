"""What one rank of a process group runs for a step of a redistribution: send, a collective, receive.

A step cuts one dim into equal pieces, one a member of the group. Seen along that dim a tensor is `[before, pieces,
after]`; a gather puts the pieces between, a scatter takes one out. Pieces travel in the tensor's own memory order, so a
column-major tensor stays column-major, and a gather along its major dim copies nothing. One-byte floats travel as
bytes; they are never summed. `shards.run_step` does the same for all ranks in one process, by positions.

Everything here is known before any tensor is there: shapes and orders come from the layouts, not from what arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .graph import TensorSpec
from .layout import Factors, Layout, local_factors, local_shape, local_spec
from .parts import index_along
from .redistribute import Step
from .shards import as_bytes


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


@dataclass(frozen=True)
class RankStep:
    """A step as one rank runs it, with everything but the group worked out.

    Attributes:
        kind, reduction: as in `Step`.
        ways: members of the group.
        source_cut, target_cut: of the dim that is gathered, and of the one that is cut.
        before, after: the rank's tensor.
        order: its dims, outermost in memory first.
        index: number of the rank's own piece (for a slice).
    """

    kind: str
    reduction: str
    ways: int
    source_cut: Cut | None
    target_cut: Cut | None
    before: TensorSpec
    after: TensorSpec
    order: tuple[int, ...]
    index: int


def rank_step(
    step: Step, spec: TensorSpec, factors: Factors, sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> RankStep:
    """The step on the rank at a coordinate.

    Args:
        step: from `redistribute`.
        spec: the global tensor.
        factors: of its dims.
        sizes: of the mesh axes.
        coordinate: of the rank; nothing but `index` depends on it.
    """
    before, after = (
        local_spec(spec, local_shape(spec.shape, factors, layout, sizes)) for layout in (step.source, step.target)
    )
    return RankStep(
        step.kind,
        step.reduction,
        prod(sizes[a] for a in step.axes),
        _cut(step, step.source, factors, step.target, sizes),
        _cut(step, step.target, factors, step.source, sizes),
        before,
        after,
        tuple(sorted(range(len(spec.shape)), key=lambda d: (-spec.stride[d], d))),
        index_along(step.axes, sizes, coordinate),
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


def sliced(x: Tensor, step: RankStep) -> Tensor:
    """The rank's own piece of its tensor, dense: a step of kind "slice"."""
    assert step.target_cut is not None
    cut = step.target_cut
    opened = as_bytes(x).unflatten(cut.dim, (cut.before, step.ways, cut.after)).select(cut.dim + 1, step.index)
    return _placed(opened.flatten(cut.dim, cut.dim + 1), step)


def send(x: Tensor, step: RankStep) -> Tensor:
    """What the rank gives to the collective: its elements in memory order, one dim; [pieces, ...] where it is cut."""
    moved = as_bytes(x)
    if step.kind in ("all_gather", "all_reduce"):
        return moved.permute(step.order).reshape(-1)
    cut = step.target_cut
    assert cut is not None
    axes = len(cut.order)
    opened = moved.unflatten(cut.dim, (cut.before, *cut.order[::-1], cut.after))
    places = [d + (axes + 1) * (d > cut.dim) for d in range(x.ndim)]
    inner = [place for d in step.order for place in ([cut.dim, cut.dim + axes + 1] if d == cut.dim else [places[d]])]
    return opened.permute([*range(cut.dim + axes, cut.dim, -1), *inner]).reshape(-1)


def receive(flat: Tensor, step: RankStep) -> Tensor:
    """The rank's tensor after the step, from what the collective gave: one dim, pieces one after the other."""
    cut = step.source_cut if step.kind in ("all_gather", "all_to_all") else None
    if cut is None:
        return _ordered(flat, step)
    shape = [*step.after.shape]
    shape[cut.dim] = cut.before * cut.after
    axes = len(cut.order)
    sizes = [size for d in step.order for size in ([cut.before, cut.after] if d == cut.dim else [shape[d]])]
    opened = flat.view([*cut.order, *sizes])
    at = axes + sum(1 for d in step.order[: step.order.index(cut.dim)])
    pieces = list(range(axes))[::-1]  # the later axis is major
    joined = opened.permute([*range(axes, at + 1), *pieces, *range(at + 1, opened.ndim)])
    return _ordered(joined.reshape(-1), step)


def _ordered(flat: Tensor, step: RankStep) -> Tensor:
    """The tensor whose elements in memory order are `flat`."""
    stored = flat.view([step.after.shape[d] for d in step.order])
    return _placed(stored.permute([step.order.index(d) for d in range(len(step.order))]), step)


def _placed(x: Tensor, step: RankStep) -> Tensor:
    """In the result's dtype and exact strides."""
    x = x.view(step.after.dtype) if x.dtype != step.after.dtype else x
    return in_order(x, step.after.stride)


def in_order(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The same values with these strides; a copy only where they differ for a dim of more than one element."""
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), stride, strict=True)):
        return x
    shape = x.shape
    for d, step in enumerate(stride):
        if step == 0 and shape[d] > 1:
            x = x.narrow(d, 0, 1)  # repeats in memory
    order = sorted(range(x.ndim), key=lambda d: (-stride[d], d))
    back = [order.index(d) for d in range(x.ndim)]
    dense = as_bytes(x).permute(order).contiguous().permute(back)
    dense = dense.view(x.dtype) if dense.dtype != x.dtype else dense
    return dense.expand(shape) if x.shape != shape else dense


def received(numel: int, step: RankStep) -> int:
    """How many elements the collective gives for so many sent."""
    return {"all_gather": numel * step.ways, "reduce_scatter": numel // step.ways}.get(step.kind, numel)


def dry(flat: Tensor, step: RankStep) -> Tensor:
    """A tensor of the size that the collective gives for `flat`, of the same dtype."""
    return torch.empty(received(flat.numel(), step), dtype=flat.dtype, device=flat.device)
