"""What a search over meshes found, as plain data: a row for each mesh, the best plan, and a bound for all of them."""

from __future__ import annotations

from dataclasses import dataclass

from .mesh import Mesh
from .plan import Plan

LATE = "time limit"
"""The reason of a mesh that was not reached."""


def gap_of(step_us: float, lower_bound_us: float) -> float:
    """How far above a bound a step lies, as a share of the step."""
    return max(0.0, step_us - lower_bound_us) / max(abs(step_us), 1e-9)


@dataclass(frozen=True)
class RankedMesh:
    """What is known of one mesh.

    Attributes:
        mesh: axes and sizes.
        bound_us: no plan on it is faster; inf where there is none, 0 where time ran out before.
        step_us, gap, memory_bytes: of its plan, where it was planned.
        reason: why it was not planned, or has no plan; else "".
    """

    mesh: Mesh
    bound_us: float
    step_us: float | None = None
    gap: float | None = None
    memory_bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class MeshSearch:
    """All meshes of so many GPUs, the best first, and the plan on the best one; `print(search)` shows them.

    Attributes:
        gpus: devices of each mesh.
        ranked: planned meshes by their step, then the others by their bound, those without a plan last.
        plan: on `ranked[0].mesh`.
        lower_bound_us: no plan on any of the meshes is faster.
    """

    gpus: int
    ranked: tuple[RankedMesh, ...]
    plan: Plan
    lower_bound_us: float

    @property
    def gap(self) -> float:
        """Of the plan, among all plans on all meshes."""
        return gap_of(self.plan.objective_us, self.lower_bound_us)

    def __str__(self) -> str:
        from .report.meshes import format_meshes

        return format_meshes(self)
