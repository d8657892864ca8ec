"""Microscaling (MX) casts as one op: float8 elements with one power-of-two scale a block.

    autoparallel_fp8::to_mx(x, elem_dtype, block_size, axis, scaling_mode) -> (data, scale)

Blocks are runs of `block_size` elements along `axis` of x (float32 or bfloat16). data has x's shape in `elem_dtype`,
scale x's shape with size / block_size along `axis`, in float8_e8m0fnu. Both lie in memory with `axis` innermost and
the other dims in their order, whatever the order of x: `axis=0` of [m, k] gives column-major data, as the second
operand of a float8 GEMM is. Bit for bit torchao's `to_mx`, which need not be installed.

Source: OCP Microscaling Formats v1.0, section 6.3 ("floor": the largest power of two of the block over the largest of
the element dtype); cuBLAS, "1D block scaling" ("rceil": the block's maximum over the largest element, rounded up).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.graph import dtype_name

BLOCK_SIZE = 32
"""Elements that share a scale in MXFP8 GEMMs."""

SCALING_MODES = ("floor", "rceil")
_BIAS = 127  # of e8m0 and of float32 exponents
_NAN = 255  # the e8m0 code of NaN
_MANTISSA_BITS = 23  # of float32
_LEAST_NORMAL = 2.0**-126  # of float32: a smaller divisor may be taken for zero on devices


class _Element(NamedTuple):
    """The largest value of an element dtype, and the exponent of its largest power of two."""

    largest: float
    exponent: int


_ELEMENTS = {torch.float8_e4m3fn: _Element(448.0, 8), torch.float8_e5m2: _Element(57344.0, 15)}
SOURCES = (torch.float32, torch.bfloat16)
_TAKEN = (*SOURCES, torch.float64)  # a plan is verified in float64


def to_mx_formula(
    x: Tensor, elem_dtype: torch.dtype, block_size: int, axis: int, scaling_mode: str
) -> tuple[Tensor, Tensor]:
    """(data, scale) of the cast, by plain ops.

    >>> data, scale = to_mx_formula(torch.full((1, 32), 3.0), torch.float8_e4m3fn, 32, -1, "floor")
    >>> data.float().unique().item(), 2.0 ** (scale.view(torch.uint8).item() - 127)
    (384.0, 0.0078125)

    Raises:
        UsageError: a dtype or mode that is not covered, an axis that x lacks, or a size that is no multiple of the
            block.
    """
    at = _check(x, elem_dtype, block_size, axis, scaling_mode)
    moved = x.movedim(at, -1)
    blocks = moved.unflatten(-1, (moved.shape[-1] // block_size, block_size))
    largest = blocks.abs().amax(-1, keepdim=True).to(torch.float32)
    element = _ELEMENTS[elem_dtype]
    scale = _rceil if scaling_mode == "rceil" else _floor
    code, scaled = scale(blocks.to(torch.float32), largest, element)
    data = scaled.clamp(-element.largest, element.largest).to(elem_dtype).flatten(-2).contiguous()
    code = code.to(torch.uint8).view(torch.float8_e8m0fnu).squeeze(-1).contiguous()
    return data.movedim(-1, at), code.movedim(-1, at)


def from_mx(data: Tensor, scale: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """The values that MX data stands for, in float32 or bfloat16: each element times its block's scale.

    Exact but for values outside of the dtype's range.
    """
    at = axis % data.ndim
    moved, codes = data.movedim(at, -1), scale.movedim(at, -1)
    blocks = moved.unflatten(-1, (codes.shape[-1], -1)).to(dtype)
    return (blocks * codes.to(dtype).unsqueeze(-1)).flatten(-2).movedim(-1, at)


def _floor(x: Tensor, largest: Tensor, element: _Element) -> tuple[Tensor, Tensor]:
    """Codes and scaled values: 2 ** (floor(log2(largest)) - element.exponent), read from the float's bits."""
    exponent = ((largest.view(torch.int32) >> _MANTISSA_BITS) & 0xFF) - _BIAS
    code = (exponent - element.exponent).clamp(min=-_BIAS) + _BIAS
    code = torch.where(largest.isnan(), _NAN, code)
    return code, x / (code << _MANTISSA_BITS).view(torch.float32).clamp(min=_LEAST_NORMAL)


def _rceil(x: Tensor, largest: Tensor, element: _Element) -> tuple[Tensor, Tensor]:
    """Codes and scaled values: the next power of two from largest / element.largest on.

    Scaling is a product with the scale's reciprocal; a block of nothing (code 0) stays as it is.
    """
    wanted = largest / element.largest
    code = wanted.log2().ceil().clamp(-_BIAS, _BIAS) + _BIAS  # infinity: the largest code but NaN's
    code = torch.where(wanted.isnan(), float(_NAN), code)
    inverse = torch.where(code == 0, 1.0, torch.where(code == _NAN - 1, 2.0**-_BIAS, torch.exp2(_BIAS - code)))
    return code, x * torch.where(code == _NAN, wanted, inverse)


def _check(x: Tensor, elem_dtype: torch.dtype, block_size: int, axis: int, scaling_mode: str) -> int:
    """The axis counted from the front."""
    if x.dtype not in _TAKEN:
        raise UsageError(f"to_mx casts from {_names(SOURCES)}, not {x.dtype}", at="x", do="cast x first")
    if elem_dtype not in _ELEMENTS:
        raise UsageError(f"to_mx has no elements of {elem_dtype}", at="elem_dtype", do=f"use {_names(_ELEMENTS)}")
    if scaling_mode not in SCALING_MODES:
        raise UsageError(
            f"to_mx has no scaling mode {scaling_mode!r}", at="scaling_mode", do=f"use {' or '.join(SCALING_MODES)}"
        )
    if not -x.ndim <= axis < x.ndim:
        raise UsageError(f"to_mx along dim {axis} of a tensor with {x.ndim} dims", at="axis")
    if block_size < 1 or x.shape[axis] % block_size:
        raise UsageError(
            f"to_mx of {list(x.shape)} along dim {axis}: {x.shape[axis]} is not a multiple of {block_size}",
            at="x, block_size",
            do="pad the dim to whole blocks",
        )
    return axis % x.ndim


def _names(dtypes: object) -> str:
    return " or ".join(dtype_name(dtype) for dtype in dtypes)  # type: ignore[attr-defined]


to_mx = torch.library.custom_op("autoparallel_fp8::to_mx", to_mx_formula, mutates_args=())


@to_mx.register_fake
def _to_mx_fake(
    x: Tensor, elem_dtype: torch.dtype, block_size: int, axis: int, scaling_mode: str
) -> tuple[Tensor, Tensor]:
    at = _check(x, elem_dtype, block_size, axis, scaling_mode)
    shape = [size for d, size in enumerate(x.shape) if d != at]
    data = x.new_empty((*shape, x.shape[at]), dtype=elem_dtype)
    scale = x.new_empty((*shape, x.shape[at] // block_size), dtype=torch.float8_e8m0fnu)
    return data.movedim(-1, at), scale.movedim(-1, at)
