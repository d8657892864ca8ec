"""What torch's scaled GEMMs compute, as plain float32 ops: for devices whose kernel is slow or missing.

CPU kernels multiply float8 at 0.06 GFLOP/s and know neither blocks nor float4; these formulas give the same numbers
where sums and scales are exact. They read the scales as the kernel does: swizzled ones tile by tile, the recipe of
`aten._scaled_mm` from the shapes that *this* call has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UsageError
from .scale_tiles import from_tiles
from .scaling import PADDED_BLOCKS, ROWWISE, TENSORWISE, Scales, inferred_scales, named_scales, round_up, tiled_numel

_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of e2m1 codes 0 to 7; bit 3 is the sign. Source: OCP Microscaling Formats v1.0, section 5.3.3."""


def scaled_mm_formula(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """`aten._scaled_mm`: a [m, k] times b [k, n], scaled as the scales' shapes say, plus bias [n]."""
    if scale_result is not None:
        raise UsageError("a scale of the result is not emulated", at="_scaled_mm", do="scale the result after it")
    scales = inferred_scales(a, b, scale_a, scale_b)
    if scales is None:
        shapes = [list(t.shape) for t in (a, b, scale_a, scale_b)]
        raise UsageError(f"scales {shapes[2]} and {shapes[3]} fit no recipe for {shapes[0]} x {shapes[1]}")
    return _product(a, b, [scale_a], [scale_b], scales, bias, out_dtype)


def scaled_mm_v2_formula(
    a: Tensor,
    b: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """`aten._scaled_mm_v2`: as above, scaled as the recipes say."""
    scales = named_scales(a, b, (recipe_a, recipe_b), (swizzle_a, swizzle_b))
    if scales is None:
        raise UsageError(f"no kernel for recipes {recipe_a} and {recipe_b}", at="_scaled_mm_v2")
    return _product(a, b, scale_a, scale_b, scales, bias, out_dtype)


def _product(
    a: Tensor,
    b: Tensor,
    scale_a: Sequence[Tensor],
    scale_b: Sequence[Tensor],
    scales: tuple[Scales, Scales],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    factors = [(scale_a, scales[0]), (scale_b, scales[1])]
    wide = torch.promote_types(out_dtype or torch.float32, torch.float32)
    rows = [values_of(a).to(wide), values_of(b.t()).to(wide)]
    for i, (scale, how) in enumerate(factors):
        if how.recipe not in (TENSORWISE, ROWWISE):
            rows[i] = rows[i] * block_factors(scale[0], how, rows[i].shape[0], rows[i].shape[1])
            rows[i] = rows[i] * scale[1].to(wide) if how.has_second else rows[i]
    product = torch.mm(rows[0], rows[1].t())
    for scale, how in factors:
        if how.recipe in (TENSORWISE, ROWWISE):
            product = product * (scale[0].reshape(()) if how.recipe == TENSORWISE else scale[0])
    product = product if bias is None else product + bias.to(wide)
    return product.to(out_dtype or a.dtype)


def values_of(data: Tensor) -> Tensor:
    """float8 data, or float4 data with two values an element along the last dim, as float32.

    The low four bits are the first value. Source: torchao, prototype/mx_formats/kernels.py, unpack_uint4.
    """
    if data.dtype is not torch.float4_e2m1fn_x2:
        return data.to(torch.float32)
    codes = data.contiguous().view(torch.uint8).to(torch.int64)
    table = torch.tensor([*_FLOAT4, *(-value for value in _FLOAT4)], device=data.device)
    return torch.stack((table[codes & 15], table[codes >> 4]), -1).flatten(-2)


def block_factors(scale: Tensor, how: Scales, outer: int, inner: int) -> Tensor:
    """The scale of every value of an operand [outer, inner], whose blocks run along the last dim."""
    block = how.inner_block(torch.uint8)
    blocks = -(-inner // block)
    if how.order == "tiles":
        if scale.numel() != tiled_numel(outer, blocks):
            raise UsageError(f"{scale.numel()} swizzled scales for {outer} x {blocks} blocks")
        raw = from_tiles(scale, outer, blocks)
    else:
        raw = scale.t() if how.order == "inner" else scale
        if raw.ndim == 1:
            raw = raw.unflatten(0, (outer, blocks))
        wanted = round_up(blocks, PADDED_BLOCKS) if how.is_padded else blocks
        if list(raw.shape) != [-(-outer // how.outer_block), wanted]:
            raise UsageError(f"scales {list(raw.shape)} for {outer} x {blocks} blocks")
        raw = raw[:, :blocks]
    wide = raw.to(torch.float32).repeat_interleave(block, 1)[:, :inner]
    return wide.repeat_interleave(how.outer_block, 0)[:outer]
