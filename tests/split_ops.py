"""One op, split every way its rule allows and run on each rank in this process, held against the unsplit op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from autoparallel_fp8.rules import OpCall, OwnScales, Signature, find_rule, partial_kinds, rows
from torch import Tensor

from autoparallel_fp8.capture.rewrite import same_layout
from autoparallel_fp8.expansion import Kind, Option, format_option, local_specs, products
from autoparallel_fp8.factors import factorize
from autoparallel_fp8.graph import ABSENT, Graph, Node, Ref, TensorSpec
from autoparallel_fp8.layout import Layout, P, R
from autoparallel_fp8.lower import local_call
from autoparallel_fp8.parts import coordinates, index_along, parts
from autoparallel_fp8.shards import same_bits, shard, unshard

aten = torch.ops.aten


@dataclass(frozen=True)
class Sample:
    """A call of an op on real tensors.

    Attributes:
        op, args, kwargs: the call; sequences are tuples.
        rtol, atol: how far the split op may be off; 0 where arithmetic is exact.
        is_filled: False where the op leaves its result as memory was; then nothing but its form is held.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    rtol: float = 0.0
    atol: float = 0.0
    is_filled: bool = True

    def tensors(self) -> list[Tensor]:
        return tensors_in((*self.args, *(value for _, value in self.kwargs)))

    def run(self) -> tuple[Any, ...]:
        args = [list(v) if isinstance(v, tuple) else v for v in self.args]
        made = self.op(*args, **{k: list(v) if isinstance(v, tuple) else v for k, v in self.kwargs})
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in tensors_in(item)] if isinstance(value, tuple) else []


def spec_of(tensor: Tensor | None) -> TensorSpec:
    return ABSENT if tensor is None else TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def map_tensors(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return tuple(map_tensors(item, function) for item in value) if isinstance(value, tuple) else value


def call_of(sample: Sample) -> OpCall:
    """The call as rules see it."""
    args = map_tensors(sample.args, spec_of)
    kwargs = tuple((name, map_tensors(value, spec_of)) for name, value in sample.kwargs)
    reads = tuple(spec_of(t) for t in sample.tensors())
    return OpCall(sample.op, args, kwargs, reads, tuple(spec_of(t) for t in sample.run()))


def kind_of(sample: Sample, sizes: tuple[int, ...], *, halved: bool = False) -> Kind:
    """All options of the call on a mesh, own scales and every partial operand included.

    Args:
        sample: the call.
        sizes: of the mesh axes.
        halved: a second reader views every dim of even size as (2, half), so that splits may start inside a dim.
    """
    call = call_of(sample)
    nodes = [Node(f"x{i}", "input", None, (), (), (spec,), "forward") for i, spec in enumerate(call.tensors)]
    numbers = iter(range(len(nodes)))
    args = map_tensors(sample.args, lambda _: Ref(next(numbers)))
    kwargs = tuple((name, map_tensors(value, lambda _: Ref(next(numbers)))) for name, value in sample.kwargs)
    op = Node("op", "op", sample.op, args, kwargs, call.out, "forward")
    if halved:
        nodes += [_halving(i, spec) for i, spec in enumerate(call.tensors)]
    graph = Graph((*nodes, op), ())
    signatures = [None if n.kind != "op" else find_rule(n.op)(_call(graph, n)) for n in graph.nodes]
    factors, refined = factorize(graph, signatures)
    reads = tuple(factors[Ref(i)] for i in range(len(call.tensors)))
    makes = tuple(factors[Ref(len(nodes), k)] for k in range(len(call.out)))
    signature = refined[-1]
    axis_rows = rows(signature, call.out, own_scales=_anywhere(signature))
    possible = [
        row
        for row in axis_rows
        if all(
            p.kind not in "PM" or p.kind in partial_kinds(s) for p, s in zip(row.operands, call.tensors, strict=True)
        )
    ]
    options = tuple(products(signature, tuple(possible), reads, makes, sizes))
    return Kind(0, str(sample.op), call, reads, makes, options, ())


def _anywhere(signature: Signature) -> OwnScales:
    """Own scales and frozen splits of every operand at every place that it or another tensor has."""
    tensors = (*signature.operands, *signature.results)
    places = dict.fromkeys((d, f) for dims in tensors for d, dim in enumerate(dims) for f in range(len(dim)))
    return OwnScales(tuple(tuple((where, p) for p in places for where in (None, p)) for _ in signature.operands))


def _halving(number: int, spec: TensorSpec) -> Node:
    shape = tuple(part for size in spec.shape for part in ((2, size // 2) if size % 2 == 0 and size > 2 else (size,)))
    out = TensorSpec(shape, (1,) * len(shape), spec.dtype)
    return Node(f"view{number}", "op", aten.view.default, (Ref(number), shape), (), (out,), "forward")


def _call(graph: Graph, node: Node) -> OpCall:
    from autoparallel_fp8.graph import map_refs

    kwargs = tuple((name, map_refs(value, graph.spec)) for name, value in node.kwargs)
    return OpCall(node.op, map_refs(node.args, graph.spec), kwargs, tuple(map(graph.spec, node.reads())), node.outputs)


def problems(sample: Sample, kind: Kind, sizes: tuple[int, ...], most: int = 10**9) -> Iterator[str]:
    """What is wrong with the options of the call: a sentence for each that does not give the unsplit result.

    Args:
        sample, kind: the call and its options.
        sizes: of the mesh axes.
        most: options to try; where there are more, this many spread over all of them.
    """
    on_ranks = OnRanks(sample, kind, sizes)
    step = max(1, len(kind.options) / most)
    for option in (kind.options[int(i * step)] for i in range(min(most, len(kind.options)))):
        try:
            wrong = on_ranks.what_is_wrong(option)
        except (RuntimeError, IndexError, AssertionError) as error:
            wrong = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if wrong:
            shapes = [tuple(t.shape) for t in on_ranks.wholes]
            yield f"{sample.op} {shapes} on {sizes}: {format_option(option)}: {wrong}"


class OnRanks:
    """A sample run on all ranks of a mesh under any of its options."""

    def __init__(self, sample: Sample, kind: Kind, sizes: tuple[int, ...]) -> None:
        self.sample, self.kind, self.sizes = sample, kind, sizes
        self.wholes, self.reference = sample.tensors(), sample.run()
        self.places = coordinates(sizes)
        self._shards: dict[tuple[int, Layout], list[Tensor]] = {}

    def what_is_wrong(self, option: Option) -> str:
        own = [a for a in range(len(self.sizes)) if any(p[a].kind == "V" for p in (*option.operands, *option.results))]
        if self.sample.op is aten._scaled_mm.default and any(
            p.kind == "F" for layout in option.operands for p in layout
        ):
            return self._check_scaled_mm(option)
        if any(p.kind == "Q" for layout in option.operands for p in layout):
            return ""  # a product with each rank's own scales of what a GEMM left: whole plans hold it
        if own:
            is_exact = self.sample.is_filled and not self.sample.rtol
            return self._check_own(option, own) if is_exact else ""
        return self._check_plain(option)

    def shards(self, number: int, layout: Layout) -> list[Tensor]:
        """Of an operand."""
        if (number, layout) not in self._shards:
            self._shards[number, layout] = shard(
                self.wholes[number], self.kind.operand_factors[number], layout, self.sizes
            )
        return self._shards[number, layout]

    def run(self, option: Option, operands: Sequence[Sequence[Tensor]]) -> list[tuple[Any, ...]]:
        """Results of every rank, given each operand's local tensors."""
        return [
            local_call(self.kind, option, self.sizes, coordinate).run([shards[rank] for shards in operands])
            for rank, coordinate in enumerate(self.places)
        ]

    def _check_plain(self, option: Option) -> str:
        kind, sizes = self.kind, self.sizes
        made = self.run(option, [self.shards(k, layout) for k, layout in enumerate(option.operands)])
        wanted = local_specs(kind.call.out, kind.result_factors, option.results, sizes)
        for k, whole in enumerate(self.reference):
            if whole is None:
                continue
            for results in made:
                if not fits(results[k], wanted[k], kind.call.out[k]):
                    return f"result {k} is {spec_of(results[k])}, not {wanted[k]}"
            if not self.sample.is_filled:
                continue
            found = unshard([r[k] for r in made], kind.result_factors[k], option.results[k], sizes, tuple(whole.shape))
            if not agree(found, whole, self.sample):
                return f"result {k} is off by {(found.double() - whole.double()).abs().max()}"
        return ""

    # ---- each rank's own scales ----

    def _check_own(self, option: Option, own: list[int]) -> str:
        """Ranks have different scales along the own axes: hold them against the op with each of these scales."""
        numbers = [index_along(own, self.sizes, c) for c in self.places]
        is_made = all(p.kind != "V" for layout in option.operands for p in layout)
        variants = [self._variant(option, k) for k in range(max(numbers) + 1)]
        operands = []
        for i, layout in enumerate(option.operands):
            cut = [shard(v[i], self.kind.operand_factors[i], without_own(layout), self.sizes) for v in variants]
            operands.append([cut[numbers[rank]][rank] for rank in range(len(self.places))])
        made = self.run(option, operands)
        for number, variant in enumerate(variants):
            ranks = [rank for rank, n in enumerate(numbers) if n == number]
            tensors = iter([self._seen_by(ranks, operands[0], option)] if is_made else variant)
            sample = self.sample
            whole = Sample(sample.op, map_tensors(sample.args, lambda _, t=tensors: next(t)), sample.kwargs).run()
            for k, result in enumerate(whole):
                factors, layout = self.kind.result_factors[k], without_own(option.results[k])
                mixed = shard(result, factors, layout, self.sizes)
                for rank in ranks:
                    mixed[rank] = made[rank][k]
                if not same_bits(unshard(mixed, factors, layout, self.sizes, tuple(result.shape)), result):
                    return f"result {k} of the ranks with scale {number} is wrong"
        return ""

    def _variant(self, option: Option, number: int) -> list[Tensor]:
        """The operands, own ones scaled so that every rank along the own axes has another."""
        return [
            scaled(x, number) if any(p.kind == "V" for p in layout) else x
            for x, layout in zip(self.wholes, option.operands, strict=True)
        ]

    def _seen_by(self, ranks: list[int], shards: list[Tensor], option: Option) -> Tensor:
        """The operand of a maximum as these ranks together see it: nothing elsewhere."""
        seen = torch.full_like(self.wholes[0], -torch.inf)
        for rank in ranks:
            where = parts(self.kind.operand_factors[0], option.operands[0], self.sizes, self.places[rank])
            index = [p.positions() if p.factors else range(n) for p, n in zip(where, seen.shape, strict=True)]
            place = torch.meshgrid(*map(torch.tensor, index), indexing="ij")
            seen[place] = torch.maximum(seen[place], shards[rank])
        return seen

    def _check_scaled_mm(self, option: Option) -> str:
        """The product of what every rank undoes its own scaling of, in float64."""
        sizes, factors = self.sizes, self.kind.operand_factors
        operands = []
        for i, layout in enumerate(option.operands):
            axes = [a for a, p in enumerate(layout) if p.kind == "V"]
            cut = self.shards(i, without_own(layout))
            operands.append([scaled(t, index_along(axes, sizes, c)) for t, c in zip(cut, self.places, strict=True)])
        dequantised = []
        for data, scale in ((0, 2), (1, 3)):
            local = [d.double() * s.double() for d, s in zip(operands[data], operands[scale], strict=True)]
            shape = tuple(self.wholes[data].shape)
            dequantised.append(unshard(local, factors[data], option.operands[data], sizes, shape))
        made = [r[0].double() for r in self.run(option, operands)]
        wanted = torch.mm(*dequantised)
        wanted = wanted + self.wholes[4].double() if len(self.wholes) == 5 else wanted
        layout = tuple(P if p.kind == "Q" else p for p in option.results[0])
        found = unshard(made, self.kind.result_factors[0], layout, sizes, tuple(wanted.shape))
        return "" if same_bits(found, wanted) else f"off by {(found - wanted).abs().max()}"


def without_own(layout: Layout) -> Layout:
    """The layout of each rank's own values among the ranks that share them."""
    return tuple(R if p.kind == "V" else p for p in layout)


def scaled(x: Tensor, number: int) -> Tensor:
    """x times a power of two, in its own dtype; booleans as they are."""
    return x if x.dtype == torch.bool or not number else (x.to(torch.float64) * 2.0**number).to(x.dtype)


def fits(local: Tensor, wanted: TensorSpec, whole: TensorSpec) -> bool:
    """Whether a local result has the shape, dtype and memory order that the layout says."""
    found = spec_of(local)
    is_dense = sum((size - 1) * step for size, step in zip(whole.shape, whole.stride, strict=True)) + 1 == whole.numel
    return same_layout(found, wanted) or (not is_dense and (found.shape, found.dtype) == (wanted.shape, wanted.dtype))


def agree(found: Tensor, whole: Tensor, sample: Sample) -> bool:
    if not sample.rtol and not sample.atol:
        return same_bits(found, whole)
    found, whole = found.double(), whole.double()
    atol = sample.atol * max(1.0, float(whole.nan_to_num(0, 0, 0).abs().max()) if whole.numel() else 0.0)
    return torch.allclose(found, whole, rtol=sample.rtol, atol=atol, equal_nan=True)
