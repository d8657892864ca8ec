"""Exact presolve: a `Problem` in, a smaller one out, and the `Undo` that leads back to the same objective.

A chain of steps, each `step(problem) -> (problem, undo)`; `STEPS` lists them in order, and `presolve` repeats the list
until none finds anything more. Each step's reasoning stands in its docstring, in `prune` and `eliminate`. Equal arrays
are shared throughout (`network.Pool`), so repeated layers cost once. Same problem in, same bytes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from ..problem import Problem
from .eliminate import eliminate_few_neighbours, join_determined, settle_single
from .network import Network, Undo
from .prune import drop_dominated, drop_impossible, drop_row_breakers, drop_separable_edges


@dataclass(frozen=True)
class Step:
    """A reduction as a step of its own: `step(problem)` gives a smaller problem and its undo."""

    reduce: Callable[[Network, dict[int, None]], None]

    def __call__(self, problem: Problem) -> tuple[Problem, Undo]:
        net = Network(forbid_restricted(problem))
        self.reduce(net, net.watch())
        return net.problem(), net.undo()


STEPS = (
    Step(drop_impossible),
    Step(drop_row_breakers),
    Step(drop_separable_edges),
    Step(drop_dominated),
    Step(settle_single),
    Step(eliminate_few_neighbours),
    Step(join_determined),
)


def presolve(problem: Problem, held: Iterable[int] = ()) -> tuple[Problem, Undo]:
    """The problem reduced by all steps until none applies, and the way back.

    Args:
        problem: with rows and restrictions.
        held: variables to leave in, with every possible option, so that each can be pinned afterwards.

    A variable without options in the result says that the problem has no solution.

    Example:
        >>> import numpy as np
        >>> from autoparallel_fp8.problem import Edge, Problem
        >>> costs = (np.array([1.0, 0.0]), np.array([0.0, 2.0]))
        >>> small, undo = presolve(Problem(("a", "b"), costs, (Edge(0, 1, 0),), (np.array([[0.0, 5.0], [3.0, 0.0]]),)))
        >>> small.num_variables, small.offset, undo(())
        (0, 1.0, (0, 0))
    """
    net = Network(forbid_restricted(problem), held=frozenset(held))
    run_steps(net)
    return net.problem(), net.undo()


def run_steps(net: Network) -> None:
    """Apply the steps to a network until none finds anything more, or a variable has no option left."""
    queues = [net.watch() for _ in STEPS]
    while any(queues) and net.dead is None:
        for step, queue in zip(STEPS, queues, strict=True):
            step.reduce(net, queue)


def forbid_restricted(problem: Problem) -> Problem:
    """The problem with its restrictions written as forbidden options; choices mean the same."""
    if not problem.restrictions:
        return problem
    costs = list(problem.costs)
    for restriction in problem.restrictions:
        allowed = np.zeros(len(costs[restriction.variable]), dtype=bool)
        allowed[list(restriction.allowed)] = True
        costs[restriction.variable] = np.where(allowed, costs[restriction.variable], np.inf)
    return replace(problem, costs=tuple(costs), restrictions=())
