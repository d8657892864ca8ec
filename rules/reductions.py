"""Sums and maxima. Splitting a reduced dim leaves a partial result: P(sum) or P(max).

A maximum over a split tensor may also stay each rank's own: that is a local scale, and what is scaled by it is frozen
where it lies (see `language.Signature`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..graph import ABSENT
from .language import OpCall, Signature, einsum, reduction, rule

aten = torch.ops.aten


@rule(aten.sum.default)
def sum_all(op: OpCall) -> Signature:
    return reduction(op, None, linear=((0,),))


@rule(aten.sum.dim_IntList)
def sum_dims(op: OpCall) -> Signature:
    return reduction(op, op.arg("dim"), linear=((0,),))


@rule(aten.mean.dim, aten.mean.default)
def mean(op: OpCall) -> Signature:
    """Each rank divides the sum of its part by the count of the whole; the parts then add up."""
    dims = op.arg("dim") if op.op is aten.mean.dim else None
    signature = reduction(op, dims, linear=((0,),))
    local = dict.fromkeys(signature.reduced, "mean_of_part")
    return reduction(op, dims, linear=((0,),), local=local)


@rule(aten.amax.default, left_out={r"P\(sum\) -> P\(sum\)": "over dims of size 1: a copy"})
def amax(op: OpCall) -> Signature:
    return reduction(op, op.arg("dim"), kind="M", monotone=(0,), makes_own=True)


@rule(aten.max.default)
def max_all(op: OpCall) -> Signature:
    return reduction(op, None, kind="M", monotone=(0,), makes_own=True)


@rule(aten.cumsum.default)
def cumsum(op: OpCall) -> Signature:
    """The dim that is summed along stays whole."""
    dim = op.arg("dim") % max(len(op.tensors[0].shape), 1)
    signature = reduction(op, [dim], linear=((0,),))
    names = tuple(() if i == dim else name for i, name in enumerate(signature.operands[0]))
    sizes = {atom: size for atom, size in signature.sizes.items() if atom not in signature.reduced}
    return Signature((names,), (names,), sizes, linear=((0,),))


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def softmax(op: OpCall) -> Signature:
    """The dim that is normalised stays whole."""
    dim = op.arg("dim") % max(len(op.tensors[0].shape), 1)
    names = tuple(() if i == dim or size <= 1 else (f"d{i}",) for i, size in enumerate(op.tensors[0].shape))
    sizes = {f"d{i}": size for i, size in enumerate(op.tensors[0].shape) if i != dim and size > 1}
    return Signature(tuple(names for _ in op.tensors), (names,), sizes)


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(op: OpCall) -> Signature:
    """Linear in the incoming gradient."""
    return replace(softmax(op), linear=((0,),))


@rule(aten.native_layer_norm.default, left_out={r"R( x R)? x P.* -> P\(sum\),R,R": "weights are no partial sums"})
def layer_norm(op: OpCall) -> Signature:
    """x[..., d] -> out[..., d], mean[..., 1], rstd[..., 1]: the normalised dims stay whole."""
    ndim, normalised = len(op.tensors[0].shape), len(op.arg("normalized_shape"))
    outer = " ".join(f"b{i}" for i in range(ndim - normalised))
    inner = "_ " * normalised
    statistics = f"{outer} {inner}"
    weights = ", ".join([inner] * (len(op.tensors) - 1))
    return einsum(
        op, f"{outer} {inner}{',' if weights else ''} {weights} -> {outer} {inner}, {statistics}, {statistics}"
    )


@rule(
    aten.native_layer_norm_backward.default,
    left_out={r".* x P\(sum\)( x R| x P\(sum\))? -> .*": "weights are no partial sums"},
)
def layer_norm_backward(op: OpCall) -> Signature:
    """Weight and bias gradients add up over split rows; all are linear in the incoming gradient."""
    ndim, normalised = len(op.tensors[0].shape), len(op.arg("normalized_shape"))
    outer = " ".join(f"b{i}" for i in range(ndim - normalised))
    inner = "_ " * normalised
    rows = f"{outer} {inner}"
    weights = "".join(f", {inner}" for _ in op.tensors[4:])
    results = ", ".join("_" if spec is ABSENT else rows if k == 0 else inner for k, spec in enumerate(op.out))
    return einsum(op, f"{rows}, {rows}, {rows}, {rows}{weights} -> {results}", linear=((0,),))
