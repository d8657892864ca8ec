"""The search for the best choices of a `TimedProblem`: contract, bound, walk, close what is small, improve regions.

First what neighbours decide is merged (`contract`). Prices and a dual bound rise together (`priced_dual`) while walks
from what the dual would choose give choices within the limit. Where few options are left within a small slack of the
bound, a program settles them, and wider ones until the proof is complete. Where too many are, regions are solved one
after the other for the time there is.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import numpy as np

from ..problem import OPTIMAL_GAP, Problem, Solution
from ..timed import Index, TimedProblem
from .beside import Beside, take
from .contract import Contraction
from .flat import Flat
from .lazy_rows import Closed, close, first_times, rows_at
from .narrow import decode, narrow
from .priced_dual import Ascent
from .regions import Regions
from .room import Room
from .search import infeasible
from .timeline import Timeline, make_timeline
from .tools import Tools
from .walk import Best, walk

SMALL_SHARE, LARGE_SHARE = 0.45, 0.2  # of the time left, for the bound alone; a large one goes on beside the regions
LOOK_EVERY = 0.1  # of the ascent: how often a walk begins and the gain is looked at
LEAST_GAIN = 2e-4  # of the bound, from one look to the next: less ends the ascent
FEWEST_STEPS = 30  # between looks
FIRST_SLACK, WIDER = 2e-3, 4.0  # of the bound; and how much wider where nothing was found within
CLOSING_PAIRS = 25_000  # table entries of a program that is to prove the optimum
CLOSING_SHARE = 0.7  # of the time left, for such programs
SMALL_VARIABLES = 1000  # fewer are tried to be closed whole
WALK_SHARE = 0.03  # of all time, for one walk or two
REGION_SECONDS = 6.0
SLACKS = (0.01, 0.05, 0.3, 1.0)  # of the gap: which options a region may take, by their excess


def search_timed(problem: TimedProblem, tools: Tools) -> Solution:
    """The best choices found within the limit and what is proven in the time there is.

    The choices are of all variables of the problem; the status is as of `search`.
    """
    if not problem.num_variables:
        return Solution((), 0.0, 0.0, "optimal")
    contraction = Contraction(problem)
    contraction.run()
    if contraction.dead:
        return infeasible()
    core, timeline = contraction.pairwise(), make_timeline(contraction)
    tools.say(
        f"contracted: {problem.num_variables} -> {core.num_variables} variables, {core.num_pairs} pairs, "
        f"{timeline.num_times} times"
    )
    if (timeline.limit < 0).any():
        return infeasible()
    search = _Search(core, timeline, tools)
    search.run()
    if search.best.choices is None:
        return infeasible() if search.bound == math.inf else Solution((), math.inf, search.bound, "unknown")
    full = tuple(contraction.expand(search.best.choices.tolist()))
    cost = problem.cost(full)
    solution = Solution(full, cost, min(cost, search.bound), "feasible")
    return replace(solution, status="optimal") if solution.gap <= OPTIMAL_GAP else solution


class _Search:
    def __init__(self, core: Problem, timeline: Timeline, tools: Tools) -> None:
        self.core, self.timeline, self.tools = core, timeline, tools
        self.flat = Flat(core)
        start = np.zeros(core.num_variables, dtype=np.int64)
        self.room = Room(timeline, start, self.flat.sizes)
        self.best = Best(self.flat, timeline)
        self.seconds = min(3600.0, tools.deadline - time.monotonic())
        self.bound = -math.inf
        self.ascent = Ascent.begin(core, timeline, tools)

    @property
    def is_done(self) -> bool:
        if self.tools.is_late or self.bound == math.inf:
            return True
        gap, cost = self.best.cost - self.bound, abs(self.best.cost)
        return math.isfinite(cost) and gap <= OPTIMAL_GAP * max(cost, 1e-9)

    def run(self) -> None:
        is_small = self.core.num_variables <= SMALL_VARIABLES
        self._raise(self.tools.share(SMALL_SHARE if is_small else LARGE_SHARE))
        if is_small and not self.is_done:
            self._close(self.tools.share(CLOSING_SHARE))
        if not self.is_done:
            self._improve()

    def _raise(self, tools: Tools) -> None:
        """Raise the bound until it stands still, with a walk now and then."""
        begun = time.monotonic()
        span = max(0.0, min(tools.deadline, begun + 600.0) - begun)
        look, steps, before = begun, 0, -math.inf
        while not tools.is_late:
            self.ascent.step()
            steps += 1
            is_first = before == -math.inf
            if steps >= FEWEST_STEPS and (is_first or time.monotonic() - look >= LOOK_EVERY * span or steps >= 500):
                self.bound = max(self.bound, self.ascent.bound)
                self._walk(tools)
                self._tell("ascent")
                if self.is_done or self.ascent.bound - before <= LEAST_GAIN * abs(self.ascent.bound):
                    break
                look, steps, before = time.monotonic(), 0, self.ascent.bound
        self.ascent.settle()
        self.bound = max(self.bound, self.ascent.bound)
        self._walk(self.tools)
        self._tell("settled")

    def _walk(self, tools: Tools) -> None:
        """From what the dual would choose, and from the best so far; a walk that does not arrive is cut short."""
        tools = tools.within(WALK_SHARE * self.seconds)
        choices = np.array(decode(self.ascent.dual), dtype=np.int64)
        walk(self.flat, self.room, self.timeline, self.ascent.best_prices, choices, self.best, tools)
        if self.best.choices is not None:
            walk(self.flat, self.room, self.timeline, self.ascent.best_prices, self.best.choices, self.best, tools)

    def _close(self, tools: Tools) -> None:
        """Programs within a slack of the bound: what they find there is the best of all, else the bound rises by it.

        The dual bounds the problem priced for time, and no solution within the limit gets dearer by prices.
        """
        floor, dual = self.ascent.at_best(), self.ascent.dual
        everything = np.arange(self.core.num_variables)
        slack = FIRST_SLACK * max(abs(floor), 1e-6)
        while not self.is_done and not tools.is_late:
            slack = min(slack, self.best.cost - floor)
            closed = self._closed_within(slack, everything, tools)
            if closed is None:
                break
            self.bound = max(self.bound, min(floor + slack, closed.bound))
            if closed.choices is not None:
                self.best.offer(closed.choices)
            self._tell(f"within {slack:.4g}")
            if slack == math.inf or (closed.choices is None and not closed.is_infeasible):
                break
            slack = slack * WIDER if slack < 1e3 * abs(dual.bound()) else math.inf

    def _closed_within(self, slack: float, everything: Index, tools: Tools) -> Closed | None:
        _, undo = narrow(self.core, self.ascent.dual, slack)

        def make(times: Index) -> Problem:
            rows = rows_at(times, self.room, everything, self.timeline.limit)
            return narrow(replace(self.core, rows=rows), self.ascent.dual, slack)[0]

        def widen(choices: tuple[int, ...]) -> Index:
            return np.array(undo(choices), dtype=np.int64)

        return close(make, widen, first_times(self.ascent.best_prices), self.timeline, tools, CLOSING_PAIRS)

    def _improve(self) -> None:
        """Regions for the time there is, while the bound goes on beside; with news of it, a walk from there."""
        beside = Beside(self.ascent, self.tools.deadline)
        try:
            self._improve_beside(beside)
        finally:
            beside.end()

    def _improve_beside(self, beside: Beside) -> None:
        chance = random.Random(0)
        regions, count, look = None, 0, time.monotonic()
        longest = 0.0  # of the regions so far: none is begun that might not end in time
        while not self.is_done and time.monotonic() + longest < self.tools.deadline:
            state = beside.news() if self.best.choices is None or time.monotonic() - look > 4 * REGION_SECONDS else None
            if state is not None:
                look, regions = time.monotonic(), None
                take(self.ascent, state)
                self.bound = max(self.bound, state.bound)
                self._walk(self.tools)
                self._tell("news")
            if self.best.choices is None:
                if state is None:
                    self._walk_on()
                continue
            if regions is None:
                self.room.reset(self.best.choices)
                regions = Regions(self.flat, self.room, self.timeline, self.ascent.dual.excess())
            begun = time.monotonic()
            slack = (self.best.cost - self.bound) * chance.choice(SLACKS)
            free = regions.grow(self._seeds(chance), slack)
            closed = regions.solve(free, self.tools.within(REGION_SECONDS))
            count, longest = count + 1, max(longest, time.monotonic() - begun)
            if closed is not None and closed.choices is not None and self.best.offer(closed.choices):
                self.room.reset(self.best.choices)
                self._tell(f"region {count} of {len(free)}")
        state = beside.news()
        if state is not None:
            self.bound = max(self.bound, state.bound)

    def _walk_on(self) -> None:
        """A step of the ascent here too, and a walk from it: there are no choices within the limit yet."""
        self.ascent.step()
        self.bound = max(self.bound, self.ascent.bound)
        self._walk(self.tools)

    def _seeds(self, chance: random.Random) -> list[int]:
        n = self.core.num_variables
        if chance.random() < 0.5 or not self.timeline.num_times:
            return [chance.randrange(n)]
        tight = np.argsort(self.room.left, kind="stable")[: max(1, self.timeline.num_times // 50)]
        active = self.room.active_at(int(tight[chance.randrange(len(tight))])).tolist()
        return chance.sample(active, min(len(active), 4)) or [chance.randrange(n)]

    def _tell(self, what: str) -> None:
        self.tools.say(f"{what}: bound {self.bound:.6g}, best {self.best.cost:.6g}")
