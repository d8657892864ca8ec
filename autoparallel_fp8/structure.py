"""Which choices a plan consists of, and where values travel between them: variables and links, before any price.

One variable a node (its option) and one a *copy*: a value with several readers in one phase gets a copy whose layout is
chosen, so that a redistribution is paid once however many read it. Edges:

    producer -> reader                      one reader in that phase
    producer -> copy -> each reader         several readers
    gradient -> its parameter               the optimizer wants the gradient where the parameter is
    result -> output                        what leaves the graph is whole or split, never partial
    output == tangent                       a tangent lies as its output does
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .expansion import Kind, Space
from .garbage import no_collection
from .graph import Graph, Output, Ref
from .layout import Layout, is_moved, universe
from .rules import HEAVY_OPS


@dataclass(frozen=True)
class Variable:
    """One choice to be made.

    Attributes:
        name: unique.
        role: "node", "copy" or "output".
        node: number of the node (the producer, for a copy or an output).
        ref: the value, for a copy or an output; None for a node.
        phase: of the readers it serves.
    """

    name: str
    role: str
    node: int
    ref: Ref | None
    phase: str


@dataclass(frozen=True)
class Link:
    """A value on its way: from slot `source_slot` of variable `source` to slot `target_slot` of variable `target`.

    Attributes:
        ref: the value.
        source, target: numbers of variables.
        source_slot: result of a node; 0 for a copy.
        target_slot: operand of a node; 0 for a copy, an output or a parameter (which takes its gradient).
        is_hideable: only parameters lead here, or only gradients follow: it may overlap with compute.
        is_tie: both must lie alike (output and tangent, buffer and its new value); nothing is moved.
        keeps_partial: a partial gradient on its way to the cast it is to be reduced in: no reduction here.
    """

    ref: Ref
    source: int
    source_slot: int
    target: int
    target_slot: int
    is_hideable: bool = False
    is_tie: bool = False
    keeps_partial: bool = False


@dataclass(frozen=True)
class Structure:
    """Variables and links of a space, and the layouts that each option of a variable stands for.

    Attributes:
        sources: for each variable, for each slot that a link may start from, one layout an option.
        targets: the same for slots where links end.
    """

    variables: tuple[Variable, ...]
    links: tuple[Link, ...]
    sources: tuple[tuple[tuple[Layout, ...], ...], ...]
    targets: tuple[tuple[tuple[Layout, ...], ...], ...]

    def num_options(self, variable: int) -> int:
        return len(self.sources[variable][0])


@no_collection()
def structure(space: Space) -> Structure:
    """Variables and links of the whole graph."""
    return _Builder(space).build()


class _Builder:
    def __init__(self, space: Space) -> None:
        self.space, self.graph = space, space.graph
        self.variables: list[Variable] = []
        self.links: list[Link] = []
        self.sources: list[tuple[tuple[Layout, ...], ...]] = []
        self.targets: list[tuple[tuple[Layout, ...], ...]] = []
        self.only_gradients = gradient_tails(self.graph)
        self.before_cast = _before_widening(self.graph, self.only_gradients)
        self._shared: dict[object, tuple[tuple[Layout, ...], ...]] = {}

    def build(self) -> Structure:
        for i, node in enumerate(self.graph.nodes):
            kind = self.space.kind(i)
            slots = self._share(("results", kind.number), partial(_result_layouts, kind))
            wants = self._share(("operands", kind.number), partial(_operand_layouts, kind))
            self._add(Variable(node.name, "node", i, None, node.phase), slots, wants if node.kind == "op" else slots)
        readers = self._readers()
        outputs = self._outputs_of()
        for ref in sorted({*readers, *outputs}):
            for phase in ("forward", "backward"):
                self._connect(ref, phase, readers.get(ref, {}).get(phase, []))
            for output in outputs.get(ref, []):
                self._leave(ref, output)
        self._tie_tangents()
        return Structure(tuple(self.variables), tuple(self.links), tuple(self.sources), tuple(self.targets))

    def _share(self, key: object, make: Callable[[], tuple[tuple[Layout, ...], ...]]) -> tuple[tuple[Layout, ...], ...]:
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def _add(
        self, variable: Variable, sources: tuple[tuple[Layout, ...], ...], targets: tuple[tuple[Layout, ...], ...]
    ) -> int:
        self.variables.append(variable)
        self.sources.append(sources)
        self.targets.append(targets)
        return len(self.variables) - 1

    def _readers(self) -> dict[Ref, dict[str, list[tuple[int, int]]]]:
        """value -> phase -> (node, operand) of every read."""
        found: dict[Ref, dict[str, list[tuple[int, int]]]] = {}
        for i, node in enumerate(self.graph.nodes):
            for slot, ref in enumerate(node.reads()):
                found.setdefault(ref, {}).setdefault(node.phase, []).append((i, slot))
        return found

    def _outputs_of(self) -> dict[Ref, list[Output]]:
        found: dict[Ref, list[Output]] = {}
        for output in self.graph.outputs:
            found.setdefault(output.ref, []).append(output)
        return found

    def _connect(self, ref: Ref, phase: str, reads: list[tuple[int, int]]) -> None:
        source, slot = ref.node, ref.output
        prefetched = self.graph.nodes[ref.node].from_parameters or self.graph.nodes[ref.node].kind == "parameter"
        if len(reads) > 1:
            layouts = self._copy_layouts(ref, reads)
            node = self.graph.nodes[ref.node]
            name = f"{node.name}{f'.{ref.output}' if ref.output else ''}:{phase}"
            copy = self._add(Variable(name, "copy", ref.node, ref, phase), (layouts,), (layouts,))
            only_gradients = all(self.only_gradients[i] for i, _ in reads)
            waits = all(self.before_cast[i] for i, _ in reads)
            self.links.append(Link(ref, source, slot, copy, 0, prefetched or only_gradients, keeps_partial=waits))
            source, slot = copy, 0
        for i, operand in reads:
            hides = prefetched or self.only_gradients[i]
            self.links.append(Link(ref, source, slot, i, operand, hides, keeps_partial=self.before_cast[i]))

    def _copy_layouts(self, ref: Ref, reads: list[tuple[int, int]]) -> tuple[Layout, ...]:
        """What readers want and what the producer makes, in the producer's order, without repeats."""
        kinds = tuple(sorted({(self.space.kind_of[i], operand) for i, operand in reads}))
        key = ("copy", self.space.kind_of[ref.node], ref.output, kinds)

        def make() -> tuple[tuple[Layout, ...], ...]:
            wanted = list(self.sources[ref.node][ref.output])
            for number, operand in kinds:
                wanted += [option.operands[operand] for option in self.space.kinds[number].options]
            own = set(self.sources[ref.node][ref.output])
            kept = [w for w in dict.fromkeys(wanted) if w in own or is_moved(w)]
            return (tuple(kept),)

        return self._share(key, make)[0]

    def _leave(self, ref: Ref, output: Output) -> None:
        if output.kind == "gradient":
            parameter = next(
                i for i, n in enumerate(self.graph.nodes) if n.kind == "parameter" and n.target == output.target
            )
            self.links.append(Link(ref, ref.node, ref.output, parameter, 0, True))
            return
        if output.kind == "buffer":
            buffer = next(i for i, n in enumerate(self.graph.nodes) if n.kind == "buffer" and n.target == output.target)
            self.links.append(Link(ref, ref.node, ref.output, buffer, 0))
            return
        leading = tuple((d, f) for d, f in self.space.reach[ref].splits if f == 0)
        layouts = universe(self.space.factors[ref], self.space.mesh.sizes, leading, "").layouts
        number = self._add(
            Variable(f"output {output.target}", "output", ref.node, ref, "forward"), (layouts,), (layouts,)
        )
        self.links.append(Link(ref, ref.node, ref.output, number, 0))

    def _tie_tangents(self) -> None:
        outputs = {v.name.removeprefix("output "): i for i, v in enumerate(self.variables) if v.role == "output"}
        for i, node in enumerate(self.graph.nodes):
            if node.kind == "tangent" and node.target in outputs:
                self.links.append(Link(Ref(i), outputs[node.target], 0, i, 0, is_tie=True))


def _result_layouts(kind: Kind) -> tuple[tuple[Layout, ...], ...]:
    return tuple(tuple(option.results[s] for option in kind.options) for s in range(len(kind.result_factors)))


def _operand_layouts(kind: Kind) -> tuple[tuple[Layout, ...], ...]:
    return tuple(tuple(option.operands[s] for option in kind.options) for s in range(len(kind.operand_factors)))


def gradient_tails(graph: Graph) -> list[bool]:
    """For each node, whether it is the tail of a gradient: only gradients come of it, no GEMM, attention or the like.

    What leads to a tail can wait while the rest of backward computes; what leads to another GEMM cannot.
    """
    tail = [node.kind == "op" and node.phase == "backward" and node.op not in HEAVY_OPS for node in graph.nodes]
    for output in graph.outputs:
        if output.kind != "gradient":
            tail[output.ref.node] = False
    for i in range(len(graph.nodes) - 1, -1, -1):
        if not tail[i]:
            for ref in graph.nodes[i].reads():
                tail[ref.node] = False
    return tail


def _before_widening(graph: Graph, tails: list[bool]) -> list[bool]:
    """For each node of a gradient's tail, whether it is or leads to a cast to a wider float: the dtype to reduce in."""
    found = [False] * len(graph.nodes)
    for i in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[i]
        if not tails[i]:
            continue
        sources = list(node.reads())
        if len(sources) == 1 and node.outputs[0].dtype.itemsize > graph.spec(sources[0]).dtype.itemsize:
            found[i] = True
        if found[i]:
            for ref in sources:
                found[ref.node] = found[ref.node] or tails[ref.node]
    return found
