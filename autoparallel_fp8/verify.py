"""A plan proven on this machine: every rank of its mesh in one process, held against the unsharded model.

The plan runs on smaller tensors (`shrink.py`) and with bfloat16 as float32 (`widen.py`), so that nothing but the order
of sums is left to differ; the reference is quantised with the plan's own scale scopes (`reference.py`). A wrong rule,
collective, offset or scale shows as an error many times the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .expansion import Space
from .graph import Graph, Node, Ref
from .redistribute import Routes
from .reference import run_reference
from .shrink import shrink
from .simulate_plan import run_plan
from .structure import Structure
from .widen import widen

KEEP = 16
"""Parts of tensors stay multiples of this where they were: what float8 kernels want of a rank."""

EXACT, CAST = 1e-5, 1e-2
"""Largest error: where only sums in float32 differ, and where a cast to float8 or float4 may round the other way for it
(the smallest step of e4m3 is 1/16 of a value; few values sit on an edge)."""


@dataclass(frozen=True)
class Compared:
    """One result, gradient or buffer.

    Attributes:
        kind: "output", "gradient" or "buffer".
        name: as the graph has it.
        shape: on the smaller tensors.
        error: norm of the difference over the norm of the reference.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    error: float


@dataclass(frozen=True)
class Verification:
    """What `plan.verify()` found.

    Attributes:
        num_ranks: that ran.
        compared: every result, gradient and new buffer value.
        bound: that no error may exceed.
        reason: for the bound.
        largest_shrunk: elements of the largest tensor, whole and shrunk.
    """

    num_ranks: int
    compared: tuple[Compared, ...]
    bound: float
    reason: str
    largest_shrunk: tuple[int, int]

    @property
    def is_ok(self) -> bool:
        """Whether every error is within the bound."""
        return all(one.error <= self.bound for one in self.compared)

    def __str__(self) -> str:
        from .report.verify import format_verification

        return format_verification(self)


def verify(
    space: Space,
    shape: Structure,
    choices: Sequence[int],
    routes_of: Callable[[Ref], Routes],
    *,
    seed: int = 0,
) -> Verification:
    """Run the plan on all ranks and compare with one device.

    Args:
        space, shape: the options and variables that were chosen from.
        choices: the option of every variable.
        routes_of: how a value gets from one layout to another; the priced ones.
        seed: of the made-up values.

    Raises:
        AssertionError: ranks that should hold the same differ, or a rank holds what its layout does not say.
    """
    small = widen(shrink(space, shape, choices, KEEP))
    parameters, inputs, tangents = made_up_values(small.graph, seed)
    wanted = run_reference(small, choices, parameters, inputs, tangents, seed=seed)
    found = run_plan(small, shape, choices, routes_of, parameters, inputs, tangents, seed=seed)
    is_cast = any(
        spec.dtype.is_floating_point and spec.dtype.itemsize == 1 for n in small.graph.nodes for spec in n.outputs
    )
    return Verification(
        prod(space.mesh.sizes),
        tuple(_compared(found, wanted)),
        CAST if is_cast else EXACT,
        "a cast may round the other way after a sum in another order" if is_cast else "sums in another order",
        (_largest(space.graph), _largest(small.graph)),
    )


def _compared(found: Mapping[str, Mapping[str, Tensor]], wanted: Mapping[str, Mapping[str, Tensor]]) -> list[Compared]:
    compared = []
    for kind, named in wanted.items():
        for name, whole in named.items():
            made = found[kind][name]
            assert made.shape == whole.shape and made.dtype == whole.dtype, f"{name} is {made.shape} {made.dtype}"
            difference = (made.double() - whole.double()).norm()
            error = float(difference / whole.double().norm().clamp_min(1e-30)) if float(difference) else 0.0
            compared.append(Compared(kind, name, tuple(whole.shape), error))
    return compared


def _largest(graph: Graph) -> int:
    return max(spec.numel for node in graph.nodes for spec in node.outputs)


def made_up_values(graph: Graph, seed: int) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Parameters and buffers by fqn, inputs and tangents: small random numbers, indices that every table has."""
    generator = torch.Generator().manual_seed(seed)
    rows = _rows(graph)
    parameters: dict[str, Tensor] = {}
    others: dict[str, list[Tensor]] = {"input": [], "tangent": []}
    for i, node in enumerate(graph.nodes):
        if node.kind in ("parameter", "buffer"):
            parameters[node.target] = _weights(node, generator)
        elif node.kind in others:
            others[node.kind].append(_values(node, rows.get(i, min(rows.values(), default=2)), generator))
    return parameters, others["input"], others["tangent"]


def _weights(node: Node, generator: torch.Generator) -> Tensor:
    """As layers begin: matrices keep the size of what they multiply, gains are near 1."""
    spec = node.outputs[0]
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype)
    values = torch.randn(spec.shape, generator=generator)
    if len(spec.shape) > 1:
        values = values * prod(spec.shape[1:]) ** -0.5
    elif node.target.endswith(("weight", "inv_freq")) or node.kind == "buffer":
        values = 1 + values / 10
    return values.to(spec.dtype)


def _values(node: Node, rows: int, generator: torch.Generator) -> Tensor:
    spec = node.outputs[0]
    if spec.dtype.is_floating_point:
        return torch.randn(spec.shape, generator=generator).to(spec.dtype)
    most = 2 if spec.dtype == torch.bool else max(rows, 1)
    return torch.randint(0, most, spec.shape, generator=generator).to(spec.dtype)


def _rows(graph: Graph) -> dict[int, int]:
    """Input node -> rows of the smallest table that it is an index of."""
    found: dict[int, int] = {}
    for node in graph.nodes:
        if node.op is torch.ops.aten.embedding.default:
            table, index = list(node.reads())
            found[index.node] = min(found.get(index.node, 1 << 30), graph.spec(table).shape[0])
    return found
