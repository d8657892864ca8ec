"""Graph rules for ops with a constant for an operand, where a simpler op does the same.

A mask that masks nothing leaves attention; picking one row by a constant index is a slice, and adding into zeros there,
its backward, a pad. So no rule has to say how a mask of zeros or a list of one index is split.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autoparallel_fp8.capture.rewrite import Rule, Walk, is_contiguous
from autoparallel_fp8.graph import Node, Ref
from autoparallel_fp8.ops import attention as _registers_the_op  # noqa: F401
from autoparallel_fp8.ops import scored_attention as _registers_more  # noqa: F401

aten = torch.ops.aten
ours = torch.ops.autoparallel_fp8

_MASK_AT = {
    ours.attention.default: 3,
    ours.attention_backward.default: 6,
    ours.capped_attention.default: 3,
    ours.capped_attention_backward.default: 6,
}


def drop_empty_masks(node: Node, walk: Walk) -> Node:
    """Attention without a mask that is zero, or True, everywhere."""
    at = _MASK_AT.get(node.op)
    if at is None or len(node.args) <= at:
        return node
    value = _constant(node.args[at], walk)
    is_empty = value is True or (isinstance(value, float) and value == 0)
    return replace(node, args=(*node.args[:at], None, *node.args[at + 1 :])) if is_empty else node


def slice_at_index(node: Node, walk: Walk) -> Node:
    """x[:, [i]] with a constant i as the slice from i to i + 1."""
    if node.op is not aten.index.Tensor:
        return node
    place = _one_place(node.args[1], walk)
    if place is None:
        return node
    dim, index = place
    size = walk.spec(node.args[0]).shape[dim]
    start = index + size if index < 0 else index
    made = replace(node, op=aten.slice.Tensor, args=(node.args[0], dim, start, start + 1))
    return _with_dense_result(made, node, walk)


def pad_at_index(node: Node, walk: Walk) -> Node:
    """Values added at a constant index of zeros, as the values padded with zeros."""
    if node.op is not aten.index_put.default or len(node.args) < 3 or _constant(node.args[0], walk) != 0:
        return node
    indices, values = node.args[1:3]
    place, spec = _one_place(indices, walk), node.outputs[0]
    if place is None or not is_contiguous(spec):
        return node
    dim, index = place
    size, ndim = spec.shape[dim], len(spec.shape)
    if walk.spec(values).shape != (*spec.shape[:dim], 1, *spec.shape[dim + 1 :]):
        return node
    start = index + size if index < 0 else index
    pads = (*[0] * (2 * (ndim - 1 - dim)), start, size - start - 1)
    return replace(node, op=aten.constant_pad_nd.default, args=(values, pads, 0.0))


def _with_dense_result(made: Node, before: Node, walk: Walk) -> Node:
    """The slice followed by a copy: an index op makes a tensor of its own, a slice looks into the old one."""
    source = walk.spec(made.args[0])
    view = replace(before.outputs[0], stride=source.stride)
    at = walk.add(replace(made, outputs=(view,)))
    return replace(before, op=aten.clone.default, args=(at,), kwargs=(("memory_format", torch.contiguous_format),))


def _one_place(indices: Any, walk: Walk) -> tuple[int, int] | None:
    """(dim, index) where the only index is a constant of one element in one dim."""
    used = [(dim, item) for dim, item in enumerate(indices) if item is not None]
    if len(used) != 1 or not isinstance(used[0][1], Ref) or walk.spec(used[0][1]).shape != (1,):
        return None
    value = _constant(used[0][1], walk)
    return (used[0][0], value) if isinstance(value, int) and not isinstance(value, bool) else None


def _constant(value: Any, walk: Walk) -> Any:
    """The number that a constant tensor is full of; None for others."""
    return walk.nodes[value.node].args[1] if walk.op(value) is aten.full.default else None


RULES: tuple[Rule, ...] = (drop_empty_masks, slice_at_index, pad_at_index)
