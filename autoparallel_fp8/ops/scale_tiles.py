"""Swizzled scales: padded to tiles of 128 rows x 4 columns, tile after tile, interleaved inside each.

Element (row, column) of the raw scales stands at position `(tile row, tile column, row % 32, row % 128 // 32,
column % 4)` of a flat tensor, in this order from major to minor: whole tile rows are runs of memory, a tile column is a
strided set of tiles, and parts of a tile are spread all over it. So a split on tile borders is a split of the flat
tensor's first or second factor; any other part has to be read out and swizzled again.

Source: cuBLAS, "1D block scaling factors layout"; torchao's `to_blocked` gives the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .scaling import TILE_COLUMNS, TILE_ROWS, round_up

_GROUPS = 4  # of 32 rows, side by side in a tile


def tile_positions(rows: Tensor, columns: Tensor, num_columns: int) -> Tensor:
    """Where the swizzled scales hold these rows and columns: [len(rows), len(columns)].

    Args:
        rows, columns: indices into the raw scales, int64.
        num_columns: of the raw scales, before padding.
    """
    tiles = round_up(num_columns, TILE_COLUMNS) // TILE_COLUMNS
    tile = rows[:, None] // TILE_ROWS * tiles + columns[None, :] // TILE_COLUMNS
    row = rows[:, None] % TILE_ROWS
    group = TILE_ROWS // _GROUPS
    within = (row % group * _GROUPS + row // group) * TILE_COLUMNS + columns[None, :] % TILE_COLUMNS
    return tile * (TILE_ROWS * TILE_COLUMNS) + within


def group_columns(ends: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(first column, number of columns) of every group's scales where groups lie along the contracted dim.

    Args:
        ends: where each group ends in that dim.
        block: elements that share a scale. A group's last block need not be full; its columns fill whole tiles.
    """
    blocks = (torch.diff(ends.to(torch.int64), prepend=ends.new_zeros(1, dtype=torch.int64)) + block - 1) // block
    widths = (blocks + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    return widths.cumsum(0) - widths, widths


def grouped_positions(rows: Tensor, padded_rows: int, widths: Tensor, count: int) -> Tensor:
    """Where swizzled scales hold these rows, for columns 0 to `count`: [len(rows), count].

    Each group is swizzled by itself, its `padded_rows` x `widths[g]` scales behind those of the group before it.
    Columns that are no group's get the position behind the last, `padded_rows * count`.

    Source: torchao/prototype/moe_training/kernels/mxfp8/quant.py, torch_to_blocked_2d_K_groups.
    """
    column = torch.arange(count, device=widths.device)
    ends = widths.cumsum(0)
    group = torch.searchsorted(ends, column, right=True)
    is_held = group < widths.shape[0]
    group = group.clamp(max=widths.shape[0] - 1)
    start, width = (ends - widths)[group], widths[group]
    local, row, size = column - start, rows[:, None], TILE_ROWS // _GROUPS
    tile = row // TILE_ROWS * (width // TILE_COLUMNS) + local // TILE_COLUMNS
    within = (row % size * _GROUPS + row % TILE_ROWS // size) * TILE_COLUMNS + local % TILE_COLUMNS
    found = start * padded_rows + tile * (TILE_ROWS * TILE_COLUMNS) + within
    return torch.where(is_held, found, padded_rows * count)


def to_tiles(scale: Tensor) -> Tensor:
    """Raw one-byte scales [rows, columns] as a flat swizzled tensor, padded with zero bytes.

    >>> to_tiles(torch.ones(128, 6).to(torch.float8_e8m0fnu)).shape
    torch.Size([1024])
    """
    rows, columns = scale.shape
    codes = F.pad(scale.view(torch.uint8), (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    tiles = codes.unflatten(0, (-1, TILE_ROWS)).unflatten(2, (-1, TILE_COLUMNS)).transpose(1, 2)
    groups = tiles.unflatten(2, (_GROUPS, TILE_ROWS // _GROUPS)).transpose(2, 3)
    return groups.reshape(-1).view(scale.dtype)


def from_tiles(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """Raw scales [rows, columns] of swizzled ones in whatever shape."""
    flat = tiles.contiguous().reshape(-1).view(torch.uint8)
    row, column = (torch.arange(size, device=tiles.device) for size in (rows, columns))
    return flat[tile_positions(row, column, columns)].view(tiles.dtype)
