"""A plan run on all ranks of its mesh in this process, collectives in memory: what a plan's numerics are held against.

Parameters, inputs and tangents are cut up as the plan says; then every rank runs the plan's program, instruction by
instruction, side by side, and results, gradients and new buffer values are put together again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .capture.rewrite import same_layout
from .expansion import Space
from .graph import Ref
from .lower import LocalCall, local_call
from .ops.stand_ins import stand_in
from .parts import coordinates
from .products import local_specs
from .program import Key, Program, RunOp, RunStep, program
from .redistribute import Routes
from .shards import laid_out, run_step, shard, spec_of, unshard
from .simulate import given_values
from .structure import Structure

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
    written = program(space, shape, choices, routes_of)
    return run_program(space, choices, written, parameters, inputs, tangents, seed=seed)


def run_program(
    space: Space,
    choices: Sequence[int],
    written: Program,
    parameters: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor] | None = None,
    *,
    seed: int = 0,
) -> dict[str, dict[str, Tensor]]:
    """The same for a program that is there already."""
    run = _Run(space, choices, written)
    with torch.no_grad():
        run.fill(parameters, inputs, tangents, seed)
        run.everything()
        return run.results()


class _Run:
    """Values of the program on every rank, each for as long as something reads it."""

    def __init__(self, space: Space, choices: Sequence[int], written: Program) -> None:
        self.space, self.choices, self.program = space, choices, written
        self.sizes = space.mesh.sizes
        self.places = coordinates(self.sizes)
        self.held: dict[Key, Shards] = {}
        self._calls: dict[tuple[int, int], list[LocalCall]] = {}

    def fill(
        self, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor] | None, seed: int
    ) -> None:
        given = given_values(self.space.graph, parameters, inputs, tangents, seed)
        for i, key in self.program.given:
            whole = laid_out(given[i], self.space.graph.nodes[i].outputs[0].stride)
            self.held[key] = shard(whole, self.space.factors[Ref(i)], self.program.layouts[key], self.sizes)

    def everything(self) -> None:
        for instruction, unused in zip(self.program.instructions, self.program.last_uses(), strict=True):
            if isinstance(instruction, RunOp):
                self._run_op(instruction)
            else:
                self._run_step(instruction)
            for key in unused:
                del self.held[key]

    def results(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {"output": {}, "gradient": {}, "buffer": {}}
        for output in self.space.graph.outputs:
            key = self.program.ends[output.kind, output.target]
            shape, factors = self.space.graph.spec(output.ref).shape, self.space.factors[output.ref]
            layout = self.program.layouts[key]
            found[output.kind][output.target] = unshard(self.held[key], factors, layout, self.sizes, shape)
        return found

    def _run_step(self, move: RunStep) -> None:
        spec, factors = self.space.graph.spec(move.ref), self.space.factors[move.ref]
        self.held[move.target] = run_step(self.held[move.source], move.step, spec, factors, self.sizes)

    def _run_op(self, op: RunOp) -> None:
        node, kind = self.space.graph.nodes[op.node], self.space.kind(op.node)
        made: list[Any] = []
        for rank, call in enumerate(self._local_calls(op.node)):
            made.append(call.run([self.held[key][rank] for key in op.reads]))
        results = kind.options[self.choices[op.node]].results
        wanted = local_specs(kind.call.out, kind.result_factors, results, self.sizes)
        for slot, key in enumerate(op.makes):
            if key is None:
                continue
            for values in made:
                shown = spec_of(values[slot])
                assert (shown.shape, shown.dtype) == (wanted[slot].shape, wanted[slot].dtype), (
                    f"{node.name} gives {shown}, its layout {wanted[slot]}"
                )
            self.held[key] = [_in_order(values[slot], wanted[slot].stride) for values in made]

    def _local_calls(self, i: int) -> list[LocalCall]:
        """What every rank calls; equal for repeated nodes with equal choices."""
        key = self.space.kind_of[i], self.choices[i]
        if key not in self._calls:
            kind = self.space.kind(i)
            option = kind.options[self.choices[i]]
            calls = [local_call(kind, option, self.sizes, coordinate) for coordinate in self.places]
            self._calls[key] = [with_stand_ins(call) for call in calls]
        return self._calls[key]


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
