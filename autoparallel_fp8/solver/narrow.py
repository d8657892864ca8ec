"""What a dual bound says about single options and pairs: the choices to try first, and those that can be ruled out.

The excess of an option is by how much any solution with it must exceed the bound; likewise for a pair. Options and
pairs with more excess than a slack are in no solution that costs less than bound + slack.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..problem import Array, Problem
from .dual import Dual
from .network import Network, Undo


def decode(dual: Dual) -> tuple[int, ...]:
    """Full choices: each variable, in the order of a sweep, takes the option of least excess beside those before it.

    A sweep ends with its backward pass, which leaves with each variable what those after it will cost.
    """
    problem = dual.problem
    excess = _own_excess(dual)
    rank = {v: k for k, v in enumerate(dual.order)}
    links: list[list[tuple[int, Array]]] = [[] for _ in problem.names]
    for edge, table in zip(problem.edges, dual.edge_tables(), strict=True):
        first, second = (edge.u, edge.w) if rank[edge.u] < rank[edge.w] else (edge.w, edge.u)
        table = table if first == edge.u else table.T
        excess[first] = excess[first] + table.min(axis=1)
        links[first].append((second, table))
    choices = [0] * problem.num_variables
    for v in dual.order:
        choices[v] = int(np.argmin(excess[v]))
        for w, table in links[v]:
            excess[w] = excess[w] + table[choices[v]]
    return tuple(choices)


def _own_excess(dual: Dual) -> list[Array]:
    parts = np.split(dual.theta, dual.start[1:-1]) if dual.problem.num_variables else []
    return [part - part.min() for part in parts]


def narrow(problem: Problem, dual: Dual, slack: float) -> tuple[Problem, Undo]:
    """The problem, of which `dual` bounds a priced version, without options and pairs whose excess is above `slack`.

    A solution costs at least the bound plus the excess of each option, or of each pair, that it contains.
    So the problem keeps all solutions that cost at most bound + slack, at the objective they had.
    A hair is added to the slack for rounding: keeping more is never wrong.
    """
    slack += 1e-9 * max(1.0, abs(slack), float(np.abs(dual.theta).max(initial=0.0)))
    excess = _own_excess(dual)
    tables = [table - table.min() for table in dual.edge_tables()]
    for edge, table in zip(problem.edges, tables, strict=True):
        excess[edge.u] = excess[edge.u] + table.min(axis=1)
        excess[edge.w] = excess[edge.w] + table.min(axis=0)
    allowed: dict[tuple[int, bytes], int] = {}
    values: list[Array] = []
    edges = []
    for edge, table in zip(problem.edges, tables, strict=True):
        total = (excess[edge.u] - table.min(axis=1))[:, None] + (excess[edge.w] - table.min(axis=0))[None, :] + table
        keep = total <= slack
        key = (edge.table, np.packbits(keep).tobytes())
        if key not in allowed:
            allowed[key] = len(values)
            values.append(np.where(keep, problem.tables[edge.table], np.inf))
        edges.append(replace(edge, table=allowed[key]))
    net = Network(replace(problem, edges=tuple(edges), tables=tuple(values)))
    for v, total in enumerate(excess):
        if (total > slack).any():
            net.keep(v, np.flatnonzero(total <= slack))
    return net.problem(), net.undo()
