"""How the operands of a scaled GEMM are scaled: which recipe a call means, and where each block's scale stands.

`aten._scaled_mm` takes no recipe: the kernel infers it from the scales' dtypes and shapes, in the order of
`inferred_scales`. `aten._scaled_mm_v2` names it. Both end in two `Scales`, one an operand, which the rules read as dims
and the reference formulas as factors. The *outer* dim of an operand is the one the result keeps (m of a, n of b), the
inner one is k.

Source: ATen/native/cuda/ScaledBlas.cpp (get_joint_scaling, is_blockwise_*, _scaled_block*, _scaled_mxfp8_mxfp8) and
torch/_meta_registrations.py (_check_scaled_mm_sizes, _check_scaled_mm_sizes_v2), torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

TENSORWISE, ROWWISE, BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_128X128 = range(6)
"""Values of `torch.nn.functional.ScalingType`."""

NO_SWIZZLE, SWIZZLE_32_4_4 = range(2)
"""Values of `torch.nn.functional.SwizzleType`."""

TILE_ROWS, TILE_COLUMNS = 128, 4
"""Swizzled scales come in tiles of this many rows and columns. Source: cuBLAS, "1D block scaling factors layout"."""

PADDED_BLOCKS = 4
"""The k blocks of a 128x128 scale are padded to a multiple of this in v2. Source: _scaled_block1x128_block128x128."""

_INNER = {BLOCK_1X16: 16, BLOCK_1X32: 32, BLOCK_1X128: 128, BLOCK_128X128: 128}
NAMES = {
    TENSORWISE: "tensorwise",
    ROWWISE: "rowwise",
    BLOCK_1X16: "1x16",
    BLOCK_1X32: "1x32",
    BLOCK_1X128: "1x128",
    BLOCK_128X128: "128x128",
}


@dataclass(frozen=True)
class Scales:
    """The scales of one operand.

    Attributes:
        recipe: one of the values above.
        order: "outer" for [outer, blocks], "inner" for [blocks, outer], "tiles" for swizzled ones, flat in whatever
            shape; "" for a scale of one element.
        is_padded: the dim of the blocks is padded to a multiple of `PADDED_BLOCKS`.
        has_second: a second scale, one for the whole operand, stands behind (NVFP4).
    """

    recipe: int
    order: str = ""
    is_padded: bool = False
    has_second: bool = False

    @property
    def outer_block(self) -> int:
        """Rows (columns of b) that share a scale."""
        return 128 if self.recipe == BLOCK_128X128 else 1

    def inner_block(self, dtype: torch.dtype) -> int:
        """*Stored* elements along k that share a scale; 0 where all of k do. Two float4 values are stored as one."""
        return _INNER.get(self.recipe, 0) // values_in(dtype)

    def __str__(self) -> str:
        return NAMES[self.recipe]


def values_in(dtype: torch.dtype) -> int:
    """Values that one stored element holds: 2 for packed float4."""
    return 2 if dtype is torch.float4_e2m1fn_x2 else 1


def round_up(size: int, multiple: int) -> int:
    """
    >>> round_up(5, 4)
    8
    """
    return -(-size // multiple) * multiple


def tiled_numel(outer: int, blocks: int) -> int:
    """Elements of the swizzled scales of `outer` rows with `blocks` blocks each, padding included."""
    return round_up(outer, TILE_ROWS) * round_up(blocks, TILE_COLUMNS)


def bias_fault(mat2: Sequence[int], bias: Sequence[int]) -> str:
    """What is wrong with the shape of a scaled GEMM's bias, "" where it fits. Source: _scaled_mm_out_cuda.

    >>> bias_fault((32, 64), (63,))
    'a bias of shape [63] for 64 columns of the result'
    >>> bias_fault((32, 64), (64,))
    ''
    """
    is_right = prod(bias) == mat2[1]
    return "" if is_right else f"a bias of shape {list(bias)} for {mat2[1]} columns of the result"


def inferred_scales(a: Any, b: Any, scale_a: Any, scale_b: Any) -> tuple[Scales, Scales] | None:
    """What `aten._scaled_mm` takes these scales for; None where the kernel takes them for nothing.

    Shapes decide, in the kernel's order: K of one block has scales (M, 1) and (1, N), which are rowwise.

    Args:
        a, b, scale_a, scale_b: tensors, or specs of them.
    """
    (m, k), n = tuple(a.shape), b.shape[1]
    shape_a, shape_b = tuple(scale_a.shape), tuple(scale_b.shape)
    if scale_a.dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn) and scale_b.dtype == scale_a.dtype:
        scales = Scales(BLOCK_1X32 if scale_a.dtype is torch.float8_e8m0fnu else BLOCK_1X16, "tiles")
        blocks = -(-k // scales.inner_block(a.dtype))
        is_so = (prod(shape_a), prod(shape_b)) == (tiled_numel(m, blocks), tiled_numel(n, blocks))
        return (scales, scales) if is_so else None
    if prod(shape_a) == 1 and prod(shape_b) == 1:
        return Scales(TENSORWISE), Scales(TENSORWISE)
    if (shape_a, shape_b) == ((m, 1), (1, n)):
        return Scales(ROWWISE, "outer"), Scales(ROWWISE, "inner")
    blocks, rows, columns = -(-k // 128), -(-m // 128), -(-n // 128)
    for recipe_a, recipe_b, wanted in (
        (BLOCK_128X128, BLOCK_1X128, ((rows, blocks), (blocks, n))),
        (BLOCK_1X128, BLOCK_128X128, ((m, blocks), (blocks, columns))),
        (BLOCK_1X128, BLOCK_1X128, ((m, blocks), (blocks, n))),
    ):
        if (shape_a, shape_b) == wanted:
            return Scales(recipe_a, "outer"), Scales(recipe_b, "inner")
    return None


def named_scales(
    a: Any, b: Any, recipes: tuple[Sequence[int], Sequence[int]], swizzles: tuple[Sequence[int], Sequence[int]]
) -> tuple[Scales, Scales] | None:
    """What `aten._scaled_mm_v2` takes its scales for; None for a combination without a kernel.

    Args:
        a, b: tensors, or specs of them.
        recipes: `recipe_a` and `recipe_b` of the call.
        swizzles: `swizzle_a` and `swizzle_b`; an empty list means that nothing is swizzled.
    """
    first = recipes[0][0], recipes[1][0]
    levels = len(recipes[0]), len(recipes[1])
    if levels == (2, 2):
        is_nvfp4 = all(tuple(recipe) == (BLOCK_1X16, TENSORWISE) for recipe in recipes)
        return (Scales(BLOCK_1X16, "tiles", has_second=True),) * 2 if is_nvfp4 else None
    if levels != (1, 1):
        return None
    if first == (TENSORWISE, TENSORWISE):
        return Scales(TENSORWISE), Scales(TENSORWISE)
    if first == (ROWWISE, ROWWISE):
        return Scales(ROWWISE, "outer"), Scales(ROWWISE, "inner")
    if first in ((BLOCK_1X32, BLOCK_1X32), (BLOCK_1X16, BLOCK_1X16)):
        orders = ["tiles" if swizzle and swizzle[0] == SWIZZLE_32_4_4 else "outer" for swizzle in swizzles]
        return Scales(first[0], orders[0]), Scales(first[1], orders[1])
    if first == (BLOCK_1X128, BLOCK_1X128):
        return Scales(BLOCK_1X128, "outer"), Scales(BLOCK_1X128, "outer")
    if first == (BLOCK_1X128, BLOCK_128X128):
        return Scales(BLOCK_1X128, "outer"), Scales(BLOCK_128X128, "inner", is_padded=True)
    if first == (BLOCK_128X128, BLOCK_1X128):
        return Scales(BLOCK_128X128, "inner", is_padded=True), Scales(BLOCK_1X128, "outer")
    return None
