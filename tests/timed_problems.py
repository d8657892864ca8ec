"""Random problems with a limit over time, as files of the IOPDDL contest hold them, and what is true of them.

Nothing here uses the library: `evaluate_file` and `exhaustive_file` read the file's numbers alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

Data = dict[str, Any]
FORBIDDEN = 10**18


def random_file(
    seed: int, num_nodes: int = 6, max_options: int = 3, tightness: float = 0.6, planted: bool = False
) -> Data:
    """A small problem: edges of many kinds (alike, partly forbidden, doubled), intervals long, short and empty.

    Args:
        seed: of everything.
        num_nodes, max_options: the size; exhaustive search looks at `max_options ** num_nodes` choices at most.
        tightness: where the limit lies between the least and the most that a time may hold.
        planted: whether some choices are allowed for certain; the limit lies no lower than what they hold.
    """
    random = np.random.default_rng(seed)
    sizes = random.integers(1, max_options + 1, num_nodes).tolist()
    costs = [_costs(random, size) for size in sizes]
    usages = [random.integers(0, 50, size).tolist() for size in sizes]
    intervals: list[list[int]] = []
    for _ in range(num_nodes):
        start = int(random.integers(0, 10))
        intervals.append([] if random.random() < 0.1 else [start, start + int(random.integers(0, 8))])
    pairs, tables = [], []
    for _ in range(int(random.integers(num_nodes - 1, 2 * num_nodes))):
        u, w = random.choice(num_nodes, 2, replace=False).tolist()
        pairs.append([u, w])
        tables.append(_table(random, sizes[u], sizes[w]))
    low, high = (peak(intervals, [pick(usage) for usage in usages]) for pick in (min, max))
    limit = int(low + tightness * (high - low))
    if planted:
        chosen = [int(random.integers(size)) for size in sizes]
        _allow(chosen, costs, pairs, tables, random)
        held = [usage[x] for usage, x in zip(usages, chosen, strict=True)]
        limit = max(limit, peak(intervals, held))
    nodes = {"costs": costs, "usages": usages, "intervals": intervals}
    return {
        "problem": {
            "name": f"random-{seed}",
            "nodes": nodes,
            "edges": {"nodes": pairs, "costs": tables},
            "usage_limit": limit,
        }
    }


def _allow(
    chosen: list[int],
    costs: list[list[int]],
    pairs: list[list[int]],
    tables: list[list[int]],
    random: np.random.Generator,
) -> None:
    """Give these choices and their pairs a cost."""
    for cost, x in zip(costs, chosen, strict=True):
        cost[x] = int(random.integers(0, 30))
    for (u, w), table in zip(pairs, tables, strict=True):
        table[chosen[u] * len(costs[w]) + chosen[w]] = int(random.integers(0, 40))


def _costs(random: np.random.Generator, size: int) -> list[int]:
    costs = random.integers(0, 30, size)
    costs[random.random(size) < 0.05] = FORBIDDEN
    return costs.tolist()  # type: ignore[no-any-return]


def _table(random: np.random.Generator, n: int, m: int) -> list[int]:
    table = random.integers(0, 40, (n, m))
    kind = random.random()
    if kind < 0.4 and n == m:  # the two lie alike
        allowed = np.eye(n, m, dtype=bool)
        table = np.where(allowed, 0, FORBIDDEN)
    elif kind < 0.7:
        table = np.where(random.random((n, m)) < 0.2, FORBIDDEN, table)
    return table.ravel().tolist()  # type: ignore[no-any-return]


def peak(intervals: list[list[int]], held: list[int]) -> int:
    """The most that is held at a time, where each node holds so much."""
    times = range(max([interval[1] for interval in intervals if interval], default=0))
    return max(
        (sum(h for h, i in zip(held, intervals, strict=True) if i and i[0] <= t < i[1]) for t in times), default=0
    )


def evaluate_file(data: Data, choices: list[int]) -> int | None:
    """The cost of choices; None where a pair, an option or the limit forbids them. From the file's numbers alone."""
    problem = data["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    if len(choices) != len(nodes["costs"]):
        return None
    paid = [cost[x] for cost, x in zip(nodes["costs"], choices, strict=True)]
    for (u, w), table in zip(edges["nodes"], edges["costs"], strict=True):
        paid.append(table[choices[u] * len(nodes["costs"][w]) + choices[w]])
    if any(cost >= FORBIDDEN for cost in paid):
        return None
    changes: dict[int, int] = {}
    for usage, interval, x in zip(nodes["usages"], nodes["intervals"], choices, strict=True):
        if interval:
            changes[interval[0]] = changes.get(interval[0], 0) + usage[x]
            changes[interval[1]] = changes.get(interval[1], 0) - usage[x]
    held = 0
    for time in sorted(changes):
        held += changes[time]
        if problem.get("usage_limit") is not None and held > problem["usage_limit"]:
            return None
    return sum(paid)


def exhaustive_file(data: Data) -> int | None:
    """The least cost of all choices; None where nothing is allowed."""
    ranges = [range(len(cost)) for cost in data["problem"]["nodes"]["costs"]]
    found = (evaluate_file(data, list(choices)) for choices in itertools.product(*ranges))
    return min((cost for cost in found if cost is not None), default=None)
