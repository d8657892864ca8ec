"""Sample calls of scaled GEMMs in every recipe: small whole numbers and power-of-two scales, so that sums are exact.

Scales vary along every dim, so that a block scaled by another's scale cannot pass; swizzled ones are made by torchao's
own order (`to_tiles` is held against it). What has no CPU kernel runs its formula.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from split_ops import Sample
from torch import Tensor

from autoparallel_fp8.ops.scale_tiles import to_tiles
from autoparallel_fp8.ops.scaling import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    NO_SWIZZLE,
    ROWWISE,
    SWIZZLE_32_4_4,
    TENSORWISE,
    round_up,
)
from autoparallel_fp8.ops.stand_ins import stand_in

aten = torch.ops.aten
F32, BF16, E4M3, E8M0 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu
FP4 = torch.float4_e2m1fn_x2


def whole(*shape: int, most: int = 2, dtype: torch.dtype = E4M3, order: str = "") -> Tensor:
    """Whole numbers from -most to most; order "T": column-major."""
    generator = torch.Generator().manual_seed(prod(shape) + most)
    values = torch.randint(-most, most + 1, shape, generator=generator).to(F32).to(dtype)
    return values.transpose(-1, -2).contiguous().transpose(-1, -2) if order == "T" else values


def powers(*shape: int, dtype: torch.dtype = F32, order: str = "") -> Tensor:
    """Powers of two from 1/2 to 2."""
    generator = torch.Generator().manual_seed(prod(shape) + 3)
    values = (2.0 ** torch.randint(-1, 2, shape, generator=generator).to(F32)).to(dtype)
    return values.t().contiguous().t() if order == "T" else values


def fours(rows: int, columns: int, order: str = "") -> Tensor:
    """Packed float4 codes of every value, `columns` of them a row."""
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator).to(torch.uint8).view(FP4)
    return codes.t() if order == "T" else codes


def tiles(rows: int, columns: int, dtype: torch.dtype = E8M0) -> Tensor:
    """Swizzled scales, flat."""
    return to_tiles(powers(rows, columns, dtype=dtype))


def v1(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None) -> Sample:
    op = aten._scaled_mm.default
    more = () if bias is None else (bias,)
    return Sample(op, (a, b, scale_a, scale_b, *more), (("out_dtype", F32),), stand_in=stand_in(op))


def v2(
    a: Tensor,
    b: Tensor,
    scales: tuple[Any, Any],
    recipes: tuple[tuple[int, ...], tuple[int, ...]],
    swizzle: tuple[int, ...] = (NO_SWIZZLE,),
    bias: Tensor | None = None,
) -> Sample:
    op = aten._scaled_mm_v2.default
    scale_a, scale_b = (s if isinstance(s, tuple) else (s,) for s in scales)
    args = (a, b, scale_a, recipes[0], swizzle, scale_b, recipes[1], swizzle, bias, F32)
    return Sample(op, args, stand_in=stand_in(op))


def operands(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    return whole(m, k), whole(k, n, most=1, order="T")


def block_samples() -> list[Sample]:
    """`aten._scaled_mm` with blocks of 128: ragged ones, one block along k, a bias."""
    found = []
    for m, k, n in ((8, 128, 128), (24, 384, 256), (12, 512, 384), (16, 192, 72)):
        kb, nb, mb = -(-k // 128), -(-n // 128), -(-m // 128)
        a, b = operands(m, k, n)
        found.append(v1(a, b, powers(m, kb, order="T"), powers(kb, nb, order="T")))
        found.append(v1(a, b, powers(mb, kb), powers(kb, n)))
        found.append(v1(a, b, powers(m, kb, order="T"), powers(kb, n)))
    a, b = operands(256, 256, 16)
    found.append(v1(a, b, powers(2, 2), powers(2, 16)))
    a, b = operands(12, 512, 256)
    return [*found, v1(a, b, powers(12, 4, order="T"), powers(4, 2, order="T"), whole(256, dtype=F32))]


TILED = [(256, 256, 384), (384, 384, 128), (192, 192, 96), (256, 192, 128), (128, 512, 64), (64, 96, 256)]
"""Whole tiles in all dims, in some, in none; blocks of 32 that fill no tile."""


def tiled_samples() -> list[Sample]:
    """MX scales of `aten._scaled_mm`: flat, in the two shapes that torchao gives them, under a bias, ragged."""
    found = []
    for m, k, n in TILED:
        a, b = operands(m, k, n)
        found.append(v1(a, b, tiles(m, k // 32), tiles(n, k // 32)))
    for m, k, n in TILED[:3]:
        a, b = operands(m, k, n)
        rows, width = round_up(m, 128) // 4, round_up(k // 32, 4) * 4
        as_data = tiles(m, k // 32).view(round_up(m, 128), -1)
        found.append(v1(a, b, tiles(m, k // 32).view(rows, width), tiles(n, k // 32).view(-1, width)))
        found.append(v1(a, b, as_data, tiles(n, k // 32), whole(n, dtype=F32)))
    a, b = operands(128, 80, 16)
    found.append(v1(a, b, tiles(128, 3), tiles(16, 3)))
    a, b = fours(256, 384), fours(128, 384, "T")
    return [*found, v1(a, b, tiles(256, 24, E4M3), tiles(128, 24, E4M3)), v1(a, b, tiles(256, 12), tiles(128, 12))]


def named_samples() -> list[Sample]:
    """`aten._scaled_mm_v2` in every recipe."""
    a, b = operands(12, 24, 8)
    tensorwise, rowwise = ((TENSORWISE,),) * 2, ((ROWWISE,),) * 2
    square, one = powers(4, 1, order="T"), operands(12, 128, 128)
    found = [
        v2(a, b, (powers(), powers(1)), tensorwise),
        v2(a, b, (powers(12, 1), powers(1, 8)), rowwise),
        v2(*one, (powers(12, 1), square), ((BLOCK_1X128,), (BLOCK_128X128,))),
        v2(*one, (square, powers(128, 1)), ((BLOCK_128X128,), (BLOCK_1X128,))),
        v2(a, b, (powers(12, 1), powers(1, 8)), rowwise, (), whole(8, dtype=F32)),
    ]
    for m, k, n in ((256, 384, 256), (128, 1024, 384), (12, 512, 16)):
        a, b = operands(m, k, n)
        kb, padded = k // 128, round_up(k // 128, 4)
        rows, columns = powers(m, kb, order="T"), powers(n, kb, order="T")
        square_a, square_b = powers(padded, -(-m // 128), order="T"), powers(padded, -(-n // 128), order="T")
        found.append(v2(a, b, (rows, columns), ((BLOCK_1X128,),) * 2))
        found.append(v2(a, b, (rows, square_b), ((BLOCK_1X128,), (BLOCK_128X128,))))
        found.append(v2(a, b, (square_a, columns), ((BLOCK_128X128,), (BLOCK_1X128,))))
    found.append(v2(*operands(12, 1024, 256), (powers(12, 8, order="T"), powers(8, 2, order="T")),
                    ((BLOCK_1X128,), (BLOCK_128X128,)), (), whole(256, dtype=F32)))  # fmt: skip
    mx, tiled = ((BLOCK_1X32,),) * 2, (SWIZZLE_32_4_4,)
    for m, k, n in TILED[:3]:
        a, b = operands(m, k, n)
        found.append(v2(a, b, (tiles(m, k // 32), tiles(n, k // 32)), mx, tiled))
        found.append(v2(a, b, (powers(m, k // 32, dtype=E8M0), powers(n, k // 32, dtype=E8M0)), mx))
    a, b = operands(64, 128, 32)
    found.append(v2(a, b, (powers(64 * 4, dtype=E8M0), powers(32, 4, dtype=E8M0)), mx, (), whole(32, dtype=F32)))
    a, b, nvfp4 = fours(256, 384), fours(128, 384, "T"), ((BLOCK_1X16, TENSORWISE),) * 2
    pairs = (tiles(256, 24, E4M3), powers(1)), (tiles(128, 24, E4M3), powers())
    found.append(v2(a, b, pairs, nvfp4, (SWIZZLE_32_4_4, NO_SWIZZLE)))
    found.append(v2(a, b, (pairs[0][0], pairs[1][0]), ((BLOCK_1X16,),) * 2, tiled))
    return [*found, v2(a, b, (tiles(256, 12), tiles(128, 12)), mx, tiled)]


def scaled_samples() -> list[Sample]:
    return [*block_samples(), *tiled_samples(), *named_samples()]
