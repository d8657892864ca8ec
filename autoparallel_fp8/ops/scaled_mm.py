"""What `aten._scaled_mm` computes, as plain float32 ops: for devices whose kernel is slow or missing.

CPU kernels multiply float8 at 0.06 GFLOP/s; this gives the same numbers where sums and scales are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    """a [m, k] times b [k, n] in float32, times their scales (of one element, or [m, 1] and [1, n]), plus bias [n]."""
    assert scale_result is None, "a scale of the result is not emulated"
    product = torch.mm(a.to(torch.float32), b.to(torch.float32)) * scale_a * scale_b
    product = product if bias is None else product + bias.to(torch.float32)
    return product.to(out_dtype or a.dtype)
