"""Which reductions of gradients may wait for the last of several batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .expansion import Space
from .program import Instruction, Key, RunOp, RunStep, makes_of, reads_of
from .structure import Structure

_LINEAR = frozenset({
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.t.default", "aten.transpose.int",
    "aten.permute.default", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default",
    "aten.clone.default", "aten.alias.default", "aten._to_copy.default", "prims.convert_element_type.default",
    "aten.add.Tensor", "aten.sum.dim_IntList", "aten.slice.Tensor",
})  # fmt: skip


def late_reductions(
    backward: Sequence[Instruction], space: Space, shape: Structure, ends: Collection[Key]
) -> set[Instruction]:
    """Reductions of gradients that could as well run once on a sum of several batches, and all that follows them.

    A value that waits for them is read by nothing else: what else reads it would get the sum, too.
    """
    readers: dict[Key, list[Instruction]] = {}
    for instruction in backward:
        for key in reads_of(instruction):
            readers.setdefault(key, []).append(instruction)
    refused: set[Instruction] = set()
    while True:
        found = _late(backward, space, shape, readers, refused)
        made = {key for i in found for key in makes_of(i)}
        waiting = {key for i in found for key in reads_of(i)} - made
        shared = {key for key in made | waiting if any(r not in found for r in readers.get(key, []))}
        shared |= waiting.intersection(ends)
        if not shared:
            return found
        refused |= {i for i in found if not shared.isdisjoint((*reads_of(i), *makes_of(i)))}


def _late(
    backward: Sequence[Instruction],
    space: Space,
    shape: Structure,
    readers: Mapping[Key, Sequence[Instruction]],
    refused: Collection[Instruction],
) -> set[Instruction]:
    """The same without what is refused, and without a look at what else is read."""
    linear: dict[Instruction, bool] = {}
    for instruction in reversed(backward):
        follows = [r for key in makes_of(instruction) for r in readers.get(key, [])]
        is_linear = not isinstance(instruction, RunOp) or str(space.graph.nodes[instruction.node].op) in _LINEAR
        linear[instruction] = is_linear and all(linear[r] for r in follows)
    found: set[Instruction] = set()
    after: set[Key] = set()
    for instruction in backward:
        is_first = isinstance(instruction, RunStep) and instruction.step.reduction == "sum"
        is_late = is_first and shape.links[instruction.link].is_hideable  # type: ignore[union-attr]
        is_refused = not linear[instruction] or instruction in refused
        if not is_refused and (is_late or not after.isdisjoint(reads_of(instruction))):
            found.add(instruction)
            after.update(makes_of(instruction))
    return found
