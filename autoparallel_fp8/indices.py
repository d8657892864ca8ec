"""Which tables a graph looks things up in, which of its inputs are the indices, and what they may be.

Made-up indices must be in range of every table that they reach, and a table whose indices are counted by ops, such as
positions, must keep its rows when tensors are made smaller. A rank that holds a part of a table cannot tell an index
of another part from one that nobody has, so real indices are held against the table's size before anything runs.
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
_LEAVES_OUT = {aten.slice.Tensor, aten.select.int}
_COUNTS = {aten.arange.default, aten.arange.start, aten.arange.start_step}
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


@dataclass(frozen=True)
class Limit:
    """What the elements of an input may be.

    Attributes:
        name: of the input.
        size: they are 0 to size - 1.
        ignored: or this, where it is not None: the class of what is not counted.
        reader: what looks up: an op as the graph names it, or "the cross-entropy".
    """

    name: str
    size: int
    ignored: int | None
    reader: str


def limits(graph: Graph) -> list[Limit]:
    """Of the inputs that are row numbers of a table, or class numbers of a cross-entropy, as they are."""
    found: dict[Limit, None] = {}
    ignored: dict[int, int] = {}  # input -> class that its cross-entropy leaves out
    counted = []
    for node in graph.nodes:
        if node.op in (aten.embedding.default, aten.gather.default):
            table, index = node.reads()
            dim = 0 if node.op is aten.embedding.default else node.args[1]
            sizes, source = graph.spec(table).shape or (1,), _source(graph, index)
            if source is not None:
                found[Limit(graph.nodes[source].target, sizes[dim % len(sizes)], None, node.name)] = None
        elif node.op is aten.ne.Scalar and (source := _source(graph, node.args[0])) is not None:
            ignored[source] = node.args[1]
        elif node.op is aten.eq.Tensor:
            counted.append(node)
    for node in counted:  # as `capture.decompose.cross_entropy` writes it: classes == target[:, None]
        reads = list(node.reads())
        classes, source = graph.nodes[reads[0].node], _source(graph, reads[-1])
        if len(reads) == 2 and classes.op in _COUNTS and source in ignored:
            size = graph.spec(reads[0]).shape[-1]
            found[Limit(graph.nodes[source].target, size, ignored[source], "the cross-entropy")] = None
    return list(found)


def _source(graph: Graph, index: Ref) -> int | None:
    """The one input that these values are moved from, all of them as they are; None where there is none."""
    node = graph.nodes[index.node]
    while node.op in _MOVES - _LEAVES_OUT and node.outputs[0].dtype in (torch.int32, torch.int64):
        reads = list(node.reads())
        if len(reads) != 1:
            return None
        index = reads[0]
        node = graph.nodes[index.node]
    return index.node if node.kind == "input" else None


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
