"""Which placements can occur at each value, so that no option is made that nothing could feed.

A value may be partial only where a reduction, or a linear op of partial values, makes it so. And a factor that is not
the leading one of its dim is worth a split of its own only if it leads a dim somewhere that counts: of a parameter, an
input, or an operand of a heavy op that may be split there. So tokens = (batch, sequence) keeps both, since the
sequence leads a dim of the input; heads x (head size) keeps the heads, since attention never splits a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .graph import Graph, Ref
from .layout import Factors
from .rules import HEAVY_OPS, Signature, partial_kinds


@dataclass(frozen=True)
class Reach:
    """What may occur at one value.

    Attributes:
        splits: (dim, factor) pairs that an axis may split.
        partials: "", "P", "M" or "PM".
    """

    splits: tuple[tuple[int, int], ...]
    partials: str


def reachable(
    graph: Graph, signatures: Sequence[Signature | None], factors: dict[Ref, Factors]
) -> tuple[dict[Ref, Reach], list[frozenset[str]]]:
    """What may occur at every value, and for every node the atoms that may be split.

    Args:
        graph: the captured graph.
        signatures: refined, one a node.
        factors: of every value.
    """
    slots = [_slots(graph, i, signature) for i, signature in enumerate(signatures)]
    classes = _classes(slots)
    useful = {classes.find(position) for position in _leaders(graph, signatures, factors, slots)}
    partials = _partials(graph, signatures)
    found = {}
    for ref, dims in factors.items():
        splits = tuple(
            (d, f) for d, dim in enumerate(dims) for f in range(len(dim)) if classes.find((ref, d, f)) in useful
        )
        found[ref] = Reach(splits, partials[ref])
    atoms = [
        frozenset(atom for atom, positions in places.items() if positions and classes.find(positions[0]) in useful)
        for places in slots
    ]
    return found, atoms


Position = tuple[Ref, int, int]
"""A value, a dim of it, a factor of that dim."""


def same_factors(graph: Graph, signatures: Sequence[Signature | None]) -> Callable[[Position], Position]:
    """A function that gives the same position for every one that a chain of ops makes the same factor."""
    return _classes([_slots(graph, i, signature) for i, signature in enumerate(signatures)]).find


class Classes:
    """Union-find over positions: the same factor seen in different tensors."""

    def __init__(self) -> None:
        self.parent: dict[Position, Position] = {}

    def find(self, position: Position) -> Position:
        root = position
        while self.parent.get(root, root) != root:
            root = self.parent[root]
        while self.parent.get(position, position) != root:
            self.parent[position], position = root, self.parent[position]
        return root

    def join(self, a: Position, b: Position) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[max(a, b)] = min(a, b)


def _classes(slots: Sequence[dict[str, list[Position]]]) -> Classes:
    classes = Classes()
    for places in slots:
        for positions in places.values():
            for position in positions[1:]:
                classes.join(positions[0], position)
    return classes


def _slots(graph: Graph, i: int, signature: Signature | None) -> dict[str, list[Position]]:
    """Where each atom of a node's signature stands."""
    if signature is None:
        return {}
    found: dict[str, list[Position]] = {atom: [] for atom in signature.sizes}
    reads = list(graph.nodes[i].reads())
    tensors = list(zip(reads, signature.operands, strict=True))
    tensors += [(Ref(i, k), dims) for k, dims in enumerate(signature.results)]
    for ref, dims in tensors:
        for d, dim in enumerate(dims):
            for f, atom in enumerate(dim):
                if atom not in signature.whole:
                    found[atom].append((ref, d, f))
    return found


def _leaders(
    graph: Graph,
    signatures: Sequence[Signature | None],
    factors: dict[Ref, Factors],
    slots: list[dict[str, list[Position]]],
) -> list[Position]:
    """Leading factors of parameters, their gradients and inputs, and of heavy ops' operands where they may be split."""
    found = [
        (output.ref, d, 0)
        for output in graph.outputs
        if output.kind == "gradient"
        for d, dim in enumerate(factors[output.ref])
        if dim
    ]
    for i, node in enumerate(graph.nodes):
        if node.kind in ("parameter", "input", "tangent"):
            found += [(Ref(i), d, 0) for d, dim in enumerate(factors[Ref(i)]) if dim]
        elif node.kind == "op" and node.op in HEAVY_OPS:
            found += [p for positions in slots[i].values() for p in positions if p[2] == 0]
    return found


def _partials(graph: Graph, signatures: Sequence[Signature | None]) -> dict[Ref, str]:
    """Forward pass: which values can be P(sum) or P(max)."""
    found: dict[Ref, str] = {}
    for i, (node, signature) in enumerate(zip(graph.nodes, signatures, strict=True)):
        kinds: set[str] = set()
        if signature is not None:
            operands = [found[ref] for ref in node.reads()]
            for way in (signature, signature.finer) if signature.finer else (signature,):
                kinds |= {kind for atom, kind in way.reduced.items() if atom not in way.whole}
            if any(all("P" in operands[k] for k in group) for group in signature.linear):
                kinds.add("P")
            if signature.monotone and all("M" in operands[k] for k in signature.monotone):
                kinds.add("M")
        for k, spec in enumerate(node.outputs):
            found[Ref(i, k)] = "".join(kind for kind in partial_kinds(spec) if kind in kinds)
    return found
