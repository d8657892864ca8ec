"""One op, split every way its rule allows and run on each rank in this process, held against the unsplit op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from autoparallel_fp8.rules import AxisRow, OpCall, OwnScales, Signature, find_rule, partial_kinds, rows
from autoparallel_fp8.rules.check import apply_rule
from autoparallel_fp8.rules.language import Rule
from torch import Tensor

from autoparallel_fp8.capture.rewrite import same_layout
from autoparallel_fp8.expansion import Kind
from autoparallel_fp8.expansion import call_of as node_call
from autoparallel_fp8.factors import factorize
from autoparallel_fp8.graph import ABSENT, Graph, Node, Ref, TensorSpec
from autoparallel_fp8.layout import Factors, Layout, P, R
from autoparallel_fp8.lower import local_call
from autoparallel_fp8.parts import coordinates, index_along, parts
from autoparallel_fp8.products import Option, format_option, local_specs, products
from autoparallel_fp8.rank import with_stand_ins
from autoparallel_fp8.shards import same_bits, shard, unshard

aten = torch.ops.aten


@dataclass(frozen=True)
class Sample:
    """A call of an op on real tensors.

    Attributes:
        op, args, kwargs: the call; sequences are tuples.
        rtol, atol: how far the split op may be off; 0 where arithmetic is exact.
        is_filled: False where the op leaves its result as memory was; then nothing but its form is held.
        stand_in: what runs in place of an op that has no CPU kernel.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    rtol: float = 0.0
    atol: float = 0.0
    is_filled: bool = True
    stand_in: Any = None

    def tensors(self) -> list[Tensor]:
        return tensors_in((*self.args, *(value for _, value in self.kwargs)))

    def run(self) -> tuple[Any, ...]:
        args = [list(v) if isinstance(v, tuple) else v for v in self.args]
        made = (self.stand_in or self.op)(*args, **{k: list(v) if isinstance(v, tuple) else v for k, v in self.kwargs})
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


@dataclass(frozen=True)
class Ways:
    """What one axis may do to a call, whatever its size: own scales and every partial operand included.

    Attributes:
        call: as rules see it.
        signature: refined to the factors of the call's tensors.
        reads, makes: factors of the tensors.
        axis_rows: rows whose partial operands are possible in their dtypes.
    """

    call: OpCall
    signature: Signature
    reads: tuple[Factors, ...]
    makes: tuple[Factors, ...]
    axis_rows: tuple[AxisRow, ...]

    def kind(self, sizes: tuple[int, ...]) -> Kind:
        """All options of the call on a mesh with axes of these sizes."""
        options = tuple(products(self.signature, self.axis_rows, self.reads, self.makes, sizes))
        return Kind(0, str(self.call.op), self.call, self.reads, self.makes, options, ())


def ways_of(sample: Sample, *, halved: bool = False, rule: Rule | None = None) -> Ways:
    """What one axis may do to the call.

    Args:
        sample: the call.
        halved: a second reader views every dim of even size as (2, half), so that splits may start inside a dim.
        rule: stands in for the one that is registered.
    """
    call = call_of(sample)
    rule = rule or find_rule(call.op)
    assert rule is not None, f"no rule for {call.op}"
    nodes = [Node(f"x{i}", "input", None, (), (), (spec,), "forward") for i, spec in enumerate(call.tensors)]
    numbers = iter(range(len(nodes)))
    args = map_tensors(sample.args, lambda _: Ref(next(numbers)))
    kwargs = tuple((name, map_tensors(value, lambda _: Ref(next(numbers)))) for name, value in sample.kwargs)
    op = Node("op", "op", sample.op, args, kwargs, call.out, "forward")
    halvings = [_halving(i, spec) for i, spec in enumerate(call.tensors)] if halved else []
    graph, view = Graph((*nodes, *halvings, op), ()), find_rule(aten.view.default)
    assert view is not None
    views = [apply_rule(view, node_call(graph, n)) for n in halvings]
    factors, refined = factorize(graph, [*(None for _ in nodes), *views, apply_rule(rule, call, is_tried=False)])
    reads = tuple(factors[Ref(i)] for i in range(len(call.tensors)))
    makes = tuple(factors[Ref(len(graph.nodes) - 1, k)] for k in range(len(call.out)))
    signature = refined[-1]
    assert signature is not None
    possible = [
        row
        for row in rows(signature, call.out, own_scales=_anywhere(signature))
        if all(
            p.kind not in "PM" or p.kind in partial_kinds(s) for p, s in zip(row.operands, call.tensors, strict=True)
        )
    ]
    return Ways(call, signature, reads, makes, tuple(possible))


def kind_of(sample: Sample, sizes: tuple[int, ...], *, halved: bool = False, rule: Rule | None = None) -> Kind:
    """All options of the call on a mesh; see `ways_of`."""
    return ways_of(sample, halved=halved, rule=rule).kind(sizes)


def _anywhere(signature: Signature) -> OwnScales:
    """Own scales and frozen splits of every operand at every place that it or another tensor has."""
    tensors = (*signature.operands, *signature.results)
    places = dict.fromkeys((d, f) for dims in tensors for d, dim in enumerate(dims) for f in range(len(dim)))
    return OwnScales(tuple(tuple((where, p) for p in places for where in (None, p)) for _ in signature.operands))


def _halving(number: int, spec: TensorSpec) -> Node:
    shape = tuple(part for size in spec.shape for part in ((2, size // 2) if size % 2 == 0 and size > 2 else (size,)))
    out = TensorSpec(shape, (1,) * len(shape), spec.dtype)
    return Node(f"view{number}", "op", aten.view.default, (Ref(number), shape), (), (out,), "forward")


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
        rule = find_rule(sample.op)
        self.undoes_scales = rule is not None and bool(rule(kind.call).scaled)
        self._shards: dict[tuple[int, Layout], list[Tensor]] = {}

    def what_is_wrong(self, option: Option) -> str:
        placed = [(p.kind, a) for layout in (*option.operands, *option.results) for a, p in enumerate(layout)]
        own = sorted({a for kind, a in placed if kind in "FV"})
        if any(p.kind == "Q" for layout in option.operands for p in layout):
            return ""  # a product with each rank's own scales of what a GEMM left: whole plans hold it
        if own and self.undoes_scales:
            return self._check_undone(option)
        return self._check_own(option, own) if own else self._check_plain(option)

    def shards(self, number: int, layout: Layout) -> list[Tensor]:
        """Of an operand."""
        if (number, layout) not in self._shards:
            self._shards[number, layout] = shard(
                self.wholes[number], self.kind.operand_factors[number], layout, self.sizes
            )
        return self._shards[number, layout]

    def run(self, option: Option, operands: Sequence[Sequence[Tensor]]) -> list[tuple[Any, ...]]:
        """Results of every rank, given each operand's local tensors."""
        calls = [local_call(self.kind, option, self.sizes, coordinate) for coordinate in self.places]
        if self.sample.stand_in is not None:
            calls = [with_stand_ins(c, lambda op: self.sample.stand_in if op is self.sample.op else op) for c in calls]
        return [call.run([shards[rank] for shards in operands]) for rank, call in enumerate(calls)]

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
        """Ranks have different scales along the own axes: hold them against the op with each of these scales.

        A frozen operand is scaled already. What is neither frozen nor a scale must not show any rank's scale.
        """
        if not self.sample.is_filled:
            return ""
        numbers = [index_along(own, self.sizes, c) for c in self.places]
        is_made = all(p.kind not in "FV" for layout in option.operands for p in layout)
        variants = [self._variant(option, k) for k in range(max(numbers) + 1)]
        operands = []
        for i, layout in enumerate(option.operands):
            cut = [shard(v[i], self.kind.operand_factors[i], without_own(layout), self.sizes) for v in variants]
            operands.append([cut[numbers[rank]][rank] for rank in range(len(self.places))])
        made = self.run(option, operands)
        for number, variant in enumerate(variants):
            ranks = [rank for rank, n in enumerate(numbers) if n == number]
            seen = [self._seen_by(ranks, operands[0], option)] if is_made else variant
            for k, result in enumerate(self._called_on(seen)):
                if wrong := self._differs(option, made, k, ranks, result):
                    return f"{wrong} on the ranks with scale {number}"
        return ""

    def _differs(
        self, option: Option, made: list[tuple[Any, ...]], k: int, ranks: list[int], scaled_result: Any
    ) -> str:
        """Whether result k of these ranks is not what it should be with their scale."""
        is_own = any(p.kind in "FV" for p in option.results[k])
        whole = scaled_result if is_own else self.reference[k]
        factors, layout = self.kind.result_factors[k], without_own(option.results[k])
        if whole is None:
            return ""
        wanted = shard(whole, factors, layout, self.sizes)
        if not any(p.kind in "PM" for p in layout):
            is_good = all(agree(made[rank][k], wanted[rank], self.sample) for rank in ranks)
        elif self.sample.rtol:
            return ""  # parts of a sum that are rounded differ from replica to replica; exact samples hold them
        else:
            for rank in ranks:
                wanted[rank] = made[rank][k]
            is_good = agree(unshard(wanted, factors, layout, self.sizes, tuple(whole.shape)), whole, self.sample)
        return "" if is_good else f"result {k} is wrong"

    def _called_on(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The op on these whole tensors."""
        sample, left = self.sample, iter(tensors)
        args = map_tensors(sample.args, lambda _: next(left))
        kwargs = tuple((name, map_tensors(value, lambda _: next(left))) for name, value in sample.kwargs)
        return replace(sample, args=args, kwargs=kwargs).run()

    def _variant(self, option: Option, number: int) -> list[Tensor]:
        """The operands, own and frozen ones scaled so that every rank along the own axes has another."""
        return [
            scaled(x, number) if any(p.kind in "FV" for p in layout) else x
            for x, layout in zip(self.wholes, option.operands, strict=True)
        ]

    def _seen_by(self, ranks: list[int], shards: list[Tensor], option: Option) -> Tensor:
        """The operand of a maximum as these ranks together see it: nothing elsewhere."""
        whole = self.wholes[0]
        seen = torch.full_like(whole, least(whole.dtype))
        for rank in ranks:
            where = parts(self.kind.operand_factors[0], option.operands[0], self.sizes, self.places[rank])
            index = [p.positions() if p.factors else range(n) for p, n in zip(where, seen.shape, strict=True)]
            place = torch.meshgrid(*map(torch.tensor, index), indexing="ij")
            seen[place] = torch.maximum(seen[place], shards[rank])
        return seen

    def _check_undone(self, option: Option) -> str:
        """A GEMM of frozen data with each rank's own scales: it undoes the scaling, or leaves that to what follows."""
        operands, undone = [], [0] * len(self.places)
        for i, layout in enumerate(option.operands):
            own = [a for a, p in enumerate(layout) if p.kind in "FV"]
            sign = -1 if any(p.kind == "F" for p in layout) else 1
            numbers = [index_along(own, self.sizes, c) * sign for c in self.places]
            operands.append([scaled(x, n) for x, n in zip(self.shards(i, without_own(layout)), numbers, strict=True)])
            undone = [a - n for a, n in zip(undone, numbers, strict=True)]
        made = [results[0] for results in self.run(option, operands)]
        if any(p.kind == "Q" for p in option.results[0]):
            made = [scaled(x, n) for x, n in zip(made, undone, strict=True)]
        layout, whole = tuple(P if p.kind == "Q" else p for p in option.results[0]), self.reference[0]
        found = unshard(made, self.kind.result_factors[0], layout, self.sizes, tuple(whole.shape))
        return "" if agree(found, whole, self.sample) else f"off by {(found.double() - whole.double()).abs().max()}"


def without_own(layout: Layout) -> Layout:
    """The layout of each rank's own values among the ranks that share them."""
    return tuple(R if p.kind == "V" else p for p in layout)


def least(dtype: torch.dtype) -> float:
    """Below all else, for a maximum."""
    if dtype.is_floating_point:
        return -torch.inf
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def scaled(x: Tensor, number: int) -> Tensor:
    """x times a power of two, in its own dtype; booleans as they are."""
    if x.dtype == torch.bool or not number:
        return x
    if not x.dtype.is_floating_point:
        return x * 2**number
    return (x.to(torch.float64) * 2.0**number).to(x.dtype)


def fits(local: Tensor, wanted: TensorSpec, whole: TensorSpec) -> bool:
    """Whether a local result has the shape, dtype and memory order that the layout says."""
    found = spec_of(local)
    if not whole.numel:
        return (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    is_dense = sum((size - 1) * step for size, step in zip(whole.shape, whole.stride, strict=True)) + 1 == whole.numel
    return same_layout(found, wanted) or (not is_dense and (found.shape, found.dtype) == (wanted.shape, wanted.dtype))


def agree(found: Tensor, whole: Tensor, sample: Sample) -> bool:
    if not sample.rtol and not sample.atol:
        return same_bits(found, whole)
    if found.shape != whole.shape or found.dtype != whole.dtype:
        return False
    found, whole = found.double(), whole.double()
    atol = sample.atol * max(1.0, float(whole.nan_to_num(0, 0, 0).abs().max()) if whole.numel() else 0.0)
    return torch.allclose(found, whole, rtol=sample.rtol, atol=atol, equal_nan=True)
