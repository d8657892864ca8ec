"""A plan's layout as DTensor's placements, so that a rank's part with them is a DTensor that means the same.

Both cut a dim axis by axis; they differ in how an axis' cut is written. A layout names the factor of the dim, and of
several axes on one factor the later is the major one. DTensor goes through the mesh axes in order, each cutting what
the earlier ones left: `Shard(dim)` into n pieces, `_StridedShard(dim, split_factor=k)` each of k equal blocks into n
pieces, of which a rank takes the same one everywhere. So k is the number of blocks, of what the earlier axes left,
that are outside the axis' pieces:

    k(axis) = factors of the dim before the axis' own, as the earlier axes left them
              * sizes of the later axes that split the same factor

Where k is 1 that is `Shard`. FSDP2 over tensor parallelism, `S(0), S(0)`, is `_StridedShard(0, split_factor=tp),
Shard(0)`, as FSDP2 itself writes it. Splits being even, k exists for every layout. DTensor takes a tensor apart by
them as they say, but puts some of those together wrongly: `obstacle` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

# No public name in torch 2.11 to 2.14, where its place and signature are the same: FSDP2 makes it for its users, and
# no combination of public placements says that a later axis cuts first.
from torch.distributed.tensor.placement_types import _StridedShard

from .errors import ApplyError
from .layout import Factors, Layout, format_layout, is_moved, local_factors
from .parts import Part, parts


def dtensor_placements(layout: Layout, factors: Factors, sizes: tuple[int, ...]) -> tuple[Placement, ...]:
    """DTensor's placement on each mesh axis.

    >>> from autoparallel_fp8.layout import R, split
    >>> dtensor_placements((split(0), R, split(0)), ((16,), (8,)), (2, 2, 4))
    (_StridedShard(dim=0, sf=4), Replicate(), Shard(dim=0))

    Args:
        layout: one that fits the factors on this mesh.
        factors: of the global tensor.
        sizes: of the mesh axes.

    Raises:
        ApplyError: there is an `obstacle`.
    """
    sentence = obstacle(layout, factors, sizes)
    if sentence:
        raise ApplyError(sentence, do="take the rank's part as a plain tensor, or constrain the tensor's layout")
    return tuple(_placement(axis, layout, factors, sizes) for axis in range(len(sizes)))


def as_dtensor(
    part: Tensor, device_mesh: Any, layout: Layout, factors: Factors, shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """A tensor of which this rank holds `part`; nothing is sent.

    Args:
        part: the rank's.
        device_mesh: torch's.
        layout, factors: as `dtensor_placements`.
        shape, stride: of the whole.

    Raises:
        ApplyError: there is an `obstacle`.
    """
    placements = dtensor_placements(layout, factors, tuple(device_mesh.mesh.shape))
    return DTensor.from_local(
        part, device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def obstacle(layout: Layout, factors: Factors, sizes: tuple[int, ...]) -> str | None:
    """Why no DTensor should lie so; None where one can. A layout that splits leading factors only always can.

    DTensor reads the strides of a tensor together as an order of the mesh axes where it can (`_StridedShard(0, 2),
    Shard(0)`: the second axis of size 2 cuts first). Where one stride stands for blocks that no axis cuts, torch 2.11
    gives up, and 2.13 and 2.14 gather the axes one by one, but forget that a strided axis, too, left less of the dim to
    the next: they put the tensor together wrongly, mostly without an error.

    Args: as `dtensor_placements`.
    """
    if not is_moved(layout):
        return f"a tensor under [{format_layout(layout)}] has parts with each rank's own scales, which DTensor lacks"
    assert local_factors(factors, layout, sizes) is not None, f"layout {format_layout(layout)} does not fit {factors}"
    split = [axis for axis, placement in enumerate(layout) if placement.kind == "S" and sizes[axis] > 1]
    blocks = {axis: _blocks_outside(axis, layout, factors, sizes) for axis in split}
    blocked = [d for d in range(len(factors)) if not _is_order(d, layout, blocks, sizes)]
    if not blocked:
        return None
    sentence = f"DTensor cannot put a tensor under [{format_layout(layout)}] together: dim"
    if torch.__version__ < "2.13":
        return f"{sentence} {blocked[0]} is cut inside blocks, which takes torch 2.13"
    for axis in split:
        dim = layout[axis].dim
        if any(blocks[other] > 1 and layout[other].dim == dim for other in split if other < axis):
            return f"{sentence} {dim} is cut inside cuts"
    return None


def is_block(layout: Layout, factors: Factors, sizes: tuple[int, ...]) -> bool:
    """Whether every rank's part is one run of positions of each dim.

    `torch.distributed.checkpoint` and `torch.distributed.checkpoint.state_dict` take the part of any DTensor for one
    (torch 2.13 and 2.14), and so write or read the wrong positions of another. A layout that splits leading factors
    only always is one.

    >>> from autoparallel_fp8.layout import split
    >>> is_block((split(0), split(0)), ((4, 4),), (2, 2)), is_block((split(0, 1),), ((4, 4),), (2,))
    (True, False)

    Args: as `dtensor_placements`.
    """
    return all(_is_run(part) for part in parts(factors, layout, sizes, (0,) * len(sizes)))


def _is_run(part: Part) -> bool:
    """Whether all factors behind the first of which the rank holds several positions are whole."""
    leading = next((k for k, count in enumerate(part.counts) if count > 1), len(part.counts))
    return part.counts[leading + 1 :] == part.factors[leading + 1 :]


def _placement(axis: int, layout: Layout, factors: Factors, sizes: tuple[int, ...]) -> Placement:
    placement = layout[axis]
    if placement.kind != "S":
        return {"R": Replicate(), "P": Partial("sum"), "M": Partial("max")}[placement.kind]
    blocks = _blocks_outside(axis, layout, factors, sizes)
    if blocks == 1 or sizes[axis] == 1:
        return Shard(placement.dim)
    return _StridedShard(placement.dim, split_factor=blocks)


def _blocks_outside(axis: int, layout: Layout, factors: Factors, sizes: tuple[int, ...]) -> int:
    """Into how many blocks the dim falls, as the earlier axes left it, of which this axis cuts each."""
    mine = layout[axis]
    count = prod(factors[mine.dim][: mine.factor])
    for other, placement in enumerate(layout):
        if placement == mine and other > axis:
            count *= sizes[other]
        elif placement.kind == "S" and placement.dim == mine.dim and placement.factor < mine.factor and other < axis:
            count //= sizes[other]
    return count


def _is_order(dim: int, layout: Layout, blocks: dict[int, int], sizes: tuple[int, ...]) -> bool:
    """Whether all blocks of a dim are pieces of later axes, so that they say no more than an order of the axes."""
    order: list[int] = []  # sizes of the axes seen so far, major to minor
    for axis in sorted(blocks, reverse=True):
        if layout[axis].dim == dim:
            pieces = [prod(order[:k]) for k in range(len(order) + 1)]
            if blocks[axis] not in pieces:
                return False
            order.insert(pieces.index(blocks[axis]), sizes[axis])
    return True
