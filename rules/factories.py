"""Ops that make tensors from nothing: any dim may be split; a counting one needs the offset of the rank's part."""

from __future__ import annotations

import torch

from .language import OpCall, Signature, einsum, pointwise, rule

aten = torch.ops.aten


@rule(aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.scalar_tensor.default)
def constant(op: OpCall) -> Signature:
    return einsum(op, "-> " + (" ".join(f"d{i}" for i in range(len(op.out[0].shape))) or "."))


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(op: OpCall) -> Signature:
    return einsum(op, "-> n", local={"n": "arange_part"})


@rule(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    left_out={r"P\(sum\) -> R": "nothing is read; capture writes these as full"},
)
def like(op: OpCall) -> Signature:
    return pointwise(op)


@rule(
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    left_out={".*": "nothing is read; capture writes these as full"},
)
def new(op: OpCall) -> Signature:
    """The operand gives dtype and device only: it stays whole, the result splits."""
    operand = "_ " * len(op.tensors[0].shape) or "."
    return einsum(op, f"{operand} -> " + (" ".join(f"d{i}" for i in range(len(op.out[0].shape))) or "."))
