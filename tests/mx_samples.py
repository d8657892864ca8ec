"""Sample calls of the MX ops: values of very different size, so that a block scaled by another's scale cannot pass."""

from __future__ import annotations

from math import prod

import torch
from split_ops import Sample
from torch import Tensor

aten = torch.ops.aten
ops = torch.ops.autoparallel_fp8
F32, BF16, E4M3, E5M2 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


def uneven(*shape: int, dtype: torch.dtype = F32, order: str = "") -> Tensor:
    """Random numbers over 20 powers of two, some rows of zeros; order "T": the last two dims swapped in memory."""
    generator = torch.Generator().manual_seed(prod(shape) + len(shape))
    values = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-10, 10, shape, generator=generator)
    values[..., -1:, :] = 0.0
    values = values.to(dtype)
    return values.transpose(-1, -2).contiguous().transpose(-1, -2) if order == "T" else values


def elements(*shape: int, most: int = 1, dtype: torch.dtype = E4M3, order: str = "") -> Tensor:
    """Small whole numbers in float8."""
    generator = torch.Generator().manual_seed(prod(shape) + most)
    values = torch.randint(-most, most + 1, shape, generator=generator).to(F32).to(dtype)
    return values.t().contiguous().t() if order == "T" else values


def scales(*shape: int, low: int = -2, high: int = 2, order: str = "") -> Tensor:
    """Powers of two in float8_e8m0fnu."""
    generator = torch.Generator().manual_seed(prod(shape) + high)
    codes = torch.randint(127 + low, 128 + high, shape, generator=generator).to(torch.uint8)
    codes = codes.t().contiguous().t() if order == "T" else codes
    return codes.view(torch.float8_e8m0fnu)


def to_mx_samples() -> list[Sample]:
    op = ops.to_mx.default
    return [
        Sample(op, (uneven(12, 384), E4M3, 32, 1, "rceil")),
        Sample(op, (uneven(384, 12, dtype=BF16), E4M3, 32, 0, "floor")),
        Sample(op, (uneven(12, 48, order="T"), E5M2, 4, -1, "rceil")),
        Sample(op, (uneven(4, 24, 6, dtype=BF16), E4M3, 2, 1, "floor")),
        Sample(op, (uneven(12, 32), E4M3, 32, 1, "rceil")),
        Sample(op, (uneven(1, 96, dtype=BF16), E5M2, 32, -1, "floor")),
    ]


def mx_mm_samples() -> list[Sample]:
    op = ops.mx_mm.default

    def call(m: int, k: int, n: int, dtype: torch.dtype, low: int, high: int) -> Sample:
        a, b = elements(m, k), elements(k, n, order="T")
        scale_a, scale_b = scales(m, k // 32, low=low, high=high), scales(k // 32, n, low=low, high=high, order="T")
        return Sample(op, (a, b, scale_a, scale_b, dtype))

    mixed = call(4, 64, 8, F32, -2, 2)
    return [
        call(12, 384, 8, F32, -2, 2),
        call(12, 64, 24, BF16, 0, 1),  # sums of 64 products of 0, 1, 2 or 4: exact in bfloat16
        call(8, 32, 12, F32, -1, 2),
        Sample(op, (elements(4, 64, dtype=E5M2), *mixed.args[1:])),
    ]


def shift_samples() -> list[Sample]:
    """Of integers: what torchao's MX casts read exponents with."""
    ops_and_counts = ((aten.bitwise_right_shift.Tensor_Scalar, 2), (aten.bitwise_left_shift.Tensor_Scalar, 3))
    x, wide = torch.arange(96, dtype=torch.int32).reshape(12, 8), torch.arange(24).reshape(4, 1, 6)
    return [Sample(op, (t, n)) for op, n in (*ops_and_counts, (aten.bitwise_and.Scalar, 6)) for t in (x, wide, x.t())]
