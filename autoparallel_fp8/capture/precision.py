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

from autoparallel_fp8.capture.from_fx import layer_of
from autoparallel_fp8.graph import Graph, Node, Ref, TensorSpec, map_refs

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
    """The graph with master parameters, each cast where it is first read, and each gradient cast where it is made.

    Args:
        graph: traced with parameters in `policy.param_dtype`.
        masters: fqn -> spec of each parameter before that.
        policy: has `param_dtype` and `reduce_dtype`, dtypes or None.
    """
    nodes: list[Node] = []
    moved: list[int] = []
    casts: dict[int, int] = {}
    leaving = {one.ref: one.target for one in graph.outputs if one.kind == "gradient" and one.target in masters}
    cast_gradients: dict[Ref, Ref] = {}

    def read(ref: Ref) -> Ref:
        node = graph.nodes[ref.node]
        if node.kind != "parameter" or masters[node.target].dtype == node.outputs[0].dtype:
            return Ref(moved[ref.node], ref.output)
        if ref.node not in casts:
            casts[ref.node] = len(nodes)
            nodes.append(_cast(Ref(moved[ref.node]), node.outputs[0], "forward", node.target))
        return Ref(casts[ref.node])

    for node in graph.nodes:
        made = replace(node, args=map_refs(node.args, read), kwargs=map_refs(node.kwargs, read))
        if node.kind == "parameter":
            made = replace(made, outputs=(masters[node.target],))
        index = len(moved)
        moved.append(len(nodes))
        nodes.append(made)
        for output, spec in enumerate(node.outputs):
            target = leaving.get(Ref(index, output))
            if target is not None:
                dtypes = (policy.reduce_dtype, masters[target].dtype)
                cast_gradients[Ref(index, output)] = _cast_to(nodes, Ref(moved[-1], output), spec, dtypes, target)
    outputs = tuple(
        replace(one, ref=cast_gradients[one.ref] if one.kind == "gradient" and one.target in masters else read(one.ref))
        for one in graph.outputs
    )
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def _cast_to(nodes: list[Node], ref: Ref, spec: TensorSpec, dtypes: tuple[Any, ...], target: str) -> Ref:
    """A gradient after casts to each dtype in turn, added to the nodes; None stands for its own dtype."""
    for dtype in dtypes:
        if dtype is not None and spec.dtype.is_floating_point and spec.dtype != dtype:
            spec = replace(spec, dtype=dtype)
            nodes.append(_cast(ref, spec, "backward", target))
            ref = Ref(len(nodes) - 1)
    return ref


def _cast(source: Ref, spec: TensorSpec, phase: str, parameter: str) -> Node:
    module = parameter.rpartition(".")[0]
    kwargs = (("dtype", spec.dtype),)
    return Node("", "op", _to_copy, (source,), kwargs, (spec,), phase, "", module, layer_of(module))
