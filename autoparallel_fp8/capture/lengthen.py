"""The joint graph of a deep model from that of its first and last three blocks.

`shorten` has shown that all inner blocks are the same program. Here the joint graph of six blocks, named as in the
whole model, is compared with itself, one block further, in forward and backward: the third block and the fourth must
agree node by node, every read either the same fixed value or the same place in the same, the next or the block before.
The cut blocks are then copies of the third between the two, with parameters and buffers of their own, and the result is
the graph that tracing in full gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoparallel_fp8.capture.dropout import call_in_block, calls_per_block, first_call, without_call
from autoparallel_fp8.capture.from_fx import layer_of
from autoparallel_fp8.capture.phases import name_nodes
from autoparallel_fp8.capture.shorten import NUM_KEPT, Stack
from autoparallel_fp8.graph import Graph, Node, Output, Ref, map_refs

_MODEL, _TWIN = 2, 3  # positions among the kept blocks: copies are made of the one, compared with the other


@dataclass(frozen=True)
class _Place:
    """Position of a block among the kept ones, and of a node in it."""

    phase: str
    block: int
    at: int


def lengthen(graph: Graph, stack: Stack) -> Graph | None:
    """The graph with all blocks; None where the third and the fourth block do not agree."""
    places = _places(graph, stack)
    if places is None:
        return None
    fixed = _compare(graph, stack, places)
    if fixed is None:
        return None
    num_calls = calls_per_block(_twins(graph, places))
    if num_calls is None or not _has_own_tensors(graph, stack):
        return None
    return name_nodes(_Copier(graph, stack, places, fixed, num_calls).graph())


def _has_own_tensors(graph: Graph, stack: Stack) -> bool:
    """Whether the inner blocks have the same parameters and buffers, each block's next to each other."""
    for kind in ("parameter", "buffer"):
        names = [node.target for node in graph.nodes if node.kind == kind]
        owners = [stack.block_of(name) for name in names]
        held = {block: [n for n, owner in zip(names, owners, strict=True) if owner == block] for block in stack.kept}
        inner = [[stack.in_block(name, 0) for name in held[block]] for block in stack.kept[1:-1]]
        inside = [owner for owner in owners if owner is not None]
        if any(names != inner[0] for names in inner) or inside != sorted(inside):
            return False
    return True


def _places(graph: Graph, stack: Stack) -> dict[int, _Place] | None:
    """Where each node of a block is; None unless blocks are runs of nodes, those of the inner ones equally long."""
    places: dict[int, _Place] = {}
    lengths: dict[tuple[str, int], int] = {}
    for phase, step in (("forward", 1), ("backward", -1)):
        indices = [i for i, node in enumerate(graph.nodes) if node.kind == "op" and node.phase == phase]
        owners = [stack.block_of(graph.nodes[i].module) for i in indices]
        inside = [at for at, owner in enumerate(owners) if owner is not None]
        if not inside:
            return None
        current = stack.kept.index(owners[inside[0]])
        if current != (0 if step == 1 else NUM_KEPT - 1):
            return None
        for at in range(inside[0], inside[-1] + 1):
            owner = owners[at]
            block = current if owner is None else stack.kept.index(owner)
            if block not in (current, current + step):
                return None
            current = block
            places[indices[at]] = _Place(phase, block, lengths.get((phase, block), 0))
            lengths[phase, block] = places[indices[at]].at + 1
        inner = {lengths.get((phase, block)) for block in range(1, NUM_KEPT - 1)}
        if len(inner) != 1:
            return None
    return places


def _compare(graph: Graph, stack: Stack, places: dict[int, _Place]) -> set[tuple[int, int]] | None:
    """(reader, read) pairs of nodes that stay fixed in every block; None where model and twin differ."""
    at = {place: index for index, place in places.items()}
    fixed: set[tuple[int, int]] = set()
    for place, index in at.items():
        if place.block != _MODEL:
            continue
        node, twin_index = graph.nodes[index], at[replace(place, block=_TWIN)]
        twin = graph.nodes[twin_index]
        if not _same_op(node, twin) or stack.in_block(node.module, 0) != stack.in_block(twin.module, 0):
            return None
        for a, b in zip(node.reads(), twin.reads(), strict=True):
            if a == b and not _is_near(places, a.node, _MODEL):
                fixed |= {(index, a.node), (twin_index, b.node)}
            elif a.output != b.output or not _moves_along(graph, stack, places, a.node, b.node):
                return None
    outer = {index for index, place in places.items() if place.block not in (_MODEL, _TWIN)}
    for index, node in enumerate(graph.nodes):
        reader = places.get(index)
        for ref in node.reads():
            read = places.get(ref.node)
            if (index not in outer and reader is not None) or read is None or read.block in (0, NUM_KEPT - 1):
                continue
            if reader is None or abs(reader.block - read.block) > 1:
                return None
    return fixed


def _twins(graph: Graph, places: dict[int, _Place]) -> list[tuple[Node, Node]]:
    """Each node of the model block with the same one of its twin."""
    at = {place: index for index, place in places.items()}
    models = [(index, place) for index, place in places.items() if place.block == _MODEL]
    return [(graph.nodes[index], graph.nodes[at[replace(place, block=_TWIN)]]) for index, place in models]


def _is_near(places: dict[int, _Place], index: int, block: int) -> bool:
    return index in places and abs(places[index].block - block) <= 1


def _moves_along(graph: Graph, stack: Stack, places: dict[int, _Place], a: int, b: int) -> bool:
    """Whether b is to the twin what a is to the model: its parameter, or the same place in the same or a next block."""
    first, second = graph.nodes[a], graph.nodes[b]
    if first.kind in ("parameter", "buffer") and second.kind == first.kind:
        is_own = stack.block_of(first.target) == stack.kept[_MODEL]
        return is_own and stack.in_block(first.target, stack.kept[_TWIN]) == second.target
    if a not in places or b not in places or abs(places[a].block - _MODEL) > 1:
        return False
    return places[b] == replace(places[a], block=places[a].block + 1)


def _same_op(a: Node, b: Node) -> bool:
    def blank(node: Node) -> tuple[object, ...]:
        args = map_refs(without_call(node.op, node.args), lambda _: None)
        return node.op, args, map_refs(node.kwargs, lambda _: None), node.outputs

    return blank(a) == blank(b)


class _Copier:
    """Walks the short graph and puts copies of the model block between it and its twin."""

    def __init__(
        self, graph: Graph, stack: Stack, places: dict[int, _Place], fixed: set[tuple[int, int]], num_calls: int
    ) -> None:
        self.short, self.stack, self.places, self.fixed = graph, stack, places, fixed
        self.at = {(place.phase, place.block, place.at): index for index, place in places.items()}
        self.num_calls = num_calls  # of dropout in one block
        self.inserted = range(3, stack.depth - 3)
        self.held: dict[str, int] = {}  # parameter or buffer -> its node in the long graph
        self.is_copied: set[str] = set()
        self.model = {
            phase: [i for i, place in places.items() if place.block == _MODEL and place.phase == phase]
            for phase in ("forward", "backward")
        }
        self.first_after = first_call(self.short.nodes[i] for i, at in places.items() if at.block == _TWIN)
        self.nodes: list[Node] = []
        self.moved: dict[int, int] = {}
        self.copies: dict[tuple[int, int], int] = {}

    def graph(self) -> Graph:
        """The long graph, nodes not yet named."""
        for index, node in enumerate(self.short.nodes):
            place = self.places.get(index)
            if place is not None and place.at == 0:
                starts = _TWIN if place.phase == "forward" else _MODEL
                if place.block == starts:
                    self._insert(place.phase)
            if node.kind in ("parameter", "buffer"):
                self._insert_held(node)
                self.held[node.target] = len(self.nodes)
            self.moved[index] = len(self.nodes)
            self._add(index, node, None)
        outputs = sorted(self._outputs(), key=self._rank)
        return replace(self.short, nodes=tuple(self.nodes), outputs=tuple(outputs))

    def _insert_held(self, before: Node) -> None:
        """The parameters or buffers of the cut blocks, where the first of the block after them comes."""
        if self.stack.block_of(before.target) != self.stack.kept[_TWIN] or before.kind in self.is_copied:
            return
        self.is_copied.add(before.kind)
        models = [node for node in self.short.nodes if node.kind == before.kind]
        models = [node for node in models if self.stack.block_of(node.target) == self.stack.kept[_MODEL]]
        for block in self.inserted:
            for node in models:
                name = self.stack.in_block(node.target, block)
                self.held[name] = len(self.nodes)
                module = self.stack.in_block(node.module, block)
                self.nodes.append(replace(node, name=name, target=name, module=module, layer=layer_of(module)))

    def _insert(self, phase: str) -> None:
        for block in self.inserted if phase == "forward" else reversed(self.inserted):
            modules: dict[str, str] = {}
            for index in self.model[phase]:
                self.copies[block, index] = len(self.nodes)
                node = call_in_block(self.short.nodes[index], block - self.stack.kept[_MODEL], self.num_calls)
                if node.module not in modules:
                    modules[node.module] = self.stack.in_block(node.module, block)
                self._add(index, node, block, modules[node.module])

    def _add(self, index: int, node: Node, copy: int | None, module: str | None = None) -> None:
        def to(ref: Ref) -> Ref:
            return Ref(self._read(index, ref.node, copy), ref.output)

        if copy is None:
            node = call_in_block(node, len(self.inserted), self.num_calls, self.first_after)
        args, kwargs = map_refs(node.args, to), map_refs(node.kwargs, to)
        if module is None:
            self.nodes.append(replace(node, args=args, kwargs=kwargs))
        else:
            self.nodes.append(replace(node, args=args, kwargs=kwargs, module=module, layer=layer_of(module)))

    def _read(self, reader: int, read: int, copy: int | None) -> int:
        """The node of the long graph that stands for what a node, or its copy in a cut block, reads."""
        if (reader, read) in self.fixed:
            return self.moved[read]
        node, at = self.short.nodes[read], self.places.get(read)
        reader_block = self.places[reader].block if reader in self.places else None
        if copy is None:
            if at is None or {reader_block, at.block} != {_MODEL, _TWIN}:
                return self.moved[read]
            return self._block(self.inserted[-1] if reader_block == _TWIN else self.inserted[0], at)
        if node.kind in ("parameter", "buffer"):
            own = self.stack.block_of(node.target) == self.stack.kept[_MODEL]
            return self.held[self.stack.in_block(node.target, copy)] if own else self.moved[read]
        return self.moved[read] if at is None else self._block(copy + at.block - _MODEL, at)

    def _block(self, block: int, place: _Place) -> int:
        """The node at a place, in a block given by its number in the whole stack."""
        if block in self.inserted:
            return self.copies[block, self.at[place.phase, _MODEL, place.at]]
        return self.moved[self.at[place.phase, self.stack.kept.index(block), place.at]]

    def _outputs(self) -> Iterator[Output]:
        for output in self.short.outputs:
            yield replace(output, ref=Ref(self.moved[output.ref.node], output.ref.output))
            place = self.places.get(output.ref.node)
            if place is not None and place.block == _MODEL:
                for block in self.inserted:
                    ref = Ref(self.copies[block, output.ref.node], output.ref.output)
                    yield Output(output.kind, ref, self.stack.in_block(output.target, block))

    def _rank(self, output: Output) -> tuple[int, int]:
        order = {"output": 0, "gradient": 1, "buffer": 2}
        return order[output.kind], self.held.get(output.target, len(self.nodes)) if output.kind != "output" else 0
