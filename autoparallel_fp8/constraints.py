"""What a user demands of a plan, turned into restrictions on variables: pins, input and output placements, budgets.

A constraint is kept as the user wrote it and read against the structure only when the plan is made, so the order of
calls does not matter and one can be taken back.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from .errors import UsageError
from .expansion import Space
from .layout import Factors, Layout, R, format_layout, local_factors, parse_layout
from .problem import Restriction
from .structure import Structure

Wanted = str | Sequence[str] | None
"""`"R, S(0)"` or `("R", "S(0)")`; None leaves free."""


@dataclass(frozen=True)
class Constraints:
    """Everything a user has asked for, in order; each method gives a new value.

    Attributes:
        parameters: (name or glob, placement) of pins.
        nodes: (name or glob, placement) of ops' results.
        inputs, outputs: a placement each, in order; None leaves free.
        budget: (least, largest) share that one rank may hold of every parameter without a pin.
    """

    parameters: tuple[tuple[str, str], ...] = ()
    nodes: tuple[tuple[str, str], ...] = ()
    inputs: tuple[str | None, ...] = ()
    outputs: tuple[str | None, ...] = ()
    budget: tuple[float, float] | None = None

    def pin(self, pattern: str, placement: Wanted) -> Constraints:
        """Pin parameters by name or glob; None takes the pin back."""
        check_name("pin", pattern)
        rest = tuple(item for item in self.parameters if item[0] != pattern or placement is not None)
        if placement is None:
            return replace(self, parameters=rest)
        return replace(self, parameters=(*rest, (pattern, as_text(placement, f'pin("{pattern}")'))))

    def node(self, pattern: str, placement: Wanted) -> Constraints:
        """Pin the result of ops by name or glob; None takes it back."""
        check_name("add_node_constraint", pattern)
        rest = tuple(item for item in self.nodes if item[0] != pattern or placement is not None)
        if placement is None:
            return replace(self, nodes=rest)
        return replace(self, nodes=(*rest, (pattern, as_text(placement, f'add_node_constraint("{pattern}")'))))

    def with_inputs(self, placements: Sequence[Wanted]) -> Constraints:
        return replace(self, inputs=_list_of_texts(placements, "add_input_constraints"))

    def with_outputs(self, placements: Sequence[Wanted]) -> Constraints:
        return replace(self, outputs=_list_of_texts(placements, "add_output_constraints"))

    def beside(self, other: Constraints) -> Constraints:
        """These, and the pins of others."""
        return replace(self, parameters=(*self.parameters, *other.parameters), nodes=(*self.nodes, *other.nodes))

    def recorded(self) -> dict[str, Any] | None:
        """What a plan file says of them; None where nothing was asked."""
        found = {
            "parameters": [list(pin) for pin in self.parameters],
            "nodes": [list(pin) for pin in self.nodes],
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "budget": list(self.budget) if self.budget else [],
        }
        return {name: value for name, value in found.items() if value} or None

    @classmethod
    def recall(cls, recorded: Mapping[str, Any] | None) -> Constraints:
        """What `recorded` gave.

        Raises:
            UsageError: it is no record of constraints.
        """
        found, data = cls(), recorded or {}
        for pattern, placement in data.get("parameters", ()):
            found = found.pin(pattern, placement)
        for pattern, placement in data.get("nodes", ()):
            found = found.node(pattern, placement)
        found = found.with_inputs(data.get("inputs", ())).with_outputs(data.get("outputs", ()))
        return found.with_budget(*data["budget"]) if data.get("budget") else found

    def described(self) -> tuple[str, ...]:
        """A line for each wish, for the plan's notes."""
        lines = [f"{name} as {placement}" for name, placement in (*self.parameters, *self.nodes)]
        for what, placements in (("input", self.inputs), ("output", self.outputs)):
            lines += [f"{what} {i} as {p}" for i, p in enumerate(placements) if p is not None]
        if self.budget:
            lines.append(f"each rank holds {self.budget[0]:g} to {self.budget[1]:g} of every parameter without a pin")
        return tuple(lines)

    def with_budget(self, low: float, high: float) -> Constraints:
        numbers = all(isinstance(share, Real) and not isinstance(share, bool) for share in (low, high))
        if not numbers or not 0 <= low <= high or high > 1:
            raise UsageError(
                f"a parameter memory constraint from {low!r} to {high!r}",
                at="add_parameter_memory_constraint",
                do="give shares of each parameter, 0 <= low <= high <= 1",
            )
        return replace(self, budget=(low, high))


def as_text(placement: str | Sequence[str], at: str) -> str:
    """`"R, S(0)"` from either form, torch's placement objects included.

    Raises:
        UsageError: neither form; `at` says which constraint has it.
    """
    if isinstance(placement, str):
        return placement
    if not isinstance(placement, Sequence):
        raise UsageError(
            f"{placement!r} is no placement", at=at, do='write one for each axis, "R, S(0)" or ["R", "S(0)"]'
        )
    return ", ".join(_one_text(p, at) for p in placement)


def check_name(call: str, name: object) -> None:
    if not isinstance(name, str):
        raise UsageError(f"{name!r} is no name", at=call, do='give a name or glob as text, such as "layers.*.weight"')


def _list_of_texts(placements: Sequence[Wanted], call: str) -> tuple[str | None, ...]:
    if isinstance(placements, str) or not isinstance(placements, Sequence):
        raise UsageError(
            f"{placements!r} is no list of placements", at=call, do='give one for each in a list, such as ["S(0), R"]'
        )
    return tuple(None if p is None else as_text(p, f"{call}, number {i}") for i, p in enumerate(placements))


def _label(call: str, pattern: str, text: str, name: str) -> str:
    """The constraint as the user wrote it, and what it was read as where that is another name."""
    return f'{call}("{pattern}", "{text}")' + (f" on {name}" if name != pattern else "")


def _one_text(placement: object, at: str) -> str:
    if isinstance(placement, str):
        return placement
    name = type(placement).__name__
    if name == "Replicate":
        return "R"
    if name == "Shard":
        return f"S({placement.dim})"  # type: ignore[attr-defined]
    if name == "Partial":
        return f"P({placement.reduce_op})"  # type: ignore[attr-defined]
    raise UsageError(
        f"{placement!r} is no placement",
        at=at,
        do='write "R", "S(dim)" or "P(sum)", or torch\'s Replicate, Shard, Partial',
    )


def restrictions(wanted: Constraints, space: Space, shape: Structure) -> tuple[Restriction, ...]:
    """The constraints as restrictions on variables.

    Raises:
        UsageError: a name that nothing has, a placement of the wrong form, or one that no option of the tensor meets.
    """
    return tuple(_Reader(space, shape).read(wanted))


@dataclass
class _Reader:
    space: Space
    shape: Structure
    _names: dict[str, int] = field(default_factory=dict)

    def read(self, wanted: Constraints) -> Iterator[Restriction]:
        nodes = self.space.graph.nodes
        parameters = {n.target: i for i, n in enumerate(nodes) if n.kind == "parameter"}
        aliases = {alias: parameters[kept] for alias, kept in self.space.graph.aliases if kept in parameters}
        ops = {n.name: i for i, n in enumerate(nodes) if n.kind == "op"}
        pinned = set()
        for pattern, text in wanted.parameters:
            for name, v in self._matching(pattern, {**parameters, **aliases}, "parameter"):
                pinned.add(v)
                yield self._restrict(_label("pin", pattern, text, name), v, text)
        for pattern, text in wanted.nodes:
            for name, v in self._matching(pattern, ops, "op"):
                yield self._restrict(_label("add_node_constraint", pattern, text, name), v, text)
        inputs = [(n.target, i) for i, n in enumerate(nodes) if n.kind == "input"]
        yield from self._listed("input", inputs, wanted.inputs)
        outputs = [
            (v.name.removeprefix("output "), i) for i, v in enumerate(self.shape.variables) if v.role == "output"
        ]
        yield from self._listed("output", outputs, wanted.outputs)
        if wanted.budget is not None:
            for name, v in parameters.items():
                if v not in pinned:
                    yield self._budget(name, v, *wanted.budget)

    def _matching(self, pattern: str, names: dict[str, int], what: str) -> list[tuple[str, int]]:
        found = [(name, names[name]) for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            shown = ", ".join(list(names)[:6]) + (", ..." if len(names) > 6 else "")
            raise UsageError(f"no {what} is called {pattern!r}", at="constraints", do=f"names are {shown}")
        return found

    def _listed(
        self, what: str, slots: list[tuple[str, int]], placements: tuple[str | None, ...]
    ) -> Iterator[Restriction]:
        if placements and len(placements) != len(slots):
            names = ", ".join(name for name, _ in slots)
            raise UsageError(
                f"{len(placements)} {what} constraints for {len(slots)} {what}s ({names})",
                at=f"add_{what}_constraints",
                do="give one for each, None to leave one free",
            )
        for (name, v), text in zip(slots, placements, strict=False):
            if text is not None:
                yield self._restrict(f'{what} {name} as "{text}"', v, text)

    def _restrict(self, label: str, v: int, text: str) -> Restriction:
        variable = self.shape.variables[v]
        ref = variable.ref
        spec = self.space.graph.spec(ref) if ref else self.space.graph.nodes[variable.node].outputs[0]
        factors = self.space.factors[ref] if ref else self.space.kind(v).result_factors[0]
        try:
            layout = parse_layout(text, len(self.space.mesh.axes), len(spec.shape))
        except UsageError as error:
            raise UsageError(error.message, at=label, do=error.do) from error
        # an axis of one device splits nothing
        layout = tuple(p if size > 1 else R for p, size in zip(layout, self.space.mesh.sizes, strict=True))
        layouts = self.shape.sources[v][0]
        allowed = tuple(i for i, found in enumerate(layouts) if found == layout)
        if not allowed:
            raise self._no_option(label, layout, spec.shape, factors, layouts)
        return Restriction(label, v, allowed)

    def _no_option(
        self, label: str, layout: Layout, shape: tuple[int, ...], factors: Factors, layouts: tuple[Layout, ...]
    ) -> UsageError:
        sizes = self.space.mesh.sizes
        there = "; ".join(dict.fromkeys(format_layout(option) for option in layouts))
        reason = f"no option of a tensor {list(shape)} is [{format_layout(layout)}]"
        for axis, placement in zip(self.space.mesh.axes, layout, strict=True):
            if placement.kind == "S":
                ways = 1
                for other, size in zip(layout, sizes, strict=True):
                    ways *= size if other == placement else 1
                if shape[placement.dim] % ways:
                    size = shape[placement.dim]
                    reason += f": dim {placement.dim} of size {size} does not split {ways} ways over axis {axis.name}"
                    break
        else:
            if local_factors(factors, layout, sizes) is None:
                reason += ": its dims are products of factors that do not split so"
        return UsageError(reason, at=label, do=f"choose one of: {there}")

    def _budget(self, name: str, v: int, low: float, high: float) -> Restriction:
        """Options within the budget; where a parameter cannot be split so finely, its own best."""
        sizes = self.space.mesh.sizes
        spec = self.space.graph.nodes[v].outputs[0]
        shares = []
        for layout in self.shape.sources[v][0]:
            share = 1.0
            for placement, size in zip(layout, sizes, strict=True):
                share /= size if placement.kind == "S" else 1
            shares.append(share)
        limit = max(high, min(shares))
        floor = min(low, max(shares))
        allowed = tuple(i for i, share in enumerate(shares) if floor - 1e-9 <= share <= limit + 1e-9)
        assert allowed, f"no share of {spec.shape} between {floor} and {limit}"
        return Restriction(f"memory budget {low:g} to {high:g} of {name}", v, allowed)
