"""Mixed precision in the graph: masters in their own dtype, compute in `param_dtype`, gradients in `reduce_dtype`.

The model is traced with parameters in `param_dtype`. Here each parameter becomes a master followed by its cast, and
each gradient is cast to `reduce_dtype`, then to the master's dtype, before it leaves. The policy is torch's
`torch.distributed.fsdp.MixedPrecisionPolicy`, read by attribute; what it says about inputs and outputs, the traced
module does (`capture`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoparallel_fp8.graph import Graph, Node, Output, Ref, TensorSpec, map_refs

_to_copy = torch.ops.aten._to_copy.default


def model_in_param_dtype(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Casts the floating parameters of a meta copy in place; shared parameters stay shared."""
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                if id(parameter) not in cast:
                    cast[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                setattr(module, name, cast[id(parameter)])


def apply_mixed_precision(graph: Graph, masters: Mapping[str, TensorSpec], policy: Any) -> Graph:
    """The graph with master parameters, their casts, and casts of their gradients.

    Args:
        graph: traced with parameters in `policy.param_dtype`.
        masters: fqn -> spec of each parameter before that.
        policy: has `param_dtype` and `reduce_dtype`, dtypes or None.
    """
    nodes: list[Node] = []
    moved: dict[int, int] = {}
    casts: list[tuple[int, Node]] = []
    for index, node in enumerate(graph.nodes):
        master = masters.get(node.target) if node.kind == "parameter" else None
        if node.kind == "op" and casts:
            for original, cast in casts:
                moved[original] = len(nodes)
                nodes.append(cast)
            casts = []
        moved_args = map_refs(node.args, lambda ref: Ref(moved[ref.node], ref.output))
        moved_kwargs = map_refs(node.kwargs, lambda ref: Ref(moved[ref.node], ref.output))
        moved[index] = len(nodes)
        nodes.append(replace(node, args=moved_args, kwargs=moved_kwargs))
        if master is not None and master.dtype != node.outputs[0].dtype:
            nodes[-1] = replace(node, outputs=(master,))
            casts.append(
                (index, _cast(f"{node.name}.cast", Ref(moved[index]), node.outputs[0], "forward", node.target))
            )
    for original, cast in casts:
        moved[original] = len(nodes)
        nodes.append(cast)
    outputs = tuple(replace(output, ref=Ref(moved[output.ref.node], output.ref.output)) for output in graph.outputs)
    return _cast_gradients(replace(graph, nodes=tuple(nodes), outputs=outputs), masters, policy.reduce_dtype)


def _cast_gradients(graph: Graph, masters: Mapping[str, TensorSpec], reduce_dtype: torch.dtype | None) -> Graph:
    nodes, outputs = list(graph.nodes), []
    for output in graph.outputs:
        ref = output.ref
        if output.kind == "gradient" and output.target in masters:
            for dtype in (reduce_dtype, masters[output.target].dtype):
                spec = nodes[ref.node].outputs[ref.output]
                if dtype is not None and dtype.is_floating_point and spec.dtype != dtype:
                    name = f"{output.target}.grad.{str(dtype).removeprefix('torch.')}"
                    nodes.append(_cast(name, ref, replace(spec, dtype=dtype), "backward", output.target))
                    ref = Ref(len(nodes) - 1)
        outputs.append(Output(output.kind, ref, output.target))
    return replace(graph, nodes=tuple(nodes), outputs=tuple(outputs))


def _cast(name: str, source: Ref, spec: TensorSpec, phase: str, parameter: str) -> Node:
    from autoparallel_fp8.from_fx import layer_of

    module = parameter.rpartition(".")[0]
    kwargs = (("dtype", spec.dtype),)
    return Node(name, "op", _to_copy, (source,), kwargs, (spec,), phase, "", module, layer_of(module))
