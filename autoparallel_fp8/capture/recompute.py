"""Activation checkpointing as a change of the graph: backward makes forward's values again instead of keeping them.

Nothing downstream knows of it: a copy is a node like any other, with options, a price and a place in the program. The
unit is a layer (`Node.layer`); what stands outside of layers is left alone. What a layer takes from elsewhere stays
kept, as do results of random ops and what reads a buffer that forward changes; dropout is no random op here, since its
mask is a function of seed and position. Maxima stay kept too: they are small, float8 data made again has forward's
scale, and no rank asks the others for it twice. "full" makes everything else again, "selective" all but the results of
heavy ops (`HEAVY_OPS`). With a weight's cast and gather it is as in `phases`: backward has its own.

Where that would keep more of a layer than it frees, values of the layer stay kept: each for which the bytes to make it
of, beyond what is kept anyway, are more than its own. A copy runs right before its first reader, so that one layer's
values are there at a time; these are not part of a plan's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from autoparallel_fp8.capture.phases import is_forwards
from autoparallel_fp8.capture.simplify import computed
from autoparallel_fp8.garbage import no_collection
from autoparallel_fp8.graph import Graph, Node, Ref, map_refs
from autoparallel_fp8.rules import HEAVY_OPS

MODES = ("none", "selective", "full")
_RANDOM = torch.Tag.nondeterministic_seeded
_MAXIMA = {torch.ops.aten.amax.default, torch.ops.aten.max.default}


@no_collection()
def recompute(graph: Graph, mode: str) -> Graph:
    """The graph whose backward makes again what `mode` says; results are the same bit for bit.

    Copies are called after what they copy: "layers.0.attn.recompute.mm".

    Args:
        graph: as `capture` makes it, all layers in it.
        mode: one of `MODES`.
    """
    if mode == "none":
        return graph
    copier = _Copier(graph, _Choice(graph, keeps_heavy=mode == "selective"))
    made = copier.graph()
    return replace(made, notes=(*graph.notes, f'recompute="{mode}"{_what_it_did(graph, copier)}'))


def saves_more(graph: Graph) -> tuple[str, ...]:
    """The modes by which backward would make more again than it does in this graph."""
    return tuple(mode for mode in MODES if len(recompute(graph, mode).nodes) > len(graph.nodes))


def _what_it_did(graph: Graph, copier: _Copier) -> str:
    copied = [graph.nodes[i] for i in copier.own if i not in copier.twins and not _is_view(graph.nodes[i])]
    layers = {node.layer for node in copied if not node.from_parameters}
    if layers:
        return (
            f": {len(copied)} ops of {len(layers)} layer{'s' * (len(layers) > 1)} run again in backward; "
            "activations leave out what backward of one layer makes again at a time"
        )
    if not any(node.layer for node in graph.nodes):
        return " changes nothing: the model has no layers, numbered modules such as layers.0"
    return " changes nothing: no layer keeps a value for backward that could be made again from less"


class _Choice:
    """Which values of forward stay kept.

    Attributes:
        kept: values that stay; views stand for what they look at.
    """

    def __init__(self, graph: Graph, *, keeps_heavy: bool) -> None:
        self.nodes, self.spec = graph.nodes, graph.spec
        self._fixed = self._find_fixed(graph, keeps_heavy)
        backward = [node for node in graph.nodes if node.phase == "backward"]
        self._wanted = {root for node in backward for root in self._values_read(node)}
        self.kept = {root for root in self._wanted if root.node in self._fixed}
        layers: dict[str, list[int]] = {}
        for i, node in enumerate(graph.nodes):
            if self._is_value(i) and node.layer:
                layers.setdefault(node.layer, []).append(i)
        for inside in layers.values():
            least = [self._kept_of(inside, only_if_less) for only_if_less in (False, True)]
            self.kept |= min(least, key=self._num_bytes)

    def is_remade(self, ref: Ref) -> bool:
        """Whether backward has its own copy of a value of forward, if it reads it."""
        node, root = self.nodes[ref.node], self._root(ref)
        if node.phase == "backward" or is_forwards(node):
            return node.phase == "forward"
        return self._is_value(root.node) and root.node not in self._fixed and root not in self.kept

    def _is_value(self, i: int) -> bool:
        """An op's result that forward has to keep if backward is to have it."""
        node = self.nodes[i]
        return node.kind == "op" and node.phase == "forward" and not node.from_parameters

    def _root(self, ref: Ref) -> Ref:
        """The value that a chain of views looks at."""
        while _is_view(self.nodes[ref.node]):
            ref = next(self.nodes[ref.node].reads())
        return ref

    def _values_read(self, node: Node) -> Iterator[Ref]:
        return (root for root in map(self._root, node.reads()) if self._is_value(root.node))

    def _find_fixed(self, graph: Graph, keeps_heavy: bool) -> set[int]:
        """Nodes that are never run again: see the module's docstring."""
        changed = {output.target for output in graph.outputs if output.kind == "buffer"}
        fixed = {self._root(output.ref).node for output in graph.outputs}
        for i, node in enumerate(graph.nodes):
            if not self._is_value(i) or _is_view(node):
                continue
            fixed |= {root.node for root in self._values_read(node) if self.nodes[root.node].layer != node.layer}
            is_kept = node.op in _MAXIMA or (keeps_heavy and node.op in HEAVY_OPS)
            sources = (self.nodes[self._root(ref).node] for ref in node.reads())
            reads_changed = any(source.kind == "buffer" and source.target in changed for source in sources)
            if not node.layer or is_kept or reads_changed or _RANDOM in node.op.tags:
                fixed.add(i)
        return fixed

    def _kept_of(self, inside: list[int], only_if_less: bool) -> set[Ref]:
        """What a layer keeps beyond what is kept already.

        Args:
            inside: the layer's nodes in forward, in order.
            only_if_less: keep a value itself where less is not enough to make it again.
        """
        found: set[Ref] = set()
        needs: dict[Ref, set[Ref]] = {}  # value -> what it is made of, beyond what was kept then
        for i in inside:
            node = self.nodes[i]
            if _is_view(node):
                continue
            sources: set[Ref] = set()
            for root in self._values_read(node):
                sources |= needs.get(root, {root})
            sources -= self.kept | found
            for ref in (Ref(i, k) for k in range(len(node.outputs))):
                more = only_if_less and self._num_bytes(sources) > self.spec(ref).num_bytes
                needs[ref] = {ref} if i in self._fixed or more else sources
                if ref in self._wanted:
                    found |= needs[ref] - self.kept
        return found

    def _num_bytes(self, refs: Iterable[Ref]) -> int:
        return sum(self.spec(ref).num_bytes for ref in refs)


def _is_view(node: Node) -> bool:
    return node.kind == "op" and node.op._schema.returns[0].alias_info is not None


class _Copier:
    """Walks the graph and puts copies of forward's nodes before what first reads them in backward.

    Attributes:
        own: node of forward -> its copy, or the node of backward that does the same already.
    """

    def __init__(self, graph: Graph, choice: _Choice) -> None:
        self.old, self.choice = graph, choice
        self.twins = _twins(graph)
        self.nodes: list[Node] = []
        self.moved: dict[int, int] = {}
        self.own: dict[int, int] = {}
        self.names = {node.name for node in graph.nodes}

    def graph(self) -> Graph:
        for i, node in enumerate(self.old.nodes):
            if i in self.moved:
                continue  # of backward, and already before an earlier reader
            if node.phase == "backward":
                for source in self._missing(node):
                    self._copy(source)
            self._add(i, node)
        outputs = tuple(replace(one, ref=Ref(self.moved[one.ref.node], one.ref.output)) for one in self.old.outputs)
        return replace(self.old, nodes=tuple(self.nodes), outputs=outputs)

    def _missing(self, node: Node) -> list[int]:
        """Nodes of forward to copy before a node can run, in order."""
        found: set[int] = set()
        stack = list(node.reads())
        while stack:
            ref = stack.pop()
            if ref.node not in self.own and ref.node not in found and self.choice.is_remade(ref):
                found.add(ref.node)
                stack += self.old.nodes[ref.node].reads()
        return sorted(found)

    def _copy(self, source: int) -> None:
        node, twin = self.old.nodes[source], self.twins.get(source)
        if twin is not None:
            if twin not in self.moved:
                self._add(twin, replace(self.old.nodes[twin], args=node.args, kwargs=node.kwargs))
            self.own[source] = self.moved[twin]
            return
        self.own[source] = len(self.nodes)
        self.nodes.append(self._rewired(replace(node, name=self._name(node), phase="backward")))

    def _add(self, i: int, node: Node) -> None:
        self.moved[i] = len(self.nodes)
        self.nodes.append(self._rewired(node))

    def _rewired(self, node: Node) -> Node:
        def to(ref: Ref) -> Ref:
            is_own = node.phase == "backward" and ref.node in self.own and self.choice.is_remade(ref)
            return Ref((self.own if is_own else self.moved)[ref.node], ref.output)

        return replace(node, args=map_refs(node.args, to), kwargs=map_refs(node.kwargs, to))

    def _name(self, node: Node) -> str:
        short = node.name.removeprefix(f"{node.module}.")
        name = ".".join(part for part in (node.module * (short != node.name), "recompute", short) if part)
        while name in self.names:
            name += "_2"
        self.names.add(name)
        return name


def _twins(graph: Graph) -> dict[int, int]:
    """Node of forward that derives from parameters -> the node of backward that makes the same again already."""
    found: dict[int, int] = {}
    for i, at in enumerate(first_equals(graph)):
        if graph.nodes[i].phase == "backward" and graph.nodes[at].phase == "forward" and graph.nodes[i].from_parameters:
            found.setdefault(at, i)
    return found


def first_equals(graph: Graph) -> list[int]:
    """For each node the first one that computes the same, which is mostly itself."""
    seen: dict[Any, int] = {}
    found: list[int] = []
    for i, node in enumerate(graph.nodes):
        at = i
        if node.kind == "op" and _RANDOM not in node.op.tags:
            args, kwargs = node.args, node.kwargs
            if any(found[ref.node] != ref.node for ref in node.reads()):
                args, kwargs = map_refs((args, kwargs), lambda ref: Ref(found[ref.node], ref.output))
            at = seen.setdefault(computed(node, args, kwargs), i)
        found.append(at)
    return found
