"""Matrix products. Split m or n and the result is split; split k and each rank has a part of the sum."""

from __future__ import annotations

import torch

from .language import OpCall, Signature, einsum, heavy, rule

aten = torch.ops.aten

heavy(aten.mm.default, aten.bmm.default, aten._scaled_mm.default)


@rule(aten.mm.default)
def mm(op: OpCall) -> Signature:
    return einsum(op, "m k, k n -> m n", linear=((0,), (1,)))


@rule(aten.bmm.default)
def bmm(op: OpCall) -> Signature:
    return einsum(op, "b m k, b k n -> b m n", linear=((0,), (1,)))


@rule(aten._scaled_mm.default, left_out={r"R x R x .*P\(sum\).* -> P\(sum\)": "a scale is no partial sum"})
def scaled_mm(op: OpCall) -> Signature:
    """Tensorwise (scales of one element) or rowwise (a[m,k], b[k,n], scale_a[m,1], scale_b[1,n]).

    No operand may be a partial sum: 8-bit rounding does not add up. A split m or n takes its scales along; a split
    k wants scales that span all of k, or one of each rank's own on both operands: each rank undoes its own scaling.
    """
    tensorwise = op.tensors[2].numel == 1 and op.tensors[3].numel == 1
    scale_a, scale_b = ("_ " * len(op.tensors[i].shape) or "." for i in (2, 3))
    scales = f"{scale_a}, {scale_b}" if tensorwise else "m _, _ n"
    bias = ", n" if len(op.tensors) == 5 else ""
    whole = ("k",) if bias else ()  # a bias may be added once, not on every rank
    return einsum(op, f"m k, k n, {scales}{bias} -> m n", scaled=((0, 2), (1, 3)), whole=whole)
