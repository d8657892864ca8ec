"""The joint fx graph as a plain `Graph`.

In goes what capture traced: placeholders and results described by `Slot`s, op nodes with fake tensors in
`meta["val"]`. Out comes the same graph as frozen data: parameters, buffers and inputs first, then forward (all that a
result or a new buffer value needs), then tangents, then backward, each part in traced order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autoparallel_fp8.errors import CaptureError
from autoparallel_fp8.graph import ABSENT, Graph, Node, Output, Ref, TensorSpec, dtype_name

_DROPPED = {"device", "layout", "pin_memory", "non_blocking"}
_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.convolution.default}
_FIRST = {"parameter": 0, "buffer": 1, "input": 2}


@dataclass(frozen=True)
class Slot:
    """What a placeholder is, or what a result is: its kind and target as in `Node` and `Output`."""

    kind: str
    target: str


def graph_from_fx(
    traced: fx.Graph,
    placeholders: Mapping[fx.Node, Slot | None],
    results: Sequence[tuple[Any, Slot | None]],
    module_of: Callable[[fx.Node], str],
) -> Graph:
    """The plain graph; placeholders and results without a slot are left out.

    Raises:
        CaptureError: a node is no plain aten op, or a size depends on data.
    """
    kept = [(value, slot) for value, slot in results if slot is not None and isinstance(value, fx.Node)]
    is_forward = _ancestors([value for value, slot in kept if slot.kind != "gradient"])
    order = _ordered(traced, placeholders, is_forward)
    refs: dict[fx.Node, Ref] = {}
    nodes: list[Node] = []
    seen: dict[Slot, Ref] = {}
    for item in order:
        if item.target is operator.getitem:
            refs[item] = Ref(refs[item.args[0]].node, item.args[1])  # type: ignore[index, arg-type]
            continue
        slot = placeholders.get(item)
        phase = "forward" if item in is_forward or (slot and slot.kind != "tangent") else "backward"
        refs[item] = Ref(len(nodes)) if slot is None else seen.setdefault(slot, Ref(len(nodes)))
        if refs[item] != Ref(len(nodes)):
            continue  # another fqn of a parameter or buffer that has its node
        if slot is not None:
            outputs = (spec_of(item.meta["val"]),)
            nodes.append(Node(slot.target, slot.kind, None, (), (), outputs, phase, slot.target))
        else:
            nodes.append(_op_node(item, refs, phase, module_of(item)))
    leaving = tuple(Output(slot.kind, refs[value], slot.target) for value, slot in kept)
    return Graph(tuple(nodes), leaving)


def spec_of(value: Tensor) -> TensorSpec:
    """Shape, stride and dtype of a fake, meta or real tensor."""
    return TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype)


def layer_of(module: str) -> str:
    """The part of a module's fqn up to its first number: "model.layers.3" of "model.layers.3.mlp"."""
    parts = module.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return "" if first is None else ".".join(parts[: first + 1])


def _ordered(traced: fx.Graph, placeholders: Mapping[fx.Node, Slot | None], is_forward: set[fx.Node]) -> list[fx.Node]:
    first: list[fx.Node] = []
    forward: list[fx.Node] = []
    tangents: list[fx.Node] = []
    backward: list[fx.Node] = []
    for item in traced.nodes:
        slot = placeholders.get(item)
        if slot is not None:
            (tangents if slot.kind == "tangent" else first).append(item)
        elif item.op == "get_attr" or item.op == "call_function":
            (forward if item in is_forward else backward).append(item)
    first.sort(key=lambda item: _FIRST[placeholders[item].kind])  # type: ignore[union-attr]
    return first + forward + tangents + backward


def _ancestors(ends: Sequence[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(ends)
    while stack:
        item = stack.pop()
        if item not in seen:
            seen.add(item)
            stack.extend(item.all_input_nodes)
    return seen


def _op_node(item: fx.Node, refs: Mapping[fx.Node, Ref], phase: str, module: str) -> Node:
    where = f"{module or 'model'}: {item.target}"
    if item.op == "get_attr":
        return _constant(item, phase, module, where)
    if not isinstance(item.target, torch._ops.OpOverload):
        raise CaptureError(f"{item.target} is not an aten op", at=where, do="write this part with plain tensor ops")
    _check_dtypes(item, module)
    value = item.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    outputs = tuple(ABSENT if one is None else _result_spec(one, where) for one in values)
    args = tuple(_plain(arg, refs, where) for arg in item.args)
    kwargs = tuple(
        (name, _plain(arg, refs, where))
        for name, arg in item.kwargs.items()
        if name not in _DROPPED and arg is not None
    )
    return Node(item.name, "op", item.target, args, kwargs, outputs, phase, "", module, layer_of(module))


def _check_dtypes(item: fx.Node, module: str) -> None:
    """Fake tensors multiply matrices of different dtypes, which no device does."""
    dtypes = {one.meta["val"].dtype for one in item.all_input_nodes}
    if item.target in _MATMULS and len(dtypes) > 1:
        names = " and ".join(sorted(map(dtype_name, dtypes)))
        raise CaptureError(
            f"a matrix product of {names}",
            at=module or "model",
            do="pass inputs in the parameters' dtype, cast in forward, or use mixed_precision",
        )


def _constant(item: fx.Node, phase: str, module: str, where: str) -> Node:
    """A tensor made outside of forward's ops: a scalar becomes a `full`, anything larger is refused."""
    root = item.graph.owning_module
    value: Any = root
    for part in str(item.target).split("."):
        value = getattr(value, part, None)
    if not isinstance(value, Tensor) or value.numel() != 1 or value.device.type == "meta":
        raise CaptureError(
            "forward uses a tensor that is neither argument, parameter, buffer nor result of an op",
            at=where,
            do="register the tensor as a buffer",
        )
    spec, fill = spec_of(value), value.item()
    op = torch.ops.aten.full.default
    return Node(
        item.name, "op", op, (spec.shape, fill), (("dtype", spec.dtype),), (spec,), phase, "", module, layer_of(module)
    )


def _result_spec(value: Any, where: str) -> TensorSpec:
    if not isinstance(value, Tensor):
        raise CaptureError(
            f"an op returns a {type(value).__name__} that depends on data",
            at=where,
            do="keep numbers read from tensors out of forward",
        )
    if not all(isinstance(size, int) for size in value.shape):
        raise CaptureError(
            f"a result's shape {tuple(value.shape)} depends on data",
            at=where,
            do="use ops with shapes known beforehand",
        )
    return spec_of(value)


def _plain(arg: Any, refs: Mapping[fx.Node, Ref], where: str) -> Any:
    if isinstance(arg, fx.Node):
        if arg not in refs:
            raise CaptureError(f"{arg} is no tensor of the graph", at=where, do="pass it as an input")
        return refs[arg]
    if isinstance(arg, (list, tuple)):
        return tuple(_plain(one, refs, where) for one in arg)
    return arg
