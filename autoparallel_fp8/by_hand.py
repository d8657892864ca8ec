"""The plans people write by hand, as constraints: where parameters are stored, and how activations are split.

    DDP           batch over all axes, parameters whole
    FSDP          batch over all axes, parameters split over all of them
    HSDP          batch over all axes, parameters split over the innermost axis and whole over the others
    TP + SP       tensor parallel over one axis, batch over the others; tokens are split between the linears (Megatron)
    FSDP x TP     the same, parameters split over the other axes too

What is column- and what row-parallel follows from the model: a linear that reads what column-parallel linears made is
row-parallel, every other one column-parallel. A plan that the mesh or the model does not allow comes with a sentence.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .constraints import Constraints
from .expansion import Space
from .graph import Graph
from .plan_reading import Reading, Used

TENSOR_AXIS = "tp"  # the axis of this name is the one for tensor parallelism, else the innermost of several
ATTENTION = "autoparallel_fp8.attention"
LINEARS = ("linear", "conv1d")


@dataclass(frozen=True)
class ByHand:
    """A plan somebody would write.

    Attributes:
        name: as people call it.
        constraints: that make it; None where it cannot be written.
        why: the reason then.
        whole: parameters that do not divide as the style has it, and stay whole instead.
    """

    name: str
    constraints: Constraints | None
    why: str = ""
    whole: tuple[str, ...] = ()


@dataclass
class _Writer:
    """Collects the placements of one plan."""

    space: Space
    reading: Reading
    parameters: list[tuple[str, str]] = field(default_factory=list)
    nodes: list[tuple[str, str]] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)

    def store(self, wanted: Mapping[str, Sequence[str]]) -> None:
        """Parameters as wanted, or whole on the axes of FSDP where they do not divide."""
        for v, node in enumerate(self.space.graph.nodes):
            if node.kind == "parameter":
                options = {tuple(map(str, option.results[0])) for option in self.space.kind(v).options}
                placement = tuple(wanted[node.target])
                if placement not in options and tuple("R" for _ in placement) in options:
                    self.whole.append(node.target)
                    placement = tuple("R" for _ in placement)
                self.parameters.append((glob.escape(node.target), ", ".join(placement)))

    def place(self, node: int, placements: Iterable[str]) -> None:
        """The result of an op."""
        self.nodes.append((glob.escape(self.space.graph.nodes[node].name), ", ".join(placements)))

    def written(self, name: str) -> ByHand:
        constraints = Constraints(parameters=tuple(self.parameters), nodes=tuple(self.nodes))
        return ByHand(name, constraints, whole=tuple(self.whole))


def plans_by_hand(space: Space, reading: Reading) -> tuple[ByHand, ...]:
    """All of them, in the order of the module's table.

    Args:
        space: of the graph.
        reading: of any plan for it; tells the modules and where they run.
    """
    axes = space.mesh.names
    tensor = TENSOR_AXIS if TENSOR_AXIS in axes else axes[-1] if len(axes) > 1 else None
    found = [_data_parallel(space, reading, "DDP", ()), _data_parallel(space, reading, "FSDP", axes)]
    if len(axes) > 1:
        found.append(_data_parallel(space, reading, "HSDP", axes[-1:]))
    else:
        found.append(ByHand("HSDP", None, "the mesh has one axis, and it takes two"))
    for name, is_sharded in (("TP + SP", False), ("FSDP x TP", True)):
        if tensor is None or (is_sharded and len(axes) == 1):
            found.append(ByHand(name, None, "the mesh has one axis, and it takes two: tensors and batch"))
        else:
            found.append(_tensor_parallel(space, reading, name, tensor, is_sharded))
    return tuple(found)


def _data_parallel(space: Space, reading: Reading, name: str, sharded: Sequence[str]) -> ByHand:
    """Batch over all axes, every parameter's first dim over `sharded`."""
    axes = space.mesh.names
    batch = _batch(space.graph)
    if batch is None or batch % space.mesh.num_devices:
        return ByHand(name, None, _no_split(batch, space.mesh.num_devices))
    writer = _Writer(space, reading)
    placement = ["S(0)" if axis in sharded else "R" for axis in axes]
    writer.store({node.target: placement for node in space.graph.nodes if node.kind == "parameter"})
    for node in _products(space.graph, reading, batch):
        writer.place(node, ["S(0)"] * len(axes))
    return writer.written(name)


def _tensor_parallel(space: Space, reading: Reading, name: str, tensor: str, is_sharded: bool) -> ByHand:
    """Linears column- and row-parallel over one axis; batch over the others, which may split parameters too."""
    axes = space.mesh.names
    roles = roles_of(space.graph, reading)
    if "row" not in roles.values():
        return ByHand(name, None, "no linear of the model reads what other linears made")
    batch, devices = _batch(space.graph), space.mesh.num_devices // space.mesh.sizes[axes.index(tensor)]
    if batch is None or batch % devices:
        return ByHand(name, None, _no_split(batch, devices))
    writer = _Writer(space, reading)
    tables = {n: used for n, used in reading.modules.items() if _is_of_tokens(space.graph, used, batch)}
    for module in _indivisible(space, reading, roles, tables, tensor):
        writer.whole.append(f"{module}.weight")
        roles.pop(module, None)
        tables.pop(module, None)
    stored = dict(_tensor_dims(space.graph, reading, roles, tables))
    other = "S(0)" if is_sharded else "R"
    writer.store(
        {
            node.target: [stored.get(node.target, "R") if axis == tensor else other for axis in axes]
            for node in space.graph.nodes
            if node.kind == "parameter"
        }
    )
    for node, made in _tensor_results(space.graph, reading, roles, tables):
        writer.place(node, [made if axis == tensor else "S(0)" for axis in axes])
    return writer.written(name)


def roles_of(graph: Graph, reading: Reading) -> dict[str, str]:
    """Module of each linear -> "column" or "row"."""
    reached = nearest_linears(graph, reading)
    roles: dict[str, str] = {}
    for module, used in reading.modules.items():
        if used.kind in LINEARS:
            below = reached[used.at].below
            roles[module] = "row" if any(roles.get(name) == "column" for name in below) else "column"
    return roles


@dataclass(frozen=True)
class _Reached:
    """Linears that a value comes from without another linear between: `below` the op, and seen by its readers."""

    below: frozenset[str]
    seen: frozenset[str]


def nearest_linears(graph: Graph, reading: Reading) -> list[_Reached]:
    """For each node of the forward pass; what parameters alone make is left out."""
    linears = {used.at: name for name, used in reading.modules.items() if used.kind in LINEARS}
    found: list[_Reached] = []
    for i, node in enumerate(graph.nodes):
        if node.phase == "backward":
            break
        sources = [found[ref.node].seen for ref in node.reads() if not graph.nodes[ref.node].from_parameters]
        below = frozenset[str]().union(*sources)
        found.append(_Reached(below, frozenset({linears[i]}) if i in linears else below))
    return found


def _indivisible(
    space: Space, reading: Reading, roles: Mapping[str, str], tables: Mapping[str, Used], tensor: str
) -> list[str]:
    """Modules whose weight does not divide over the tensor axis, such as a vocabulary of odd size."""
    ways = space.mesh.sizes[space.mesh.names.index(tensor)]
    shapes = {node.target: node.outputs[0].shape for node in space.graph.nodes if node.kind == "parameter"}
    kept = dict(space.graph.aliases)
    split = dict(_tensor_dims(space.graph, reading, roles, tables))
    odd = {name for name, text in split.items() if name in shapes and shapes[name][int(text[2])] % ways}
    return [module for module in reading.modules if kept.get(f"{module}.weight", f"{module}.weight") in odd]


def _no_split(batch: int | None, devices: int) -> str:
    if batch is None:
        return "the inputs have no batch to split"
    return f"a batch of {batch} does not split over {devices} devices; plan for a multiple of {devices} to compare it"


def _batch(graph: Graph) -> int | None:
    """The first dim of the first input."""
    shapes = [node.outputs[0].shape for node in graph.nodes if node.kind == "input"]
    return shapes[0][0] if shapes and shapes[0] else None


def _is_of_tokens(graph: Graph, used: Used, batch: int) -> bool:
    """Whether a module looks every token up, as positions are not."""
    shape = graph.nodes[used.at].outputs[0].shape
    return used.kind == "embedding" and len(shape) > 1 and shape[0] == batch


def _products(graph: Graph, reading: Reading, batch: int) -> Iterator[int]:
    """Linears, embeddings of tokens and attention in forward: where a style says how activations lie."""
    for used in reading.modules.values():
        if used.kind in LINEARS or _is_of_tokens(graph, used, batch):
            yield used.at
    yield from _attentions(graph)


def _attentions(graph: Graph) -> Iterator[int]:
    for i, node in enumerate(graph.nodes):
        if node.phase == "forward" and node.kind == "op" and node.op_name.startswith(ATTENTION):
            yield i


def _residuals(graph: Graph, reading: Reading, rows: Collection[str]) -> Iterator[int]:
    """Sums of two [batch, sequence, features] that row-parallel linears made."""
    for i, reached in enumerate(nearest_linears(graph, reading)):
        node = graph.nodes[i]
        shapes = [graph.spec(ref).shape for ref in node.reads()]
        is_sum = node.op_name == "aten.add.Tensor" and shapes == [node.outputs[0].shape] * 2
        if is_sum and len(shapes[0]) == 3 and reached.seen & set(rows):
            yield i


def _tensor_dims(
    graph: Graph, reading: Reading, roles: Mapping[str, str], tables: Mapping[str, Used]
) -> Iterator[tuple[str, str]]:
    """Parameter -> its split over the tensor axis, of those that have one."""
    kept = dict(graph.aliases)
    names = {node.target for node in graph.nodes if node.kind == "parameter"}
    for module, used in reading.modules.items():
        weight, bias = (kept.get(f"{module}.{leaf}", f"{module}.{leaf}") for leaf in ("weight", "bias"))
        if module in roles:
            is_column = roles[module] == "column"
            yield weight, "S(0)" if is_column == (used.kind == "linear") else "S(1)"
            if is_column and bias in names:
                yield bias, "S(0)"
        elif module in tables:
            yield weight, "S(0)"


def _tensor_results(
    graph: Graph, reading: Reading, roles: Mapping[str, str], tables: Mapping[str, Used]
) -> Iterator[tuple[int, str]]:
    """Op -> how its result lies over the tensor axis."""
    for module, used in reading.modules.items():
        if module in roles:
            yield used.at, "S(1)" if roles[module] == "column" else "P(sum)"
        elif module in tables:
            yield used.at, "P(sum)"
        elif used.kind == "norm" and used.num_dims == 3 and len(graph.nodes[used.last].outputs[0].shape) == 3:
            yield used.last, "S(1)"
    rows = {name for name, role in roles.items() if role == "row"}
    yield from ((node, "S(1)") for node in _residuals(graph, reading, rows))
    for node in _attentions(graph):
        yield node, "S(1)"
