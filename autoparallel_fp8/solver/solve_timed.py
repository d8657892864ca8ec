"""Solves a `TimedProblem`, as `solve` does a `Problem`."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import UsageError
from ..problem import Solution
from ..timed import TimedProblem
from .solve import program_runner
from .timed_search import search_timed
from .tools import Tools

MARGIN_SECONDS, MARGIN_SHARE = 2.5, 0.03  # a program ends that much after its deadline, at times


def solve_timed(
    problem: TimedProblem,
    *,
    time_limit: float = 60.0,
    solver: str = "highs",
    progress: Callable[[str], None] | None = None,
) -> Solution:
    """The best choices found within the limit and what is proven about them.

    Args:
        problem: as `read_iopddl` gives it.
        time_limit: seconds; at the limit the best choices in hand come back with their bound.
        solver: "highs" or "cbc".
        progress: called with a line of text now and then.

    Raises:
        UsageError: a time limit that is not positive, or no such solver.
        SolveError: the solver is not installed or failed.
    """
    if not time_limit > 0:
        raise UsageError(f"time limit of {time_limit:g} s", at="time_limit", do="give a positive number of seconds")
    margin = MARGIN_SECONDS + MARGIN_SHARE * time_limit
    deadline = time.monotonic() + max(0.5 * time_limit, time_limit - margin)
    return search_timed(problem, Tools(program_runner(solver), deadline, say=progress or (lambda text: None)))
