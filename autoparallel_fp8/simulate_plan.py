"""A plan run on all ranks of its mesh in this process, collectives in memory: what a plan's numerics are held against.

Parameters, inputs and tangents are cut up as the plan says; every value travels the steps that were priced, a copy once
for all its readers; every op runs on each rank as `lower` writes it; results, gradients and new buffer values are put
together again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .capture.rewrite import same_layout
from .errors import UsageError
from .expansion import Space
from .graph import ABSENT, Node, Ref
from .layout import Layout
from .lower import LocalCall, local_call
from .ops.stand_ins import stand_in
from .parts import coordinates
from .products import Option, local_specs
from .redistribute import Routes
from .shards import laid_out, run_step, shard, spec_of, unshard
from .structure import Link, Structure

Shards = list[Tensor]


def run_plan(
    space: Space,
    shape: Structure,
    choices: Sequence[int],
    routes_of: Callable[[Ref], Routes],
    parameters: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor] | None = None,
    *,
    seed: int = 0,
) -> dict[str, dict[str, Tensor]]:
    """Results, gradients and new buffer values, as `simulate.run_graph` gives them.

    Args:
        space, shape: the options and variables that were chosen from.
        choices: the option of every variable.
        routes_of: how a value gets from one layout to another.
        parameters: parameters and buffers by fqn, whole.
        inputs: one tensor for each input node, in order, whole.
        tangents: one for each tangent node; ones by default.
        seed: of the step's dropout, where the graph has some; the same on all ranks.

    Raises:
        UsageError: a parameter, buffer or input is missing.
        AssertionError: ranks that should hold the same differ, or a rank holds what its layout does not say.
    """
    run = _Run(space, shape, choices, routes_of)
    with torch.no_grad():
        run.everything(parameters, inputs, tangents, seed)
        return run.results()


class _Run:
    """Values of the plan's variables on every rank.

    Attributes:
        held: (variable, slot) -> the local tensors, in the layout that the variable chose.
        arriving: (variable, slot) -> the link that ends there; ties and gradients are not among them.
    """

    def __init__(
        self, space: Space, shape: Structure, choices: Sequence[int], routes_of: Callable[[Ref], Routes]
    ) -> None:
        self.space, self.shape, self.choices, self.routes_of = space, shape, choices, routes_of
        self.sizes = space.mesh.sizes
        self.places = coordinates(self.sizes)
        self.held: dict[tuple[int, int], Shards] = {}
        self.arriving: dict[tuple[int, int], Link] = {}
        self.leaving: list[Link] = []
        self._calls: dict[tuple[int, int], list[LocalCall]] = {}
        for link in shape.links:
            target = shape.variables[link.target]
            if target.role == "node" and space.graph.nodes[target.node].kind != "op":
                self.leaving += [] if link.is_tie else [link]
            else:
                self.arriving[link.target, link.target_slot] = link

    def everything(
        self, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor] | None, seed: int
    ) -> None:
        given = {"input": iter(inputs), "tangent": iter(tangents or ()), "seed": iter([torch.tensor(seed)])}
        for i, node in enumerate(self.space.graph.nodes):
            if node.kind == "op":
                for slot, shards in enumerate(self._run_op(i, node)):
                    self.held[i, slot] = shards
                continue
            spec = node.outputs[0]
            if node.kind in ("parameter", "buffer"):
                whole = parameters.get(node.target)
            elif node.kind == "tangent" and tangents is None:
                whole = torch.ones(spec.shape, dtype=spec.dtype)
            else:
                whole = next(given[node.kind], None)
            if whole is None:
                raise UsageError(f"no value for {node.kind} {node.target}", at="run_plan")
            whole = laid_out(whole, spec.stride)
            self.held[i, 0] = shard(whole, self.space.factors[Ref(i)], self._start(i, 0), self.sizes)

    def results(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {"output": {}, "gradient": {}, "buffer": {}}
        leaving = list(self.leaving)
        leaving += [link for (v, _), link in self.arriving.items() if self.shape.variables[v].role == "output"]
        ends = {(link.ref, self._target_name(link)): link for link in leaving}
        for output in self.space.graph.outputs:
            link = ends[output.ref, output.target]
            shards, layout = self._deliver(link), self._end(link)
            shape = self.space.graph.spec(link.ref).shape
            found[output.kind][output.target] = unshard(shards, self.space.factors[link.ref], layout, self.sizes, shape)
        return found

    def _target_name(self, link: Link) -> str:
        variable = self.shape.variables[link.target]
        if variable.role == "output":
            return variable.name.removeprefix("output ")
        return self.space.graph.nodes[variable.node].target

    def _run_op(self, i: int, node: Node) -> list[Shards]:
        reads = [self._deliver(self.arriving[i, slot]) for slot, _ in enumerate(node.reads())]
        kind, option = self.space.kind(i), self._option(i)
        made: list[Any] = []
        for rank, call in enumerate(self._local_calls(i)):
            made.append(call.run([shards[rank] for shards in reads]))
        wanted = local_specs(kind.call.out, kind.result_factors, option.results, self.sizes)
        found: list[Shards] = []
        for slot, spec in enumerate(node.outputs):
            if spec is ABSENT:
                found.append([])
                continue
            for results in made:
                shown = spec_of(results[slot])
                assert (shown.shape, shown.dtype) == (wanted[slot].shape, wanted[slot].dtype), (
                    f"{node.name} gives {shown}, its layout {wanted[slot]}"
                )
            found.append([_in_order(results[slot], wanted[slot].stride) for results in made])
        return found

    def _local_calls(self, i: int) -> list[LocalCall]:
        """What every rank calls; equal for repeated nodes with equal choices."""
        key = self.space.kind_of[i], self.choices[i]
        if key not in self._calls:
            kind, option = self.space.kind(i), self._option(i)
            calls = [local_call(kind, option, self.sizes, coordinate) for coordinate in self.places]
            self._calls[key] = [with_stand_ins(call) for call in calls]
        return self._calls[key]

    def _deliver(self, link: Link) -> Shards:
        """The value as the end of the link wants it."""
        shards = self._value(link.source, link.source_slot)
        start, end = self._start(link.source, link.source_slot), self._end(link)
        if start == end:
            return shards
        spec, factors = self.space.graph.spec(link.ref), self.space.factors[link.ref]
        for step in self.routes_of(link.ref).path(start, end):
            shards = run_step(shards, step, spec, factors, self.sizes)
        return shards

    def _value(self, variable: int, slot: int) -> Shards:
        """What a variable holds; a copy is made when it is first read."""
        if (variable, slot) not in self.held:
            self.held[variable, slot] = self._deliver(self.arriving[variable, slot])
        return self.held[variable, slot]

    def _start(self, variable: int, slot: int) -> Layout:
        return self.shape.sources[variable][slot][self.choices[variable]]

    def _end(self, link: Link) -> Layout:
        return self.shape.targets[link.target][link.target_slot][self.choices[link.target]]

    def _option(self, i: int) -> Option:
        return self.space.kind(i).options[self.choices[i]]


def with_stand_ins(call: LocalCall, replacement: Callable[[Any], Any] = stand_in) -> LocalCall:
    """The call with what runs on the CPU in place of its op, which a local program is told of.

    Args:
        call: of an op, or of a local program.
        replacement: op -> what runs.
    """
    function = call.function
    if isinstance(function, partial):
        place = function.args[0]
        function = partial(function.func, replace(place, op=replacement(place.op)))
        return LocalCall(function, call.args, call.kwargs)
    return LocalCall(replacement(function), call.args, call.kwargs)


def _in_order(local: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The tensor in the memory order that its layout says."""
    found = spec_of(local)
    is_so = same_layout(found, type(found)(found.shape, stride, found.dtype))
    return local if is_so else laid_out(local, stride)
