"""What torchao's block-scaled casts and GEMMs compute, as plain ops: for devices without its kernels.

Casts to 128-blocks: scale = 448 / max(|x|) in float64, rounded to float32, its reciprocal is what is returned. Results
have the kernels' memory order. MX casts are `to_mx`'s formula, which is torchao's bit for bit.

Source: torchao 0.18, prototype/blockwise_fp8_training/kernels.py and prototype/mx_formats/kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .scale_tiles import to_tiles
from .scaled_mm import scaled_mm_v2_formula
from .scaling import BLOCK_128X128, PADDED_BLOCKS
from .to_mx import to_mx_formula

E4M3 = torch.float8_e4m3fn
_LEAST = 1e-12
"""Maxima below it count as this much. Source: kernels.py, EPS."""


def _quantised(x: Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(data, reciprocal scales) of blocks of rows x columns; the last row of blocks need not be full."""
    missing = -x.shape[0] % rows
    padded = torch.nn.functional.pad(x, (0, 0, 0, missing)).to(torch.promote_types(x.dtype, torch.float32))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    largest = blocks.abs().amax((1, 3), keepdim=True).clamp(min=_LEAST).to(torch.float64)
    most = torch.finfo(dtype).max
    scale = (most / largest).to(torch.promote_types(x.dtype, torch.float32))
    data = (blocks * scale).clamp(-most, most).reshape(padded.shape)[: x.shape[0]].to(dtype)
    return data, 1.0 / scale[:, 0, :, 0]


def _column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def act_quant_lhs(x: Tensor, block_size: int = 128, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """[m, k] in blocks of 1 x block: row-major data, column-major scales [m, k / block]."""
    data, scale = _quantised(x, 1, block_size, dtype)
    return data, _column_major(scale)


def act_quant_rhs(x: Tensor, block_size: int = 128, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """[m, k] in blocks of block x 1: column-major data, row-major scales [m / block, k]."""
    data, scale = _quantised(x, block_size, 1, dtype)
    return _column_major(data), scale.contiguous()


def act_quant_transposed_lhs(x: Tensor, block_size: int = 128, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """[m, k] in blocks of block x 1, transposed: row-major data [k, m], column-major scales [k, m / block]."""
    data, scale = _quantised(x, block_size, 1, dtype)
    return data.t().contiguous(), scale.contiguous().t()


def weight_quant_rhs(x: Tensor, block_size: int = 128, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """[m, n] in square blocks: column-major data and scales."""
    data, scale = _quantised(x, block_size, block_size, dtype)
    return _column_major(data), _column_major(scale)


def weight_quant_transposed_rhs(x: Tensor, block_size: int = 128, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """[m, n] in square blocks, transposed: column-major data [n, m] and scales [n / block, m / block]."""
    data, scale = _quantised(x, block_size, block_size, dtype)
    return data.contiguous().t(), scale.contiguous().t()


def gemm_1x128_128x128(
    a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor, block_size: int = 128, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """a [m, k] x b [k, n], scaled by a_s [m, k / block] and b_s [k / block, n / block]."""
    columns = b_s.repeat_interleave(block_size, 1)[:, : b.shape[1]]
    return gemm_1x128_128x1(a, b, a_s, columns, block_size, out_dtype)


def gemm_1x128_128x1(
    a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor, block_size: int = 128, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """a [m, k] x b [k, n], scaled by a_s [m, k / block] and b_s [k / block, n]."""
    k = a.shape[1]
    wide = torch.promote_types(out_dtype, torch.float32)
    left = a.to(wide) * a_s.repeat_interleave(block_size, 1)[:, :k]
    right = b.to(wide) * b_s.repeat_interleave(block_size, 0)[:k]
    return torch.mm(left, right).to(out_dtype)


def blockwise_scaled_mm(
    a: Tensor, b: Tensor, a_s: Tensor, scale_recipe_a: int, b_s: Tensor, scale_recipe_b: int, out_dtype: torch.dtype
) -> Tensor:
    """`aten._scaled_mm_v2` after padding 128x128 scales of b."""
    if scale_recipe_b == BLOCK_128X128:
        b_s = torch.nn.functional.pad(b_s, (0, 0, 0, -b_s.shape[0] % PADDED_BLOCKS), value=1.0)
    return scaled_mm_v2_formula(a, b, [a_s], [scale_recipe_a], [], [b_s], [scale_recipe_b], [], None, out_dtype)


def to_mxfp8_dim0(x: Tensor, inner_block_size: int = 32, scaling_mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """Blocks along the last dim: data of x's shape, scales [..., size / block]."""
    return to_mx_formula(x, E4M3, inner_block_size, -1, scaling_mode)


def to_mxfp8_dim1(x: Tensor, inner_block_size: int = 32, scaling_mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """Blocks along dim 0 of [m, n]: column-major data [m, n], row-major scales [n, m / block]."""
    data, scale = to_mx_formula(x, E4M3, inner_block_size, 0, scaling_mode)
    return data, scale.t().contiguous()


def mxfp8_quantize(
    x: Tensor, rowwise: bool, colwise: bool, scale_dim_x: int, scale_dim_y: int, fp8_format: str, scaling_mode: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(data by row, data by column, scales [r, c / 32, 1] by row, [c, r / 32] by column), empty if unasked."""
    made = [x.new_empty(0, dtype=d) for d in (E4M3, E4M3, torch.float8_e8m0fnu, torch.float8_e8m0fnu)]
    if rowwise:
        made[0], scale = to_mx_formula(x, E4M3, 32, 1, scaling_mode)
        made[2] = scale.unsqueeze(-1)
    if colwise:
        made[1], scale = to_mx_formula(x, E4M3, scale_dim_y, 0, scaling_mode)
        made[3] = scale.contiguous().t()
    return made[0], made[1], made[2], made[3]


def mx_block_rearrange(scale_tensor: Tensor) -> Tensor:
    """Swizzled scales, shown with the padded rows and columns of the raw ones."""
    rows, columns = (size + -size % multiple for size, multiple in zip(scale_tensor.shape, (128, 4), strict=True))
    return to_tiles(scale_tensor).view(rows, columns)


FORMULAS: dict[str, Callable[..., Any]] = {
    "torchao.triton_fp8_blockwise_act_quant_lhs.default": act_quant_lhs,
    "torchao.triton_fp8_blockwise_act_quant_rhs.default": act_quant_rhs,
    "torchao.triton_fp8_blockwise_act_quant_transposed_lhs.default": act_quant_transposed_lhs,
    "torchao.triton_fp8_blockwise_weight_quant_rhs.default": weight_quant_rhs,
    "torchao.triton_fp8_blockwise_weight_quant_transposed_rhs.default": weight_quant_transposed_rhs,
    "torchao.triton_fp8_gemm_1x128_128x128.default": gemm_1x128_128x128,
    "torchao.triton_fp8_gemm_1x128_128x1.default": gemm_1x128_128x1,
    "torchao.blockwise_scaled_mm.default": blockwise_scaled_mm,
    "torchao.triton_to_mxfp8_dim0.default": to_mxfp8_dim0,
    "torchao.triton_to_mxfp8_dim1.default": to_mxfp8_dim1,
    "torchao.mxfp8_quantize.default": mxfp8_quantize,
    "torchao.triton_mx_block_rearrange.default": mx_block_rearrange,
}
"""Name of the overload -> its formula."""
