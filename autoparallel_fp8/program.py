"""A plan as one rank runs it: ops and collectives in order, forward, then backward.

In: the space, its variables and links, a choice for each. Out: a `Program`, the same list for every rank; what a rank
calls for an op is `lower.local_call`. The steps of a link are the ones that were priced, in the order in which they
were. `schedule.py` says when a rank runs what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .expansion import Space
from .graph import ABSENT, Ref
from .layout import Layout
from .redistribute import Routes, Step
from .structure import Link, Structure


class Key(NamedTuple):
    """A local value: result `slot` of a variable, after `steps` steps of link `link` (-1: as the variable holds it)."""

    variable: int
    slot: int
    link: int = -1
    steps: int = 0


@dataclass(frozen=True)
class RunOp:
    """Run the op of a node on local tensors."""

    node: int
    reads: tuple[Key, ...]
    makes: tuple[Key | None, ...]
    phase: str


@dataclass(frozen=True)
class RunStep:
    """One collective or slice: `ref` goes from `step.source` to `step.target`."""

    ref: Ref
    link: int
    step: Step
    source: Key
    target: Key
    phase: str


Instruction = RunOp | RunStep


@dataclass(frozen=True)
class Program:
    """What one rank runs.

    Attributes:
        given: (node, value it holds) of parameters, buffers, inputs, tangents and seeds.
        instructions: in order.
        ends: (kind, target) of every output of the graph -> its value.
        layouts: of every value.
    """

    given: tuple[tuple[int, Key], ...]
    instructions: tuple[Instruction, ...]
    ends: dict[tuple[str, str], Key]
    layouts: dict[Key, Layout]

    def ends_of(self, *kinds: str) -> tuple[Key, ...]:
        """The values of all outputs of these kinds: "output", "buffer", "gradient"; each once."""
        return tuple(dict.fromkeys(key for (kind, _), key in self.ends.items() if kind in kinds))


def reads_of(instruction: Instruction) -> tuple[Key, ...]:
    return instruction.reads if isinstance(instruction, RunOp) else (instruction.source,)


def makes_of(instruction: Instruction) -> tuple[Key, ...]:
    if isinstance(instruction, RunOp):
        return tuple(key for key in instruction.makes if key is not None)
    return (instruction.target,)


def program(space: Space, shape: Structure, choices: Sequence[int], routes_of: Callable[[Ref], Routes]) -> Program:
    """The program of a plan.

    Args:
        space, shape: the options and variables that were chosen from.
        choices: the option of every variable.
        routes_of: how a value gets from one layout to another.
    """
    return _Writer(space, shape, choices, routes_of).written()


class _Writer:
    def __init__(
        self, space: Space, shape: Structure, choices: Sequence[int], routes_of: Callable[[Ref], Routes]
    ) -> None:
        self.space, self.shape, self.choices, self.routes_of = space, shape, choices, routes_of
        self.nodes = space.graph.nodes
        self.instructions: list[Instruction] = []
        self.held: dict[tuple[int, int], Key] = {}
        self.layouts: dict[Key, Layout] = {}
        self.arriving: dict[tuple[int, int], int] = {}
        self.leaving: dict[int, list[int]] = {}
        for number, link in enumerate(shape.links):
            target = shape.variables[link.target]
            if link.is_tie:
                continue
            if target.role == "output" or (target.role == "node" and self.nodes[target.node].kind != "op"):
                self.leaving.setdefault(link.ref.node, []).append(number)
            else:
                self.arriving[link.target, link.target_slot] = number

    def written(self) -> Program:
        given = []
        delivered: dict[int, Key] = {}
        for i, node in enumerate(self.nodes):
            if node.kind == "op":
                self._op(i)
            else:
                key = self.held[i, 0] = Key(i, 0)
                self.layouts[key] = self._start(i, 0)
                given.append((i, key))
            for number in self.leaving.get(i, []):
                delivered[number] = self._deliver(number)
        return Program(tuple(given), tuple(self.instructions), self._ends(delivered), self.layouts)

    def _op(self, i: int) -> None:
        node = self.nodes[i]
        reads = tuple(self._deliver(self.arriving[i, slot]) for slot, _ in enumerate(node.reads()))
        makes: list[Key | None] = []
        for slot, spec in enumerate(node.outputs):
            key = None if spec is ABSENT else Key(i, slot)
            if key is not None:
                self.held[i, slot] = key
                self.layouts[key] = self._start(i, slot)
            makes.append(key)
        self.instructions.append(RunOp(i, reads, tuple(makes), node.phase))

    def _deliver(self, number: int) -> Key:
        """The value as the end of the link wants it."""
        link = self.shape.links[number]
        key = self._value(link.source, link.source_slot)
        start, end = self._start(link.source, link.source_slot), self._end(link)
        phase = self.shape.variables[link.target].phase
        target = self.shape.variables[link.target]
        if target.role == "node" and self.nodes[target.node].kind != "op":
            phase = self.nodes[link.ref.node].phase  # a gradient on its way to its parameter
        for count, step in enumerate(self.routes_of(link.ref).path(start, end), start=1):
            new = Key(link.source, link.source_slot, number, count)
            self.instructions.append(RunStep(link.ref, number, step, key, new, phase))
            self.layouts[new] = step.target
            key = new
        return key

    def _value(self, variable: int, slot: int) -> Key:
        """What a variable holds; a copy is made when it is first read."""
        if (variable, slot) not in self.held:
            self.held[variable, slot] = self._deliver(self.arriving[variable, slot])
        return self.held[variable, slot]

    def _ends(self, delivered: dict[int, Key]) -> dict[tuple[str, str], Key]:
        found = {}
        by_target = {}
        for number, key in delivered.items():
            link = self.shape.links[number]
            variable = self.shape.variables[link.target]
            name = (
                variable.name.removeprefix("output ") if variable.role == "output" else self.nodes[variable.node].target
            )
            by_target[link.ref, name] = key
        for output in self.space.graph.outputs:
            found[output.kind, output.target] = by_target[output.ref, output.target]
        return found

    def _start(self, variable: int, slot: int) -> Layout:
        return self.shape.sources[variable][slot][self.choices[variable]]

    def _end(self, link: Link) -> Layout:
        return self.shape.targets[link.target][link.target_slot][self.choices[link.target]]
