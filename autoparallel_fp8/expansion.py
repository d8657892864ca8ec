"""Every way each op may be split over the whole mesh: rows for one axis, multiplied out and checked.

In: the graph and the mesh. Out: a `Space`: for every node its `Kind` (op, shapes, factors; equal in repeated layers,
so computed once) and for every kind its `Option`s: one layout for each tensor read and made. A combination is dropped
where a split is not even, and refused, with a sentence, where a kernel would not take the local operands.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import RuleError, UsageError
from .factors import factorize
from .fitting import fitting_inputs
from .garbage import no_collection
from .graph import Graph, Node, Ref, TensorSpec, map_refs
from .layout import Factors, Layout, R, local_shape, universe
from .mesh import Mesh
from .own_scales import own_scales
from .products import Option, Refusal, local_specs, products
from .reach import Reach, reachable
from .rules import (
    AxisRow,
    OpCall,
    OwnScales,
    Signature,
    advice,
    broken_constraints,
    find_rule,
    in_float8_of,
    partial_kinds,
    rows,
)
from .rules.check import apply_rule
from .rules.plugins import load_plugins

Broken = Callable[[OpCall, Sequence[TensorSpec]], tuple[str, ...]]
"""What the kernel of a call has against a rank's operands, in sentences."""

_OWN_CODE = (__name__.split(".")[0], "contextlib")  # what calls this file; contextlib runs our decorators


@dataclass(frozen=True, eq=False)
class Kind:
    """What repeated nodes share: the op on tensors of these shapes and factors, and its options.

    Attributes:
        number: position in `Space.kinds`.
        call: op, attributes and tensor specs.
        operand_factors, result_factors: of the tensors, in order.
        options: what may be chosen, all-replicated first where the kernel takes it.
        refused: what a constraint removed.
        has_rule: False for an op that is planned replicated because nobody wrote a rule.
    """

    number: int
    name: str
    call: OpCall
    operand_factors: tuple[Factors, ...]
    result_factors: tuple[Factors, ...]
    options: tuple[Option, ...]
    refused: tuple[Refusal, ...]
    has_rule: bool = True


@dataclass(frozen=True)
class Space:
    """The graph with the options of every node.

    Attributes:
        graph, mesh: as given.
        factors, reach: of every value; what may be split, and where it may be partial.
        kinds: without repeats, in order of first use.
        kind_of: for each node, its number in `kinds`.
        replicated_ops: names of ops without a rule, planned replicated.
        signatures: of every node, atoms refined to the factors; None for what has no rule.
    """

    graph: Graph
    mesh: Mesh
    factors: dict[Ref, Factors]
    reach: dict[Ref, Reach]
    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    replicated_ops: tuple[str, ...] = field(default=())
    signatures: tuple[Signature | None, ...] = ()

    def kind(self, node: int) -> Kind:
        return self.kinds[self.kind_of[node]]

    def local_shape(self, ref: Ref, layout: Layout) -> tuple[int, ...]:
        return local_shape(self.graph.spec(ref).shape, self.factors[ref], layout, self.mesh.sizes)


@no_collection()
def expand(
    graph: Graph,
    mesh: Mesh,
    *,
    architecture: str,
    scale_scope: str = "local",
    strict: bool = False,
    emulate: bool = False,
) -> Space:
    """The options of every node of the graph on the mesh.

    Args:
        graph: from `capture`.
        mesh: axes and sizes.
        architecture: of the device, for the kernels' constraints (`sm90`). The graph's float8 types stand for the
            device's own: `in_float8_of`.
        scale_scope: "local" lets activations and gradients carry one float8 scale a shard; "global" does not.
        strict: an op without a rule is an error.
        emulate: a scaled GEMM without a kernel on the device is emulated in bfloat16, so that nothing is demanded.

    Raises:
        RuleError: `strict` and an op has no rule; or an op without a rule is random or writes its arguments.
    """

    def broken(call: OpCall, operands: Sequence[TensorSpec]) -> tuple[str, ...]:
        ours = in_float8_of(architecture, operands)
        return broken_constraints(call.op, ours, architecture, call, emulate=emulate)

    load_plugins()
    calls = [call_of(graph, node) for node in graph.nodes]
    signatures = _signatures(graph, calls)
    missing = tuple(
        sorted({n.op_name for n, s in zip(graph.nodes, signatures, strict=True) if n.kind == "op" and s is None})
    )
    _complain(graph, missing, strict)
    factors, refined = factorize(graph, signatures)
    reach, atoms = reachable(graph, refined, factors)
    scales = own_scales(graph, refined) if scale_scope == "local" else {}
    kinds: list[Kind] = []
    numbers: dict[Any, int] = {}
    kind_of = []
    for i, node in enumerate(graph.nodes):
        reads = tuple(factors[ref] for ref in node.reads())
        makes = tuple(factors[Ref(i, k)] for k in range(len(node.outputs)))
        partials = tuple(reach[ref].partials for ref in node.reads())
        key = (node.kind, calls[i], reads, makes, scales.get(i), atoms[i], partials)
        if key not in numbers:
            numbers[key] = len(kinds)
            signature = refined[i]
            if node.kind != "op":
                found = _source_kind(len(kinds), node, calls[i], makes, mesh)
            elif signature is None:
                found = _replicated_kind(len(kinds), node, calls[i], reads, makes, mesh)
            else:
                axis_rows = rows(signature, node.outputs, own_scales=scales.get(i), atoms=atoms[i], partials=partials)
                found = _op_kind(len(kinds), node, calls[i], signature, axis_rows, reads, makes, mesh, broken)
            if not found.options:
                inputs = fitting_inputs(graph, refined, factors, i, calls[i], broken)
                raise _illegal(node, found, architecture, inputs)
            kinds.append(found)
        kind_of.append(numbers[key])
    return Space(graph, mesh, factors, reach, tuple(kinds), tuple(kind_of), missing, tuple(refined))


@dataclass(frozen=True)
class LoneOp:
    """One op without a graph around it.

    Attributes:
        kind: its options; none where the kernel takes no layout of it.
        signature, rows: what the options were made of.
    """

    kind: Kind
    signature: Signature
    rows: tuple[AxisRow, ...]


def expand_lone(
    graph: Graph, mesh: Mesh, *, architecture: str, own_scales: Callable[[Signature], OwnScales | None]
) -> LoneOp:
    """The options of a graph's last op, every partial operand included: not only what the graph before it makes.

    Args:
        graph: its last node is an op with a rule.
        mesh: as in `expand`.
        architecture: of the device, whose kernels get the operands as they are.
        own_scales: where the op may meet scales of each rank's own.
    """
    calls = [call_of(graph, node) for node in graph.nodes]
    factors, refined = factorize(graph, _signatures(graph, calls))
    node, call, signature = graph.nodes[-1], calls[-1], refined[-1]
    assert signature is not None, f"{node.op_name} has no rule"
    reads = tuple(factors[ref] for ref in node.reads())
    makes = tuple(factors[Ref(len(graph.nodes) - 1, k)] for k in range(len(node.outputs)))
    partials = [partial_kinds(spec) for spec in call.tensors]
    axis_rows = rows(signature, node.outputs, own_scales=own_scales(signature), partials=partials)

    def broken(call: OpCall, operands: Sequence[TensorSpec]) -> tuple[str, ...]:
        return broken_constraints(call.op, operands, architecture, call)

    kind = _op_kind(0, node, call, signature, axis_rows, reads, makes, mesh, broken)
    return LoneOp(kind, signature, axis_rows)


def call_of(graph: Graph, node: Node) -> OpCall:
    """A node of the graph as rules see it."""
    args, kwargs = (map_refs(value, graph.spec) for value in (node.args, node.kwargs))
    return OpCall(node.op, args, kwargs, tuple(map(graph.spec, node.reads())), node.outputs)


def _signatures(graph: Graph, calls: list[OpCall]) -> list[Signature | None]:
    cache: dict[OpCall, Signature] = {}
    found: list[Signature | None] = []
    for node, call in zip(graph.nodes, calls, strict=True):
        function = find_rule(node.op) if node.kind == "op" else None
        if function is None:
            found.append(None)
            continue
        if call not in cache:
            cache[call] = apply_rule(function, call)
        found.append(cache[call])
    return found


def _complain(graph: Graph, missing: tuple[str, ...], strict: bool) -> None:
    for node in graph.nodes:
        if node.op_name in missing:
            schema = node.op._schema
            random = "nondeterministic_seeded" in {str(tag).split(".")[-1] for tag in node.op.tags}
            if random or schema.is_mutable:
                what = "draws random numbers" if random else "writes its arguments"
                raise RuleError(
                    f"{node.op_name} {what} and has no rule, so it cannot be planned",
                    at=node.module or node.name,
                    do="turn it off (dropout=0), or register a rule for it with autoparallel_fp8.rules.rule",
                )
    if missing and strict:
        raise RuleError(
            f"no rule for {', '.join(missing)}", do="register one, or plan with strict=False: it runs replicated"
        )
    if missing:
        warnings.warn(f"no rule for {', '.join(missing)}: planned replicated", stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """How many calls above our caller the first one stands that is not this library's: the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OWN_CODE:
        level, frame = level + 1, frame.f_back
    return level


def _source_kind(number: int, node: Node, call: OpCall, makes: tuple[Factors, ...], mesh: Mesh) -> Kind:
    options = tuple(_source_options(node, makes, mesh.sizes))
    return Kind(number, node.kind, call, (), makes, options, ())


def _replicated_kind(
    number: int, node: Node, call: OpCall, reads: tuple[Factors, ...], makes: tuple[Factors, ...], mesh: Mesh
) -> Kind:
    row = AxisRow((R,) * len(reads), (R,) * len(makes), "replicated: no rule")
    whole = (R,) * len(mesh.sizes)
    option = Option((whole,) * len(reads), (whole,) * len(makes), (row,) * len(mesh.sizes))
    return Kind(number, node.op_name, call, reads, makes, (option,), (), has_rule=False)


def _op_kind(
    number: int,
    node: Node,
    call: OpCall,
    signature: Signature,
    axis_rows: tuple[AxisRow, ...],
    reads: tuple[Factors, ...],
    makes: tuple[Factors, ...],
    mesh: Mesh,
    broken: Broken,
) -> Kind:
    sizes = mesh.sizes
    options_found: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Option] = {}
    refused: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Refusal] = {}
    for option in products(signature, axis_rows, reads, makes, sizes):
        key = (option.operands, option.results)
        if key in options_found or key in refused:
            continue
        sentences = broken(call, local_specs(call.tensors, reads, option.operands, sizes))
        if sentences:
            refused[key] = Refusal(option.results, option.operands, sentences[0])
        else:
            options_found[key] = option
    return Kind(number, node.op_name, call, reads, makes, tuple(options_found.values()), tuple(refused.values()))


def _source_options(node: Node, makes: tuple[Factors, ...], sizes: tuple[int, ...]) -> Iterator[Option]:
    """Layouts of a parameter, buffer, input or tangent: whole, or split along leading factors.

    Inputs are split along their first two dims only (batch, sequence); buffers stay whole.
    """
    dims = range(len(makes[0]))
    if node.kind == "input":
        dims = range(min(2, len(makes[0])))
    elif node.kind == "buffer":
        dims = range(0)
    leading = tuple((d, 0) for d in dims if makes[0][d])
    for layout in universe(makes[0], sizes, leading, "").layouts:
        row = tuple(AxisRow((), (p,), "as stored") for p in layout)
        yield Option((), (layout,), row)


def _illegal(node: Node, kind: Kind, architecture: str, inputs: str | None) -> UsageError:
    """What to say of an op that its kernel refuses even whole.

    Args:
        inputs: what to change about the model's inputs, where that helps.
    """
    whole = next((r for r in kind.refused if all(p == R for layout in r.operands for p in layout)), kind.refused[0])
    call, operands = kind.call, in_float8_of(architecture, kind.call.tensors)
    helpful = "; ".join(advice(call.op, operands, architecture, call))
    return UsageError(
        f"a float8 GEMM is illegal even unsplit: {whole.sentence}",
        at=f"{node.module or 'the model itself'} ({node.op_name}, {node.phase})",
        do=f"{inputs}; or leave the layer out of the conversion" if inputs else helpful,
    )
