"""The lowered program held against the plan: what one rank would really send, read off a run without data.

The rank's program runs on the meta device, so shapes, strides and dtypes are those of the real run. What reaches a
collective is noted (kind, axes, dtype, bytes) and must be the plan's list, one for one; a value kept for backward must
have the bytes that the plan's memory counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ApplyError
from .graph import dtype_name
from .plan import CollectivePlan
from .program import Key, RunStep
from .rank import Calls, run_items
from .rank_steps import RankStep, dry
from .schedule import Schedule


@dataclass(frozen=True, order=True)
class Sent:
    """One collective of one rank.

    Attributes:
        kind: as in `CollectivePlan`.
        axis: mesh axes, joined by "+".
        dtype: of the value; one-byte floats travel as bytes and are told by what they are.
        bytes: the gathered or unreduced tensor.
    """

    kind: str
    axis: str
    dtype: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.kind} over {self.axis}: {self.bytes} bytes of {self.dtype}"


class Recorder:
    """Collectives on tensors without data: notes what is sent."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.sent: list[Sent] = []

    def begin(self, steps: Sequence[RankStep], axes: tuple[int, ...], flats: list[Tensor]) -> list[Tensor]:
        made = [dry(flat, step) for flat, step in zip(flats, steps, strict=True)]
        for step, flat, got in zip(steps, flats, made, strict=True):
            largest = max(flat.nbytes * (step.ways if step.kind == "all_to_all" else 1), got.nbytes)
            axis = "+".join(self.names[a] for a in axes)
            self.sent.append(Sent(step.kind, axis, dtype_name(step.after.dtype), largest))
        return made

    def end(self, started: list[Tensor], moves: Sequence[RunStep]) -> list[Tensor]:
        return started


def reread(
    written: Schedule, calls: Calls, planned: Sequence[CollectivePlan], *, names: tuple[str, ...]
) -> dict[Key, int]:
    """Runs forward and backward of one rank without data and holds them against the plan.

    Args:
        written: the schedule.
        calls: what the rank calls, on the meta device.
        planned: the plan's collectives.
        names: of the mesh axes.

    Returns:
        Bytes of every value that forward saves.

    Raises:
        ApplyError: the program sends something that the plan does not have, or the other way round.
    """
    recorder = Recorder(names)
    given = {key: _empty(calls, node, written, key) for node, key in written.program.given}
    forward = run_items(written.parts["forward"], calls, recorder, dict(given))
    saved = {key: forward[key] for key in written.saved}
    run_items(written.parts["backward"], calls, recorder, {**given, **saved})
    found = Counter(recorder.sent)
    wanted = Counter(Sent(c.kind, c.axis, c.dtype, c.bytes) for c in planned)
    for text, rest in (("more than the plan has", found - wanted), ("less than the plan has", wanted - found)):
        if rest:
            first, count = min(rest.items())
            raise ApplyError(
                f"the lowered program sends {text}: {first}, {count} times",
                at=f"{sum(rest.values())} of {sum(wanted.values())} collectives",
                do="do not run it; report it with the plan",
            )
    return {key: value.nbytes for key, value in saved.items()}


def _empty(calls: Calls, node: int, written: Schedule, key: Key) -> Tensor:
    spec = calls.given(node, written.program.layouts[key])
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
