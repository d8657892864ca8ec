"""Good choices without proof: one variable after another takes its best option, until none wants to change.

Used for incumbents: a plan to hold when time runs out, and an upper bound that lets options be ruled out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..problem import Array, Problem

Links = list[list[tuple[int, Array]]]


def descend(problem: Problem, start: Sequence[int] | None = None, max_sweeps: int = 50) -> tuple[int, ...]:
    """Choices that no change of one variable improves; rows are respected where the start lets them.

    Args:
        problem: without restrictions.
        start: full choices to improve; without it, variables choose one after another, looking at those before them.
        max_sweeps: passes over the variables at most.
    """
    links = links_of(problem)
    choices = list(start) if start is not None else _greedy(problem, links)
    totals = [row.base + sum(float(c[choices[v]]) for v, c in row.terms.items()) for row in problem.rows]
    terms: list[list[tuple[int, Array]]] = [[] for _ in problem.names]
    for r, row in enumerate(problem.rows):
        for v, coefficients in row.terms.items():
            terms[v].append((r, coefficients))
    queue = dict.fromkeys(range(problem.num_variables))
    for _ in range(max_sweeps):
        batch, queue = list(queue), {}
        for v in batch:
            cost = conditional_cost(problem, links, choices, v)
            for r, coefficients in terms[v]:
                rest = totals[r] - coefficients[choices[v]]
                room = max(problem.rows[r].bound, totals[r])  # a row broken already may at least not get worse
                cost = np.where(rest + coefficients <= room, cost, np.inf)
            best = int(np.argmin(cost))
            if cost[best] < cost[choices[v]]:
                for r, coefficients in terms[v]:
                    totals[r] += float(coefficients[best] - coefficients[choices[v]])
                choices[v] = best
                queue.update(dict.fromkeys(w for w, _ in links[v]))
        if not queue:
            break
    return tuple(choices)


def links_of(problem: Problem) -> Links:
    """For each variable its neighbours with the table [own options, the neighbour's options]."""
    links: Links = [[] for _ in problem.names]
    for edge in problem.edges:
        table = problem.tables[edge.table]
        links[edge.u].append((edge.w, table))
        links[edge.w].append((edge.u, table.T))
    return links


def conditional_cost(problem: Problem, links: Links, choices: Sequence[int], v: int) -> Array:
    """Cost of each option of v while all others stay as chosen."""
    cost = problem.costs[v]
    for w, table in links[v]:
        cost = cost + table[:, choices[w]]
    return cost


def _greedy(problem: Problem, links: Links) -> list[int]:
    """Variables in order; each looks at chosen neighbours, and at the best case with those still open."""
    choices = [-1] * problem.num_variables
    floors: dict[int, Array] = {}
    for v in range(problem.num_variables):
        cost = problem.costs[v]
        for w, table in links[v]:
            if choices[w] >= 0:
                cost = cost + table[:, choices[w]]
            else:
                floor = floors.get(id(table))
                if floor is None:
                    floor = floors[id(table)] = table.min(axis=1)
                cost = cost + floor
        choices[v] = int(np.argmin(cost))
    return choices
