"""Problems of many equal layers: what their short version says of them holds, and is exact where it can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel_fp8.problem import Array, Edge, Problem, Row, evaluate, row_value
from autoparallel_fp8.solver import search as search_stage
from autoparallel_fp8.solver import solve
from autoparallel_fp8.solver.ascent import ascend
from autoparallel_fp8.solver.descent import descend
from autoparallel_fp8.solver.dual import Dual
from autoparallel_fp8.solver.fold import KEPT, LEAST, Fold, fold, num_layers
from autoparallel_fp8.solver.narrow import decode
from autoparallel_fp8.solver.prices import Priced, find_prices_short
from autoparallel_fp8.solver.tools import Outcome, Tools

TOOLS = Tools(lambda problem, deadline, relaxed: Outcome(None, -np.inf))
PAIRS = [
    *[("a", "b"), ("b", "c"), ("a", "c"), ("hub", "a"), ("hub", "b"), ("hub", "c")],  # inside a layer
    *[("c", "a"), ("b", "b")],  # to the next one
]
seeds = st.integers(0, 1 << 20)


def layered(seed: int, depth: int = LEAST + 2, limit: float | None = None) -> Problem:
    """Three variables a layer in a ring, each tied to the next layer's and to a hub; a first and a last variable.

    With a limit the dearer options of two of the three hold less, and a share of what is held at most is allowed.
    """
    rng = np.random.default_rng(seed)
    sizes = {"a": 3, "b": 3, "c": 3, "hub": 2, "first": 2, "last": 3}

    def costs(name: str) -> Array:
        return np.sort(rng.integers(0, 9, sizes[name])).astype(float)

    def table(u: str, w: str) -> Array:
        made = rng.integers(0, 12, (sizes[u], sizes[w])).astype(float)
        made[rng.integers(sizes[u]), rng.integers(sizes[w])] = np.inf
        return made

    names, vectors = ["hub", "first"], [costs("hub"), costs("first")]
    of_layer = {name: costs(name) for name in "abc"}
    number: dict[str, int] = {"hub": 0, "first": 1}
    for layer in range(depth):
        for name, vector in of_layer.items():
            number[f"{layer}{name}"] = len(names)
            names.append(f"net.layers.{layer}.{name}")
            vectors.append(vector)
    number["last"] = len(names)
    names.append("last")
    vectors.append(costs("last"))
    tables = [table(*pair) for pair in PAIRS]
    edges = []
    for layer in range(depth):
        ends = [(u if u == "hub" else f"{layer}{u}", f"{layer + (t >= 6)}{w}") for t, (u, w) in enumerate(PAIRS)]
        edges += [Edge(number[u], number[w], t) for t, (u, w) in enumerate(ends) if w in number]
    tables += [table("first", "a"), table("c", "last")]
    count = len(PAIRS)
    edges += [Edge(1, number["0a"], count), Edge(number[f"{depth - 1}c"], number["last"], count + 1)]
    problem = Problem(tuple(names), tuple(vectors), tuple(edges), tuple(tables))
    if limit is None:
        return problem
    held = {number[f"{layer}{name}"]: 9.0 - of_layer[name] for layer in range(depth) for name in "ab"}
    most = sum(float(c.max()) for c in held.values())
    least = sum(float(c.min()) for c in held.values())
    return replace(problem, rows=(Row("memory", least + limit * (most - least), held),))


@pytest.fixture
def always_folded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(search_stage, "FOLD_PAIRS", 0)
    monkeypatch.setattr(search_stage, "SMALL_PAIRS", 0)
    yield


@settings(max_examples=10, deadline=None)
@given(seeds)
def test_moved_costs_of_the_short_problem_bound_the_long_one(seed: int) -> None:
    """Whatever they are: before, between and after the sweeps; in the end as well as sweeps over all layers."""
    problem = layered(seed)
    best = solve(problem)
    folded = fold(problem)
    assert folded is not None and best.status == "optimal"
    assert folded.short.num_variables == 3 + 3 * 2 * KEPT
    dual = Dual(folded.short)
    for _ in range(4):
        lifted = folded.lift(dual, problem)
        assert lifted.bound() <= best.objective + 1e-9
        dual.sweep()
    ascend(dual, TOOLS)
    lifted, whole = folded.lift(dual, problem), Dual(problem)
    assert ascend(lifted, TOOLS) >= ascend(whole, TOOLS) - 0.02 * abs(best.objective)
    assert lifted.bound() <= best.objective + 1e-9


@settings(max_examples=10, deadline=None)
@given(seeds)
def test_moved_costs_add_up(seed: int) -> None:
    """What is moved to a variable is taken from its edges: any choices cost the same before and after."""
    problem = layered(seed)
    folded = fold(problem)
    assert folded is not None
    dual = Dual(folded.short)
    dual.sweep()
    lifted = folded.lift(dual, problem)
    rng = np.random.default_rng(seed)
    choices = [int(rng.integers(len(cost))) for cost in problem.costs]
    own = sum(lifted.theta[lifted.start[v] + x] for v, x in enumerate(choices))
    pairs = sum(
        table[choices[edge.u], choices[edge.w]] for edge, table in zip(problem.edges, lifted.edge_tables(), strict=True)
    )
    assert own + pairs == pytest.approx(evaluate(problem, choices))


@pytest.mark.usefixtures("always_folded")
@pytest.mark.parametrize("limit", [None, 0.15, 0.4, 1.0])
def test_folding_finds_what_is_found_without(limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimum, with a row that binds and with one that does not, and that nothing is allowed."""
    used: list[int] = []

    def counted(folded: Fold, tools: Tools) -> Priced:
        used.append(folded.short.num_variables)
        return find_prices_short(folded, tools)

    monkeypatch.setattr(search_stage, "find_prices_short", counted)
    for seed in range(6):
        problem = layered(seed, limit=limit)
        found = solve(problem)
        with monkeypatch.context() as patch:
            patch.setattr(search_stage, "FOLD_PAIRS", 1 << 60)
            plain = solve(problem)
        assert plain.status in ("optimal", "infeasible")
        if plain.status == "infeasible":
            assert found.status == "infeasible"
            continue
        assert found.lower_bound <= plain.objective + 1e-6
        assert found.objective >= plain.objective - 1e-6
        assert found.gap <= 1e-3
        assert evaluate(problem, found.choices) == found.objective
    assert used


def test_choices_are_led_back_to_every_layer() -> None:
    """The inner layers choose as the third does; with a row some choose cheaply, the others small."""
    problem = layered(3, depth=30)
    folded = fold(problem)
    assert folded is not None
    dual = Dual(folded.short)
    ascend(dual, TOOLS)
    choices = folded.lift_choices(descend(folded.short, decode(dual)))
    by_layer = [choices[2 + 3 * layer : 5 + 3 * layer] for layer in range(30)]
    assert len(set(by_layer[2:-3])) == 1
    limited = layered(3, depth=30, limit=0.3)
    found = solve(limited)
    assert row_value(limited.rows[0], found.choices) <= limited.rows[0].bound


def test_layers_that_differ_are_not_folded() -> None:
    """In a cost, in a table, in their number of variables; few layers, or names without numbers."""
    problem = layered(0)
    assert num_layers(problem) == LEAST + 2 and fold(problem) is not None
    middle = problem.names.index("net.layers.6.a")
    costs = list(problem.costs)
    costs[middle] = costs[middle] + 1.0
    assert fold(replace(problem, costs=tuple(costs))) is None
    tables = (*problem.tables, problem.tables[0] + 1.0)
    edges = [replace(e, table=len(tables) - 1) if middle in (e.u, e.w) and e.table == 0 else e for e in problem.edges]
    assert fold(replace(problem, edges=tuple(edges), tables=tables)) is None
    assert fold(replace(problem, edges=tuple(e for e in problem.edges if middle not in (e.u, e.w)))) is not None
    assert fold(layered(0, depth=LEAST - 1)) is None
    assert fold(replace(problem, names=tuple(f"v{v}" for v in range(problem.num_variables)))) is None
    names = list(problem.names)
    names[middle] = "net.layers.6.other"
    assert fold(replace(problem, names=tuple(names))) is None
