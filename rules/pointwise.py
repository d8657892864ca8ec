"""Ops that work element by element: any dim may be split. What differs is which partial sums pass.

A cast to 8 bits, to integers or to booleans passes none (`language.rows` drops them by dtype); neither does anything
that is not linear: reading a part of a sum through it would give another number.
"""

from __future__ import annotations

import torch

from ..graph import TensorSpec
from .language import OpCall, Signature, pointwise, rule

aten = torch.ops.aten

_WIDE = (torch.bfloat16, torch.float32, torch.float64)


@rule(
    aten.abs.default, aten.reciprocal.default, aten.rsqrt.default, aten.sqrt.default,
    aten.exp.default, aten.exp2.default, aten.log.default, aten.log2.default, aten.cos.default, aten.sin.default,
    aten.tanh.default, aten.sigmoid.default, aten.silu.default, aten.gelu.default, aten.relu.default,
    aten.erf.default, aten.isnan.default, aten.isinf.default, aten.logical_not.default, aten.bitwise_not.default,
    aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar,
    aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
    aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.logical_and.default, aten.logical_or.default,
    aten.maximum.default, aten.minimum.default, aten.pow.Tensor_Tensor, aten.rsub.Scalar,
    aten.sign.default, aten.bitwise_and.Scalar, aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Tensor_Scalar,
)  # fmt: skip
def nonlinear(op: OpCall) -> Signature:
    return pointwise(op)


@rule(aten.add.Scalar, aten.sub.Scalar)
def add_scalar(op: OpCall) -> Signature:
    """Linear where nothing is added; every rank would add another number."""
    return pointwise(op, linear=((0,),) if op.arg("other") == 0 else ())


@rule(aten.pow.Tensor_Scalar)
def power(op: OpCall) -> Signature:
    """Linear where the exponent is 1."""
    return pointwise(op, linear=((0,),) if op.arg("exponent") == 1 else ())


@rule(
    aten.floor.default,
    aten.ceil.default,
    aten.round.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
)
def nondecreasing(op: OpCall) -> Signature:
    """f(max) = max(f): a partial maximum passes."""
    return pointwise(op, monotone=True)


@rule(aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten.clone.default, aten.alias.default, aten.detach.default)
def linear_in_all(op: OpCall) -> Signature:
    return pointwise(
        op, linear=((0,),), monotone=op.op in (aten.clone.default, aten.alias.default, aten.detach.default)
    )


@rule(
    aten._to_copy.default,
    left_out={
        r"P\(sum\) -> P\(sum\)": "to float16: parts may be larger than the whole, and overflow where it does not"
    },
)
def cast(op: OpCall) -> Signature:
    """A cast between float types of 16 bits or more adds up (to its rounding); to 8 bits or integers it does not.

    Nor does one to float16: parts may be larger than the whole, and what does not fit its small range is infinite.
    A partial maximum passes into those types too: a cast to integers may wrap, and to bool it is not monotone.
    """
    source, target = op.tensors[0].dtype, op.out[0].dtype
    adds_up = source.is_floating_point and source.itemsize > 1 and target in (source, *_WIDE)
    keeps_order = target.is_floating_point and target.itemsize > 1
    return pointwise(op, linear=((0,),) if adds_up else (), monotone=keeps_order)


@rule(aten.add.Tensor, aten.sub.Tensor)
def add(op: OpCall) -> Signature:
    """Two partial sums add to a partial sum; a sum and a constant do not (every rank would add the constant)."""
    return pointwise(op, linear=((0, 1),) if len(op.tensors) == 2 else ())


@rule(aten.mul.Tensor)
def mul(op: OpCall) -> Signature:
    """Linear in each factor by itself."""
    return pointwise(op, linear=[(i,) for i in range(len(op.tensors))])


@rule(aten.div.Tensor)
def div(op: OpCall) -> Signature:
    """Linear in the numerator."""
    return pointwise(op, linear=((0,),) if isinstance(op.args[0], TensorSpec) else ())


@rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(op: OpCall) -> Signature:
    """Linear in both branches together, the condition whole. Every rank would add a scalar branch that is not zero."""
    scalars = {aten.where.ScalarOther: "other", aten.where.ScalarSelf: "self"}
    if op.op is aten.where.self:
        return pointwise(op, linear=((1, 2),))
    is_linear = op.op in scalars and op.arg(scalars[op.op]) == 0
    return pointwise(op, linear=((1,),) if is_linear else ())


@rule(aten.masked_fill.Scalar)
def masked_fill(op: OpCall) -> Signature:
    """Linear in the tensor where the fill is zero."""
    return pointwise(op, linear=((0,),) if op.arg("value") == 0 else ())


@rule(
    aten.silu_backward.default,
    aten.gelu_backward.default,
    aten.sigmoid_backward.default,
    aten.tanh_backward.default,
    aten.threshold_backward.default,
)
def gradient_of_pointwise(op: OpCall) -> Signature:
    """Linear in the incoming gradient."""
    return pointwise(op, linear=((0,),))
