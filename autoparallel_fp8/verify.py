"""A plan proven on this machine: every rank of its mesh in one process, held against the unsharded model.

The plan runs on smaller tensors (`shrink.py`) and in float64 (`widen.py`), so that nothing but the order of sums is
left to differ, at 1e-16 of a value; the reference is quantised with the plan's own scale scopes (`reference.py`). A
wrong rule, collective, offset or scale shows as an error many times the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from .errors import UsageError
from .expansion import Space
from .graph import Graph, Node, Ref
from .indices import look_ups
from .layout import R
from .ops.stand_ins import kernels_of
from .program import RunStep
from .redistribute import Routes
from .reference import run_reference
from .schedule import Schedule, planned_schedule
from .shrink import shrink
from .simulate import run_graph
from .simulate_plan import run_schedule
from .structure import Structure
from .widen import float64_by_default, widen

KEEP = 2
"""A part of a tensor stays a multiple of this where it was one: more than one element, so that an order shows."""

KERNELS_KEEP = 16
"""The same where kernels run: K and N of a float8 GEMM are multiples of 16 on every rank."""

BOUND = 1e-9
"""Largest error: sums in float64 taken in another order, through some hundred ops. Casts to float8 round alike."""

NUDGE, NOISE = 2.0**-52, 100.0
"""The reference runs again on values whose last bit is changed. What that changes, times so much for rounding at the
ops on the way, is no error either: the gradient of a bias of attention's keys is zero, what is found is rounding."""

TIMES, LEAST = 2.0, 1e-2
"""With kernels: what rounding in bfloat16 and float8 leaves differs from run to run, but not by twice."""


@dataclass(frozen=True)
class Compared:
    """One result, gradient or buffer.

    Attributes:
        kind: "output", "gradient" or "buffer".
        name: as the graph has it.
        shape: on the smaller tensors.
        error: norm of the difference over the norm of the reference.
        bound: that the error may not exceed.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    error: float
    bound: float

    @property
    def is_ok(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Verification:
    """What `plan.verify()` found.

    Attributes:
        num_ranks: that ran.
        compared: every result, gradient and new buffer value.
        reason: for the bounds.
        largest_shrunk: elements of the largest tensor, whole and shrunk.
    """

    num_ranks: int
    compared: tuple[Compared, ...]
    reason: str
    largest_shrunk: tuple[int, int]

    @property
    def is_ok(self) -> bool:
        """Whether every error is within its bound."""
        return all(one.is_ok for one in self.compared)

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
    device: str = "cpu",
) -> Verification:
    """Run the plan on all ranks and compare with one device.

    Args:
        space, shape: the options and variables that were chosen from.
        choices: the option of every variable.
        routes_of: how a value gets from one layout to another; the priced ones.
        seed: of the made-up values.
        device: "cpu", in float64; or a GPU, "cuda", in the plan's own dtypes and with its kernels.

    Raises:
        UsageError: there is no such device.
        AssertionError: ranks that should hold the same differ, or a rank holds what its layout does not say.
    """
    written = planned_schedule(space, shape, choices, routes_of)
    at = checked_device(device)
    moves = [item for item in written.program.instructions if isinstance(item, RunStep)]
    between = [(move.ref, move.step.target) for move in moves]
    if at.type == "cpu":
        small = widen(shrink(space, shape, choices, KEEP, between))
        with float64_by_default(), one_thread():
            values = made_up_values(small.graph, seed)
            wanted = run_reference(small, choices, *values, seed=seed)
            found = run_schedule(small, choices, written, *values, seed=seed)
            errors, bounds = _errors(found, wanted), {}
            if max(errors.values(), default=0.0) > BOUND:
                noise = _errors(run_reference(small, choices, *_nudged(values, seed), seed=seed), wanted)
                bounds = {key: NOISE * size for key, size in noise.items()}
        compared = [Compared(*key, error, max(BOUND, bounds.get(key, 0.0))) for key, error in errors.items()]
        reason = f"bound {BOUND:g}: sums in another order, in float64"
    else:
        small = shrink(space, shape, choices, KERNELS_KEEP, between)
        compared = _with_kernels(small, choices, written, seed, at)
        reason = f"bound: {TIMES:g} times the error of one device with the same kernels, at least {LEAST:g}"
    largest = _largest(space.graph), _largest(small.graph)
    return Verification(prod(space.mesh.sizes), tuple(compared), reason, largest)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for the while: ops are many and small, and two cores that share each take six times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def checked_device(device: str) -> torch.device:
    """The device, if it is there.

    Raises:
        UsageError: no device of that name, or none here.
    """
    try:
        made = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{device!r} is no device", at="device", do='use "cpu" or "cuda"') from error
    if made.type not in ("cpu", "cuda") or (made.type == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"there is no device {device!r} here", at="device", do='use "cpu"')
    return made


def _with_kernels(
    small: Space, choices: Sequence[int], written: Schedule, seed: int, device: torch.device
) -> list[Compared]:
    """Errors of the plan on the device against float64, beside those of one device, each quantised as it is."""
    wide, alone = widen(small), _unsplit(small)
    values = made_up_values(small.graph, seed)
    exact = _map_tensors(values, lambda x: x.double() if x.is_floating_point() and x.itemsize > 1 else x)
    with float64_by_default():
        wanted, wanted_alone = (run_reference(wide, each, *exact, seed=seed) for each in (choices, alone))
    kernels = kernels_of(device)
    plan = _errors(
        run_schedule(small, choices, written, *values, seed=seed, device=device, replacement=kernels), wanted
    )
    one = _errors(run_graph(small.graph, *values, seed=seed, device=device, replacement=kernels), wanted_alone)
    return [Compared(*key, error, max(TIMES * one[key], LEAST)) for key, error in plan.items()]


def _unsplit(space: Space) -> list[int]:
    """For every node the option in which nothing is split."""
    found = []
    for i in range(len(space.graph.nodes)):
        layouts = [(*option.operands, *option.results) for option in space.kind(i).options]
        found.append(next(k for k, each in enumerate(layouts) if all(p == R for layout in each for p in layout)))
    return found


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _map_tensors(item, function) for name, item in value.items()}
    return [_map_tensors(item, function) for item in value]


def _nudged(values: Any, seed: int) -> Any:
    """The values, the last bit of floats changed."""
    generator = torch.Generator().manual_seed(seed + 1)

    def nudged(x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            return x
        return x * (1 + NUDGE * torch.randint(-1, 2, x.shape, generator=generator).double())

    return _map_tensors(values, nudged)


def _errors(
    found: Mapping[str, Mapping[str, Tensor]], wanted: Mapping[str, Mapping[str, Tensor]]
) -> dict[tuple[str, str, tuple[int, ...]], float]:
    """(kind, name, shape) -> norm of the difference over the norm of what is wanted."""
    errors = {}
    for kind, named in wanted.items():
        for name, whole in named.items():
            made = found[kind][name].cpu()
            assert made.shape == whole.shape, f"{name} is {list(made.shape)}"
            difference = (made.double() - whole.double()).norm()
            error = float(difference / whole.double().norm().clamp_min(1e-30)) if float(difference) else 0.0
            errors[kind, name, tuple(whole.shape)] = error
    return errors


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
    for one in look_ups(graph):
        for i in one.inputs or ():
            found[i] = min(found.get(i, 1 << 30), graph.spec(one.table).shape[one.dim])
    return found
