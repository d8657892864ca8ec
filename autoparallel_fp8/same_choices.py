"""The choices that an earlier plan made, found again among the options of a graph; no solver runs.

    recorded_choices    from a plan file: every op's layouts stand in `plan.nodes`; a copy's or an output's is the
                        cheapest that gives the collectives which the file lists for it
    same_choices        from a live plan, for the same program on tensors of other sizes

Copies and outputs touch ops alone, so each is found by itself once the ops are fixed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .assemble import steps_of, value_name
from .cost_models import Pricing
from .errors import PlanError
from .expansion import Space
from .layout import Layout, R, format_layout, local_factors
from .live import Live
from .plan import Plan
from .problem import Array, Problem
from .structure import Link

Moved = tuple[str, str, str, str]
"""Kind, axes, source and target of a collective."""


def recorded_choices(plan: Plan, pricing: Pricing, problem: Problem) -> tuple[int, ...] | None:
    """The option of every variable; None where the file's layouts are no options here.

    Args:
        plan: read from a file, made for the same graph.
        pricing: of this graph.
        problem: made of it; decides between options that give the same collectives.
    """
    space = pricing.space
    if [node.name for node in plan.nodes] != [node.name for node in space.graph.nodes]:
        return None
    choices = []
    for found in _recorded(plan, space):
        if found is None:
            return None
        choices.append(found)
    return _Filler(plan, pricing, problem, choices).fill()


def first_unknown(plan: Plan, space: Space) -> str:
    """The first op whose layouts in the file are no options here, with its layouts; "" where there is none."""
    for node, found in zip(plan.nodes, _recorded(plan, space), strict=False):
        if found is None:
            reads = ", ".join(f"[{text}]" for text in node.inputs)
            makes = ", ".join(f"[{text}]" for text in node.output)
            return f"{node.name} {reads} -> {makes}" if reads else f"{node.name} {makes}"
    return ""


def _recorded(plan: Plan, space: Space) -> Iterator[int | None]:
    """Each node's option that has the file's layouts."""
    by_text: dict[int, dict[tuple[tuple[str, ...], tuple[str, ...]], int]] = {}
    for v, node in enumerate(plan.nodes):
        number = space.kind_of[v]
        if number not in by_text:
            by_text[number] = {
                (tuple(map(format_layout, o.operands)), tuple(map(format_layout, o.results))): i
                for i, o in enumerate(space.kinds[number].options)
            }
        yield by_text[number].get((node.inputs, node.output))


class _Filler:
    """Finds the copies and outputs, given every node's choice."""

    def __init__(self, plan: Plan, pricing: Pricing, problem: Problem, choices: list[int]) -> None:
        self.pricing, self.shape, self.problem, self.choices = pricing, pricing.shape, problem, choices
        self.recorded: dict[tuple[str, str], list[Moved]] = {}
        for c in plan.collectives:
            self.recorded.setdefault((c.tensor, c.reader), []).append((c.kind, c.axis, c.source, c.target))
        self.links: dict[int, list[Link]] = {}
        for link in self.shape.links:
            for v in {link.source, link.target}:
                self.links.setdefault(v, []).append(link)

    def fill(self) -> tuple[int, ...] | None:
        first = len(self.choices)
        costs = self._costs(first)
        chosen = [self._choose(v, cost) for v, cost in enumerate(costs, first)]
        return None if None in chosen else (*self.choices, *(x for x in chosen if x is not None))

    def _costs(self, first: int) -> list[Array]:
        """Of each option of the variables from `first` on, what is paid on its edges."""
        found = [cost.copy() for cost in self.problem.costs[first:]]
        for edge in self.problem.edges:
            table = self.problem.tables[edge.table]
            if edge.w >= first > edge.u:
                found[edge.w - first] += table[self.choices[edge.u]]
            elif edge.u >= first > edge.w:
                found[edge.u - first] += table[:, self.choices[edge.w]]
        return found

    def _choose(self, v: int, cost: Array) -> int | None:
        """The cheapest option with the file's collectives; the cheapest at all where none has them."""
        possible = [int(x) for x in np.argsort(cost, kind="stable") if np.isfinite(cost[x])]
        same = (x for x in possible if self._is_recorded(v, x))
        return next(same, possible[0] if possible else None)

    def _is_recorded(self, v: int, option: int) -> bool:
        moved: dict[tuple[str, str], list[Moved]] = {}
        for link in self.links[v]:
            start = self._layout(link, link.source, self.shape.sources, link.source_slot, v, option)
            end = self._layout(link, link.target, self.shape.targets, link.target_slot, v, option)
            key = (value_name(self.pricing.space.graph, link.ref), self.shape.variables[link.target].name)
            steps = moved.setdefault(key, [])
            for step in steps_of(self.pricing, link, start, end):
                axes = "+".join(self.pricing.space.mesh.names[a] for a in step.axes)
                if step.kind != "slice":
                    steps.append((step.kind, axes, format_layout(step.source), format_layout(step.target)))
        return all(steps == self.recorded.get(key, []) for key, steps in moved.items())

    def _layout(
        self,
        link: Link,
        end: int,
        slots: tuple[tuple[tuple[Layout, ...], ...], ...],
        slot: int,
        v: int,
        option: int,
    ) -> Layout:
        return slots[end][slot][option if end == v else self.choices[end]]


def same_choices(live: Live, pricing: Pricing) -> tuple[int, ...]:
    """The option of every variable that has the layouts of a live plan's.

    Args:
        live: of the plan.
        pricing: of the same model captured with inputs of other sizes.

    Raises:
        PlanError: the graph is another program; or a layout does not divide, or no kernel takes it, at the new sizes.
    """
    _require_same_program(live, pricing)
    space, shape = pricing.space, pricing.shape
    choices = [_same_option(live, space, v) for v in range(len(space.graph.nodes))]
    for v in range(len(choices), len(shape.variables)):
        layout = live.shape.sources[v][0][live.choices[v]]
        layouts = shape.sources[v][0]
        if layout not in layouts:
            name = shape.variables[v].name
            raise PlanError(
                f"[{format_layout(layout)}] of the plan is no layout of {name} at these sizes",
                at=name,
                do="plan for these inputs",
            )
        choices.append(layouts.index(layout))
    return tuple(choices)


def _require_same_program(live: Live, pricing: Pricing) -> None:
    """Node by node the same op on the same values, of dims with as many factors."""
    do = "plan for these inputs"
    old, new = live.space, pricing.space
    if len(old.graph.nodes) != len(new.graph.nodes):
        raise PlanError(
            f"the model is another program at these inputs: {len(old.graph.nodes)} ops there, "
            f"{len(new.graph.nodes)} here",
            do=do,
        )
    for there, here in zip(old.graph.nodes, new.graph.nodes, strict=True):
        if (there.kind, there.op, there.target, list(there.reads())) != (
            here.kind,
            here.op,
            here.target,
            list(here.reads()),
        ):
            raise PlanError(
                f"the model is another program at these inputs: {there.name} is {there.op_name} there, "
                f"{here.name} is {here.op_name} here",
                at=here.module or here.name,
                do=do,
            )
    for ref, factors in old.factors.items():
        for dim, (before, now) in enumerate(zip(factors, new.factors[ref], strict=True)):
            if len(before) != len(now):
                node = new.graph.nodes[ref.node]
                name = node.target or node.name
                planned, size = old.graph.spec(ref).shape[dim], new.graph.spec(ref).shape[dim]
                raise PlanError(
                    f"dim {dim} of {name} is {size}, which does not split as the plan's {planned} does",
                    at=node.module or name,
                    do=do,
                )
    if [v.name for v in live.shape.variables] != [v.name for v in pricing.shape.variables]:
        raise PlanError("the model is another program at these inputs: other values are read twice", do=do)


def _same_option(live: Live, space: Space, v: int) -> int:
    wanted = live.space.kind(v).options[live.choices[v]]
    kind = space.kind(v)
    for i, option in enumerate(kind.options):
        if (option.operands, option.results) == (wanted.operands, wanted.results):
            return i
    node = space.graph.nodes[v]
    name = node.target or node.name
    for reason in _uneven(space, v, wanted.operands, wanted.results):
        raise PlanError(reason, at=f"{name} of the plan", do="use sizes that divide, or plan for these inputs")
    for refusal in kind.refused:
        if (refusal.operands, refusal.results) == (wanted.operands, wanted.results):
            raise PlanError(f"{node.op_name} at these sizes: {refusal.sentence}", at=name, do="plan for these inputs")
    shown = ", ".join(format_layout(layout) for layout in wanted.results)
    raise PlanError(f"[{shown}] of the plan is no layout of {name} at these sizes", at=name, do="plan for these inputs")


def _uneven(space: Space, v: int, operands: tuple[Layout, ...], results: tuple[Layout, ...]) -> Iterator[str]:
    """What does not divide of the tensors that an op reads and makes."""
    kind, node = space.kind(v), space.graph.nodes[v]
    owners = [*(space.graph.nodes[ref.node] for ref in node.reads()), *(node for _ in results)]
    specs = (*kind.call.tensors, *node.outputs) if operands else node.outputs
    factors = (*kind.operand_factors, *kind.result_factors)
    for owner, spec, dims, layout in zip(owners, specs, factors, (*operands, *results), strict=True):
        for d, size in enumerate(spec.shape):
            alone = tuple(p if p.dim == d else R for p in layout)
            if local_factors(dims, alone, space.mesh.sizes) is None:
                axes = [f"{a.name}={a.size}" for a, p in zip(space.mesh.axes, alone, strict=True) if p.kind in "SF"]
                where = owner.target or owner.name
                yield f"dim {d} of {where} is {size}, which does not divide over {', '.join(axes)}"
