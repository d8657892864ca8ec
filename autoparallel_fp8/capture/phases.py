"""Who owns a value: parameters, forward or backward; and what each node is called.

What derives from parameters alone is not kept from forward for backward: merging backward's cast of a weight into
forward's would keep the gathered weight alive between the two (pytorch/ao#936). `separate_phases` gives backward its
own chain from the parameter. Small values (scales, maxima) stay shared.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoparallel_fp8.capture.from_fx import layer_of
from autoparallel_fp8.graph import Graph, Node, Ref, map_refs

SHARED_NUMEL = 2**16  # largest value of a parameter that backward reads from forward: 256 KiB in float32
_RANDOM = torch.Tag.nondeterministic_seeded


def mark_from_parameters(graph: Graph) -> Graph:
    """`Node.from_parameters` set where a value depends on at least one parameter and on constants beside."""
    parameters: list[bool] = []
    constants: list[bool] = []
    nodes: list[Node] = []
    for node in graph.nodes:
        reads = [ref.node for ref in node.reads()]
        is_op = node.kind == "op" and _RANDOM not in node.op.tags
        constants.append(is_op and all(constants[i] for i in reads))
        derived = is_op and all(parameters[i] or constants[i] for i in reads) and any(parameters[i] for i in reads)
        parameters.append(node.kind == "parameter" or derived)
        nodes.append(replace(node, from_parameters=parameters[-1]))
    return replace(graph, nodes=tuple(nodes))


def is_forwards(node: Node) -> bool:
    """Whether a node makes a large value that forward derives from parameters: backward does not read it."""
    is_large = max(spec.numel for spec in node.outputs) > SHARED_NUMEL
    return node.kind == "op" and node.phase == "forward" and node.from_parameters and is_large


def separate_phases(graph: Graph) -> Graph:
    """Backward with its own copy of every large value that forward derives from parameters."""
    nodes: list[Node] = []
    moved: list[int] = []
    own: dict[int, int] = {}

    def owned(ref: Ref) -> Ref:
        if not is_forwards(nodes[ref.node]):
            return ref
        if ref.node not in own:
            node = nodes[ref.node]
            copy = replace(node, phase="backward", args=map_refs(node.args, owned), kwargs=map_refs(node.kwargs, owned))
            own[ref.node] = len(nodes)
            nodes.append(copy)
        return Ref(own[ref.node], ref.output)

    for node in graph.nodes:
        args, kwargs = (map_refs(x, lambda ref: Ref(moved[ref.node], ref.output)) for x in (node.args, node.kwargs))
        if node.phase == "backward":
            args, kwargs = map_refs(args, owned), map_refs(kwargs, owned)
        moved.append(len(nodes))
        nodes.append(replace(node, args=args, kwargs=kwargs))
    outputs = tuple(replace(one, ref=Ref(moved[one.ref.node], one.ref.output)) for one in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def fill_modules(graph: Graph) -> Graph:
    """Sums of gradients, which no line of the model made, given the module whose gradient came last."""
    nodes: list[Node] = []
    for node in graph.nodes:
        refs = [ref.node for ref in node.reads()]
        is_sum = node.kind == "op" and node.op is torch.ops.aten.add.Tensor and len(refs) == 2
        if is_sum and not node.module and node.phase == "backward" and nodes[max(refs)].phase == "backward":
            module = nodes[max(refs)].module
            node = replace(node, module=module, layer=layer_of(module))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def name_nodes(graph: Graph) -> Graph:
    """Names from module, phase and op: "layers.0.wq.mm", "layers.0.wq.backward.mm", the second "..._2".

    Parameters and buffers are called by their fqn, inputs by their name, tangents "tangent." and the result's name.
    """
    taken: dict[str, int] = {}
    nodes = []
    for node in graph.nodes:
        if node.kind == "op":
            short = node.op_name.split(".")[1]
            base = ".".join(part for part in (node.module, "backward" * (node.phase == "backward"), short) if part)
        else:
            base = f"tangent.{node.target}" if node.kind == "tangent" else node.target
        name = base
        while name in taken:
            taken[base] += 1
            name = f"{base}_{taken[base]}"
        taken[name] = 1
        nodes.append(replace(node, name=name))
    return replace(graph, nodes=tuple(nodes))
