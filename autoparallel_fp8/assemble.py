"""From the solver's choices back to a `Plan`: layouts, collectives, times and bytes, read off what was priced."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .cost_models import Pricing
from .graph import Graph, Ref, dtype_name, map_refs
from .layout import Layout, format_layout, split_order
from .overlap import Overlap
from .plan import PLAN_VERSION, CollectivePlan, NodePlan, ParameterPlan, Plan
from .problem import Array, Solution, evaluate
from .redistribute import Step
from .structure import Link, gradient_tails


@dataclass(frozen=True)
class Request:
    """What the user asked for, as the plan records it."""

    model: str
    recipe: str | None
    inputs: Mapping[str, str]
    settings: Mapping[str, Any]
    memory_limit: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Move:
    """One step of one link, with its price."""

    link: Link
    step: Step
    us: float


def assemble(request: Request, pricing: Pricing, costs: list[Array], overlap: Overlap, solution: Solution) -> Plan:
    """The plan that a solution stands for.

    Args:
        request: what was asked.
        pricing: space, structure and prices that the problem was made of.
        costs: of each option, compute included.
        overlap: the two sums that the step is the larger of.
        solution: with a choice for every variable.
    """
    space = pricing.space
    graph, mesh, choices = space.graph, space.mesh, solution.choices
    moves = list(moves_of(pricing, choices))
    times = _step_time(pricing, costs, choices, evaluate(overlap.waiting, choices), solution.objective)
    return Plan(
        version=PLAN_VERSION,
        torch=torch.__version__.split("+")[0],
        graph=fingerprint(graph),
        model=request.model,
        mesh={axis.name: axis.size for axis in mesh.axes},
        device=pricing.device.name,
        recipe=request.recipe,
        inputs=dict(request.inputs),
        settings=dict(request.settings),
        status=solution.status,
        objective_us=solution.objective,
        lower_bound_us=solution.lower_bound,
        gap=solution.gap,
        step_time_us=times,
        memory_bytes=_memory(pricing, choices, request.memory_limit),
        parameters=_parameters(pricing, choices, moves),
        nodes=tuple(_nodes(pricing, costs, choices)),
        collectives=tuple(_collective(pricing, move) for move in moves if move.step.kind != "slice"),
        replicated_ops=space.replicated_ops,
        skipped=dict(graph.skipped),
        notes=request.notes + graph.notes + _waits(times),
    )


def fingerprint(graph: Graph) -> str:
    """Sixteen hex digits of the graph's ops, shapes, dtypes and edges: equal for equal model, torch and inputs."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        reads = map_refs((node.args, node.kwargs), lambda ref: f"%{ref.node}.{ref.output}")
        digest.update(repr((node.kind, node.op_name, node.target, reads, node.outputs, node.phase)).encode())
    digest.update(repr(graph.outputs).encode())
    return digest.hexdigest()[:16]


def moves_of(pricing: Pricing, choices: tuple[int, ...]) -> Iterator[Move]:
    """Every step of every link under these choices, in the order of the program."""
    shape = pricing.shape
    order = sorted(range(len(shape.links)), key=lambda i: _when(pricing, shape.links[i]))
    for i in order:
        link = shape.links[i]
        start = shape.sources[link.source][link.source_slot][choices[link.source]]
        end = shape.targets[link.target][link.target_slot][choices[link.target]]
        for step in steps_of(pricing, link, start, end):
            yield Move(link, step, pricing.routes(link.ref).step_us(step))


def steps_of(pricing: Pricing, link: Link, start: Layout, end: Layout) -> tuple[Step, ...]:
    """What a link does to its value between two layouts."""
    return () if start == end or link.is_tie else pricing.routes(link.ref).path(start, end)


def value_name(graph: Graph, ref: Ref) -> str:
    """As the plan's collectives name a value: `mm`, `topk.1`, a parameter's fqn."""
    node = graph.nodes[ref.node]
    return node.target or (f"{node.name}.{ref.output}" if ref.output else node.name)


def _when(pricing: Pricing, link: Link) -> tuple[int, int]:
    """A link runs before its reader; a gradient's or an output's right after its producer."""
    target = pricing.shape.variables[link.target]
    if target.role == "node" and target.node > link.ref.node:
        return target.node, 0
    return link.ref.node, 1


def _step_time(
    pricing: Pricing, costs: list[Array], choices: tuple[int, ...], waiting: float, total: float
) -> dict[str, float]:
    """compute + exposed_comm + optimizer = total; hidden_comm is the rest of all communication, beside compute."""
    nodes = pricing.space.graph.nodes
    optimizer = compute = 0.0
    for v, variable in enumerate(pricing.shape.variables):
        us = float(costs[v][choices[v]])
        if nodes[variable.node].kind == "parameter" and variable.role == "node":
            optimizer += us
        else:
            compute += us
    exposed = max(0.0, total - compute - optimizer)
    return {
        "compute": compute,
        "exposed_comm": exposed,
        "hidden_comm": max(0.0, waiting - optimizer - exposed),
        "optimizer": optimizer,
        "total": total,
    }


def _waits(times: Mapping[str, float]) -> tuple[str, ...]:
    if times["hidden_comm"] < times["compute"] * (1 - 1e-9) or not times["exposed_comm"]:
        return ()
    return ("there is more communication than compute to run it beside: the step waits for it",)


def _memory(pricing: Pricing, choices: tuple[int, ...], limit: int) -> dict[str, int]:
    found: Counter[str] = Counter({"parameters": 0, "gradients": 0, "optimizer": 0, "activations": 0})
    for v, node in enumerate(pricing.space.graph.nodes):
        if node.kind == "parameter":
            for name, held in pricing.parameter_bytes(v).items():
                found[name] += int(held[choices[v]])
    for ref in pricing.fusion.kept:
        found["activations"] += int(pricing.kept_bytes(ref)[choices[ref.node]])
    return {**found, "total": sum(found.values()), "limit": limit}


def _parameters(pricing: Pricing, choices: tuple[int, ...], moves: list[Move]) -> dict[str, ParameterPlan]:
    space = pricing.space
    reasons = _reasons(pricing, moves)
    found = {}
    for v, node in enumerate(space.graph.nodes):
        if node.kind != "parameter":
            continue
        layout = space.kind(v).options[choices[v]].results[0]
        spec = node.outputs[0]
        local = space.local_shape(Ref(v), layout)
        found[node.target] = ParameterPlan(
            shape=spec.shape,
            dtype=dtype_name(spec.dtype),
            placements=tuple(str(p) for p in layout),
            split={str(dim): tuple(axes) for dim, axes in split_order(layout, space.mesh.names).items()},
            local_shape=local,
            bytes=int(np.prod(local, dtype=np.int64)) * spec.dtype.itemsize,
            why="; ".join(reasons.get(v, [])) or _quiet_reason(layout),
        )
    return found


def _quiet_reason(layout: Layout) -> str:
    return "whole on every rank" if all(p.kind == "R" for p in layout) else "stays where it is"


def _reasons(pricing: Pricing, moves: list[Move]) -> dict[int, list[str]]:
    """Parameter -> what moves because of it, in words: gathers of what derives from it, reductions of its gradient."""
    nodes = pricing.space.graph.nodes
    origin: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if node.kind == "parameter":
            origin[i] = i
        elif node.from_parameters:
            sources = {origin[ref.node] for ref in node.reads() if ref.node in origin}
            if len(sources) == 1:
                origin[i] = sources.pop()
    owner = _gradient_owners(pricing.space.graph)
    found: dict[int, dict[str, list[str]]] = {}
    for move in moves:
        target = pricing.shape.variables[move.link.target]
        if move.step.kind == "slice":
            continue
        axes = "+".join(pricing.space.mesh.names[a] for a in move.step.axes)
        dtype = dtype_name(pricing.space.graph.spec(move.link.ref).dtype)
        v = target.node if nodes[target.node].kind == "parameter" else owner.get(target.node)
        if v is not None and target.role == "node":
            found.setdefault(v, {}).setdefault(f"gradient {_verb(move.step)} in {dtype} over {axes}", [])
        elif move.link.ref.node in origin:
            v = origin[move.link.ref.node]
            small = pricing.space.graph.spec(move.link.ref).numel < nodes[v].outputs[0].numel
            words = f"{'amax ' if small else ''}{_verb(move.step)} in {dtype} over {axes}"
            found.setdefault(v, {}).setdefault(words, []).append("fwd" if target.phase == "forward" else "bwd")
    return {v: [_with_phases(text, phases) for text, phases in words.items()] for v, words in found.items()}


def _gradient_owners(graph: Graph) -> dict[int, int]:
    """Node of a gradient's tail -> the parameter whose gradient it is."""
    tails = gradient_tails(graph)
    parameters = {node.target: v for v, node in enumerate(graph.nodes) if node.kind == "parameter"}
    found: dict[int, int] = {}
    for output in graph.outputs:
        if output.kind == "gradient" and tails[output.ref.node]:
            found[output.ref.node] = parameters[output.target]
    for i in sorted(range(len(graph.nodes)), reverse=True):
        if i in found:
            for ref in graph.nodes[i].reads():
                if tails[ref.node]:
                    found.setdefault(ref.node, found[i])
    return found


def _verb(step: Step) -> str:
    return {"all_gather": "gathered", "reduce_scatter": "reduce-scattered", "all_reduce": "all-reduced"}.get(
        step.kind, "exchanged"
    )


def _with_phases(text: str, phases: list[str]) -> str:
    return f"{text} ({', '.join(dict.fromkeys(phases))})" if phases else text


def _nodes(pricing: Pricing, costs: list[Array], choices: tuple[int, ...]) -> Iterator[NodePlan]:
    space = pricing.space
    for v, node in enumerate(space.graph.nodes):
        option = space.kind(v).options[choices[v]]
        yield NodePlan(
            name=node.name,
            op=node.op_name,
            inputs=tuple(format_layout(layout) for layout in option.operands),
            output=tuple(format_layout(layout) for layout in option.results),
            local_shapes=tuple(_local(pricing, v, k, layout) for k, layout in enumerate(option.results)),
            compute_us=float(costs[v][choices[v]]) if node.kind == "op" else 0.0,
        )


def _local(pricing: Pricing, node: int, output: int, layout: Layout) -> tuple[int, ...]:
    return pricing.space.local_shape(Ref(node, output), layout)


def _collective(pricing: Pricing, move: Move) -> CollectivePlan:
    space = pricing.space
    return CollectivePlan(
        kind=move.step.kind,
        axis="+".join(space.mesh.names[a] for a in move.step.axes),
        tensor=value_name(space.graph, move.link.ref),
        reader=pricing.shape.variables[move.link.target].name,
        dtype=dtype_name(space.graph.spec(move.link.ref).dtype),
        bytes=move.step.num_bytes,
        us=move.us,
        hidden=move.link.is_hideable,
        source=format_layout(move.step.source),
        target=format_layout(move.step.target),
    )
