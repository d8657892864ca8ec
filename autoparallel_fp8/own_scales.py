"""Where each rank's own scales may live: between a maximum and the scaled GEMMs that undo its scaling.

A scale of a rank's own is right only for the part it was taken of. So what is multiplied by it must be the tensor that
the maximum saw (up to element-wise ops, views and moves of that tensor alone), split at the same place; and a GEMM
takes frozen data together with the scale of the same maximum alone. torchao's rowwise GEMM without fast accumulation
takes unit scales and is multiplied by the product of the real ones after: there the product must be of the maxima of
just the data that the GEMM read. Weights keep one scale: they are left out. A tensor that backward makes again
(`capture.recompute`) is, split at the same place, the one that forward's maximum saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .capture.recompute import first_equals
from .graph import Graph, Ref
from .rules import Dims, OwnScales, Place, Signature, place_of


@dataclass(frozen=True)
class _Scaled:
    """What is known of a scale, or of data multiplied by it.

    Attributes:
        maxima: numbers of the nodes that the scale comes from, more than one for a product of scales.
        places: (place where the data may be frozen, or None for a scale; place that the scale was taken at).
    """

    maxima: tuple[int, ...]
    places: tuple[tuple[Place | None, Place], ...]
    is_scale: bool


def own_scales(graph: Graph, signatures: Sequence[Signature | None]) -> dict[int, OwnScales]:
    """For every node that own scales or frozen data may reach on their way to a scaled GEMM, what each operand may be.

    Args:
        graph: the captured graph.
        signatures: refined, one a node.
    """
    return _Search(graph, signatures).search()


class _Search:
    def __init__(self, graph: Graph, signatures: Sequence[Signature | None]) -> None:
        self.graph, self.signatures = graph, signatures
        self.values: dict[Ref, _Scaled] = {}
        self.found: dict[int, OwnScales] = {}
        self.unscaled: dict[Ref, tuple[int, ...]] = {}  # result of a GEMM with unit scales -> maxima of its data

    def search(self) -> dict[int, OwnScales]:
        for i, signature in enumerate(self.signatures):
            if signature is None or self.graph.nodes[i].from_parameters:
                continue
            reads = list(self.graph.nodes[i].reads())
            if signature.makes_own:
                self._start(i, signature, reads)
            elif signature.scaled:
                self._end(i, signature, reads)
            elif signature.passes_scales:
                self._pass(i, signature, reads)
        return self._on_the_way()

    def _start(self, i: int, signature: Signature, reads: list[Ref]) -> None:
        """A maximum over split dims."""
        atoms = [atom for atom, kind in signature.reduced.items() if kind == "M" and atom not in signature.whole]
        taken = [place for atom in atoms if (place := place_of(signature.operands[0], atom)) is not None]
        self.values[Ref(i)] = _Scaled((i,), tuple((None, place) for place in taken), True)
        self.found[i] = OwnScales(((),) * len(reads))

    def _end(self, i: int, signature: Signature, reads: list[Ref]) -> None:
        """A scaled GEMM, where data and scale come from one maximum."""
        places: list[tuple[tuple[Place | None, Place], ...]] = [()] * len(reads)
        for d, s in signature.scaled:
            data, scale = self.values.get(reads[d]), self.values.get(reads[s])
            if data and scale and not data.is_scale and scale.is_scale and data.maxima == scale.maxima:
                places[d], places[s] = data.places, scale.places
        if any(places):
            self.found[i] = OwnScales(tuple(places))
        elif maxima := self._maxima_of_data(signature, reads):
            self.unscaled[Ref(i)] = maxima
            self.found[i] = OwnScales(self._places_of(reads), "unscaled")

    def _maxima_of_data(self, signature: Signature, reads: list[Ref]) -> tuple[int, ...]:
        """Maxima of the scaled data that a GEMM reads with scales that are nobody's; () where it reads none."""
        data = [self.values[reads[d]] for d, _ in signature.scaled if reads[d] in self.values]
        if any(value.is_scale for value in data) or any(reads[s] in self.values for _, s in signature.scaled):
            return ()
        return tuple(sorted({maximum for value in data for maximum in value.maxima}))

    def _places_of(self, reads: list[Ref]) -> tuple[tuple[tuple[Place | None, Place], ...], ...]:
        return tuple(self.values[ref].places if ref in self.values else () for ref in reads)

    def _undo(self, i: int, reads: list[Ref]) -> bool:
        """The multiplication of an unscaled product by the scales of just its data."""
        if self.graph.nodes[i].op is torch.ops.aten.mul.Tensor and len(reads) == 2:
            for product, scale in (reads, reads[::-1]):
                value = self.values.get(scale)
                if product in self.unscaled and value and value.is_scale and value.maxima == self.unscaled[product]:
                    self.found[i] = OwnScales(self._places_of(reads), "undo")
                    return True
        return False

    def _multiply(self, i: int, reads: list[Ref]) -> bool:
        """A scale times a scale of something else, a weight's included."""
        scales = [self.values[ref] for ref in reads if ref in self.values and self.values[ref].is_scale]
        others = [ref for ref in reads if ref not in self.values]
        if len(reads) != 2 or not scales or len(scales) + len(others) != 2:
            return False
        if not all(self.graph.nodes[ref.node].from_parameters for ref in others):
            return False
        places = tuple(dict.fromkeys(place for value in scales for place in value.places))
        self.values[Ref(i)] = _Scaled(tuple(sorted({m for v in scales for m in v.maxima})), places, True)
        self.found[i] = OwnScales(self._places_of(reads), "product")
        return True

    def _pass(self, i: int, signature: Signature, reads: list[Ref]) -> None:
        """Element-wise ops and moves: of a scale, of frozen data, or of data and the scale of its own parts."""
        if self._undo(i, reads) or self._multiply(i, reads):
            return
        known = [k for k, ref in enumerate(reads) if ref in self.values]
        if len(known) != 1:
            return
        value = self.values[reads[known[0]]]
        places = [value.places if k == known[0] else () for k in range(len(reads))]
        others = [k for k in range(len(reads)) if k != known[0]]
        made: _Scaled | None = value
        if not value.is_scale:
            made = self._frozen(signature, known[0], value.places, value.maxima) if not others else None
        elif len(others) == 1:
            seen = next(self.graph.nodes[value.maxima[0]].reads())
            origins = {self._origin(seen, taken): taken for _, taken in value.places}
            x = reads[others[0]]
            at = ((place, origins.get(self._origin(x, place))) for place in _places(signature.operands[others[0]]))
            places[others[0]] = tuple((place, taken) for place, taken in at if taken is not None)
            if places[others[0]]:
                made = self._frozen(signature, others[0], places[others[0]], value.maxima)
        if made is not None:
            self.values[Ref(i)] = made
            self.found[i] = OwnScales(tuple(places))

    def _frozen(
        self,
        signature: Signature,
        operand: int,
        places: tuple[tuple[Place | None, Place], ...],
        maxima: tuple[int, ...],
    ) -> _Scaled:
        """The result, frozen where it has the operand's places."""
        carried = []
        for where, taken in places:
            assert where is not None, "data is frozen at a place"
            atom = _atom(signature.operands[operand], where)
            place = place_of(signature.results[0], atom) if atom else None
            if place is not None:
                carried.append((place, taken))
        return _Scaled(maxima, tuple(carried), False)

    def _origin(self, ref: Ref, place: Place | None) -> tuple[Ref, Place] | None:
        """Where a place of a value comes from, back through ops of one tensor that work element by element or move."""
        while place is not None:
            signature, reads = self.signatures[ref.node], list(self.graph.nodes[ref.node].reads())
            atom = _atom(signature.results[ref.output], place) if signature else None
            if signature is None or atom is None or len(reads) != 1 or not signature.passes_scales:
                return Ref(self._first[ref.node], ref.output), place
            ref, place = reads[0], place_of(signature.operands[0], atom)
        return None

    @cached_property
    def _first(self) -> list[int]:
        return first_equals(self.graph)

    def _on_the_way(self) -> dict[int, OwnScales]:
        """Those nodes from which a scaled GEMM is reached."""
        readers = self.graph.readers()
        kept: dict[int, OwnScales] = {}
        for i in sorted(self.found, reverse=True):
            signature = self.signatures[i]
            assert signature is not None
            if signature.scaled or self.found[i].use == "undo" or any(j in kept for j in readers.get(Ref(i), ())):
                kept[i] = self.found[i]
        return kept


def _places(dims: Dims) -> list[Place]:
    return [(d, f) for d, dim in enumerate(dims) for f in range(len(dim))]


def _atom(dims: Dims, place: Place) -> str | None:
    """The atom at a place of a tensor; None where the op keeps that dim whole."""
    atoms = dims[place[0]]
    return atoms[place[1]] if place[1] < len(atoms) else None
