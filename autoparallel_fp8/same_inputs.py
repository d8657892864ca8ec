"""Whether ranks that must have the same part of the inputs do: each sends digests of its own, and all compare.

Where an input's layout is R over an axis, every rank along it works on one part. Others than that are wrong numbers
that nobody sees: each rank computes a piece of one model on data of its own. Inputs are compared at the first call with
their sizes, which costs later steps nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import ApplyError
from .expansion import Space
from .layout import Layout, format_layout
from .parts import coordinates
from .runner import Runner
from .same_ranks import gathered

CHECKS = ("first", "always", "never")
"""When inputs are compared: at the first call with their sizes, at every call, or not at all."""


class SameInputs:
    """The comparison, on one rank.

    Args:
        when: one of `CHECKS`.
        space: that was planned.
        rank: of this process on the mesh.
        groups: process groups that together join all ranks; None for the default one.
    """

    def __init__(self, when: str, space: Space, rank: int, groups: Sequence[Any] | None) -> None:
        self.when, self.mesh, self.groups = when, space.mesh, groups
        self.place = coordinates(space.mesh.sizes)[rank]
        self.seen: set[Runner] = set()

    def check(self, runner: Runner, parts: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> None:
        """Compares this rank's parts with the others'.

        Args:
            runner: one for each size of the inputs.
            parts: of the inputs, by name.
            layouts: of the inputs.

        Raises:
            ApplyError: on every rank, where two that must have the same part have not, or one is lost.
        """
        is_wanted = self.when == "always" or (self.when == "first" and runner not in self.seen)
        alike = {name for name in parts if self._axes(layouts[name])}
        if not is_wanted or not alike:
            return
        own = {name: (self._where(layouts[name]), _digest(part)) for name, part in parts.items() if name in alike}
        found = gathered(own, self.groups, "inputs")
        for name in own:
            first: dict[tuple[int, ...], int] = {}
            for rank in sorted(found):
                where, digest = found[rank][name]
                other = first.setdefault(where, rank)
                if found[other][name][1] != digest:
                    raise self._differ(name, layouts[name], rank, other)
        self.seen.add(runner)

    def _axes(self, layout: Layout) -> list[str]:
        """Along which all have the same part."""
        pairs = zip(self.mesh.axes, layout, strict=True)
        return [axis.name for axis, p in pairs if p.kind == "R" and axis.size > 1]

    def _where(self, layout: Layout) -> tuple[int, ...]:
        """The same for ranks that have the same part."""
        return tuple(0 if p.kind == "R" else c for p, c in zip(layout, self.place, strict=True))

    def _differ(self, name: str, layout: Layout, rank: int, other: int) -> ApplyError:
        axes = ", ".join(self._axes(layout))
        return ApplyError(
            f"rank {rank} and rank {other} have other values of {name}, and must have the same",
            at=f"{name} [{format_layout(layout)}] on mesh {self.mesh}",
            do=f"pass one batch to all ranks along {axes}: pick data by the coordinate on the other axes, not by the "
            "rank; or the whole batch, the same, to every rank",
        )


def _digest(part: Tensor) -> str:
    values = part.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()
