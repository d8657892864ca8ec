"""The smallest inputs from those given with which a kernel takes an op that it refuses even whole.

In: an op of the graph and what its constraints say of it unsplit. Out: a sentence that names the inputs' dims which the
op's dims are made of, and sizes that fit: a linear's gradient contracts over rows, which are batch times sequence in
one layer and the batch alone in another. Followed by the factors that ops share, so whatever lies between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .graph import Graph, Ref, TensorSpec
from .layout import Factors, local_spec
from .reach import same_factors
from .rules import OpCall, Signature

FARTHEST = 512
"""Steps that one dim is grown by before it is given up: the largest demand known is a multiple of 128."""


@dataclass(frozen=True)
class _Dim:
    """One dim of an input, and the factors of the op's operands that are it."""

    name: str
    dim: int
    size: int
    places: frozenset[tuple[int, int, int]]  # (operand, dim, factor)

    @property
    def beside(self) -> set[tuple[int, int]]:
        """The operands' dims that it is a factor of."""
        return {(operand, dim) for operand, dim, _ in self.places}


def fitting_inputs(
    graph: Graph,
    signatures: Sequence[Signature | None],
    factors: dict[Ref, Factors],
    number: int,
    call: OpCall,
    broken: Callable[[OpCall, Sequence[TensorSpec]], tuple[str, ...]],
) -> str | None:
    """What to change about the inputs so that the kernel takes the whole op; None where no input's size helps.

    Args:
        graph, signatures, factors: as of `expand`.
        number: of the node that is refused.
        call: the op on whole tensors.
        broken: what the kernel of a call has against operands.
    """
    refs = list(graph.nodes[number].reads())
    parts = [factors[ref] for ref in refs]
    dims = _input_dims(graph, signatures, factors, refs)
    for grown in reversed(dims):
        for size in range(grown.size + 1, grown.size + FARTHEST + 1):
            specs = [_resized(spec, parts[k], k, grown, size) for k, spec in enumerate(call.tensors)]
            if not broken(replace(call, tensors=tuple(specs)), specs):
                return _sentence([d for d in dims if d.beside & grown.beside], grown, size)
    return None


def _input_dims(
    graph: Graph, signatures: Sequence[Signature | None], factors: dict[Ref, Factors], refs: list[Ref]
) -> list[_Dim]:
    """The dims of inputs that are a factor of the op's operands and no parameter's, of the first input that has any."""
    class_of = same_factors(graph, signatures)
    fixed = {
        class_of((Ref(i), d, f))
        for i, node in enumerate(graph.nodes)
        if node.kind == "parameter"
        for d, dim in enumerate(factors[Ref(i)])
        for f in range(len(dim))
    }
    places: dict[object, list[tuple[int, int, int]]] = {}
    for k, ref in enumerate(refs):
        for d, dim in enumerate(factors[ref]):
            for f in range(len(dim)):
                places.setdefault(class_of((ref, d, f)), []).append((k, d, f))
    for i, node in enumerate(graph.nodes):
        if node.kind == "input":
            found = []
            for d, dim in enumerate(factors[Ref(i)]):
                which = class_of((Ref(i), d, 0))
                here = places.get(which, [])
                if here and len(dim) == 1 and which not in fixed:
                    found.append(_Dim(node.target, d, dim[0], frozenset(here)))
            if found:
                return found
    return []


def _resized(spec: TensorSpec, parts: Factors, operand: int, grown: _Dim, size: int) -> TensorSpec:
    """The operand where the input's dim has another size, its dims in the same order in memory."""
    shape = tuple(
        math.prod(size if (operand, d, f) in grown.places else part for f, part in enumerate(dim)) if dim else whole
        for (d, dim), whole in zip(enumerate(parts), spec.shape, strict=True)
    )
    return local_spec(spec, shape) if shape != spec.shape else spec


def _sentence(dims: list[_Dim], grown: _Dim, size: int) -> str:
    names = " x ".join(str(d.dim) for d in dims)
    now = " x ".join(str(d.size) for d in dims)
    then = " x ".join(str(size if d is grown else d.size) for d in dims)
    total = math.prod(size if d is grown else d.size for d in dims)
    dim = "dim" if len(dims) == 1 else "dims"
    more = "" if len(dims) == 1 else f" ({total} tokens)"
    return f"its rows come from {dim} {names} of {grown.name}, {now}: the smallest from here is {then}{more}"
