"""What a rank runs one after the other: instructions of a program, their collectives with a start and an end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .program import Instruction, Key, RunOp, RunStep, makes_of, reads_of


@dataclass(frozen=True)
class Begin:
    """Starts collectives of one kind over one group, as one call."""

    number: int
    moves: tuple[RunStep, ...]


@dataclass(frozen=True)
class End:
    """Waits for what `Begin` of that number started."""

    number: int
    moves: tuple[RunStep, ...]


Item = RunOp | RunStep | Begin | End
"""A `RunStep` among items is a slice: it moves nothing."""


def starts(item: Item) -> tuple[Key, ...]:
    """Values that an item reads."""
    if isinstance(item, Begin):
        return tuple(move.source for move in item.moves)
    return () if isinstance(item, End) else reads_of(item)


def gives(item: Item) -> tuple[Key, ...]:
    """Values that are there after an item."""
    if isinstance(item, End):
        return tuple(move.target for move in item.moves)
    return () if isinstance(item, Begin) else makes_of(item)


def last_uses(items: Sequence[Item], ends: Iterable[Key]) -> list[tuple[Key, ...]]:
    """For each item, the values that nothing reads after it."""
    wanted = set(ends)
    found: list[tuple[Key, ...]] = []
    for item in reversed(items):
        fresh = [key for key in dict.fromkeys([*starts(item), *gives(item)]) if key not in wanted]
        wanted.update(fresh)
        found.append(tuple(fresh))
    return found[::-1]


def is_collective(instruction: Instruction) -> bool:
    """Whether it moves something between ranks, as a slice does not."""
    return isinstance(instruction, RunStep) and instruction.step.kind != "slice"
