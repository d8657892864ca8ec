"""Local programs of scaled GEMMs: what a rank runs where its scales are not simply the scales' own split.

`own_scales`: swizzled scales, or padded ones, that the rank holds in whole or in larger runs than it needs. It reads
the scales of its own rows and k blocks and lays them out again for its own product, with zero padding. A bias is added
by the ranks that hold the first part of k.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.scale_tiles import tile_positions, to_tiles
from ..ops.scaling import PADDED_BLOCKS, Scales, inferred_scales, named_scales, tiled_numel
from ..parts import Part
from .local import Where, program

aten = torch.ops.aten
Parts = tuple[Part, ...]


class _Whole:
    """The whole operand as far as a recipe's inference reads it."""

    def __init__(self, parts: Parts, dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(part.full_size for part in parts), dtype


@program("own_scales", aten._scaled_mm.default)
def own_scaled_mm(
    where: Where,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    *rest: Any,
    **more: Any,
) -> Tensor:
    """The product of the rank's parts, each with the scales of that part alone."""
    wholes = [_Whole(p, t.dtype) for p, t in zip(where.operands, (a, b, scale_a, scale_b), strict=False)]
    found = inferred_scales(*wholes)
    assert found is not None, "a rule that runs this knows the recipe"
    own_a, own_b = (
        own_scale(scale, how, where.operands[number], rows, inner, a.dtype)
        for scale, how, number, rows, inner in _operands(where, (scale_a, scale_b), found, (2, 3))
    )
    return where.op(a, b, own_a, own_b, own_bias(where, bias, more), *rest, **more)


@program("own_scales", aten._scaled_mm_v2.default)
def own_scaled_mm_v2(
    where: Where,
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None = None,
    *rest: Any,
    **more: Any,
) -> Tensor:
    """As above; a second scale is of the whole operand and stays."""
    found = named_scales(a, b, (recipe_a, recipe_b), (swizzle_a, swizzle_b))
    assert found is not None, "a rule that runs this knows the recipe"
    numbers = (2, 2 + len(scale_a))
    own_a, own_b = (
        own_scale(scale, how, where.operands[number], rows, inner, a.dtype)
        for scale, how, number, rows, inner in _operands(where, (scale_a[0], scale_b[0]), found, numbers)
    )
    return where.op(
        a, b, [own_a, *scale_a[1:]], recipe_a, swizzle_a, [own_b, *scale_b[1:]], recipe_b, swizzle_b,
        own_bias(where, bias, more), *rest, **more,
    )  # fmt: skip


def _operands(
    where: Where, scales: tuple[Tensor, Tensor], found: tuple[Scales, Scales], numbers: tuple[int, int]
) -> list[tuple[Tensor, Scales, int, Part, Part]]:
    """(scale, how it lies, number of the operand, the rank's part of m or n, its part of k) of a and b."""
    k = where.operands[0][1]
    outer = where.operands[0][0], where.operands[1][1]
    return [(scales[i], found[i], numbers[i], outer[i], k) for i in range(2)]


def own_bias(where: Where, bias: Tensor | None, more: dict[str, Any]) -> Tensor | None:
    """The bias on the ranks with the first part of k, None on the others."""
    given = more.pop("bias", None) if bias is None else bias
    return given if is_first(where.operands[0][1]) else None


def is_first(part: Part) -> bool:
    """Whether the rank holds the beginning of the dim."""
    return not any(part.starts)


def own_scale(scale: Tensor, how: Scales, held: Parts, outer: Part, inner: Part, dtype: torch.dtype) -> Tensor:
    """The scale of the rank's part of an operand, as the kernel wants it.

    Args:
        scale: what the rank holds of it.
        how: recipe and order.
        held: the part of each of its dims that this is.
        outer, inner: the rank's part of the operand's outer dim and of k.
        dtype: of the operand.
    """
    if how.order == "tiles":
        index = own_tile_index(held, outer, inner, how.inner_block(dtype))
        return scale if index is None else retiled(scale, index)
    if how.is_padded and not inner.is_whole:
        index = _own_rows(held[0], inner, how.inner_block(dtype)).to(scale.device)
        rows = scale[index]
        missing = -rows.shape[0] % PADDED_BLOCKS
        return F.pad(rows.t(), (0, missing)).contiguous().t()  # the blocks of k lie next to each other
    return scale


def retiled(scale: Tensor, index: Tensor) -> Tensor:
    """Tiles of the scales that stand at these positions."""
    raw = scale.contiguous().reshape(-1).view(torch.uint8)[index.to(scale.device)]
    return to_tiles(raw.view(scale.dtype))


@lru_cache(maxsize=256)
def own_tile_index(held: Parts, outer: Part, inner: Part, block: int) -> Tensor | None:
    """Where the rank's tiles have the scales of its rows and blocks: [rows, blocks]; None where they are just these.

    Args:
        held: the part of each dim of the scales.
        outer, inner: the part of the operand's outer dim and of k.
        block: stored elements of k that share a scale.
    """
    if all(part.is_whole for part in (outer, inner)):
        return None
    rows, blocks = torch.tensor(outer.positions()), own_blocks(inner, block)
    wanted = tile_positions(rows, blocks, -(-inner.full_size // block))
    found = _find(held, wanted)
    plain = tile_positions(torch.arange(len(rows)), torch.arange(len(blocks)), len(blocks))
    is_all = prod(part.size for part in held) == tiled_numel(len(rows), len(blocks))
    return None if is_all and torch.equal(found, plain) else found


def _find(held: Parts, flat: Tensor) -> Tensor:
    """Positions of the whole tensor as positions of what the rank holds of it, both row-major."""
    below = prod(part.full_size for part in held)
    local = torch.zeros_like(flat)
    for part in held:
        below //= part.full_size
        local = local * part.size + _held(part, flat // below % part.full_size)
    return local


def _held(part: Part, positions: Tensor) -> Tensor:
    """Where the rank holds these positions of a dim."""
    local: Tensor
    local, here = part.find(positions)
    assert bool(here.all()), "the rank lacks scales of its own part"
    return local


def own_blocks(inner: Part, block: int) -> Tensor:
    """The blocks of k that the rank has."""
    return torch.tensor(inner.positions())[::block] // block


@lru_cache(maxsize=256)
def _own_rows(held: Part, inner: Part, block: int) -> Tensor:
    """Positions, in what the rank holds of a padded dim of blocks, of the blocks of its part of k."""
    return _held(held, own_blocks(inner, block))
