"""Graphs run on real tensors in this process.

`run_graph` runs a captured graph on one device, op by op, as plain aten calls: what every change to a graph is held
against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoparallel_fp8.capture.rewrite import same_layout
from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.graph import ABSENT, Graph, Node, TensorSpec, map_refs
from autoparallel_fp8.lower import placement
from autoparallel_fp8.ops import attention as _registers_the_op  # noqa: F401


def run_graph(
    graph: Graph,
    parameters: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor] | None = None,
    *,
    seed: int = 0,
    check: bool = False,
    device: torch.device | str = "cpu",
    replacement: Callable[[Any], Any] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Results, gradients and new buffer values: {"output": {name: ...}, "gradient": {...}, "buffer": {...}}.

    Args:
        graph: as `capture` makes it.
        parameters: parameters and buffers by fqn.
        inputs: one tensor for each input node, in order.
        tangents: one for each tangent node, in order; ones by default.
        seed: of the step's dropout, where the graph has some.
        check: hold shape, stride and dtype of every value against the graph.
        device: that it runs on.
        replacement: op -> what runs in its place; nothing by default.

    Raises:
        UsageError: a parameter, buffer, input or tangent is missing.
    """
    given = given_values(graph, parameters, inputs, tangents, seed)
    values: list[tuple[Any, ...]] = []
    with torch.no_grad():
        for i, node in enumerate(graph.nodes):
            if node.kind != "op":
                values.append((given[i].to(device),))
            else:
                args, kwargs = (map_refs(x, lambda ref: values[ref.node][ref.output]) for x in (node.args, node.kwargs))
                function = node.op if replacement is None else replacement(node.op)
                placed = placement(node.op, device, has_tensors=next(node.reads(), None) is not None)
                result = function(*args, **dict(kwargs), **placed)
                values.append(tuple(result) if isinstance(result, (tuple, list)) else (result,))
                if check:
                    _check_specs(node, values[-1])
    found: dict[str, dict[str, Tensor]] = {"output": {}, "gradient": {}, "buffer": {}}
    for output in graph.outputs:
        found[output.kind][output.target] = values[output.ref.node][output.ref.output]
    return found


def given_values(
    graph: Graph,
    parameters: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor] | None,
    seed: int,
) -> dict[int, Tensor]:
    """The value of every node without an op; arguments and errors as of `run_graph`."""
    in_order = {"input": iter(inputs), "tangent": iter(tangents or ()), "seed": iter([torch.tensor(seed)])}
    found = {}
    for i, node in enumerate(graph.nodes):
        if node.kind == "op":
            continue
        if node.kind == "tangent" and tangents is None:
            value: Tensor | None = torch.ones(node.outputs[0].shape, dtype=node.outputs[0].dtype)
        elif node.kind in in_order:
            value = next(in_order[node.kind], None)
        else:
            value = parameters.get(node.target)
        if value is None:
            place = f"{node.kind}s" if node.kind in in_order else "parameters"
            raise UsageError(f"no value for {node.kind} {node.target}", at=place)
        found[i] = value
    return found


def _check_specs(node: Node, values: tuple[Any, ...]) -> None:
    """Holds that an op's results have the shapes, dtypes and strides that the graph says."""
    for spec, value in zip(node.outputs, values, strict=True):
        assert (value is None) == (spec is ABSENT), f"{node.name}: {spec} but {value}"
        if value is not None:
            found = TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype)
            assert same_layout(found, spec), f"{node.name} {node.op_name}: the graph says {spec}, it is {found}"
