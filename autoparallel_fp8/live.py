"""What a plan that was just made, or restored, can still be asked beyond its data: to run, to be verified, to explain.

A plan file has none of it; `restore.py` makes it again from the file and the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .cost_models import Pricing
from .expansion import Space
from .structure import Structure


@dataclass(frozen=True, eq=False, repr=False)
class Live:
    """The live part of a plan.

    Attributes:
        pricing: prices, routes of every value, and what is kept for backward.
        choices: the option of every variable of `shape`.
        explain: a parameter's alternatives, by its name; those of all for None.
        planner: the `AutoParallel` that captured the model; restoring for another batch asks it again.
    """

    pricing: Pricing
    choices: tuple[int, ...]
    explain: Callable[[str | None], Any]
    planner: Any

    @property
    def space(self) -> Space:
        """The options that were chosen from, of every op of `space.graph`."""
        return self.pricing.space

    @property
    def shape(self) -> Structure:
        """The variables, and the links on which values travel."""
        return self.pricing.shape
