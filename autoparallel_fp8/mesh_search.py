"""Which mesh of N GPUs is best: every candidate bounded, then planned from the lowest bound on, until none can win.

The model is captured once, with one batch, so that every mesh does the same work. A bound is that of the step's dual
ascent (`overlap.bound_step`): no plan on the mesh is faster. Meshes are planned in the order of their bounds and the
search stops where the next bound is not below the best step: the best plan is then the best on any candidate, as far as
the gaps of the plans say. Bounds and plans are made by workers side by side; what they make ahead of their turn is left
out of the ranking, so plan and table do not depend on their number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .api import AutoParallel, Proof
from .errors import AutoParallelError, InfeasibleError, SolveError, UsageError
from .input_text import describe_inputs
from .memory import format_need
from .mesh import Mesh
from .mesh_candidates import candidates, check_whole, useless_axis
from .mesh_ranking import LATE, MeshSearch, RankedMesh, gap_of
from .overlap import bound_step, solve_step
from .problem import OPTIMAL_GAP, Problem, Solution, row_value
from .progress import Stage
from .solver import bound, solve
from .workers import Workers, default_workers

BOUND_SHARE = 0.5  # of a time limit, for the bounds
MOMENT = 0.01  # seconds; solvers take none of 0
ROUNDING = 1e-9  # of a bound: sums in another order differ in the last digits


@dataclass(frozen=True)
class Found:
    """The plan on one mesh, as a worker sends it: choices with their proof, bytes on one device."""

    solution: Solution
    weight: float
    memory_bytes: int


def search(planner: AutoParallel, workers: int | None, max_axes: int) -> MeshSearch:
    """As `AutoParallel.search_meshes`, which tells the arguments."""
    if planner.gpus is None:
        do = f'make the planner with mesh "auto" and gpus={planner.mesh.num_devices}'
        raise UsageError("the planner has a mesh already", at=f"mesh {planner.mesh}", do=do)
    check_whole("max_axes", max_axes, most=3)
    count = default_workers() if workers is None else check_whole("workers", workers)
    planner.graph()
    every = candidates(planner.gpus, max_axes)
    useful = [mesh for mesh in every if useless_axis(mesh, planner.graph()) is None]
    if not useful:
        raise _no_useful_mesh(planner, every)
    limit = planner.settings.time_limit
    with Workers(min(count, len(useful))) as pool:
        found = _Search(planner, useful, pool, math.inf if limit is None else time.monotonic() + limit)
        with Stage(planner._say, "bounds"):
            found.bound_all(limit)
        with Stage(planner._say, "meshes"):
            found.plan_best_first()
    left_out = [_left_out(mesh, planner) for mesh in every if mesh not in useful]
    return found.conclude(left_out)


class _Search:
    """The state of one search; meshes go by their number in `meshes`."""

    def __init__(self, planner: AutoParallel, meshes: Sequence[Mesh], pool: Workers, deadline: float) -> None:
        self.planner, self.meshes, self.pool, self.deadline = planner, meshes, pool, deadline
        self.silent = _silenced(planner)
        self.bounds: dict[int, float] = {}
        self.found: dict[int, Found] = {}
        self.errors: dict[int, AutoParallelError] = {}

    def bound_all(self, limit: float | None) -> None:
        """A bound for each mesh that there is time for."""
        deadline = self.deadline if limit is None else time.monotonic() + BOUND_SHARE * limit

        def jobs() -> Iterator[tuple[int, Callable[[], float]]]:
            for k, mesh in enumerate(self.meshes):
                if k == 0 or time.monotonic() < deadline:
                    yield k, partial(_bound, self.silent, mesh, deadline)

        for k, result in self.pool.run(jobs()):
            if isinstance(result, AutoParallelError):
                self.errors[k] = result
                continue
            self.bounds[k] = result
            shown = f"{result / 1e3:.2f} ms" if math.isfinite(result) else "no plan"
            done = len(self.bounds) + len(self.errors)
            self.planner._say(f"meshes: {done} of {len(self.meshes)} bounded, at least {shown} on {self.meshes[k]}")

    def plan_best_first(self) -> None:
        """Plans, from the lowest bound on, until no mesh left can be better.

        The first has its half of a time limit for the solver alone, so that a short limit gives a plan too.
        """

        def jobs() -> Iterator[tuple[int, Callable[[], Found]]]:
            for turn, k in enumerate(self.order()):
                left = self.deadline - time.monotonic()
                if turn and left <= 0:
                    return
                if self.is_beaten(k, self.best(self.found)):
                    continue
                self.planner._say(f"meshes: planning {self.meshes[k]}")
                least = MOMENT if turn else (1 - BOUND_SHARE) * (self.planner.settings.time_limit or 0.0)
                yield k, partial(_plan, self.silent, self.meshes[k], self.deadline, least)

        for k, result in self.pool.run(jobs()):
            if isinstance(result, AutoParallelError):
                self.errors[k] = result
            else:
                self.found[k] = result
                self.planner._say(f"meshes: {result.solution.objective / 1e3:.2f} ms on {self.meshes[k]}")

    def order(self) -> list[int]:
        """Meshes that may have a plan, by their bounds; equal ones by their number, those without a bound last."""
        open_ones = [k for k in range(len(self.meshes)) if k not in self.errors and self.bound(k) < math.inf]
        return sorted(open_ones, key=lambda k: (k not in self.bounds, _rounded(self.bound(k)), k))

    def bound(self, k: int) -> float:
        return self.bounds.get(k, 0.0)

    def best(self, found: dict[int, Found]) -> int | None:
        planned = [k for k, one in found.items() if one.solution.choices]
        return min(planned, key=lambda k: (_rounded(found[k].solution.objective), k), default=None)

    def is_beaten(self, k: int, best: int | None) -> bool:
        """Whether the mesh cannot be better than the best by more than what is called optimal."""
        return best is not None and self.bound(k) >= self.found[best].solution.objective * (1 - OPTIMAL_GAP)

    def in_turn(self) -> dict[int, Found]:
        """What one worker alone would have found: the plans whose turn came before the search was over."""
        kept: dict[int, Found] = {}
        for k in self.order():
            if k in self.found and not self.is_beaten(k, self.best(kept)):
                kept[k] = self.found[k]
        return kept

    def conclude(self, left_out: list[RankedMesh]) -> MeshSearch:
        kept = self.in_turn()
        best = self.best(kept)
        if best is None:
            raise self.nothing()
        step = kept[best].solution.objective
        rows = [self.row(k, kept, step) for k in range(len(self.meshes))]
        rows.sort(key=lambda row: _place(row, self.meshes[best]))
        lower = min(kept[k].solution.lower_bound if k in kept else self.bound(k) for k in self.order())
        lower = min(step, lower)
        planner = self.planner.with_mesh(self.meshes[best], *self.notes(rows, gap_of(step, lower)))
        chosen = kept[best].solution
        plan = planner.plan_of(chosen.choices, planner.overlap(), Proof(chosen.lower_bound, kept[best].weight))
        return MeshSearch(self.planner.gpus or 0, (*rows, *left_out), plan, lower)

    def row(self, k: int, kept: dict[int, Found], best_us: float) -> RankedMesh:
        mesh = self.meshes[k]
        if k in self.errors:
            return RankedMesh(mesh, math.inf, reason=self.errors[k].message)
        if self.bound(k) == math.inf or (k in kept and kept[k].solution.status == "infeasible"):
            return RankedMesh(mesh, math.inf, reason=_too_much(self.planner))
        if k not in kept:
            is_beaten = self.bound(k) >= best_us * (1 - OPTIMAL_GAP)
            return RankedMesh(mesh, self.bound(k), reason="" if is_beaten else LATE)
        one = kept[k].solution
        if not one.choices:
            return RankedMesh(mesh, self.bound(k), reason=LATE)
        return RankedMesh(mesh, self.bound(k), one.objective, one.gap, kept[k].memory_bytes)

    def notes(self, rows: Sequence[RankedMesh], gap: float) -> list[str]:
        """What the plan's file says of the search."""
        count, gpus = len(self.meshes), self.planner.gpus
        best = f"the mesh is the best of {count} of {gpus} GPUs: no plan on any is faster (gap {gap:.1e})"
        if cut := sum(row.reason == LATE for row in rows):
            best = f"the time limit left {cut} of {count} meshes of {gpus} GPUs without a plan: gap {gap:.1e} among all"
        notes = [best if count > 1 else f"the mesh is the only one of {gpus} GPUs that splits the model"]
        inputs = ", ".join(describe_inputs(self.planner.inputs, self.planner.kwargs).values())
        notes.append(f"all meshes were given the same inputs, {inputs}")
        return notes

    def nothing(self) -> AutoParallelError:
        """Why no mesh has a plan."""
        is_late = any(k not in self.found for k in self.order()) or any(
            one.solution.status == "unknown" for one in self.found.values()
        )
        if is_late:
            limit = self.planner.settings.time_limit
            return SolveError("no plan was found in the time limit", at=f"time_limit {limit} s", do="give more time")
        if len(self.errors) == len(self.meshes) and len({str(e) for e in self.errors.values()}) == 1:
            return self.errors[0]
        rows = [self.row(k, {}, 0.0) for k in range(len(self.meshes))]
        reasons = dict.fromkeys(f"{row.mesh}: {row.reason or _too_much(self.planner)}" for row in rows)
        return InfeasibleError(
            f"no mesh of {self.planner.gpus} GPUs has a plan",
            at="; ".join(reasons),
            do="allow more memory or GPUs, a smaller batch or recompute, or take pins back; plan one of these meshes "
            "for what it needs",
        )


def _silenced(planner: AutoParallel) -> AutoParallel:
    """The planner, silent: meshes planned side by side would talk at once."""
    other = planner.with_mesh(planner.mesh)
    other._say = lambda text: None
    return other


def _bound(planner: AutoParallel, mesh: Mesh, deadline: float) -> float:
    """A lower bound of the step of every plan on the mesh."""
    overlap = planner.with_mesh(mesh).overlap()

    def in_time(problem: Problem) -> Solution:
        return bound(problem, time_limit=_left(deadline))

    found = bound_step(overlap, in_time)
    return found - ROUNDING * abs(found) if math.isfinite(found) else found


def _plan(planner: AutoParallel, mesh: Mesh, deadline: float, least: float) -> Found:
    """The plan on the mesh; its solver has until the deadline, and `least` seconds at least."""
    overlap = planner.with_mesh(mesh).overlap()

    def in_time(problem: Problem, seconds: float | None) -> Solution:
        return solve(problem, time_limit=seconds, with_conflict=False)

    solution, weight = solve_step(overlap, in_time, _left(deadline, least))
    held = row_value(overlap.busy.rows[0], solution.choices) if solution.choices else 0.0
    return Found(solution, weight, int(held))


def _left(deadline: float, least: float = MOMENT) -> float | None:
    """Seconds to a deadline, `least` at least; None where there is none."""
    return None if deadline == math.inf else max(least, deadline - time.monotonic())


def _rounded(us: float) -> float:
    """To nine digits, so that equal plans on different meshes count as equal."""
    return float(f"{us:.9g}")


def _place(row: RankedMesh, best: Mesh) -> tuple[Any, ...]:
    step = math.inf if row.step_us is None else _rounded(row.step_us)
    return row.mesh != best, step, _rounded(row.bound_us)


def _too_much(planner: AutoParallel) -> str:
    limit = format_need(planner.settings.memory_limit)
    asked = " with what was asked for" if planner.constraints.recorded() else ""
    return f"no plan{asked} fits in {limit}"


def _left_out(mesh: Mesh, planner: AutoParallel) -> RankedMesh:
    axis = useless_axis(mesh, planner.graph())
    return RankedMesh(mesh, math.inf, reason=f"no dim of the model divides by {axis.size if axis else 1}")


def _no_useful_mesh(planner: AutoParallel, meshes: Sequence[Mesh]) -> UsageError:
    axes = {axis.size for mesh in meshes if (axis := useless_axis(mesh, planner.graph())) is not None}
    inputs = ", ".join(describe_inputs(planner.inputs, planner.kwargs).values())
    return UsageError(
        f"no mesh of {planner.gpus} GPUs splits the model: no dim divides by {min(axes)}",
        at=f"gpus, with inputs {inputs}",
        do="use a number of GPUs whose factors divide the batch or the model's dims",
    )
