"""A program cut in two: what forward runs and keeps, and what backward runs, made again or not.

Backward starts from parameters, buffers, inputs, tangents and the values that forward *saved*. Saved is what the
memory of the plan counts (`Fusion.kept`); what lies between is made again in backward, right before it is first
needed. No collective runs twice: where making a value again would need one, what that collective gave is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from .cost_models.fusion import is_light
from .graph import Graph, Ref
from .program import Instruction, Key, Program, RunOp, makes_of, reads_of


@dataclass(frozen=True)
class Halves:
    """Instructions in order.

    Attributes:
        inference: what results and new buffer values need.
        forward: the same, and what is saved.
        saved: values that forward keeps for backward.
        backward: what gradients need, given `saved`.
    """

    inference: tuple[Instruction, ...]
    forward: tuple[Instruction, ...]
    saved: tuple[Key, ...]
    backward: tuple[Instruction, ...]


def halves(program: Program, graph: Graph, kept: Collection[Ref]) -> Halves:
    """The program's two halves.

    Args:
        program: of the whole step.
        graph: that it runs.
        kept: values that the plan's memory holds between forward and backward.
    """
    results, gradients = program.ends_of("output", "buffer"), program.ends_of("gradient")
    forward = [i for i in program.instructions if i.phase == "forward"]
    backward = [i for i in program.instructions if i.phase != "forward"]
    given = {key for _, key in program.given}
    again = _Again(forward, given, lambda key: _is_saved(key, graph, kept))
    written: list[Instruction] = []
    for instruction in needed(backward, gradients):
        written += again.before(reads_of(instruction))
        written.append(instruction)
    written += again.before([key for key in gradients if key in again.made_by])
    saved = tuple(sorted(again.saved))
    return Halves(tuple(needed(forward, results)), tuple(needed(forward, [*results, *saved])), saved, tuple(written))


def needed(instructions: Iterable[Instruction], ends: Iterable[Key]) -> list[Instruction]:
    """The instructions that these values come of, in order."""
    wanted = set(ends)
    found = []
    for instruction in reversed(list(instructions)):
        if not wanted.isdisjoint(makes_of(instruction)):
            found.append(instruction)
            wanted.update(reads_of(instruction))
    return found[::-1]


def _is_saved(key: Key, graph: Graph, kept: Collection[Ref]) -> bool:
    """Whether a result of an op in forward is saved rather than made again."""
    node = graph.nodes[key.variable]
    return Ref(key.variable, key.slot) in kept or node.from_parameters or not is_light(node)


class _Again:
    """What backward makes again of forward's values.

    Attributes:
        made_by: value -> the instruction of forward that makes it.
        saved: what it turned out must be saved.
    """

    def __init__(self, forward: list[Instruction], given: set[Key], is_saved: Callable[[Key], bool]) -> None:
        self.made_by = {key: i for i in forward for key in makes_of(i)}
        self.given, self.is_saved = given, is_saved
        self.saved: set[Key] = set()
        self._there: set[Key] = set()

    def before(self, reads: Iterable[Key]) -> list[Instruction]:
        """Instructions that must run for these values to be there, in order; each is given once."""
        found: list[Instruction] = []
        stack = [(key, False) for key in reversed(list(reads))]
        while stack:
            key, is_ready = stack.pop()
            if key in self._there or key in self.given or key not in self.made_by:
                continue
            instruction = self.made_by[key]
            if self._must_save(key, instruction):
                self.saved.add(key)
                self._there.add(key)
            elif is_ready:
                found.append(instruction)
                self._there.update(makes_of(instruction))
            else:
                stack.append((key, True))
                stack += [(read, False) for read in reversed(reads_of(instruction))]
        return found

    def _must_save(self, key: Key, instruction: Instruction) -> bool:
        if isinstance(instruction, RunOp):
            return self.is_saved(key)
        return instruction.step.kind != "slice"
