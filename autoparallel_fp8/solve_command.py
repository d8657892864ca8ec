"""`autoparallel-fp8 solve FILE`: the best choices for a problem of the IOPDDL contest, and what is proven about them.

The whole command, with reading the file, keeps to the time limit. Numbers that are whole are written as such. The JSON
holds no times: the same file and enough time give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from .errors import InfeasibleError, SolveError, UsageError

if TYPE_CHECKING:
    from .problem import Solution
    from .timed import TimedProblem

TIME_LIMIT = 60.0
MOST_BEFORE = 10.0  # seconds: a process that is older was not started for this command
LEAST_SHARE = 0.1  # of the limit goes to the solver, however long reading took


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a problem, .json or .json.gz")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=TIME_LIMIT,
        metavar="SECONDS",
        help=f"for the whole command (default: {TIME_LIMIT:g})",
    )
    parser.add_argument("--json", metavar="FILE", help="write the answer; - for standard output instead of the text")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(options: argparse.Namespace) -> None:
    """Read, solve, write, print."""
    started = time.monotonic() - _seconds_before()
    limit = options.time_limit
    if not 0 < limit < math.inf:
        do = "give a positive number of seconds"
        raise UsageError(f"the time limit is {limit:g} s", at="--time-limit", do=do)
    from .files import check_writable, write_text
    from .iopddl import read_iopddl
    from .progress_line import ProgressLine
    from .solver.solve_timed import solve_timed

    if options.json and options.json != "-":
        check_writable(options.json)
    progress = ProgressLine(sys.stderr, options.quiet)
    progress(f"reading {options.file}")
    problem = read_iopddl(options.file)
    left = max(LEAST_SHARE * limit, limit - (time.monotonic() - started))
    solution = solve_timed(problem, time_limit=left, progress=progress)
    progress.finish()
    _require_choices(problem, solution, options)
    text = json.dumps(answer(problem, solution), separators=(",", ":")) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
        return
    if options.json:
        write_text(options.json, text)
    print(format_answer(options.file, problem, solution, time.monotonic() - started))


def _seconds_before() -> float:
    """How long this process has been there, where the system tells: importing libraries takes seconds too."""
    try:
        with open("/proc/self/stat") as file:
            ticks = float(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
    return age if 0.0 <= age <= MOST_BEFORE else 0.0


def _require_choices(problem: TimedProblem, solution: Solution, options: argparse.Namespace) -> None:
    if solution.status == "infeasible":
        raise InfeasibleError(
            f"no choices keep the usage limit of {_plain(problem.limit)} and every forbidden pair",
            at=options.file,
            do="raise usage_limit, or allow more pairs",
        )
    if not solution.choices and problem.num_variables:
        raise SolveError(
            f"no choices within the limit found in {options.time_limit:g} s; none costs less than "
            f"{_plain(solution.lower_bound)}",
            at=options.file,
            do="give more time with --time-limit",
        )


def answer(problem: TimedProblem, solution: Solution) -> dict[str, Any]:
    """The answer as data: `choices` has the option of each node."""
    return {
        "status": solution.status,
        "cost": _plain(solution.objective),
        "bound": _plain(solution.lower_bound),
        "gap": solution.gap,
        "peak_usage": _plain(problem.peak(solution.choices)),
        "usage_limit": None if problem.limit == math.inf else _plain(problem.limit),
        "choices": list(solution.choices),
    }


def format_answer(file: str, problem: TimedProblem, solution: Solution, seconds: float) -> str:
    """The answer for people to read."""
    proof = "proven optimal" if solution.status == "optimal" else "not proven optimal"
    limit = "without a limit" if problem.limit == math.inf else f"limit {_plain(problem.limit)}"
    lines = [
        f"{file}: {problem.num_variables} nodes, {len(problem.edges)} edges, {len(problem.tables)} tables",
        f"cost   {_plain(solution.objective)}",
        f"bound  {_plain(solution.lower_bound)}",
        f"gap    {100 * solution.gap:.4f} % ({proof})",
        f"usage  {_plain(problem.peak(solution.choices))} at most ({limit})",
        f"time   {seconds:.1f} s",
    ]
    return "\n".join(lines)


def _plain(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value
