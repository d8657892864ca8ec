"""The meshes of a search as a table: the best first, then what the others take at least, or why they have no plan."""

from __future__ import annotations

import math

from ..mesh_ranking import LATE, MeshSearch, RankedMesh
from .text import format_bytes, format_table, format_us


def format_meshes(search: MeshSearch) -> str:
    """One line a mesh, and what is proven of all of them."""
    best = search.plan.objective_us
    rows: list[tuple[str, ...]] = [("mesh", "at least", "step", "memory", "gap", "")]
    rows += [_row(row, search.ranked[0], best) for row in search.ranked]
    planned = sum(row.step_us is not None for row in search.ranked)
    pruned = sum(row.step_us is None and not row.reason for row in search.ranked)
    late = sum(row.reason == LATE for row in search.ranked)
    counts = [f"{planned} planned", f"{pruned} ruled out by their bounds"]
    counts += [f"{late} not reached in the time limit"] * bool(late)
    counts.append(f"{len(search.ranked) - planned - pruned - late} without a plan")
    return (
        f"{len(search.ranked)} meshes of {search.gpus} x {search.plan.device}: {', '.join(counts)}\n"
        f"no plan on any of them is faster than {format_us(search.lower_bound_us)} (gap {search.gap:.1e})\n\n"
        + format_table(rows)
    )


def _row(row: RankedMesh, best: RankedMesh, best_us: float) -> tuple[str, ...]:
    bound = format_us(row.bound_us) if 0 < row.bound_us < math.inf else ""
    if row.step_us is None:
        return (str(row.mesh), bound, "", "", "", row.reason or _pruned(row.bound_us / best_us - 1))
    verdict = "best" if row is best else f"{row.step_us / best_us - 1:+.2%}"
    memory = format_bytes(row.memory_bytes or 0)
    return (str(row.mesh), bound, format_us(row.step_us), memory, f"{row.gap or 0.0:.1e}", verdict)


def _pruned(excess: float) -> str:
    """For a bound that is above the best step by this share, or not below it by more than counts."""
    return f"pruned: at least {excess:+.2%}" if excess >= 5e-5 else "pruned: not faster than the best"
