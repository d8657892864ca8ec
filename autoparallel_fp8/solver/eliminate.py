"""Reductions that take variables out of a `Network`: settled ones, ones with few neighbours, ones that another decides.

Source: variable elimination (min-sum, "bucket elimination", Dechter 1999), limited to what leaves pairwise tables.
"""

from __future__ import annotations

import numpy as np

from ..problem import Array
from .network import Network, Options, Pool

BLOCK = 1 << 20  # numbers in a temporary array: 8 MB


def settle_single(net: Network, queue: dict[int, None]) -> None:
    """Take out variables with one option: their tables become costs of the neighbours.

    The variable's choice is known, so T[0, j] is paid exactly when the neighbour takes j.
    Its own cost goes to the offset and its row terms to the rows' constants, unchanged.
    """
    while queue and net.dead is None:
        batch = list(queue)
        queue.clear()
        for v in batch:
            if net.alive[v] and v not in net.held and net.dead is None and len(net.costs[v]) == 1:
                net.leave_rows(v)
                _eliminate(net, v)


def eliminate_few_neighbours(net: Network, queue: dict[int, None]) -> None:
    """Take out variables that have at most two neighbours and stand in no row.

    Once the neighbours have chosen i and j, the best the variable can do is min over d of A[d, i] + c[d] + B[d, j].
    Nothing else depends on d, so this minimum as a table between the neighbours keeps the optimum.
    A variable in a row stays: its cheapest option may be the one that breaks the row.
    """
    while queue and net.dead is None:
        batch = list(queue)
        queue.clear()
        for v in batch:
            stays = v in net.held or bool(net.terms[v])
            if net.alive[v] and net.dead is None and len(net.links[v]) <= 2 and not stays:
                _eliminate(net, v)


def _eliminate(net: Network, v: int) -> None:
    """Take out v: a constant, a cost or a table stands for it. A settled variable may have any number of neighbours."""
    pool, cost, links = net.pool, net.costs[v], list(net.links[v].items())
    if not np.isfinite(cost).any():
        net.keep(v, np.flatnonzero(np.isfinite(cost)))
        return
    net.remove(v)
    if len(cost) == 1:
        net.offset += float(cost[0])
        for w, table in links:
            net.add_cost(w, _first_row(pool, table))
    elif not links:
        net.offset += float(cost.min())
    elif len(links) == 1:
        ((w, table),) = links
        net.add_cost(w, pool.memo(("project", id(cost), id(table)), lambda: pool.share((table.T + cost).min(axis=1))))
    else:
        (u, a), (w, b) = links
        net.link(u, w, _min_plus(pool, a, cost, b))


def _first_row(pool: Pool, table: Array) -> Array:
    return pool.memo(("row", id(table)), lambda: pool.share(table[0].copy()))


def _min_plus(pool: Pool, a: Array, cost: Array, b: Array) -> Array:
    """[i, j]: min over d of a[d, i] + cost[d] + b[d, j]."""

    def compute() -> Array:
        left = a.T + cost
        n, m = left.shape[0], b.shape[1]
        out = np.empty((n, m))
        step = max(1, BLOCK // max(1, b.size))
        right = np.ascontiguousarray(b.T)
        for i in range(0, n, step):
            out[i : i + step] = (left[i : i + step, None, :] + right[None, :, :]).min(axis=2)
        return pool.share(out)

    return pool.memo(("min plus", id(a), id(cost), id(b)), compute)


def join_determined(net: Network, queue: dict[int, None]) -> None:
    """Make one variable of two where their table allows few pairs.

    A solution takes one allowed pair, so a variable with an option for each allowed pair has the same solutions.
    Costs, row terms and the edges of both follow the pair, so each keeps its objective and its row values.
    Done only where the pairs of options over all edges do not grow, as where one variable decides the other.
    """
    while queue and net.dead is None:
        batch = list(queue)
        queue.clear()
        for v in batch:
            for w in list(net.links[v]) if net.alive[v] else ():
                if w in net.links[v] and not net.held & {v, w} and _is_worth_joining(net, v, w):
                    kept, gone = min(v, w), max(v, w)
                    net.join(kept, gone, _allowed_pairs(net.pool, net.links[kept][gone]))
                    if gone == v:
                        break


def _allowed_pairs(pool: Pool, table: Array) -> Options:
    return pool.memo(("pairs", id(table)), lambda: np.argwhere(np.isfinite(table)))


def _is_worth_joining(net: Network, v: int, w: int) -> bool:
    table = net.links[v][w]
    num_pairs = net.pool.memo(("count", id(table)), lambda: int(np.isfinite(table).sum()))
    if not num_pairs or num_pairs > sum(table.shape):
        return False
    around = {x: t.shape[1] for x, t in (*net.links[v].items(), *net.links[w].items())}
    del around[v], around[w]
    before = sum(t.size for t in net.links[v].values()) + sum(t.size for t in net.links[w].values()) - table.size
    return num_pairs * sum(around.values()) <= before
