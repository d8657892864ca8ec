"""Reductions that drop options, edges or rows and keep every variable.

Each takes a `Network` and the queue of variables to look at, and works until the queue is empty. What follows from
tables alone is remembered in the pool, so equal tables of repeated layers are looked at once.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from ..problem import Array
from .network import Network, Options, Pool

BLOCK = 1 << 20  # numbers in a temporary array: 8 MB
Mask = npt.NDArray[np.bool_]


def drop_impossible(net: Network, queue: dict[int, None]) -> None:
    """Drop options that are forbidden, or have no allowed partner on some edge.

    Such an option makes the objective `inf` whatever the others choose.
    So no solution contains it, and dropping it loses none.
    Dropping one can leave a neighbour's option without partner, which is why neighbours are looked at again.
    """
    while queue and net.dead is None:
        batch = list(queue)
        queue.clear()
        for v in batch:
            if not net.alive[v]:
                continue
            possible = np.isfinite(net.costs[v])
            for table in net.links[v].values():
                possible = possible & _has_partner(net.pool, table)
            if not possible.all():
                net.keep(v, np.flatnonzero(possible))
            if net.dead is not None:
                return


def _has_partner(pool: Pool, table: Array) -> Mask:
    return pool.memo(("partner", id(table)), lambda: np.asarray(np.isfinite(table).any(axis=1)))


def drop_row_breakers(net: Network, queue: dict[int, None]) -> None:
    """Drop options too large for a row even beside the smallest others, and rows that no choice can break.

    If the option's coefficient plus the least of every other member exceeds the row, no solution contains it.
    If even the largest coefficients together stay within the row, the row forbids nothing.
    Both are decided with the row's own tolerance, so what counts as a solution stays the same.
    """
    while queue and net.dead is None:
        rows = sorted({r for v in queue for r in net.terms[v]})
        queue.clear()
        for r in rows:
            _look_at_row(net, r)
            if net.dead is not None:
                return


def _look_at_row(net: Network, r: int) -> None:
    members, bound = net.members[r], net.rows[r].bound
    least = {v: float(net.terms[v][r].min()) for v in members}
    if net.bases[r] + sum(float(net.terms[v][r].max()) for v in members) <= net.rows[r].limit:
        net.drop_row(r)
        return
    room = bound - net.bases[r] - sum(least.values())
    slack = 1e-12 * max(abs(bound), 1.0)  # rounding of the sum
    for v in list(members):
        fits = net.terms[v][r] - least[v] <= room + slack
        if not fits.all():
            net.keep(v, np.flatnonzero(fits))
            if net.dead is not None:
                return


def drop_separable_edges(net: Network, queue: dict[int, None]) -> None:
    """Turn a table that is a sum of a part for each end into costs of the two ends, and drop the edge.

    T[i, j] = f[i] + g[j] contributes f to one end and g to the other, whichever pair is chosen.
    Adding f and g to the ends' costs therefore leaves every solution's objective as it was.
    Tables with a forbidden pair are left alone: their ends are not independent.
    """
    while queue:
        batch = list(queue)
        queue.clear()
        for v in batch:
            for w, table in list(net.links[v].items()):
                parts = net.pool.memo(("separable", id(table)), partial(_parts, net.pool, table))
                if parts is not None:
                    net.unlink(v, w)
                    net.add_cost(v, parts[0])
                    net.add_cost(w, parts[1])


def _parts(pool: Pool, table: Array) -> tuple[Array, Array] | None:
    if not table.size or not np.isfinite(table).all():
        return None
    first, second = table[:, 0], table[0] - table[0, 0]
    rest = np.abs(table - first[:, None] - second[None, :]).max()
    return (pool.share(first.copy()), pool.share(second)) if rest <= 1e-13 * np.abs(table).max() else None


def drop_dominated(net: Network, queue: dict[int, None]) -> None:
    """Drop an option that another option of the variable beats whatever the neighbours do.

    Option b replaces a in any solution at a change of c_b - c_a + sum over edges of (T[b, j] - T[a, j]).
    Where the sum of the largest such differences is <= 0 and b takes no more of any row, the swap never hurts.
    Options go one at a time, later ones first, each beaten by one still there: of two equal ones the first stays.
    """
    while queue and net.dead is None:
        batch = list(queue)
        queue.clear()
        for v in batch:
            if net.alive[v] and v not in net.held and len(net.costs[v]) > 1:
                kept = _undominated(net, v)
                if len(kept) < len(net.costs[v]):
                    net.keep(v, kept)


def _undominated(net: Network, v: int) -> Options:
    tables, coefficients = list(net.links[v].values()), list(net.terms[v].values())
    key = ("undominated", id(net.costs[v]), *map(id, tables), None, *map(id, coefficients))
    return net.pool.memo(key, lambda: _find_undominated(net.pool, net.costs[v], tables, coefficients))


def _find_undominated(pool: Pool, cost: Array, tables: list[Array], coefficients: list[Array]) -> Options:
    """Numbers of the options to keep."""
    with np.errstate(invalid="ignore"):
        worst = cost[None, :] - cost[:, None]  # [a, b]: most that b can cost more than a
        for table in tables:
            worst = worst + pool.memo(("worst", id(table)), partial(_worst_change, table))
    beats = worst <= 0.0
    for coefficient in coefficients:
        beats &= coefficient[None, :] <= coefficient[:, None]
    np.fill_diagonal(beats, False)
    alive = np.ones(len(cost), dtype=bool)
    for a in np.flatnonzero(beats.any(axis=1))[::-1]:
        alive[a] = not (beats[a] & alive).any()
    return np.flatnonzero(alive)


def _worst_change(table: Array) -> Array:
    """[a, b]: max over j of table[b, j] - table[a, j], where j allows a."""
    n, m = table.shape
    worst = np.empty((n, n))
    step = max(1, BLOCK // max(1, n * m))
    with np.errstate(invalid="ignore"):
        for a in range(0, n, step):
            change = table[None, :, :] - table[a : a + step, None, :]
            np.copyto(change, -np.inf, where=np.isinf(table[a : a + step, None, :]))
            worst[a : a + step] = change.max(axis=2)
    return worst
