"""The GEMM of MX operands: float8 data with one float8_e8m0fnu scale for every 32 elements of the contracted dim.

    autoparallel_fp8::mx_mm(a, b, scale_a, scale_b, out_dtype) -> a @ b

a [m, k], b [k, n], scale_a [m, k / 32], scale_b [k / 32, n] -> [m, n]. Scales are *raw*: element (i, c) belongs to the
32 elements of row i from 32 c on. CUDA kernels want them padded to tiles of 128 x 4 and swizzled inside those. That
is done last, by each rank on what it holds: a part of the swizzled scales is not the swizzled part (a split of k picks
a strided set of tiles, one of m whole tiles only where 128 rows divide it), so raw scales are what splits and moves
with the data. Swizzling late reads and writes 1/32 of the operands' bytes.

sm100 and later and gfx950 run torch's scaled GEMM; other devices dequantise and multiply, in float32 on CPUs and
bfloat16 elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.graph import dtype_name
from autoparallel_fp8.ops.scale_tiles import to_tiles
from autoparallel_fp8.ops.to_mx import BLOCK_SIZE, from_mx

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_RESULTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def mx_mm_formula(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The product of the dequantised operands in float32 (float64 where that comes out), cast to `out_dtype`.

    Raises:
        UsageError: dtypes or shapes are not those of an MX product.
    """
    _check(a, b, scale_a, scale_b, out_dtype)
    wide = torch.promote_types(out_dtype, torch.float32)
    return torch.mm(from_mx(a, scale_a, 1, wide), from_mx(b, scale_b, 0, wide)).to(out_dtype)


mx_mm = torch.library.custom_op("autoparallel_fp8::mx_mm", mx_mm_formula, mutates_args=())


@mx_mm.register_kernel("cuda")
def _mx_mm_cuda(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    _check(a, b, scale_a, scale_b, out_dtype)
    if not has_kernel(a.device):
        return torch.mm(from_mx(a, scale_a, 1, torch.bfloat16), from_mx(b, scale_b, 0, torch.bfloat16)).to(out_dtype)
    is_swizzled = torch.version.hip is None
    order = F.SwizzleType.SWIZZLE_32_4_4 if is_swizzled else F.SwizzleType.NO_SWIZZLE
    scales = [to_tiles(s) if is_swizzled else s.contiguous() for s in (scale_a, scale_b.t())]
    return F.scaled_mm(
        a,
        b,
        scale_a=scales[0],
        scale_recipe_a=F.ScalingType.BlockWise1x32,
        scale_b=scales[1],
        scale_recipe_b=F.ScalingType.BlockWise1x32,
        swizzle_a=order,
        swizzle_b=order,
        output_dtype=out_dtype,
    )


@mx_mm.register_fake
def _mx_mm_fake(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    _check(a, b, scale_a, scale_b, out_dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def has_kernel(device: torch.device) -> bool:
    """Whether torch's scaled GEMM takes MXFP8 on this CUDA or ROCm device: sm100 and later, gfx950.

    Source: aten/src/ATen/native/cuda/ScaledBlas.cpp, _scaled_mxfp8_mxfp8.
    """
    if torch.version.hip is not None:
        return bool(torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx950"))
    return torch.cuda.get_device_capability(device) >= (10, 0)


def _check(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> None:
    if out_dtype not in _RESULTS:
        raise UsageError(
            f"mx_mm makes bfloat16, float16 or float32, not {dtype_name(out_dtype)}",
            at="mx_mm, out_dtype",
            do="make one of these and cast it after the product",
        )
    if any(t.dtype not in _FLOAT8 for t in (a, b)) or any(t.dtype != torch.float8_e8m0fnu for t in (scale_a, scale_b)):
        dtypes = ", ".join(dtype_name(t.dtype) for t in (a, b, scale_a, scale_b))
        raise UsageError(f"mx_mm multiplies float8 by float8 with float8_e8m0fnu scales, not {dtypes}", at="mx_mm")
    shapes = [list(t.shape) for t in (a, b, scale_a, scale_b)]
    is_product = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] and a.shape[1] % BLOCK_SIZE == 0
    blocks = a.shape[-1] // BLOCK_SIZE
    if not is_product or shapes[2:] != [[a.shape[0], blocks], [blocks, b.shape[1]]]:
        raise UsageError(
            f"mx_mm of {shapes[0]} and {shapes[1]} with scales {shapes[2]} and {shapes[3]}",
            at="mx_mm",
            do=f"pass a [m, k], b [k, n], scale_a [m, k / {BLOCK_SIZE}] and scale_b [k / {BLOCK_SIZE}, n]",
        )
