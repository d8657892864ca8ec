"""What a search works with: the solver as a function, the time at which to stop, where to tell of progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..problem import Problem


@dataclass(frozen=True)
class Outcome:
    """What the solver said: rounded choices (None: nothing usable), a lower bound, and whether nothing is allowed."""

    choices: tuple[int, ...] | None
    bound: float
    is_infeasible: bool = False


@dataclass(frozen=True)
class Tools:
    """`run_program(problem, deadline, relaxed)` is the solver; `deadline` is in `time.monotonic()`'s seconds."""

    run_program: Callable[[Problem, float, bool], Outcome]
    deadline: float = math.inf
    program_seconds: float = math.inf  # for one program at most
    say: Callable[[str], None] = lambda text: None

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def run(self, problem: Problem, *, relaxed: bool) -> Outcome:
        """Run the solver in the time there is."""
        return self.run_program(problem, min(self.deadline, time.monotonic() + self.program_seconds), relaxed)

    def share(self, part: float) -> Tools:
        """The same with a part of the time left."""
        return self.within(part * max(0.0, self.deadline - time.monotonic()))

    def within(self, seconds: float) -> Tools:
        """The same with at most so many seconds from now."""
        return replace(self, deadline=min(self.deadline, time.monotonic() + seconds))
