"""What a plan's nodes say of the modules that hold its parameters: how each weight lies when it is used.

A plan is data: its nodes have names (`<module>.<op>`), ops and layouts, and no edges. That is enough to find the GEMM
of a linear, the lookup of an embedding and the result of a norm, in the order in which they run; `export.py` reads
the hand-written form of the plan from them. A module that is none of the three is in `others`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .plan import NodePlan, Plan

GEMMS = {
    "aten.mm.default": (0, 1),
    "aten.addmm.default": (1, 2),
    "aten._scaled_mm.default": (0, 1),
    "aten._scaled_mm_v2.default": (0, 1),
    "autoparallel_fp8.mx_mm.default": (0, 1),
}
"""Op -> where its operands a [m, k] and b [k, n] stand among the tensors that it reads."""
TRANSPOSES = ("aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.numpy_T.default")
_SPLIT = re.compile(r"(?:S|Frozen)\((\d+)(?:\.(\d+))?\)")
_NUMBER = re.compile(r"(.*?)\.?\b(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Split:
    """A split of a tensor over one mesh axis: dim, and factor of it (0 unless dims were flattened)."""

    dim: int
    factor: int = 0


Splits = tuple[Split | None, ...]
"""How a tensor is split, a mesh axis each; None where it is whole or partial there."""


@dataclass(frozen=True)
class Used:
    """A module with a weight, as forward runs it.

    Attributes:
        kind: "linear" (weight [out, in]), "conv1d" (a GEMM with weight [in, out]), "embedding" or "norm".
        weight: name of its parameter in the plan; None where it is tied to another module's.
        first, at, last: positions of its first node, of the GEMM or lookup, and of its last.
        as_used: the weight's splits when it is used, in the weight's own dims.
        reads: splits of the activation that it reads.
        makes: splits of its result, and how many dims that has.
    """

    kind: str
    weight: str | None
    first: int
    at: int
    last: int
    as_used: Splits
    reads: Splits
    makes: Splits
    num_dims: int


@dataclass(frozen=True)
class Reading:
    """A plan by modules.

    Attributes:
        axes: names of the mesh axes.
        forward: nodes of the forward pass with their module; a node keeps its position in the plan.
        modules: name of a module -> how it is used.
        others: parameters of modules that are none of these.
    """

    axes: tuple[str, ...]
    forward: tuple[tuple[str, NodePlan], ...]
    modules: Mapping[str, Used]
    others: tuple[str, ...]

    def stored(self, plan: Plan, name: str) -> Splits:
        """A parameter's splits where it is stored."""
        return splits_of(", ".join(plan.parameters[name].placements))


def splits_of(layout: str) -> Splits:
    """The splits in a layout's text, one a mesh axis.

    >>> splits_of("S(0), R")
    (Split(dim=0, factor=0), None)
    """
    found = (_SPLIT.fullmatch(part) for part in layout.split(", "))
    return tuple(Split(int(match[1]), int(match[2] or 0)) if match else None for match in found)


def layer_of(name: str) -> tuple[str, int] | None:
    """The stack and number in a name, up to its first number; None where it has none.

    >>> layer_of("model.layers.3.mlp.up_proj.weight")
    ('model.layers', 3)
    """
    found = split_name(name)
    return found[:2] if found else None


def split_name(name: str) -> tuple[str, int, str] | None:
    """The same, and what follows the number.

    >>> split_name("model.layers.3.mlp.up_proj.weight")
    ('model.layers', 3, '.mlp.up_proj.weight')
    """
    match = _NUMBER.match(name)
    return (match[1], int(match[2]), name[match.end(2) :]) if match else None


def size_of(plan: Plan, name: str) -> int:
    """Elements of the whole parameter."""
    return prod(plan.parameters[name].shape)


def read_plan(plan: Plan) -> Reading:
    """Finds what every module with parameters does in forward."""
    forward = []
    for node in plan.nodes:
        if node.op == "tangent" or node.name.startswith("backward.") or ".backward." in node.name:
            break
        forward.append((node.name.rpartition(".")[0], node))
    own: dict[str, list[str]] = {}
    for name in plan.parameters:
        own.setdefault(name.rpartition(".")[0], []).append(name)
    ran: dict[str, list[int]] = {}
    for i, (module, node) in enumerate(forward):
        if node.op not in ("parameter", "buffer", "input"):
            ran.setdefault(module, []).append(i)
    modules: dict[str, Used] = {}
    for module, places in ran.items():
        used = _used(plan, module, own.get(module, []), forward, places)
        if used is not None and module:
            modules[module] = used
    within = {module for module, used in modules.items() if used.kind != "norm"}
    for module in [m for m, used in modules.items() if used.kind == "norm"]:
        if any(inner.startswith(f"{module}.") for inner in within):
            del modules[module]  # gains of a block, not a norm
    others = tuple(name for name in plan.parameters if name.rpartition(".")[0] not in modules)
    return Reading(tuple(plan.mesh), tuple(forward), modules, others)


def _used(
    plan: Plan, module: str, names: Sequence[str], forward: Sequence[tuple[str, NodePlan]], places: Sequence[int]
) -> Used | None:
    """What a module does, where it is one of the kinds."""
    shapes = {name.rpartition(".")[2]: plan.parameters[name].shape for name in names}
    weight = f"{module}.weight" if "weight" in shapes else None
    nodes = [(i, forward[i][1]) for i in places]
    first, last = places[0], places[-1]
    for i, node in nodes:
        if node.op in GEMMS and len(shapes.get("weight", (0, 0))) == 2 and set(shapes) <= {"weight", "bias"}:
            a, b = (splits_of(node.inputs[k]) for k in GEMMS[node.op])
            if weight is None and layer_of(module):
                return None  # a product of activations
            is_linear = weight is None or any(other.op in TRANSPOSES for j, other in nodes if j < i)
            as_used = tuple(split and Split(1 - split.dim, split.factor) for split in b) if is_linear else b
            kind = "linear" if is_linear else "conv1d"
            return Used(kind, weight, first, i, last, as_used, a, splits_of(node.output[0]), 2)
        if node.op == "aten.embedding.default" and set(shapes) == {"weight"}:
            table, index = (splits_of(text) for text in node.inputs[:2])
            num_dims = len(node.local_shapes[0])
            return Used("embedding", weight, first, i, last, table, index, splits_of(node.output[0]), num_dims)
    if shapes and all(len(shape) == 1 for shape in shapes.values()):
        node = forward[last][1]
        whole = tuple(None for _ in plan.mesh)
        made = splits_of(node.output[0])
        return Used("norm", weight, first, last, last, whole, made, made, len(node.local_shapes[0]))
    return None
