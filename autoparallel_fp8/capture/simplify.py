"""Graph to smaller graph with the same results: what tracing leaves behind goes, what costs nothing is merged.

One walk applies the rules of `RULES` and merges equal nodes as it goes; what phases share and what nodes are called is
settled after (`phases`). Values agree with the unsimplified graph bit for bit, but for the sign of zeros (x + 0 is x).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autoparallel_fp8.capture import constant_operands
from autoparallel_fp8.capture.phases import fill_modules, mark_from_parameters, name_nodes, separate_phases
from autoparallel_fp8.capture.rewrite import Rule, Walk, drop_dead, is_contiguous, rewrite, same_layout
from autoparallel_fp8.capture.sink_views import drop_expands, drop_kept_dims, sink_views
from autoparallel_fp8.graph import Graph, Node, Ref, map_refs

aten = torch.ops.aten

_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
_COPIES = {aten.clone.default, aten._to_copy.default}
_VIEWS = {
    aten.view.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.permute.default,
    aten.constant_pad_nd.default,
}
_SCALAR_FORMS = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}
_NEUTRAL = {
    aten.add.Tensor: 0,
    aten.sub.Tensor: 0,
    aten.mul.Tensor: 1,
    aten.div.Tensor: 1,
    aten.pow.Tensor_Scalar: 1,
}
_FILLS = {
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}
_FILLS_WITH_VALUE = {aten.scalar_tensor.default: 0, aten.full_like.default: 1, aten.new_full.default: 2}
_EXACT_IN = {  # float dtypes that hold every value of the key
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


def simplify(graph: Graph) -> Graph:
    """The same graph, smaller; simplifying it again changes nothing."""
    graph = drop_dead(graph)
    graph = drop_dead(rewrite(graph, [*RULES, equal_merger()]))
    graph = drop_dead(separate_phases(mark_from_parameters(graph)))
    return name_nodes(fill_modules(graph))


def normalise(node: Node, _: Walk) -> Node:
    """One spelling for each op: scalar overloads as Tensor ones, every constant tensor as `full`, sizes written out."""
    spec = node.outputs[0]
    op, args = node.op, node.args
    if op in _SCALAR_FORMS:
        return replace(node, op=_SCALAR_FORMS[op])
    if op in _FILLS or op in _FILLS_WITH_VALUE:
        value = _FILLS[op] if op in _FILLS else args[_FILLS_WITH_VALUE[op]]
        return _full(node, value) if is_contiguous(spec) and not isinstance(value, Ref) else node
    if op in (aten.view.default, aten.expand.default) and args[1] != spec.shape:
        return replace(node, args=(args[0], spec.shape))
    if op is aten._unsafe_view.default:
        return replace(node, op=aten.view.default, args=(args[0], spec.shape))
    return node


def _full(node: Node, value: Any) -> Node:
    spec = node.outputs[0]
    value = bool(value) if spec.dtype == torch.bool else float(value) if spec.dtype.is_floating_point else value
    return replace(node, op=aten.full.default, args=(spec.shape, value), kwargs=(("dtype", spec.dtype),))


def drop_no_ops(node: Node, walk: Walk) -> Node | Ref:
    """Without detaches, copies into the layout that is there, views to the same shape, and x + 0, x * 1, x ** 1."""
    if node.op in _SAME:
        return node.args[0]
    if node.op not in _COPIES and node.op not in _VIEWS and node.op not in _NEUTRAL:
        return node
    source = node.args[0]
    if not isinstance(source, Ref) or not same_layout(walk.spec(source), node.outputs[0]):
        return node
    if node.op in _NEUTRAL and (node.kwargs or not _equals(node.args[1], _NEUTRAL[node.op])):
        return node
    return source


def merge_views(node: Node, walk: Walk) -> Node | Ref:
    """Views of views as one, t(t(x)) as x, and a widening cast that is cast back as no cast."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Ref) or walk.op(source) is not node.op:
        return node
    inner = walk.nodes[source.node]
    first = inner.args[0] if inner.args else None
    if not isinstance(first, Ref):
        return node
    original, after = walk.spec(first), node.outputs[0]
    if node.op is aten.view.default and is_contiguous(original):
        return first if same_layout(original, after) else replace(node, args=(first, after.shape))
    return first if _undoes(node, inner) and same_layout(original, after) else node


def _undoes(node: Node, inner: Node) -> bool:
    if node.op is aten.t.default:
        return True
    if node.op is aten.transpose.int:
        ndim = len(node.outputs[0].shape)
        return {dim % ndim for dim in node.args[1:]} == {dim % ndim for dim in inner.args[1:]}
    if node.op is aten.permute.default:
        return all(node.args[1][dim] == at for at, dim in enumerate(inner.args[1]))
    if node.op is aten._to_copy.default:
        return inner.outputs[0].dtype in _EXACT_IN.get(node.outputs[0].dtype, ())
    return False


def merge_pads(node: Node, walk: Walk) -> Node:
    """The sum of two tensors that are padded with zeros to fill each other's gap, as one cat."""
    if node.op is not aten.add.Tensor or node.kwargs or not is_contiguous(node.outputs[0]):
        return node
    if not all(walk.op(arg) is aten.constant_pad_nd.default for arg in node.args):
        return node
    pads = [(_one_pad(walk.nodes[arg.node]), walk.nodes[arg.node].args[0]) for arg in node.args]
    found = sorted((pad, ref) for pad, ref in pads if pad is not None)
    if len(found) != 2:
        return node
    (first, first_ref), (second, second_ref) = found
    dim = first[0]
    sizes = [walk.spec(ref).shape[dim] for ref in (first_ref, second_ref)]
    is_fit = first == (dim, 0, sizes[1]) and second == (dim, sizes[0], 0)
    return replace(node, op=aten.cat.default, args=((first_ref, second_ref), dim)) if is_fit else node


def _one_pad(node: Node) -> tuple[int, int, int] | None:
    """(dim, before, after) of a pad with zeros along one dim."""
    pads, ndim = node.args[1], len(node.outputs[0].shape)
    value = node.args[2] if len(node.args) > 2 else 0
    padded = [i for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]
    if value != 0 or len(padded) != 1:
        return None
    (at,) = padded
    return ndim - 1 - at, pads[2 * at], pads[2 * at + 1]


def fold_constants(node: Node, walk: Walk) -> Node:
    """Pointwise ops on nothing but one-element constants, computed now."""
    spec = node.outputs[0]
    if len(node.outputs) != 1 or spec.numel != 1 or not is_contiguous(spec):
        return node
    if torch.Tag.pointwise not in node.op.tags and node.op not in _COPIES and node.op not in _VIEWS:
        return node
    reads = list(node.reads())
    if not reads or not all(walk.op(ref) is aten.full.default and walk.spec(ref).numel == 1 for ref in reads):
        return node

    def value(ref: Ref) -> torch.Tensor:
        constant = walk.nodes[ref.node]
        made: torch.Tensor = aten.full.default(*constant.args, **dict(constant.kwargs))
        return made

    result = node.op(*map_refs(node.args, value), **dict(map_refs(node.kwargs, value)))
    return _full(node, result.item())


def computed(node: Node, args: Any, kwargs: Any) -> Any:
    """A key that two nodes share if they compute the same of these arguments."""
    return node.op, _exact(args), _exact(kwargs), node.outputs


def equal_merger() -> Rule:
    """A rule with one node for all that compute the same: equal op, arguments and result; random ops stay."""
    seen: dict[Any, int] = {}

    def merge_equal(node: Node, walk: Walk) -> Node | Ref:
        if torch.Tag.nondeterministic_seeded in node.op.tags:
            return node
        at = seen.setdefault(computed(node, node.args, node.kwargs), len(walk.nodes))
        return node if at == len(walk.nodes) else Ref(at)

    return merge_equal


def _equals(value: Any, number: int) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number


def _exact(value: Any) -> Any:
    """A key that tells 1 from 1.0 and True, and 0.0 from -0.0."""
    if isinstance(value, tuple):
        return tuple(_exact(item) for item in value)
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value), value) if isinstance(value, int) else value


RULES: tuple[Callable[[Node, Walk], Node | Ref], ...] = (
    normalise,
    drop_no_ops,
    merge_views,
    drop_kept_dims,
    sink_views,
    drop_expands,
    merge_pads,
    *constant_operands.RULES,
    fold_constants,
)
