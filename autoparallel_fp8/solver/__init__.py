"""From a `Problem` to a `Solution` with a proof. `solve.py` is the way in and the only file that knows the ILP solver.

presolve   exact steps with an undo, on a `network`: `prune` drops options, `eliminate` drops variables
search     bound, guess, narrow, and a program for what is left
dual       a lower bound by dual ascent (`ascent`); `narrow` rules out what the bound excludes
fold       six layers of many equal ones, and the way back
descent    better choices by changing one variable at a time
prices     what a unit of a row (memory) is worth
conflict   a small set of constraints that cannot hold together
windows    bounds and choices for many pinned options at once, each from its surroundings
nearby     many choices near known ones, led back and added up together

A `TimedProblem`, with a limit at thousands of times, has a way in of its own, `solve_timed.py`:

contract      one variable for all that lie alike
timeline      what they hold at which time; `room`: what is left of the limit
priced_dual   prices for times and a dual bound, raised together; `beside`: in a process of its own
walk          choices within the limit; `flat`: what every option costs, in arrays
lazy_rows     programs with the rows that bind; `regions`: part of the problem at a time
timed_search  all of these in order
"""

from .conflict import is_impossible, without_options
from .presolve import presolve
from .solve import bound, min_row, mix, solve, solve_larger, solve_raw
from .solve_timed import solve_timed

__all__ = [
    "bound",
    "is_impossible",
    "min_row",
    "mix",
    "presolve",
    "solve",
    "solve_larger",
    "solve_raw",
    "solve_timed",
    "without_options",
]
