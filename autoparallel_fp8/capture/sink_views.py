"""Views moved below pointwise ops, so that equal work looks equal and is done where it is smallest.

A linear's input is cast to float8 as [batch, seq, k] in forward and as [tokens, k] in backward; moved below its cast,
the view leaves two equal casts, which merge, and one amax is reduced in place of two. In the same way a weight is cast
in its own shape and transposed after, and what backward of a mean spreads over a dim is scaled before it is spread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autoparallel_fp8.capture.rewrite import Walk, is_contiguous
from autoparallel_fp8.graph import Node, Ref, TensorSpec

aten = torch.ops.aten

_REORDERS = {aten.t.default, aten.transpose.int, aten.permute.default}
_SINKING = _REORDERS | {aten.view.default}
_FULL_MAXIMA = {aten.max.default, aten.min.default}  # the result does not depend on the order, unlike that of a sum


def sink_views(node: Node, walk: Walk) -> Node:
    """A pointwise op on a flattened or transposed tensor as that view of the op's result."""
    if node.op in _FULL_MAXIMA:
        inner = walk.nodes[node.args[0].node]
        return replace(node, args=inner.args[:1]) if inner.op in _SINKING else node
    at = _only_tensor(node, walk)
    if at is None:
        return node
    inner = walk.nodes[node.args[at].node]
    if not _sinks(inner, walk):
        return node
    before = walk.spec(inner.args[0])
    args = (*node.args[:at], inner.args[0], *node.args[at + 1 :])
    moved = walk.add(replace(node, args=args, outputs=(replace(before, dtype=node.outputs[0].dtype),)))
    after = TensorSpec(inner.outputs[0].shape, inner.outputs[0].stride, node.outputs[0].dtype)
    return replace(node, op=inner.op, args=(moved, *inner.args[1:]), kwargs=inner.kwargs, outputs=(after,))


def _only_tensor(node: Node, walk: Walk) -> int | None:
    """Position of the one argument with dims of a pointwise op that keeps its memory order; None if there are more."""
    if not is_pointwise(node):
        return None
    refs = [i for i, arg in enumerate(node.args) if isinstance(arg, Ref) and walk.spec(arg).shape != ()]
    if len(refs) != 1:
        return None
    before, after = walk.spec(node.args[refs[0]]), node.outputs[0]
    return refs[0] if before.shape == after.shape and before.stride == after.stride else None


def is_pointwise(node: Node) -> bool:
    """Whether each element of the one result depends on the elements at its place alone, casts included."""
    if node.op is aten._to_copy.default:
        return [name for name, _ in node.kwargs] == ["dtype"]
    tags = node.op.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and len(node.outputs) == 1


def _sinks(view: Node, walk: Walk) -> bool:
    if view.op not in _SINKING:
        return False
    flattens = len(walk.spec(view.args[0]).shape) > len(view.outputs[0].shape)
    return view.op is not aten.view.default or flattens


def drop_expands(node: Node, walk: Walk) -> Node:
    """Arguments of a pointwise op read before they were expanded, where the op broadcasts them itself."""
    if not is_pointwise(node) or sum(isinstance(arg, Ref) for arg in node.args) < 2:
        return node
    sources = [_before_expand(arg, walk) for arg in node.args]
    if not any(sources):
        return node
    specs = [walk.spec(source or arg) for source, arg in zip(sources, node.args, strict=True) if isinstance(arg, Ref)]
    is_same_type = len({spec.dtype for spec in specs} - {torch.bool}) == 1
    is_same_shape = tuple(torch.broadcast_shapes(*(spec.shape for spec in specs))) == node.outputs[0].shape
    if not is_same_type or not is_same_shape:
        return node
    args = [_narrow(arg, walk) if source else arg for source, arg in zip(sources, node.args, strict=True)]
    return replace(node, args=tuple(args))


def _before_expand(arg: Any, walk: Walk) -> Ref | None:
    """What was expanded to make a value, through pointwise ops with scalars; None if nothing was."""
    if not isinstance(arg, Ref) or walk.nodes[arg.node].kind != "op":
        return None
    node = walk.nodes[arg.node]
    if node.op is aten.expand.default:
        source: Ref = node.args[0]
        return source
    at = [i for i, one in enumerate(node.args) if isinstance(one, Ref)]
    return _before_expand(node.args[at[0]], walk) if is_pointwise(node) and len(at) == 1 else None


def _narrow(arg: Ref, walk: Walk) -> Ref:
    """The same value before it was expanded."""
    node = walk.nodes[arg.node]
    if node.op is aten.expand.default:
        source: Ref = node.args[0]
        return source
    (at,) = (i for i, one in enumerate(node.args) if isinstance(one, Ref))
    source = _narrow(node.args[at], walk)
    spec = replace(walk.spec(source), dtype=node.outputs[0].dtype)
    return walk.add(replace(node, args=(*node.args[:at], source, *node.args[at + 1 :]), outputs=(spec,)))


def drop_kept_dims(node: Node, walk: Walk) -> Node:
    """A view that drops the dims which a sum has kept as a sum that does not keep them."""
    if node.op is not aten.view.default or walk.op(node.args[0]) is not aten.sum.dim_IntList:
        return node
    inner = walk.nodes[node.args[0].node]
    if len(inner.args) < 3 or not inner.args[2] or not is_contiguous(node.outputs[0]):
        return node
    dims = {dim % len(inner.outputs[0].shape) for dim in inner.args[1]}
    left = tuple(size for dim, size in enumerate(inner.outputs[0].shape) if dim not in dims)
    if left != node.outputs[0].shape:
        return node
    return replace(node, op=inner.op, args=inner.args[:2], kwargs=inner.kwargs)
