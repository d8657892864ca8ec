"""The same graph, options and choices on smaller tensors, so that all ranks of a mesh fit into one process.

In: a `Space` and the choices made in it. Out: a `Space` whose every layout is legal as before. A factor that ops split
or pass on everywhere shrinks to the ways that the plan splits it, times what kernels want of a rank's part; whatever
an op wants whole, or says nothing of, keeps its size. What is computed is no longer the user's model, but the same
ops, shardings and collectives: a wrong rule or a wrong collective gives wrong numbers as it would at full size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import gcd, lcm, prod
from typing import Any

import torch

from .expansion import Kind, Space, call_of
from .graph import ABSENT, Graph, Node, Ref, TensorSpec
from .indices import look_ups
from .layout import Factors, Layout, local_factors, local_spec
from .lower import LocalCall, localized
from .reach import Classes, Position
from .rules import Dims, OpCall, Signature
from .structure import Structure

aten = torch.ops.aten

WHOLE = 128
"""What is never split keeps its size up to this, or a multiple of it: blocks of scales are no larger."""


def shrink(
    space: Space, shape: Structure, choices: Sequence[int], keep: int, between: Iterable[tuple[Ref, Layout]] = ()
) -> Space:
    """The space on smaller tensors.

    Args:
        space: options, with the signatures that they come from.
        shape: its variables.
        choices: the option of every variable; layouts of these stay legal.
        keep: a rank's part of a factor stays a multiple of this where it was one (of its divisors otherwise).
        between: layouts that values pass through on the way from one of the choices to another; they stay legal too.
    """
    sizes = _Sizes(space)
    for ref, layout in (*_layouts(space, shape, choices), *between):
        sizes.split(ref, layout)
    return _rebuilt(space, sizes.factors(keep))


def _layouts(space: Space, shape: Structure, choices: Sequence[int]) -> Iterator[tuple[Ref, Layout]]:
    """Every layout that a value is in under the choices."""
    for link in shape.links:
        yield link.ref, shape.sources[link.source][link.source_slot][choices[link.source]]
        yield link.ref, shape.targets[link.target][link.target_slot][choices[link.target]]
    for i, node in enumerate(space.graph.nodes):
        for k, spec in enumerate(node.outputs):
            if spec is not ABSENT:
                yield Ref(i, k), shape.sources[i][k][choices[i]]


class _Sizes:
    """Factors that are one, seen in different tensors, and how finely the plan splits each.

    Attributes:
        find: the position that stands for all that are one with it.
        fixed: roots that keep their size.
        whole: roots that some op never splits; they shrink as far as blocks of scales and heads let them.
        ways: root -> in how many parts it is split, at least.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self._classes = Classes()
        self.find = self._classes.find
        self.ways: dict[Position, int] = {}
        fixed: list[Position] = []
        whole: list[Position] = []
        for i, node in enumerate(space.graph.nodes):
            if node.kind != "op":
                continue
            signature = space.signatures[i]
            values = [*node.reads(), *(Ref(i, k) for k in range(len(node.outputs)))]
            if signature is None:
                fixed += [p for ref in values for p in self._positions(ref)]
            else:
                dims = (*signature.operands, *signature.results)
                self._join(signature, list(zip(values, dims, strict=True)), fixed, whole)
        for one in look_ups(space.graph):
            fixed += [p for p in self._positions(one.table) if one.inputs is None and p[1] == one.dim]
        fixed += self._join_ends()
        self.fixed = {self.find(p) for p in fixed}
        self.whole = {self.find(p) for p in whole}

    def _positions(self, ref: Ref) -> Iterator[Position]:
        for d, dim in enumerate(self.space.factors[ref]):
            for f in range(len(dim)):
                yield ref, d, f

    def _join(
        self, signature: Signature, tensors: list[tuple[Ref, Dims]], fixed: list[Position], whole: list[Position]
    ) -> None:
        """Ties the positions of each atom; notes those that the op does not name, and those that it wants whole.

        Where an atom crosses the factors of a dim, all that it stands for keeps its size.
        """
        first: dict[str, Position] = {}
        crossing: set[str] = set()
        for ref, dims in tensors:
            for d, dim in enumerate(self.space.factors[ref]):
                is_named = tuple(signature.sizes[atom] for atom in dims[d]) == dim
                fixed += [] if is_named else [(ref, d, f) for f in range(len(dim))]
                crossing.update(() if is_named else dims[d])
                for f, atom in enumerate(dims[d] if is_named else ()):
                    self._classes.join(first.setdefault(atom, (ref, d, f)), (ref, d, f))
                    whole += [(ref, d, f)] if atom in signature.whole else []
        fixed += [first[atom] for atom in crossing & first.keys()]

    def _join_ends(self) -> Iterator[Position]:
        """Ties gradients and new buffer values to what they are of; the positions where their factors differ."""
        graph = self.space.graph
        stored = {node.target: Ref(i) for i, node in enumerate(graph.nodes) if node.kind in ("parameter", "buffer")}
        for output in graph.outputs:
            if output.kind == "output":
                continue
            ends = output.ref, stored[output.target]
            if self.space.factors[ends[0]] == self.space.factors[ends[1]]:
                for one, other in zip(*map(self._positions, ends), strict=True):
                    self._classes.join(one, other)
            else:
                yield from (p for end in ends for p in self._positions(end))

    def split(self, ref: Ref, layout: Layout) -> None:
        """Takes note of how a layout splits a value."""
        factors = self.space.factors[ref]
        local = local_factors(factors, layout, self.space.mesh.sizes)
        assert local is not None
        for d, (whole, part) in enumerate(zip(factors, local, strict=True)):
            for f, (size, left) in enumerate(zip(whole, part, strict=True)):
                root = self.find((ref, d, f))
                self.ways[root] = lcm(self.ways.get(root, 1), size // left)

    def factors(self, keep: int) -> dict[Ref, Factors]:
        """Factors of every value after shrinking."""
        found = {}
        for ref, dims in self.space.factors.items():
            found[ref] = tuple(
                tuple(self._size(self.find((ref, d, f)), size, keep) for f, size in enumerate(dim))
                for d, dim in enumerate(dims)
            )
        return found

    def _size(self, root: Position, size: int, keep: int) -> int:
        if root in self.fixed:
            return size
        ways = self.ways.get(root, 1)
        small = ways * gcd(size // ways, keep)
        if root in self.whole:
            small = lcm(small, gcd(size, WHOLE))
        return small if small > 1 else size


def _rebuilt(space: Space, factors: dict[Ref, Factors]) -> Space:
    """The space on tensors of these factors; options and layouts stay as they are."""
    shaped = [
        replace(n, outputs=tuple(_small(spec, factors[Ref(i, k)]) for k, spec in enumerate(n.outputs)))
        for i, n in enumerate(space.graph.nodes)
    ]
    small = replace(space.graph, nodes=tuple(shaped))
    kinds: list[Kind] = []
    numbers: dict[Any, int] = {}
    kind_of = []
    nodes = []
    for i, node in enumerate(shaped):
        old = space.kind(i)
        made = _resized(small, node, old.call) if node.kind == "op" else node
        nodes.append(made)
        call = call_of(small, made)
        reads = tuple(factors[ref] for ref in made.reads())
        makes = tuple(factors[Ref(i, k)] for k in range(len(made.outputs)))
        key = (old.number, call, reads, makes)
        if key not in numbers:
            numbers[key] = len(kinds)
            kinds.append(replace(old, number=len(kinds), call=call, operand_factors=reads, result_factors=makes))
        kind_of.append(numbers[key])
    graph = replace(space.graph, nodes=tuple(nodes))
    return replace(space, graph=graph, factors=factors, kinds=tuple(kinds), kind_of=tuple(kind_of))


def _small(spec: TensorSpec, factors: Factors) -> TensorSpec:
    if spec is ABSENT:
        return spec
    shape = tuple(prod(dim) if dim else size for dim, size in zip(factors, spec.shape, strict=True))
    return local_spec(spec, shape)


def _resized(graph: Graph, node: Node, whole: OpCall) -> Node:
    """The node with every size among its arguments that of its smaller tensors."""
    if node.op in _ARANGE:
        return replace(node, args=_ARANGE[node.op](node.outputs[0].shape[0], *node.args))
    reads = tuple(graph.spec(ref) for ref in node.reads())
    call = localized(whole, LocalCall(node.op, node.args, node.kwargs), reads, node.outputs)
    return replace(node, op=call.function, args=call.args, kwargs=call.kwargs)


_ARANGE: dict[Any, Callable[..., tuple[Any, ...]]] = {
    aten.arange.default: lambda count, end: (count,),
    aten.arange.start: lambda count, start, end: (start, start + count),
    aten.arange.start_step: lambda count, start, end, step=1: (start, start + count * step, step),
}
