"""Small random problems and exhaustive search, for the tests of presolve and solve."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import strategies as st

from autoparallel_fp8.problem import Array, Edge, Problem, Restriction, Row, evaluate

NUMBERS = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 0.5, 1e-3)  # few and small, so that ties are frequent


@st.composite
def problems(draw: st.DrawFn, max_rows: int = 2, max_restrictions: int = 2) -> Problem:
    """3 to 7 variables of 1 to 5 options, with ties, forbidden options and pairs, rows and restrictions."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=3, max_size=7))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    forbidden = draw(st.sampled_from([0.0, 0.0, 0.2, 0.5]))

    def numbers(shape: tuple[int, ...], share: float) -> Array:
        values = random.choice(NUMBERS, shape)
        values[random.random(shape) < share] = np.inf
        return values

    tables: list[Array] = []
    edges = []
    density = draw(st.sampled_from([0.3, 0.6, 1.0]))
    for u, w in itertools.combinations(range(len(sizes)), 2):
        if random.random() < density:
            alike = [k for k, table in enumerate(tables) if table.shape == (sizes[u], sizes[w])]
            if alike and random.random() < 0.5:
                edges.append(Edge(u, w, alike[0]))
                continue
            edges.append(Edge(u, w, len(tables)))
            tables.append(numbers((sizes[u], sizes[w]), forbidden))
    rows = []
    for r in range(draw(st.integers(0, max_rows))):
        terms = {v: numbers((n,), 0.0) for v, n in enumerate(sizes) if random.random() < 0.7}
        least = sum(float(c.min()) for c in terms.values())
        most = sum(float(c.max()) for c in terms.values())
        share = draw(st.sampled_from([-0.1, 0.0, 0.2, 0.4, 0.7, 1.1]))
        rows.append(Row(f"row {r}", 1.0 + least + share * (most - least), terms, 1.0))
    restrictions = []
    for k in range(draw(st.integers(0, max_restrictions))):
        v = int(random.integers(len(sizes)))
        allowed = np.flatnonzero(random.random(sizes[v]) < 0.6)
        restrictions.append(Restriction(f"pin {k}", v, tuple(allowed.tolist())))
    return Problem(
        tuple(f"v{v}" for v in range(len(sizes))),
        tuple(numbers((n,), forbidden / 4) for n in sizes),
        tuple(edges),
        tuple(tables),
        tuple(rows),
        tuple(restrictions),
        float(random.choice(NUMBERS)),
    )


def exhaustive(problem: Problem) -> tuple[float, tuple[int, ...]]:
    """The least objective over all choices, and choices that have it; inf where none is allowed."""
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    for choices in itertools.product(*(range(len(cost)) for cost in problem.costs)):
        value = evaluate(problem, choices)
        if value < best[0]:
            best = (value, choices)
    return best


def layers(num_layers: int = 8, num_ops: int = 20, num_options: int = 5, seed: int = 0) -> Problem:
    """Equal layers in a row that share their tables, with a hub that every layer reads."""
    random = np.random.default_rng(seed)
    tables = [random.integers(0, 30, (num_options, num_options)).astype(float) for _ in range(3 * num_ops)]
    for table in tables:
        table[random.random(table.shape) < 0.1] = np.inf
        np.fill_diagonal(table, 3.0)
    costs = [random.integers(0, 20, num_options).astype(float) for _ in range(num_ops)]
    skips = [int(random.integers(2, num_ops)) for _ in range(num_ops)]
    edges = {}
    for layer, k in itertools.product(range(num_layers), range(num_ops)):
        v = 1 + layer * num_ops + k
        edges[v - 1, v] = k
        if k % 3 == 0 and v - skips[k] >= 1:
            edges[v - skips[k], v] = num_ops + k
        if k == num_ops // 2:
            edges[0, v] = 2 * num_ops + k
    names = ("hub", *(f"layers.{layer}.op{k}" for layer in range(num_layers) for k in range(num_ops)))
    return Problem(
        names,
        (np.zeros(num_options), *costs * num_layers),
        tuple(Edge(u, w, t) for (u, w), t in edges.items()),
        tuple(tables),
    )
