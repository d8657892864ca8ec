"""When a rank runs what: collectives put together, started ahead and waited for at use.

In: a `Program` and what it keeps for backward. Out: lists of items, the same for every rank. Nothing is added to or
taken from the program's collectives; they get a `Begin` and an `End`:

- What derives from parameters alone is gathered a segment ahead (a segment is a layer): while layer 3 computes, the
  weights of layer 4 are cast, their maxima reduced and their gathers started, in as many stages as that takes.
- Reductions of gradients start at the end of their segment and are waited for at the end of the next one.
- Collectives of one stage with one kind, one group and one dtype go as one call.
- Everything else, which compute waits for anyway, stands where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .cost_models.fusion import fuse
from .expansion import Space
from .graph import Ref
from .items import Item, gives, last_uses
from .late_reductions import late_reductions
from .ordering import Scheduler
from .program import Key, Program, makes_of, program, reads_of
from .redistribute import Routes
from .saving import halves, needed
from .structure import Structure


@dataclass(frozen=True)
class Part:
    """One list of a schedule, as it is run.

    Attributes:
        items: in order.
        ends: values that are wanted.
        unused: for each item, the values that nothing reads after it.
    """

    items: tuple[Item, ...]
    ends: tuple[Key, ...]
    unused: tuple[tuple[Key, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """What a rank runs.

    Attributes:
        program: what it was made of, with layouts and ends.
        inference: results alone.
        forward: results, and what backward needs.
        saved: values that forward keeps for backward.
        backward: gradients.
        unreduced: gradients up to the reductions that may wait for the last of several batches.
        waiting: values that then add up: where `unreduced` ends and reductions begin.
    """

    program: Program
    inference: tuple[Item, ...]
    forward: tuple[Item, ...]
    saved: tuple[Key, ...]
    backward: tuple[Item, ...]
    unreduced: tuple[Item, ...]
    waiting: tuple[Key, ...]

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The four lists by name, each with what it is to give."""
        results, gradients = self.program.ends_of("output", "buffer"), self.program.ends_of("gradient")
        late = {key for item in self.backward for key in gives(item)}
        late -= {key for item in self.unreduced for key in gives(item)}
        early = [key for key in gradients if key not in late]
        ends = {
            "inference": results,
            "forward": (*results, *self.saved),
            "backward": gradients,
            "unreduced": (*self.waiting, *early),
        }
        return {name: _part(getattr(self, name), wanted) for name, wanted in ends.items()}


def _part(items: tuple[Item, ...], ends: Iterable[Key]) -> Part:
    wanted = tuple(dict.fromkeys(ends))
    return Part(items, wanted, tuple(last_uses(items, wanted)))


def planned_schedule(
    space: Space,
    shape: Structure,
    choices: Sequence[int],
    routes_of: Callable[[Ref], Routes],
    kept: Collection[Ref] | None = None,
) -> Schedule:
    """The schedule of a plan.

    Args:
        space, shape: the options and variables that were chosen from.
        choices: the option of every variable.
        routes_of: how a value gets from one layout to another; the priced ones.
        kept: values that the plan's memory holds for backward; worked out again where None.
    """
    kept = fuse(space.graph).kept if kept is None else kept
    return schedule(program(space, shape, choices, routes_of), space, shape, kept)


def schedule(program: Program, space: Space, shape: Structure, kept: Collection[Ref]) -> Schedule:
    """The schedule of a program.

    Args:
        program: of the whole step.
        space, shape: what it was chosen from.
        kept: values that the plan's memory holds between forward and backward.
    """
    cut = halves(program, space.graph, kept)
    made = Scheduler(space, shape)
    gradients = program.ends_of("gradient")
    last = late_reductions(cut.backward, space, shape, set(gradients))
    kept_back = {key for i in last for key in makes_of(i)}
    waiting = tuple(dict.fromkeys(key for i in last for key in reads_of(i) if key not in kept_back))
    early = [key for key in gradients if key not in kept_back]
    unreduced = needed([i for i in cut.backward if i not in last], [*waiting, *early])
    lists = [made.items(part) for part in (cut.inference, cut.forward, cut.backward, unreduced)]
    return Schedule(program, lists[0], lists[1], cut.saved, lists[2], lists[3], waiting)
