"""Every way each op may be split over the whole mesh: rows for one axis, multiplied out and checked.

In: the graph and the mesh. Out: a `Space`: for every node its `Kind` (op, shapes, factors; equal in repeated layers,
so computed once) and for every kind its `Option`s: one layout for each tensor read and made. A combination is dropped
where a split is not even, and refused, with a sentence, where a kernel would not take the local operands.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .errors import RuleError, UsageError
from .factors import factorize
from .graph import Graph, Node, Ref, TensorSpec, map_refs
from .layout import Factors, Layout, Placement, R, format_layout, local_factors, local_shape, local_stride, universe
from .mesh import Mesh
from .own_scales import own_scales
from .reach import Reach, reachable
from .rules import ALIGNMENT, AxisRow, OpCall, Signature, broken_constraints, find_rule, rows


@dataclass(frozen=True)
class Option:
    """One way to run an op on the mesh.

    Attributes:
        operands: layout of each tensor read, as the op wants it.
        results: layout of each tensor made.
        rows: the row taken on each mesh axis, its note and local program.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    rows: tuple[AxisRow, ...]


@dataclass(frozen=True)
class Refusal:
    """A combination that fits the mesh but not the kernel, and the sentence that says why."""

    results: tuple[Layout, ...]
    operands: tuple[Layout, ...]
    sentence: str


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
    """

    graph: Graph
    mesh: Mesh
    factors: dict[Ref, Factors]
    reach: dict[Ref, Reach]
    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    replicated_ops: tuple[str, ...] = field(default=())

    def kind(self, node: int) -> Kind:
        return self.kinds[self.kind_of[node]]

    def local_shape(self, ref: Ref, layout: Layout) -> tuple[int, ...]:
        return local_shape(self.graph.spec(ref).shape, self.factors[ref], layout, self.mesh.sizes)


def expand(graph: Graph, mesh: Mesh, *, architecture: str, scale_scope: str = "local", strict: bool = False) -> Space:
    """The options of every node of the graph on the mesh.

    Args:
        graph: from `capture`.
        mesh: axes and sizes.
        architecture: of the device, for the kernels' constraints (`sm90`).
        scale_scope: "local" lets activations and gradients carry one float8 scale a shard; "global" does not.
        strict: an op without a rule is an error.

    Raises:
        RuleError: `strict` and an op has no rule; or an op without a rule is random or writes its arguments.
    """
    calls = _calls(graph)
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
                found = _op_kind(len(kinds), node, calls[i], signature, axis_rows, reads, makes, mesh, architecture)
            if not found.options:
                raise _illegal(graph, node, found)
            kinds.append(found)
        kind_of.append(numbers[key])
    return Space(graph, mesh, factors, reach, tuple(kinds), tuple(kind_of), missing)


def _calls(graph: Graph) -> list[OpCall]:
    found = []
    for node in graph.nodes:
        args = map_refs(node.args, graph.spec)
        kwargs = tuple((name, map_refs(value, graph.spec)) for name, value in node.kwargs)
        found.append(OpCall(node.op, args, kwargs, tuple(graph.spec(ref) for ref in node.reads()), node.outputs))
    return found


def _signatures(graph: Graph, calls: list[OpCall]) -> list[Signature | None]:
    cache: dict[OpCall, Signature] = {}
    found: list[Signature | None] = []
    for node, call in zip(graph.nodes, calls, strict=True):
        function = find_rule(node.op) if node.kind == "op" else None
        if function is None:
            found.append(None)
            continue
        if call not in cache:
            cache[call] = function(call)
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
        warnings.warn(f"no rule for {', '.join(missing)}: planned replicated", stacklevel=4)


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
    architecture: str,
) -> Kind:
    sizes = mesh.sizes
    options_found: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Option] = {}
    refused: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Refusal] = {}
    for option in products(signature, axis_rows, reads, makes, sizes):
        key = (option.operands, option.results)
        if key in options_found or key in refused:
            continue
        sentences = _check(call, option, reads, sizes, architecture)
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


def _illegal(graph: Graph, node: Node, kind: Kind) -> UsageError:
    """What to say of an op that its kernel refuses even whole: a layer's own size, or the number of tokens."""
    whole = next((r for r in kind.refused if all(p == R for layout in r.operands for p in layout)), kind.refused[0])
    where = f"{node.module or node.name} ({node.op_name}, {node.phase})"
    weights = {
        size
        for n in graph.nodes
        if n.kind == "parameter" and n.module_of_target == node.module
        for size in n.outputs[0].shape
    }
    bad = [size for spec in kind.call.tensors[:2] for size in spec.shape if size % ALIGNMENT and size not in weights]
    tokens = [n.outputs[0].shape[:2] for n in graph.nodes if n.kind == "input" and len(n.outputs[0].shape) >= 2]
    if bad and tokens:
        batch, seq = tokens[0]
        legal = seq
        while batch * legal % ALIGNMENT:
            legal += 1
        do = (
            f"give a batch x sequence of a multiple of {ALIGNMENT} tokens: the smallest from here is "
            f"{batch} x {legal} ({batch * legal} tokens)"
        )
    else:
        do = f"pad the layer to a multiple of {ALIGNMENT}, or keep it in bf16 (leave it out of the conversion)"
    return UsageError(f"a float8 GEMM is illegal even unsplit: {whole.sentence}", at=where, do=do)


def products(
    signature: Signature,
    axis_rows: tuple[AxisRow, ...],
    reads: tuple[Factors, ...],
    makes: tuple[Factors, ...],
    sizes: tuple[int, ...],
) -> Iterator[Option]:
    """Rows of one axis multiplied out over the mesh: every combination that fits the factors."""
    plain = _successors(signature)
    finer = _successors(signature.finer) if signature.finer else {}
    for chosen in itertools.product(*(axis_rows[:1] if size == 1 else axis_rows for size in sizes)):
        is_fit = _finer_fit(chosen, signature, sizes) and _scales_alike(chosen)
        if not is_fit or not _spills_alike(chosen, signature, plain, finer, sizes):
            continue
        operands = tuple(tuple(row.operands[k] for row in chosen) for k in range(len(reads)))
        results = tuple(tuple(row.results[k] for row in chosen) for k in range(len(makes)))
        layouts = zip((*operands, *results), (*reads, *makes), strict=True)
        if all(_fits(layout, factors, sizes) for layout, factors in layouts):
            yield Option(operands, results, chosen)


def _fits(layout: Layout, factors: Factors, sizes: tuple[int, ...]) -> bool:
    kinds = {p.kind for p in layout}
    return not {"P", "M"} <= kinds and local_factors(factors, layout, sizes) is not None


def _successors(signature: Signature) -> dict[str, set[str]]:
    """Atom -> the atoms that follow it in a dim; "" where it is the last."""
    found: dict[str, set[str]] = {}
    for dims in (*signature.operands, *signature.results):
        for dim in dims:
            for atom, follower in zip(dim, (*dim[1:], ""), strict=False):
                found.setdefault(atom, set()).add(follower)
    return found


def _ways(chosen: tuple[AxisRow, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    """In how many parts each atom is split."""
    ways: dict[str, int] = {}
    for row, size in zip(chosen, sizes, strict=True):
        if row.atom:
            ways[row.atom] = ways.get(row.atom, 1) * size
    return ways


def _finer_fit(chosen: tuple[AxisRow, ...], signature: Signature, sizes: tuple[int, ...]) -> bool:
    """Rows for finer splits serve where the split is finer than the atom, on every axis that splits it."""
    finer = {row.atom for row in chosen if row.is_finer}
    if not finer:
        return True
    ways = _ways(chosen, sizes)
    return all(ways[atom] > signature.sizes[atom] for atom in finer) and all(
        row.is_finer for row in chosen if row.atom in finer
    )


def _spills_alike(
    chosen: tuple[AxisRow, ...],
    signature: Signature,
    plain: dict[str, set[str]],
    finer: dict[str, set[str]],
    sizes: tuple[int, ...],
) -> bool:
    """A split that runs on into the next atom must meet the same next atom in every tensor."""
    is_finer = {row.atom: row.is_finer for row in chosen}
    for atom, count in _ways(chosen, sizes).items():
        after = finer if is_finer[atom] else plain
        while count > signature.sizes[atom]:
            if len(after[atom]) != 1 or after[atom] == {""} or count % signature.sizes[atom]:
                return False
            count //= signature.sizes[atom]
            (atom,) = after[atom]
            if atom in signature.whole:
                return False
    return True


def _scales_alike(chosen: tuple[AxisRow, ...]) -> bool:
    """Axes that split one factor together have own scales together: the part of each rank depends on all of them."""
    has_own = [any(p.kind == "V" for p in (*row.operands, *row.results)) for row in chosen]
    if not any(has_own):
        return True
    for k in range(len(chosen[0].operands)):
        seen: dict[tuple[int, int], bool] = {}
        for row, is_own in zip(chosen, has_own, strict=True):
            placement = row.operands[k]
            if placement.kind in "SF" and seen.setdefault((placement.dim, placement.factor), is_own) != is_own:
                return False
    return True


def _check(
    call: OpCall, option: Option, reads: tuple[Factors, ...], sizes: tuple[int, ...], architecture: str
) -> tuple[str, ...]:
    return broken_constraints(call.op, local_specs(call.tensors, reads, option.operands, sizes), architecture)


def local_specs(
    specs: tuple[TensorSpec, ...], factors: tuple[Factors, ...], layouts: tuple[Layout, ...], sizes: tuple[int, ...]
) -> tuple[TensorSpec, ...]:
    """What one rank holds of each tensor: local shape, exact local strides, dtype."""
    found = []
    for spec, dims, layout in zip(specs, factors, layouts, strict=True):
        shape = local_shape(spec.shape, dims, layout, sizes)
        found.append(TensorSpec(shape, local_stride(spec.shape, spec.stride, shape), spec.dtype))
    return tuple(found)


def format_option(option: Option | Refusal) -> str:
    """`[R, S(0)] x [S(1), R] -> [P(sum), S(0)]`."""
    left = " x ".join(f"[{format_layout(layout)}]" for layout in option.operands)
    right = ", ".join(f"[{format_layout(layout)}]" for layout in option.results)
    return f"{left} -> {right}" if left else right


__all__ = ["Kind", "Option", "Placement", "Refusal", "Space", "expand", "format_option", "local_specs"]
