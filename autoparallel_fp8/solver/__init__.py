"""From a `Problem` to a `Solution` with a proof. `solve.py` is the way in and the only file that knows the ILP solver.

presolve   exact steps with an undo, on a `network`: `prune` drops options, `eliminate` drops variables
search     bound, guess, narrow, and a program for what is left
dual       a lower bound by dual ascent; `narrow` rules out what the bound excludes
descent    better choices by changing one variable at a time
prices     what a unit of a row (memory) is worth
conflict   a small set of constraints that cannot hold together
"""

from .conflict import without_options
from .presolve import presolve
from .solve import min_row, mix, solve, solve_larger, solve_raw

__all__ = ["min_row", "mix", "presolve", "solve", "solve_larger", "solve_raw", "without_options"]
