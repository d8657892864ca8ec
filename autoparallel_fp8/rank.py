"""A schedule bound to ranks: what each calls for an op or a step, and the loop of one rank.

Collectives go through an interface (`Collectives`), so that the same loop runs over process groups, or on tensors
without data to see what would be sent (`reread.py`). Calls are worked out once for equal nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .expansion import Space
from .graph import Ref, TensorSpec
from .items import Begin, End, gives
from .lower import LocalCall, Operand, local_call, placement
from .ops.stand_ins import stand_in
from .products import local_specs
from .program import Key, RunOp, RunStep
from .rank_steps import RankStep, in_order, rank_step, receive, send, sliced
from .rules import OpCall
from .schedule import Part

_DROPOUT = torch.ops.autoparallel_fp8.dropout.default


class Collectives(Protocol):
    """Runs collectives on flat tensors, several of one kind at a time."""

    def begin(self, steps: Sequence[RankStep], axes: tuple[int, ...], flats: list[Tensor]) -> list[Tensor]:
        """Starts them; what comes back may be read after `end`."""
        ...

    def end(self, started: list[Tensor], moves: Sequence[RunStep]) -> list[Tensor]:
        """Waits for what `begin` gave."""
        ...


class Calls:
    """What a rank calls, worked out when first asked for.

    Args:
        space, choices: options, and the one of every variable.
        coordinate: of the rank.
        replacement: op -> what runs in its place on this device.
        device: where ops make tensors that read none.
        is_training: whether dropout drops.
    """

    def __init__(
        self,
        space: Space,
        choices: Sequence[int],
        coordinate: tuple[int, ...],
        replacement: Callable[[Any], Any],
        *,
        device: torch.device | str = "cpu",
        is_training: bool = True,
    ) -> None:
        self.device = torch.device(device)
        self.space, self.choices, self.coordinate = space, choices, coordinate
        self.sizes = space.mesh.sizes
        self.replacement, self.is_training = replacement, is_training
        self._ops: dict[tuple[int, int], tuple[LocalCall, tuple[TensorSpec, ...]]] = {}
        self._steps: dict[Any, RankStep] = {}

    def op(self, node: int) -> tuple[LocalCall, tuple[TensorSpec, ...]]:
        """What the rank calls for an op, and the local results it promises."""
        key = self.space.kind_of[node], self.choices[node]
        if key not in self._ops:
            kind = self.space.kind(node)
            option = kind.options[self.choices[node]]
            made = local_specs(kind.call.out, kind.result_factors, option.results, self.sizes)
            if kind.call.op is _DROPOUT and not self.is_training:
                call = LocalCall(torch.ops.aten.alias.default, (Operand(0),), ())
            else:
                call = with_stand_ins(local_call(kind, option, self.sizes, self.coordinate), self.replacement)
                call = _on_device(call, kind.call, self.device)
            self._ops[key] = call, made
        return self._ops[key]

    def step(self, move: RunStep) -> RankStep:
        """The rank's part in a step."""
        key = move.ref, move.step
        if key not in self._steps:
            spec, factors = self.space.graph.spec(move.ref), self.space.factors[move.ref]
            self._steps[key] = rank_step(move.step, spec, factors, self.sizes, self.coordinate)
        return self._steps[key]

    def given(self, node: int, layout: Any) -> TensorSpec:
        """The rank's part of a parameter, buffer, input or tangent."""
        spec = self.space.graph.nodes[node].outputs[0]
        return local_specs((spec,), (self.space.factors[Ref(node)],), (layout,), self.sizes)[0]


def _on_device(call: LocalCall, whole: OpCall, device: torch.device) -> LocalCall:
    """The call making its tensors on the device, where it reads none that say so."""
    placed = placement(whole.op, device, has_tensors=bool(whole.tensors))
    return LocalCall(call.function, call.args, (*call.kwargs, *placed.items()))


def with_stand_ins(call: LocalCall, replacement: Callable[[Any], Any] = stand_in) -> LocalCall:
    """The call with what runs on a device in place of its op, which a local program is told of.

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


def run_items(
    part: Part,
    calls: Calls,
    collectives: Collectives,
    held: dict[Key, Tensor],
    added: Mapping[Key, Tensor] | None = None,
) -> dict[Key, Tensor]:
    """The values that a part of a schedule is to give, after one rank ran it.

    Args:
        part: what runs.
        calls: what this rank calls.
        collectives: how it reaches the others.
        held: parameters, inputs and whatever else the items start from; emptied on the way.
        added: to be added to a value once it is there: sums of earlier batches.
    """
    started: dict[int, list[Tensor]] = {}
    added = added or {}
    _add(added, held, list(held))
    for item, unused in zip(part.items, part.unused, strict=True):
        if isinstance(item, RunOp):
            _run_op(item, calls, held)
        elif isinstance(item, Begin):
            steps = [calls.step(move) for move in item.moves]
            flats = [send(held[move.source], step) for move, step in zip(item.moves, steps, strict=True)]
            started[item.number] = collectives.begin(steps, item.moves[0].step.axes, flats)
        elif isinstance(item, End):
            flats = collectives.end(started.pop(item.number), item.moves)
            for move, flat in zip(item.moves, flats, strict=True):
                held[move.target] = receive(flat, calls.step(move))
        else:
            held[item.target] = sliced(held[item.source], calls.step(item))
        if added:
            _add(added, held, gives(item))
        for key in unused:
            held.pop(key, None)
    return {key: held[key] for key in part.ends}


def _add(added: Mapping[Key, Tensor], held: dict[Key, Tensor], fresh: Iterable[Key]) -> None:
    """Adds what is to be added to values that have just come."""
    for key in fresh:
        if key in added:
            held[key] = held[key] + added[key]


def _run_op(item: RunOp, calls: Calls, held: dict[Key, Tensor]) -> None:
    call, promised = calls.op(item.node)
    made = call.run([held[key] for key in item.reads])
    name = calls.space.graph.nodes[item.node].name
    for key, value in zip(item.makes, as_promised(item.makes, made, promised, name), strict=True):
        if key is not None:
            held[key] = value


def as_promised(
    makes: Sequence[Key | None], made: Sequence[Any], promised: Sequence[TensorSpec], name: str
) -> Iterator[Any]:
    """An op's results in the memory order that their layouts say; None for those that nobody has.

    Raises:
        AssertionError: one has another shape or dtype than its layout says.
    """
    for key, value, spec in zip(makes, made, promised, strict=True):
        if key is None:
            yield None
            continue
        assert value.shape == spec.shape and value.dtype == spec.dtype, (
            f"{name} gives {value.dtype} {list(value.shape)}, its layout {spec}"
        )
        yield in_order(value, spec.stride)
