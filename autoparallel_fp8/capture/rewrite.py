"""The walk that graph rules share, and the two questions about memory order that they ask.

A rule looks at one op node, whose reads are final, and returns it unchanged, another node in its place, or the `Ref`
of a value that is there already. Rules are tried in order, again from the first after each change; so rules need no
order among themselves, and each must leave a node that it does not change again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autoparallel_fp8.graph import Graph, Node, Ref, TensorSpec, map_refs


class Walk:
    """The nodes made so far, and the means to add one."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.nodes: list[Node] = []
        self._rules = rules

    def spec(self, ref: Ref) -> TensorSpec:
        return self.nodes[ref.node].outputs[ref.output]

    def op(self, value: Any) -> Any:
        """The op that made a value; None for anything else."""
        return self.nodes[value.node].op if isinstance(value, Ref) else None

    def add(self, node: Node) -> Ref:
        """The node's first result, after all rules."""
        tried = 0
        while tried < len(self._rules):
            made = self._rules[tried](node, self)
            if isinstance(made, Ref):
                return made
            tried = tried + 1 if made is node else 0
            node = made
        self.nodes.append(node)
        return Ref(len(self.nodes) - 1)


Rule = Callable[[Node, Walk], Node | Ref]


def rewrite(graph: Graph, rules: Sequence[Rule]) -> Graph:
    """The graph after all rules at each op node, in execution order."""
    walk = Walk(rules)
    moved: list[Ref] = []

    def to(ref: Ref) -> Ref:
        made = moved[ref.node]
        return Ref(made.node, ref.output) if ref.output else made

    for node in graph.nodes:
        if node.kind == "op":
            moved.append(walk.add(replace(node, args=map_refs(node.args, to), kwargs=map_refs(node.kwargs, to))))
        else:
            moved.append(Ref(len(walk.nodes)))
            walk.nodes.append(node)
    outputs = tuple(replace(output, ref=to(output.ref)) for output in graph.outputs)
    return replace(graph, nodes=tuple(walk.nodes), outputs=outputs)


def drop_dead(graph: Graph) -> Graph:
    """Without ops that no output needs; parameters, buffers, inputs and tangents stay."""
    needed = {output.ref.node for output in graph.outputs}
    for index in range(len(graph.nodes) - 1, -1, -1):
        if index in needed:
            needed.update(ref.node for ref in graph.nodes[index].reads())
    kept = [i for i, node in enumerate(graph.nodes) if i in needed or node.kind != "op"]
    if len(kept) == len(graph.nodes):
        return graph
    position = {old: new for new, old in enumerate(kept)}

    def to(ref: Ref) -> Ref:
        return Ref(position[ref.node], ref.output)

    nodes = tuple(
        replace(node, args=map_refs(node.args, to), kwargs=map_refs(node.kwargs, to))
        for node in (graph.nodes[i] for i in kept)
    )
    return replace(graph, nodes=nodes, outputs=tuple(replace(one, ref=to(one.ref)) for one in graph.outputs))


def is_contiguous(spec: TensorSpec) -> bool:
    """Whether the elements lie in row-major order without gaps; dims of size 1 may have any stride."""
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def same_layout(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two tensors have equal dtype, shape and memory order."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return all(size == 1 or x == y for size, x, y in zip(a.shape, a.stride, b.stride, strict=True))
