"""A plan run on all ranks of its mesh in this process, collectives in memory: what a plan's numerics are held against.

Parameters, inputs and tangents are cut up as the plan says; then every rank runs the plan's schedule, item by item,
side by side: forward, then, from what forward saved, backward. Results, gradients and new buffer values are put
together again. What ranks send and make of what they receive is what they do in a process each (`rank_steps.py`).

Ranks that would call the same on the very same tensors share what comes of it: replicas cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .expansion import Space
from .graph import Ref, TensorSpec
from .in_memory import exchange, groups
from .items import Begin, End
from .lower import LocalCall
from .ops.stand_ins import stand_in
from .parts import coordinates
from .program import Key, RunOp, RunStep
from .rank import Calls, as_promised
from .rank_steps import RankStep, receive, send, sliced
from .redistribute import Routes
from .schedule import Part, Schedule, planned_schedule
from .shards import laid_out, shard, unshard
from .simulate import given_values
from .structure import Structure

Shards = list[Tensor]
_OnStep = Callable[[Tensor, RankStep], Tensor]


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
    written = planned_schedule(space, shape, choices, routes_of)
    return run_schedule(space, choices, written, parameters, inputs, tangents, seed=seed)


def run_schedule(
    space: Space,
    choices: Sequence[int],
    written: Schedule,
    parameters: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor] | None = None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    replacement: Callable[[Any], Any] = stand_in,
) -> dict[str, dict[str, Tensor]]:
    """The same for a schedule that is there already; on a device, with what runs there in place of an op."""
    run = Simulation(space, choices, written, replacement, device)
    graph = space.graph
    with torch.no_grad():
        given = given_values(graph, parameters, inputs, tangents, seed)
        held = run.sharded({i: value.to(device) for i, value in given.items()})
        ends = written.program.ends
        made = run.run(written.parts["forward"], dict(held))
        held.update((key, made[key]) for key in written.saved)
        made.update(run.run(written.parts["backward"], held))
        found: dict[str, dict[str, Tensor]] = {"output": {}, "gradient": {}, "buffer": {}}
        for output in graph.outputs:
            key = ends[output.kind, output.target]
            found[output.kind][output.target] = run.whole(output.ref, key, made[key])
        return found


class Simulation:
    """Every rank of a mesh in this process.

    Args:
        space, choices: options, and the one of every variable.
        written: the schedule.
        replacement: op -> what runs in its place.
        device: where it runs.
    """

    def __init__(
        self,
        space: Space,
        choices: Sequence[int],
        written: Schedule,
        replacement: Callable[[Any], Any] = stand_in,
        device: torch.device | str = "cpu",
    ) -> None:
        self.space, self.written, self.sizes = space, written, space.mesh.sizes
        self.ranks = [Calls(space, choices, place, replacement, device=device) for place in coordinates(self.sizes)]
        self._ops: dict[tuple[int, int], tuple[list[LocalCall], tuple[TensorSpec, ...]]] = {}

    def sharded(self, given: Mapping[int, Tensor]) -> dict[Key, Shards]:
        """Every rank's part of whole values: node -> value."""
        found = {}
        for i, key in self.written.program.given:
            whole = laid_out(given[i], self.space.graph.nodes[i].outputs[0].stride)
            found[key] = shard(whole, self.space.factors[Ref(i)], self.written.program.layouts[key], self.sizes)
        return found

    def whole(self, ref: Ref, key: Key, parts: Shards) -> Tensor:
        """The parts put together; raises AssertionError where replicas differ."""
        shape, factors = self.space.graph.spec(ref).shape, self.space.factors[ref]
        return unshard(parts, factors, self.written.program.layouts[key], self.sizes, shape)

    def run(self, part: Part, held: dict[Key, Shards]) -> dict[Key, Shards]:
        """What a part of the schedule is to give, on every rank after all ran it; `held` is emptied on the way."""
        arrived: dict[int, list[Shards]] = {}
        for item, unused in zip(part.items, part.unused, strict=True):
            if isinstance(item, RunOp):
                self._op(item, held)
            elif isinstance(item, Begin):
                arrived[item.number] = [self.collective(move, held[move.source]) for move in item.moves]
            elif isinstance(item, End):
                held.update(zip((move.target for move in item.moves), arrived.pop(item.number), strict=True))
            else:
                held[item.target] = self._each(self._steps(item), held[item.source], sliced)
            for key in unused:
                held.pop(key, None)
        return {key: held[key] for key in part.ends}

    def collective(self, move: RunStep, shards: Shards) -> Shards:
        """What every rank holds after a step, each having sent and received."""
        steps = self._steps(move)
        sent = self._each(steps, shards, send)
        got: Shards = [sent[0]] * len(sent)
        known: dict[tuple[int, ...], list[Tensor]] = {}
        for members in groups(move.step.axes, self.sizes):
            given = [sent[rank] for rank in members]
            key = tuple(map(id, given))
            if key not in known:
                known[key] = exchange(move.step.kind, move.step.reduction, given)
            for rank, flat in zip(members, known[key], strict=True):
                got[rank] = flat
        return self._each(steps, got, receive)

    def _steps(self, move: RunStep) -> list[RankStep]:
        if move.step.kind == "slice":
            return [calls.step(move) for calls in self.ranks]
        return [self.ranks[0].step(move)] * len(self.ranks)  # nothing but a slice depends on the rank

    def _each(self, steps: Sequence[RankStep], shards: Shards, function: _OnStep) -> Shards:
        made: dict[tuple[int, int], Tensor] = {}
        found = []
        for x, step in zip(shards, steps, strict=True):
            key = id(x), step.index
            if key not in made:
                made[key] = function(x, step)
            found.append(made[key])
        return found

    def _op(self, item: RunOp, held: dict[Key, Shards]) -> None:
        calls, promised = self._calls(item.node)
        name = self.space.graph.nodes[item.node].name
        reads = [held[key] for key in item.reads]
        known: dict[tuple[int, ...], tuple[Any, ...]] = {}
        found: list[tuple[Any, ...]] = []
        for rank, call in enumerate(calls):
            tensors = [shards[rank] for shards in reads]
            key = (id(call), *map(id, tensors))
            if key not in known:
                known[key] = tuple(as_promised(item.makes, call.run(tensors), promised, name))
            found.append(known[key])
        for slot, made in enumerate(item.makes):
            if made is not None:
                held[made] = [values[slot] for values in found]

    def _calls(self, node: int) -> tuple[list[LocalCall], tuple[TensorSpec, ...]]:
        """What every rank calls; ranks that call alike share the call."""
        key = self.space.kind_of[node], self.ranks[0].choices[node]
        if key not in self._ops:
            first, promised = self.ranks[0].op(node)
            if isinstance(first.function, partial):
                known: dict[Any, LocalCall] = {}
                calls = [rank.op(node)[0] for rank in self.ranks]
                found = [known.setdefault(call.function.args[0], call) for call in calls]
            else:
                found = [first] * len(self.ranks)
            self._ops[key] = found, promised
        return self._ops[key]
