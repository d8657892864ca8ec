"""What two plans have different: what was asked, times, memory, where parameters lie, layouts of ops, what moves.

Plain data from plain data; either plan may come from a file. Numbers count as equal where a file's nine digits cannot
tell them apart. Plans of different meshes or models are compared in what they share, and a note says what that is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .plan import NodePlan, Plan
from .plan_text import placement_text

Group = tuple[str, str, str]
"""Kind, axes and dtype of collectives."""


@dataclass(frozen=True)
class Change:
    """One thing that differs, as text; "" where one plan has no such thing."""

    name: str
    first: str
    second: str


@dataclass(frozen=True)
class Total:
    """Collectives of one kind, axis and dtype, together."""

    count: int = 0
    bytes: int = 0
    us: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind, axis and dtype in both plans."""

    kind: str
    axis: str
    dtype: str
    first: Total
    second: Total


@dataclass(frozen=True)
class PlanDiff:
    """What differs between two plans. `print(diff)` shows it; false where nothing does.

    Attributes:
        settings: what was asked for, and the status.
        step_time_us, memory_bytes: part -> both values, all parts where one differs.
        parameters: placements.
        ops: layouts of results and operands.
        collectives: those of which number, bytes or time differ.
        num_parameters, num_ops: that were compared.
        notes: what could not be compared.
    """

    settings: tuple[Change, ...]
    step_time_us: Mapping[str, tuple[float, float]]
    memory_bytes: Mapping[str, tuple[float, float]]
    parameters: tuple[Change, ...]
    ops: tuple[Change, ...]
    collectives: tuple[Traffic, ...]
    num_parameters: int
    num_ops: int
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        found = (self.settings, self.step_time_us, self.memory_bytes, self.parameters, self.ops, self.collectives)
        return any(map(bool, (*found, self.notes)))

    def __str__(self) -> str:
        from .report.diff import format_diff

        return format_diff(self)

    def to_json(self) -> str:
        """As JSON text, in stable order."""
        return json.dumps({"is_same": not self, **asdict(self)}, indent=1) + "\n"


def diff(first: Plan, second: Plan) -> PlanDiff:
    """What the second plan has different from the first."""
    has_same_axes = tuple(first.mesh) == tuple(second.mesh)
    return PlanDiff(
        settings=tuple(_changes(dict(_settings(first)), dict(_settings(second)))),
        step_time_us=_numbers(first.step_time_us, second.step_time_us),
        memory_bytes=_numbers(first.memory_bytes, second.memory_bytes),
        parameters=tuple(_changes(_placements(first), _placements(second))) if has_same_axes else (),
        ops=tuple(_changes(*_layouts(first, second))) if has_same_axes else (),
        collectives=tuple(_traffic(first, second)),
        num_parameters=len(first.parameters.keys() | second.parameters.keys()),
        num_ops=len(_ops(first) & _ops(second)),
        notes=tuple(_notes(first, second)),
    )


def _settings(plan: Plan) -> Iterator[tuple[str, str]]:
    """What was asked for, a line each, in the order of the file."""
    yield "model", plan.model
    yield "mesh", ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    yield "device", plan.device
    yield "recipe", plan.recipe or "none"
    yield "torch", plan.torch
    yield from plan.inputs.items()
    yield "memory limit", f"{plan.memory_bytes['limit']} bytes"
    for name, value in plan.settings.items():
        if name == "constraints":
            yield from _wishes(value or {})
        elif name != "built_from":  # the model, which stands above
            yield name.replace("_", " "), "none" if value is None else _plain(value)
    yield "status", plan.status


def _wishes(recorded: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for kind, values in recorded.items():
        what = {"parameters": "pin", "nodes": "op"}.get(kind, kind)
        if what in ("pin", "op"):
            yield from ((f"{what} {name}", text) for name, text in values)
        else:
            yield what, _plain(values)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _changes(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[Change]:
    """What differs, in the first plan's order, then what only the second has."""
    for name in dict.fromkeys((*first, *second)):
        if first.get(name) != second.get(name):
            yield Change(name, first.get(name, ""), second.get(name, ""))


def _placements(plan: Plan) -> dict[str, str]:
    return {name: placement_text(p.placements, p.split) for name, p in plan.parameters.items()}


def _layouts(first: Plan, second: Plan) -> tuple[dict[str, str], dict[str, str]]:
    """Of the ops that both plans have."""
    both = _ops(first) & _ops(second)
    return tuple({n.name: _layout(n) for n in plan.nodes if n.name in both} for plan in (first, second))  # type: ignore[return-value]


def _ops(plan: Plan) -> set[str]:
    return {node.name for node in plan.nodes if node.op != "parameter"}


def _layout(node: NodePlan) -> str:
    result = "; ".join(f"[{text}]" for text in node.output)
    return " x ".join(f"[{text}]" for text in node.inputs) + f" -> {result}" if node.inputs else result


def _numbers(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """All parts, where one of them differs."""
    both = {part: (first[part], second[part]) for part in first if part in second and part != "limit"}
    return both if any(not _is_close(*pair) for pair in both.values()) else {}


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-7, abs_tol=1e-6)


def _traffic(first: Plan, second: Plan) -> Iterator[Traffic]:
    """Those of which something differs, the largest change of time first."""
    totals = [_totals(plan) for plan in (first, second)]
    found = []
    for group in dict.fromkeys((*totals[0], *totals[1])):
        a, b = (side.get(group, Total()) for side in totals)
        if (a.count, a.bytes) != (b.count, b.bytes) or not _is_close(a.us, b.us):
            found.append(Traffic(*group, a, b))
    yield from sorted(found, key=lambda t: -abs(t.second.us - t.first.us))


def _totals(plan: Plan) -> dict[Group, Total]:
    found: dict[Group, Total] = {}
    for c in plan.collectives:
        group = (c.kind, c.axis, c.dtype)
        so_far = found.get(group, Total())
        found[group] = Total(so_far.count + 1, so_far.bytes + c.bytes, so_far.us + c.us)
    return found


def _notes(first: Plan, second: Plan) -> Iterator[str]:
    if tuple(first.mesh) != tuple(second.mesh):
        axes = " and ".join(f"({', '.join(plan.mesh)})" for plan in (first, second))
        yield f"the meshes have other axes, {axes}: placements and layouts are not compared"
    if first.graph != second.graph:
        names = [_ops(plan) for plan in (first, second)]
        alone = [len(names[0] - names[1]), len(names[1] - names[0])]
        yield (
            f"the graphs are others: {len(names[0] & names[1])} ops have names of both and are compared, "
            f"{alone[0]} are only in the first and {alone[1]} only in the second"
        )
