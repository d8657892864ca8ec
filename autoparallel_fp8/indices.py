"""Which tables a graph looks things up in, and which of its inputs are the indices.

Made-up indices must be in range of every table that they reach, and a table whose indices are counted by ops, such as
positions, must keep its rows when tensors are made smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .graph import Graph, Ref

aten = torch.ops.aten

_MOVES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.transpose.int, aten.t.default, aten.permute.default, aten.expand.default, aten.slice.Tensor,
    aten.select.int, aten.cat.default, aten.constant_pad_nd.default, aten._to_copy.default,
}  # fmt: skip
_CONSTANTS = {aten.full.default, aten.scalar_tensor.default, aten.zeros.default}


@dataclass(frozen=True)
class LookUp:
    """An op that reads a table at indices.

    Attributes:
        table: the value that is read.
        dim: along which.
        inputs: numbers of the input nodes that the indices are taken from as they are; None where ops count them.
    """

    table: Ref
    dim: int
    inputs: frozenset[int] | None


def look_ups(graph: Graph) -> Iterator[LookUp]:
    """Every embedding and gather of the graph."""
    for node in graph.nodes:
        if node.op is aten.embedding.default:
            table, index = node.reads()
            yield LookUp(table, 0, _inputs(graph, index))
        elif node.op is aten.gather.default:
            table, index = node.reads()
            yield LookUp(table, node.args[1] % max(len(graph.spec(table).shape), 1), _inputs(graph, index))


def _inputs(graph: Graph, index: Ref) -> frozenset[int] | None:
    """The inputs that these values are; a constant, which stands for what is left out, is none."""
    found: set[int] = set()
    waiting = [index]
    while waiting:
        ref = waiting.pop()
        node = graph.nodes[ref.node]
        if node.kind == "input":
            found.add(ref.node)
        elif node.op in _MOVES:
            waiting += node.reads()
        elif node.op is aten.where.self:
            waiting += list(node.reads())[1:]
        elif node.op not in _CONSTANTS:
            return None
    return frozenset(found)
