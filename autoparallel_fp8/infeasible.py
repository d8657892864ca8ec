"""What to say where no plan exists: the memory that the smallest needs, or the wishes that cannot hold together."""

from __future__ import annotations

import math
from dataclasses import replace

from .capture.recompute import saves_more
from .errors import InfeasibleError
from .expansion import Space
from .explain import dead_end
from .memory import format_need
from .problem import Problem, Solution
from .solver import min_row
from .structure import Structure


def infeasible(problem: Problem, solution: Solution, space: Space, shape: Structure, device: str) -> InfeasibleError:
    """The error for a solution with status "infeasible", from its conflict."""
    mesh = space.mesh
    names = ", ".join(solution.conflict) or "the options of the ops themselves"
    for row in problem.rows:
        least = min_row(problem, row.name) if row.name in solution.conflict else math.inf
        if math.isfinite(least):
            pins = [name for name in solution.conflict if name != row.name]
            need = format_need(least)
            return InfeasibleError(
                f"no plan fits in {format_need(row.limit)} a device; the smallest needs {need}",
                at=f"mesh {mesh}, device {device}" + (f"; with {', '.join(pins)}" if pins else ""),
                do=f"set memory_limit to {need} or more, add devices to the mesh, {_recompute(space)}or drop pins",
            )
    alone = tuple(r for r in problem.restrictions if r.name == names)
    if alone:
        cause = dead_end(space, shape, replace(problem, restrictions=alone))
        return InfeasibleError(f"no plan has {names}: {cause}", at=f"mesh {mesh}", do="take it back or change it")
    return InfeasibleError(
        f"these cannot hold together: {names}", at=f"mesh {mesh}", do="take one of them back or change it"
    )


def _recompute(space: Space) -> str:
    more = saves_more(space.graph)
    return f"set recompute={' or '.join(map(repr, more))}, " * bool(more)
