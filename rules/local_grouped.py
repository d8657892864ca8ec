"""The local program of grouped GEMMs, `own_group`: offsets, tokens and scales of the groups that a rank works on.

Offsets are of the whole. Where the rank has some of the tokens, a group ends after as many of them as lie before its
end in the whole. Where it has some of the experts, their tokens are moved to the front, in their order, so that no
other expert's are multiplied, and the results are moved back into zeros. Scales of MX tiles are cut as in
`local_matmul.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.scale_tiles import group_columns, grouped_positions, tile_positions
from ..ops.scaling import BLOCK_1X32, TILE_ROWS, Scales, round_up
from ..parts import Part
from .local import Where, program
from .local_matmul import own_blocks, own_tile_index, retiled

aten = torch.ops.aten
_MX = Scales(BLOCK_1X32, "tiles")


@program("own_group", aten._grouped_mm.default)
def own_grouped_mm(where: Where, a: Tensor, b: Tensor, offs: Tensor, *rest: Any, **more: Any) -> Tensor:
    """The product of the rank's tokens with the rank's experts."""
    return _run(where, a, b, None, offs, lambda a, b, scales, offs: where.op(a, b, offs, *rest, **more))


@program("own_group", aten._scaled_grouped_mm.default)
def own_scaled_grouped_mm(
    where: Where, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, *rest: Any, **more: Any
) -> Tensor:
    """As above, with the scales of those."""

    def run(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], offs: Tensor) -> Any:
        return where.op(a, b, *scales, offs, *rest, **more)

    return _run(where, a, b, (scale_a, scale_b), offs, run)


@program("own_group", aten._scaled_grouped_mm_v2.default)
def own_scaled_grouped_mm_v2(
    where: Where,
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    offs: Tensor,
    *rest: Any,
    **more: Any,
) -> Tensor:
    """As above."""

    def run(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], offs: Tensor) -> Any:
        return where.op(
            a, b, [scales[0]], recipe_a, swizzle_a, [scales[1]], recipe_b, swizzle_b, offs, *rest, **more
        )  # fmt: skip

    return _run(where, a, b, (scale_a[0], scale_b[0]), offs, run)


def _run(
    where: Where,
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    offs: Tensor,
    product: Callable[..., Any],
) -> Tensor:
    """The product on the rank's part: tiles cut, then tokens counted, then experts picked."""
    form = a.ndim, b.ndim
    experts = where.results[0][0] if form == (2, 2) else where.operands[1 if form == (2, 3) else 0][0]
    tokens = {(2, 3): where.operands[0][0], (2, 2): where.operands[1][0], (3, 2): where.operands[1][1]}[form]
    is_mx = scales is not None and scales[0].dtype is torch.float8_e8m0fnu
    if scales is not None and is_mx:
        scales = _cut_groups(where, scales, offs, experts) if form == (2, 2) else _cut_tiles(where, a, b, scales)
    if not tokens.is_whole:
        offs = own_ends(offs, tokens)
    if experts.is_whole:
        return product(a, b, scales, offs)
    order, ends = picked(offs, experts, tokens.size)
    token_dims = {(2, 3): (0, None), (2, 2): (1, 0), (3, 2): (None, 1)}[form]
    a, b = (t if d is None else _moved(t, order, d) for t, d in zip((a, b), token_dims, strict=True))
    if scales is not None and not is_mx:
        scales = _picked_scales(scales, form, order)
    elif scales is not None and form == (2, 3):
        scales = _picked_tiles(scales, offs, experts)
    made = product(a, b, scales, ends)
    return made if form == (2, 2) else _put_back(made, order, ends[-1], 0 if form == (2, 3) else 1)


def own_ends(offs: Tensor, tokens: Part) -> Tensor:
    """Ends of the groups, counted in the rank's own tokens."""
    return torch.searchsorted(_positions(tokens).to(offs.device), offs.to(torch.int64)).to(offs.dtype)


@lru_cache(maxsize=64)
def _positions(part: Part) -> Tensor:
    return torch.tensor(part.positions())


def picked(offs: Tensor, experts: Part, num_tokens: int) -> tuple[Tensor, Tensor]:
    """(order of the tokens that puts those of the rank's experts first, the ends of its groups in that order)."""
    own = _positions(experts).to(offs.device)
    group = torch.searchsorted(offs, torch.arange(num_tokens, device=offs.device, dtype=offs.dtype), right=True)
    order = torch.argsort(torch.isin(group, own).logical_not().to(torch.uint8), stable=True)
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    return order, sizes[own].cumsum(0).to(offs.dtype)


def _moved(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """x with the positions of one dim in another order, in the same memory order."""
    is_column_major = x.ndim == 2 and x.stride(0) == 1 and x.shape[0] > 1
    source = x.t() if is_column_major else x
    at = 1 - dim if is_column_major else dim
    small = source.dtype.is_floating_point and source.dtype.itemsize == 1
    made = (source.view(torch.uint8) if small else source).index_select(at, order).view(x.dtype)
    return made.t() if is_column_major else made


def _put_back(made: Tensor, order: Tensor, count: Tensor, dim: int) -> Tensor:
    """Results of the first `count` tokens of the order at their places, zero at the others."""
    shape = [-1 if d == dim else 1 for d in range(made.ndim)]
    is_own = (torch.arange(made.shape[dim], device=made.device) < count).reshape(shape)
    return torch.zeros_like(made).index_copy(dim, order, torch.where(is_own, made, made.new_zeros(())))


def _picked_scales(scales: tuple[Tensor, Tensor], form: tuple[int, int], order: Tensor) -> tuple[Tensor, Tensor]:
    """Rowwise scales: those of tokens move with them; those of experts are the rank's own already."""
    if form == (2, 2):
        return scales
    return (scales[0][order], scales[1]) if form == (2, 3) else (scales[0], scales[1][order])


def _picked_tiles(scales: tuple[Tensor, Tensor], offs: Tensor, experts: Part) -> tuple[Tensor, Tensor]:
    """Rows of tiles of the rank's groups, in front of the others."""
    tokens = scales[0]
    count = tokens.shape[0] // TILE_ROWS
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    ends = ((sizes + TILE_ROWS - 1) // TILE_ROWS).cumsum(0).to(offs.dtype)
    order, _ = picked(ends, experts, count)
    full = tokens[: count * TILE_ROWS].reshape(count, -1).view(torch.uint8)[order].view(tokens.dtype)
    rest = tokens[count * TILE_ROWS :]
    made = full.reshape(-1, tokens.shape[1])
    return (
        torch.cat([made.view(torch.uint8), rest.view(torch.uint8)]).view(tokens.dtype) if len(rest) else made
    ), scales[1]


def _cut_tiles(where: Where, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Swizzled scales of the rank's part of k and n."""
    inner, outer, block = where.operands[0][1], where.operands[1][2], _MX.inner_block(a.dtype)
    index = own_tile_index(where.operands[3][1:], outer, inner, block)
    own_b = scales[1]
    if index is not None:
        own_b = torch.stack([retiled(row, index).view(torch.uint8) for row in own_b]).view(own_b.dtype)
    return _cut_columns(scales[0], inner, block), own_b


def _cut_columns(scale: Tensor, inner: Part, block: int) -> Tensor:
    """Scales of all groups' rows for the rank's part of k: every row of tiles has the same columns.

    What does not fill the last tile is nobody's, and is filled with zeros.
    """
    if inner.is_whole:
        return scale
    count = scale.shape[0] // TILE_ROWS * TILE_ROWS
    index = tile_positions(torch.arange(count), own_blocks(inner, block), -(-inner.full_size // block))
    own = retiled(scale[:count], index).reshape(count, -1)
    missing = scale.shape[0] - count
    return F.pad(own.view(torch.uint8), (0, 0, 0, missing)).view(scale.dtype) if missing else own


def _cut_groups(where: Where, scales: tuple[Tensor, Tensor], offs: Tensor, experts: Part) -> tuple[Tensor, Tensor]:
    """Swizzled scales of two matrices whose groups are columns: those of the rank's rows, its groups in front."""
    rows = where.operands[0][0], where.operands[1][1]
    if all(part.is_whole for part in (*rows, experts)):
        return scales
    first, second = (_cut_group(scale, part, offs, experts) for scale, part in zip(scales, rows, strict=True))
    return first, second


def _cut_group(scale: Tensor, rows: Part, offs: Tensor, experts: Part) -> Tensor:
    padded, count = scale.shape
    _, widths = group_columns(offs, _MX.inner_block(torch.float8_e4m3fn))
    flat = F.pad(scale.contiguous().reshape(-1).view(torch.uint8), (0, 1))
    raw = flat[grouped_positions(_positions(rows).to(scale.device), padded, widths, count)]
    if not experts.is_whole:
        order, _ = picked(widths.cumsum(0), experts, count)
        raw, widths = raw[:, order], widths[_positions(experts).to(widths.device)]
    own_padded = round_up(rows.size, TILE_ROWS)
    index = grouped_positions(torch.arange(rows.size, device=scale.device), own_padded, widths, count)
    made = raw.new_zeros(own_padded * count + 1).index_put((index,), raw)  # the last is nobody's
    return made[:-1].view(scale.dtype).view(own_padded, count)
