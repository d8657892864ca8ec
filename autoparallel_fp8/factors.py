"""Which factors each dim of each tensor is made of, so that a split survives views and GEMMs.

In: the graph and the signature of every op. Out: `Factors` for every value, and the signatures with their atoms refined
to those factors. A view `[16, 8192, 4096] -> [131072, 4096]` cuts its result's dim 0 at 8192; the GEMM behind it ties
that dim to its own result's, so the cut travels on, and back again, until nothing changes. A cut is kept as a suffix
product (the stride of the factor before it), and a dim's cuts form a divisor chain; one that does not fit is not
made, and the atoms it would have served stay whole in that op.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from .graph import Graph, Ref
from .layout import Factors
from .rules.language import Dims, Signature

Cuts = frozenset[int]
_NO_CUTS: Cuts = frozenset()


def factorize(
    graph: Graph, signatures: Sequence[Signature | None]
) -> tuple[dict[Ref, Factors], list[Signature | None]]:
    """Factors of every value and the refined signature of every node (None where the node has none).

    Args:
        graph: the captured graph.
        signatures: one a node, as the rules gave them; None for parameters, inputs and ops without a rule.
    """
    tensors = [_tensors(graph, i, signature) for i, signature in enumerate(signatures)]
    touching: dict[Ref, list[int]] = {}
    for i, items in enumerate(tensors):
        for ref, _ in items:
            touching.setdefault(ref, []).append(i)
    cuts: dict[tuple[Ref, int], Cuts] = {}
    queue = deque(i for i, signature in enumerate(signatures) if signature is not None)
    waiting = set(queue)
    while queue:
        i = queue.popleft()
        waiting.discard(i)
        signature = signatures[i]
        assert signature is not None
        for ref in _spread(graph, signature, tensors[i], cuts):
            for j in touching[ref]:
                if j not in waiting:
                    waiting.add(j)
                    queue.append(j)
    factors = {
        Ref(i, k): tuple(_sizes(size, cuts.get((Ref(i, k), d), _NO_CUTS)) for d, size in enumerate(spec.shape))
        for i, node in enumerate(graph.nodes)
        for k, spec in enumerate(node.outputs)
    }
    cache: dict[tuple[int, tuple[Factors, ...]], Signature] = {}
    refined: list[Signature | None] = []
    for i, signature in enumerate(signatures):
        if signature is None:
            refined.append(None)
            continue
        key = (id(signature), tuple(factors[ref] for ref, _ in tensors[i]))
        if key not in cache:
            cache[key] = _refine(signature, [(dims, factors[ref]) for ref, dims in tensors[i]])
        refined.append(cache[key])
    return factors, refined


def _tensors(graph: Graph, i: int, signature: Signature | None) -> list[tuple[Ref, Dims]]:
    if signature is None:
        return []
    node = graph.nodes[i]
    reads = list(zip(node.reads(), signature.operands, strict=True))
    return reads + [(Ref(i, k), dims) for k, dims in enumerate(signature.results)]


def _spread(
    graph: Graph, signature: Signature, tensors: list[tuple[Ref, Dims]], cuts: dict[tuple[Ref, int], Cuts]
) -> list[Ref]:
    """Carry cuts from dims to the op's atoms and from atoms to dims; the values whose cuts grew."""
    inside: dict[str, Cuts] = {}
    for ref, dims in tensors:
        for d, atoms in enumerate(dims):
            known = cuts.get((ref, d))
            if known:
                for atom, base, size in _bases(atoms, signature):
                    found = {c // base for c in known if base < c < base * size and c % base == 0}
                    if found:
                        inside[atom] = _chain(inside.get(atom, _NO_CUTS), found, size)
    grown = []
    for ref, dims in tensors:
        for d, atoms in enumerate(dims):
            wanted = set()
            for atom, base, _ in _bases(atoms, signature):
                wanted.add(base)
                wanted.update(base * c for c in inside.get(atom, _NO_CUTS))
            wanted.discard(1)
            known = cuts.get((ref, d), _NO_CUTS)
            if not wanted <= known:
                bigger = _chain(known, wanted, graph.spec(ref).shape[d])
                if bigger != known:
                    cuts[ref, d] = bigger
                    grown.append(ref)
    return grown


def _bases(atoms: tuple[str, ...], signature: Signature) -> list[tuple[str, int, int]]:
    """(atom, its stride within the dim, its size), minor to major."""
    found, base = [], 1
    for atom in reversed(atoms):
        size = signature.sizes[atom]
        found.append((atom, base, size))
        base *= size
    return found


def _chain(known: Cuts, new: Iterable[int], size: int) -> Cuts:
    """`known` and those of `new` that keep every cut a multiple of the one below it."""
    chain = set(known)
    for cut in sorted(new):
        below = [c for c in chain if c <= cut]
        above = [c for c in chain if c > cut] + [size]
        if cut not in chain and all(cut % c == 0 for c in below) and all(c % cut == 0 for c in above):
            chain.add(cut)
    return frozenset(chain)


def _sizes(size: int, cuts: Cuts) -> tuple[int, ...]:
    if size == 1:
        return ()
    edges = [1, *sorted(cuts), size]
    return tuple(high // low for low, high in pairwise(edges))[::-1]


def _refine(signature: Signature, tensors: list[tuple[Dims, Factors]]) -> Signature:
    """The signature with each atom cut into its factors; an atom whose factors differ between tensors stays whole."""
    pieces: dict[str, tuple[int, ...]] = {}
    uneven: set[str] = set()
    for dims, factors in tensors:
        for atoms, sizes in zip(dims, factors, strict=True):
            if not atoms:
                continue
            parts = _cut_along(atoms, sizes, signature)
            for atom in atoms:
                if parts is None or pieces.setdefault(atom, parts[atom]) != parts[atom]:
                    uneven.add(atom)
    kept = uneven | signature.whole
    names = {
        atom: (atom,)
        if atom in kept or len(pieces[atom]) == 1
        else tuple(f"{atom}.{k}" for k in range(len(pieces[atom])))
        for atom in signature.sizes
        if atom in pieces or atom in uneven
    }
    sizes_of = {
        name: pieces[atom][k] if atom not in kept else signature.sizes[atom]
        for atom, parts_of in names.items()
        for k, name in enumerate(parts_of)
    }
    return _renamed(signature, names, sizes_of, uneven)


def _renamed(
    signature: Signature, names: dict[str, tuple[str, ...]], sizes: dict[str, int], uneven: set[str]
) -> Signature:
    """The signature, that for finer splits included, with every atom replaced by its pieces."""

    def dims_of(dims: Dims) -> Dims:
        return tuple(tuple(name for atom in dim for name in names[atom]) for dim in dims)

    def spread(mapping: Mapping[str, str]) -> dict[str, str]:
        return {name: value for atom, value in mapping.items() if atom in names for name in names[atom]}

    return dataclasses.replace(
        signature,
        operands=tuple(map(dims_of, signature.operands)),
        results=tuple(map(dims_of, signature.results)),
        sizes=sizes,
        reduced=spread(signature.reduced),
        whole=frozenset(name for atom in uneven | signature.whole if atom in names for name in names[atom]),
        local=spread(signature.local),
        finer=None if signature.finer is None else _renamed(signature.finer, names, sizes, uneven),
    )


def _cut_along(
    atoms: tuple[str, ...], sizes: tuple[int, ...], signature: Signature
) -> dict[str, tuple[int, ...]] | None:
    """Which of the dim's factors make up each of its atoms; None where a factor crosses an atom's border."""
    parts: dict[str, tuple[int, ...]] = {}
    position = 0
    for atom in atoms:
        product, start = 1, position
        while product < signature.sizes[atom]:
            product *= sizes[position]
            position += 1
        if product != signature.sizes[atom]:
            return None
        parts[atom] = sizes[start:position]
    return parts
