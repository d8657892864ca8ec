"""Which tensors a compiled program really writes to and reads from memory.

Chains of element-wise ops, casts, views and reductions become one kernel, as Inductor fuses them; only what another
kernel needs is written. Every op gets a *level*, the number of kernels that must have finished before it runs: a GEMM
or attention starts a new one, and so does what needs a maximum or sum over more than the innermost dim (a softmax-like
reduction over the innermost dim stays in its kernel, and so does a cast in blocks along it; a cast in blocks along
another dim is a kernel that transposes tiles). A value read at its own level stays in registers. A value
that one element-wise op makes from one tensor (a cast, a sign) is made again where it is needed rather than written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..graph import Graph, Node, Ref, TensorSpec
from ..rules.language import Ops
from ..rules.torchao_ops import TORCHAO_OPS

aten = torch.ops.aten
ours = torch.ops.autoparallel_fp8

_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.expand.default, aten.slice.Tensor, aten.select.int, aten.alias.default, aten.detach.default,
    aten.split.Tensor, aten.split_with_sizes.default,
}  # fmt: skip
_REDUCTIONS = {
    aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.mean.default, aten.amax.default, aten.max.default,
}  # fmt: skip
_OWN_KERNEL = Ops({
    *TORCHAO_OPS,
    aten._scaled_mm_v2.default, aten._grouped_mm.default, aten._scaled_grouped_mm.default,
    aten._scaled_grouped_mm_v2.default,
    aten.mm.default, aten.bmm.default, aten._scaled_mm.default, aten.embedding.default,
    aten.embedding_dense_backward.default, aten.gather.default, aten.index.Tensor,
    aten.scatter.value, aten.cumsum.default, ours.attention.default, ours.attention_backward.default,
    ours.mx_mm.default,
    ours.biased_attention.default, ours.biased_attention_backward.default,
    ours.capped_attention.default, ours.capped_attention_backward.default,
    aten.convolution.default, aten.convolution_backward.default,
})  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """What one node moves through memory.

    Attributes:
        reads: (operand, bytes loaded for each of its elements) for what its kernel reads on this node's account.
        writes: results that are written out.
        is_own_kernel: a GEMM, attention or the like: its own formula counts its traffic.
        is_view: moves nothing at all.
        starts_kernel: the first node of its kernel, which pays the launch.
    """

    reads: tuple[tuple[int, float], ...] = ()
    writes: tuple[int, ...] = ()
    is_own_kernel: bool = False
    is_view: bool = False
    starts_kernel: bool = False


@dataclass(frozen=True)
class Fusion:
    """How the program runs as kernels.

    Attributes:
        traffic: of every node.
        unwritten: values that are never written (a redistribution of one has to write it).
        kept: values in memory that backward reads and forward made, parameters and what derives from them left out.
    """

    traffic: tuple[Traffic, ...]
    unwritten: frozenset[Ref]
    kept: tuple[Ref, ...]


def is_view(node: Node) -> bool:
    return node.kind == "op" and node.op in _VIEWS


def is_light(node: Node) -> bool:
    """Whether backward may make the node's result again: element-wise or a view, no GEMM, attention or reduction."""
    return node.kind == "op" and node.op not in _OWN_KERNEL and node.op not in _REDUCTIONS


def fuse(graph: Graph) -> Fusion:
    """Levels, then what is kept for backward, then what is written, then who reads it."""
    levels = _levels(graph)
    kept = _kept(graph)
    written = _written(graph, levels) | kept.keys()
    traffic = tuple(_traffic(graph, levels, written))
    unwritten = frozenset(
        Ref(i, k)
        for i, node in enumerate(graph.nodes)
        if node.kind == "op"
        for k in range(len(node.outputs))
        if _root(graph, Ref(i, k)) not in written
    )
    return Fusion(traffic, unwritten, tuple(sorted(kept)))


def _root(graph: Graph, ref: Ref) -> Ref:
    """The value that a chain of views looks at."""
    while is_view(graph.nodes[ref.node]):
        ref = next(graph.nodes[ref.node].reads())
    return ref


def _ends_kernel(graph: Graph, node: Node) -> bool:
    """A reduction over more than the innermost dim: its result is known only when the whole kernel is done."""
    if node.op not in _REDUCTIONS:
        return False
    spec = graph.spec(next(node.reads()))
    dims = dict(zip((a.name for a in node.op._schema.arguments), node.args, strict=False)).get("dim")
    if not isinstance(dims, tuple) or not dims:
        return spec.numel > 1
    reduced = {d % len(spec.shape) for d in dims}
    return _innermost(spec) not in reduced


def _innermost(spec: TensorSpec) -> int:
    """The dim whose elements are neighbours in memory."""
    return min(range(len(spec.shape)), key=lambda d: (spec.stride[d] if spec.shape[d] > 1 else 1 << 62, -d))


def _transposes(graph: Graph, node: Node) -> bool:
    """A cast in blocks along a dim that is not the innermost one: it starts a kernel, which reads its operand."""
    if node.op is not ours.to_mx.default:
        return False
    spec = graph.spec(next(node.reads()))
    return _innermost(spec) != node.args[3] % len(spec.shape)


def _levels(graph: Graph) -> list[int]:
    levels: list[int] = []
    for node in graph.nodes:
        level = 0
        for ref in node.reads():
            source = graph.nodes[ref.node]
            done = levels[ref.node]
            if source.kind == "op" and (source.op in _OWN_KERNEL or _ends_kernel(graph, source)):
                done += 1
            level = max(level, done)
        if node.kind == "op" and (node.op in _OWN_KERNEL or _transposes(graph, node)):
            level += 1
        levels.append(level)
    return levels


def _is_cheap(node: Node) -> bool:
    """Made again where needed: element-wise from one tensor, or from none."""
    return is_light(node) and len(set(node.reads())) <= 1


def _kept(graph: Graph) -> dict[Ref, None]:
    """What backward keeps of forward: results of kernels, and what is smaller than all it could be made of again.

    A value that a backward GEMM reads as it is must be kept whole; another one is made again from what is kept anyway,
    or from less than its own bytes (a float32 copy from its bfloat16 source, a norm's product from its input).
    """
    kept: dict[Ref, None] = {}
    later: list[Ref] = []
    for node in graph.nodes:
        if node.phase == "backward" and not is_view(node):
            for ref in node.reads():
                root = _root(graph, ref)
                source = graph.nodes[root.node]
                if source.phase == "forward" and source.kind == "op" and not source.from_parameters:
                    if node.op in _OWN_KERNEL or source.op in _OWN_KERNEL:
                        kept[root] = None
                    else:
                        later.append(root)
    for root in later:
        kept.update(dict.fromkeys(_cheapest(graph, root, kept, depth=12)))
    return kept


def _cheapest(graph: Graph, root: Ref, kept: dict[Ref, None], depth: int) -> set[Ref]:
    """What to keep so that a value can be had in backward: itself, or less than itself to make it from."""
    source = graph.nodes[root.node]
    if root in kept or source.kind != "op" or source.from_parameters:
        return set()
    if source.op in _OWN_KERNEL or source.op in _REDUCTIONS or depth == 0:
        return {root}
    wanted: set[Ref] = set()
    for ref in source.reads():
        wanted |= _cheapest(graph, _root(graph, ref), kept, depth - 1)
    more = sum(graph.spec(ref).num_bytes for ref in wanted)
    return wanted if more < graph.spec(root).num_bytes else {root}


def _written(graph: Graph, levels: list[int]) -> set[Ref]:
    """Roots that a kernel of its own, another kernel of the same phase or the caller reads; sources always."""
    written = {_root(graph, output.ref) for output in graph.outputs}
    for i, node in enumerate(graph.nodes):
        if is_view(node):
            continue
        for ref in node.reads():
            root = _root(graph, ref)
            source = graph.nodes[root.node]
            elsewhere = source.phase == node.phase and levels[root.node] != levels[i] and not _is_cheap(source)
            if source.kind != "op" or source.op in _OWN_KERNEL or node.op in _OWN_KERNEL or elsewhere:
                written.add(root)
    return written


def _traffic(graph: Graph, levels: list[int], written: set[Ref]) -> Iterable[Traffic]:
    seen: set[tuple[Ref, int, str]] = set()
    kernels: set[tuple[int, str]] = set()
    for i, node in enumerate(graph.nodes):
        if node.kind != "op":
            yield Traffic()
        elif is_view(node):
            yield Traffic(is_view=True)
        elif node.op in _OWN_KERNEL:
            yield Traffic(is_own_kernel=True, starts_kernel=True)
        else:
            kernel = (levels[i], node.phase)
            first = kernel not in kernels
            kernels.add(kernel)
            writes = tuple(k for k in range(len(node.outputs)) if Ref(i, k) in written)
            yield Traffic(_reads(graph, i, levels, written, seen), writes, starts_kernel=first)


def _reads(
    graph: Graph, i: int, levels: list[int], written: set[Ref], seen: set[tuple[Ref, int, str]]
) -> tuple[tuple[int, float], ...]:
    """(operand, bytes an element) of what the node's kernel loads on its account, each value once a kernel."""
    node, found = graph.nodes[i], []
    for position, ref in enumerate(node.reads()):
        for root in _loads(graph, _root(graph, ref), levels[i], node.phase, levels, written):
            if (root, levels[i], node.phase) not in seen:
                seen.add((root, levels[i], node.phase))
                share = graph.spec(root).num_bytes / max(1, graph.spec(ref).numel)
                found.append((position, share))
    return tuple(found)


def _loads(
    graph: Graph, root: Ref, level: int, phase: str, levels: list[int], written: set[Ref], depth: int = 12
) -> list[Ref]:
    """Values in memory that a read goes back to; none where it stays in registers of the same kernel."""
    source = graph.nodes[root.node]
    if root in written or depth == 0:
        return [root]
    if source.phase == phase and levels[root.node] == level:
        return []
    found: list[Ref] = []
    for ref in source.reads():
        found += _loads(graph, _root(graph, ref), level, phase, levels, written, depth - 1)
    return list(dict.fromkeys(found))
