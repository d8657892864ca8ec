"""Matrix products. Split m or n and the result is split; split k and each rank has a part of the sum.

Scaled ones are in `scaled_matmul.py`, grouped ones in `grouped_matmul.py`.
"""

from __future__ import annotations

import torch

from .language import OpCall, Signature, einsum, heavy, rule

aten = torch.ops.aten

heavy(aten.mm.default, aten.bmm.default)


@rule(aten.mm.default)
def mm(op: OpCall) -> Signature:
    return einsum(op, "m k, k n -> m n", linear=((0,), (1,)))


@rule(aten.bmm.default)
def bmm(op: OpCall) -> Signature:
    return einsum(op, "b m k, b k n -> b m n", linear=((0,), (1,)))
