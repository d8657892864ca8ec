"""What torch's grouped GEMMs compute, group by group, as plain float32 ops: for devices without the kernel.

    tokens [t, k] x weights [e, k, n], offs -> [t, n]        rows of group g times weight g
    [m, t] x [t, n], offs                   -> [e, m, n]     group g of the contracted dim (gradients of weights)
    weights [e, m, k] x tokens [k, t], offs -> [m, t]
    [e, m, k] x [e, k, n]                   -> [e, m, n]     a batched product

`offs` [e] holds where each group ends. Tokens behind the last end belong to nobody: kernels leave their results as
memory was, these formulas give zero. MX scales of tokens [t, k] lie group by group, each group padded to whole tiles.

Source: ATen/native/cuda/GroupedBlas.cpp; torch/_meta_registrations.py, _meta_grouped_mm_common; for the scales of
groups torchao/prototype/moe_training/kernels/mxfp8/quant.py, torch_to_blocked_2d_M_groups,
torch_to_blocked_2d_K_groups and torch_to_blocked_per_group_3d.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import UsageError
from .scale_tiles import from_tiles, group_columns, grouped_positions
from .scaling import BLOCK_1X32, SWIZZLE_32_4_4, TILE_ROWS, Scales, round_up, tiled_numel


def grouped_mm_formula(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`aten._grouped_mm`."""
    _check_plain(bias)
    wide = torch.promote_types(a.dtype, torch.float32)
    return _grouped(a.to(wide), b.to(wide), offs).to(out_dtype or a.dtype)


def scaled_grouped_mm_formula(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """`aten._scaled_grouped_mm`: rowwise with float32 scales, MX with float8_e8m0fnu ones."""
    _check_plain(bias, scale_result)
    if scale_a.dtype is torch.float8_e8m0fnu:
        if a.ndim == b.ndim == 2 and offs is not None:
            rows = (_dequantised_groups(x, scale, offs) for x, scale in ((a, scale_a), (b.t(), scale_b)))
            made = _grouped(next(rows), next(rows).t(), offs)
        else:
            made = _grouped(_dequantised_tokens(a, scale_a, offs), _dequantised_weights(b, scale_b), offs)
    else:
        wide = torch.promote_types(out_dtype or torch.float32, torch.float32)
        made = _grouped(a.to(wide), b.to(wide), offs) * _factors(a, b, scale_a, scale_b, offs)
    return made.to(out_dtype or torch.bfloat16)


def scaled_grouped_mm_v2_formula(
    a: Tensor,
    b: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """`aten._scaled_grouped_mm_v2`: as above."""
    if len(scale_a) != 1 or len(scale_b) != 1:
        raise UsageError("scales of two levels are not emulated in grouped products")
    if recipe_a[0] == BLOCK_1X32 and not swizzle_a[0] == swizzle_b[0] == SWIZZLE_32_4_4:
        raise UsageError("MX scales of grouped products are emulated swizzled only")
    return scaled_grouped_mm_formula(a, b, scale_a[0], scale_b[0], offs, bias, None, out_dtype)


def _without_data(
    a: Tensor,
    b: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """The result of `aten._scaled_grouped_mm_v2` as to shape and strides: rows are padded to 16 bytes."""
    dtype = out_dtype or torch.bfloat16
    shape = [*a.shape[:-1], b.shape[-1]]
    if a.ndim == b.ndim == 2:
        if offs is None:
            raise UsageError("a grouped product of matrices needs offsets")
        shape = [offs.shape[0], *shape]
    elif a.ndim == 3 and b.ndim == 2:
        shape = shape[1:]
    row = round_up(shape[-1], 16 // dtype.itemsize)
    stride = [shape[-2] * row, row, 1][-len(shape) :]
    return torch.empty_strided(shape, stride, dtype=dtype, device=a.device)


if not torch.ops.aten._scaled_grouped_mm_v2.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
    # torch 2.13 has none, so a graph with this op could be neither captured nor asked about.
    _META = torch.library.Library("aten", "IMPL", "Meta")
    _META.impl("_scaled_grouped_mm_v2", _without_data)


def _check_plain(*unwanted: Tensor | None) -> None:
    if any(value is not None for value in unwanted):
        raise UsageError("grouped products take neither a bias nor a scale of the result")


def groups(offs: Tensor) -> Iterator[tuple[int, slice]]:
    """(number, positions) of every group."""
    start = 0
    for g, end in enumerate(offs.tolist()):
        yield g, slice(start, end)
        start = end


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    if offs is None:
        return torch.bmm(a, b)
    if a.ndim == b.ndim == 2:
        return torch.stack([a[:, own] @ b[own] for _, own in groups(offs)])
    if a.ndim == 2:
        made = a.new_zeros(a.shape[0], b.shape[-1])
        for g, own in groups(offs):
            made[own] = a[own] @ b[g]
        return made
    made = a.new_zeros(a.shape[1], b.shape[-1])
    for g, own in groups(offs):
        made[:, own] = a[g] @ b[:, own]
    return made


def _factors(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None) -> Tensor:
    """Rowwise scales, multiplied out to the result's shape."""
    if offs is None:
        return scale_a[:, :, None] * scale_b[:, None, :]
    if a.ndim == b.ndim == 2:
        count = offs.shape[0]
        return scale_a.unflatten(0, (count, -1))[:, :, None] * scale_b.unflatten(0, (count, -1))[:, None, :]
    tokens, weights = (scale_a, scale_b) if a.ndim == 2 else (scale_b, scale_a)
    made = tokens.new_zeros(tokens.shape[0], weights.shape[1])
    for g, own in groups(offs):
        made[own] = tokens[own, None] * weights[g]
    return made if a.ndim == 2 else made.t()


def _dequantised_tokens(a: Tensor, scale: Tensor, offs: Tensor | None) -> Tensor:
    """Tokens [t, k] times their scales, each group's in tiles of their own behind those of the group before it."""
    if a.ndim != 2 or offs is None:
        raise UsageError("MX grouped products are emulated of tokens with weights only")
    how = Scales(BLOCK_1X32, "tiles")
    blocks = -(-a.shape[1] // how.inner_block(a.dtype))
    width = round_up(blocks, 4)
    if scale.shape[1] != width:
        raise UsageError(f"scales of {scale.shape[1]} columns for {blocks} blocks, not {width}")
    flat, start, made = scale.reshape(-1), 0, torch.zeros(a.shape, device=a.device)
    for _, own in groups(offs):
        rows = own.stop - own.start
        size = round_up(rows, TILE_ROWS) * width
        if start + size > flat.shape[0]:
            raise UsageError(f"{flat.shape[0]} scales do not reach the end of a group")
        if rows:
            raw = from_tiles(flat[start : start + size], rows, blocks)
            wide = raw.to(torch.float32).repeat_interleave(how.inner_block(a.dtype), 1)[:, : a.shape[1]]
            made[own] = a[own].to(torch.float32) * wide
        start += size
    return made


def _dequantised_groups(x: Tensor, scale: Tensor, offs: Tensor) -> Tensor:
    """Rows of which every group has columns of its own, times their scales: one block begins where a group does."""
    how = Scales(BLOCK_1X32, "tiles")
    block, (padded, count) = how.inner_block(x.dtype), scale.shape
    starts, widths = group_columns(offs, block)
    if padded != round_up(x.shape[0], TILE_ROWS) or int(widths.sum()) > count:
        raise UsageError(f"scales {list(scale.shape)} for groups of {list(x.shape)}")
    flat = torch.nn.functional.pad(scale.contiguous().reshape(-1).view(torch.uint8), (0, 1))
    rows = torch.arange(x.shape[0], device=x.device)
    raw = flat[grouped_positions(rows, padded, widths, count)].view(scale.dtype).to(torch.float32)
    made = torch.zeros(x.shape, device=x.device)
    for g, own in groups(offs):
        first, size = int(starts[g]), own.stop - own.start
        wide = raw[:, first : first + -(-size // block)].repeat_interleave(block, 1)[:, :size]
        made[:, own] = x[:, own].to(torch.float32) * wide
    return made


def _dequantised_weights(b: Tensor, scale: Tensor) -> Tensor:
    """Weights [e, k, n] times their scales, one row of tiles an expert."""
    how = Scales(BLOCK_1X32, "tiles")
    if b.ndim != 3:
        raise UsageError("MX grouped products are emulated of tokens with weights only")
    block, (experts, k, n) = how.inner_block(b.dtype), b.shape
    made = []
    if tuple(scale.shape) != (experts, tiled_numel(n, -(-k // block))):
        raise UsageError(f"scales {list(scale.shape)} for weights {list(b.shape)}")
    for g in range(experts):
        raw = from_tiles(scale[g], n, -(-k // block)).to(torch.float32)
        made.append(b[g].to(torch.float32) * raw.repeat_interleave(block, 1)[:, :k].t())
    return torch.stack(made)
