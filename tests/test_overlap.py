"""The step is the larger of two sums: exhaustive search agrees, and nothing hides behind compute that is not there."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import problems
from torch import nn

from autoparallel_fp8 import AutoParallel, InfeasibleError
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.overlap import Overlap, bound_step, solve_step
from autoparallel_fp8.problem import Problem
from autoparallel_fp8.solver import bound, solve


def other_costs(problem: Problem, seed: int) -> Problem:
    """The same choices, allowed and forbidden, at other costs."""
    random = np.random.default_rng(seed)

    def changed(a: np.ndarray) -> np.ndarray:
        return np.where(np.isinf(a), np.inf, random.integers(0, 12, a.shape).astype(float))

    return replace(problem, costs=tuple(map(changed, problem.costs)), tables=tuple(map(changed, problem.tables)))


@settings(max_examples=60, deadline=None)
@given(problem=problems(), seed=st.integers(0, 2**16))
def test_the_least_larger_sum_is_found_and_proven(problem: Problem, seed: int) -> None:
    overlap = Overlap(problem, other_costs(problem, seed))
    every = itertools.product(*(range(len(cost)) for cost in problem.costs))
    least = min((overlap.step_us(choices) for choices in every), default=math.inf)
    solution, weight = solve_step(overlap, lambda p, seconds: solve(p, time_limit=seconds))
    assert 0.0 <= weight <= 1.0
    if least == math.inf:
        assert solution.status == "infeasible"
        return
    assert solution.status == "optimal"
    assert solution.objective == overlap.step_us(solution.choices) == pytest.approx(least)
    assert solution.lower_bound <= least + 1e-6 * max(1.0, least)


@settings(max_examples=60, deadline=None)
@given(problem=problems(), seed=st.integers(0, 2**16))
def test_the_bound_of_the_larger_sum_never_exceeds_the_least(problem: Problem, seed: int) -> None:
    overlap = Overlap(problem, other_costs(problem, seed))
    every = itertools.product(*(range(len(cost)) for cost in problem.costs))
    least = min((overlap.step_us(choices) for choices in every), default=math.inf)
    assert bound_step(overlap, bound) <= least + 1e-9 * (max(1.0, least) if least < math.inf else 1.0)


def test_the_bound_of_the_larger_sum_looks_at_more_than_one_weight() -> None:
    """Each sum alone may be small where both together are not."""
    costs, waiting = (np.array([1.0, 9.0]),), (np.array([9.0, 1.0]),)
    overlap = Overlap(Problem(("a",), costs, (), ()), Problem(("a",), waiting, (), ()))
    assert bound_step(overlap, bound) == pytest.approx(5.0)


def test_no_time_left_is_honest() -> None:
    """With nothing but the first weight the bound stays below and the status says so."""
    costs, waiting = (np.array([4.0, 6.0]),), (np.array([9.0, 6.0]),)
    overlap = Overlap(Problem(("a",), costs, (), ()), Problem(("a",), waiting, (), ()))

    def only_first(problem: Problem, seconds: float | None) -> object:
        return solve(problem)

    solution, _ = solve_step(overlap, only_first, time_limit=1e-9)  # type: ignore[arg-type]
    assert (solution.objective, solution.lower_bound, solution.status) == (9.0, 4.0, "feasible")


def test_a_step_is_never_shorter_than_its_communication() -> None:
    plan = AutoParallel(build("llama3-debug", num_layers=1), "dp=64", device="H100").optimize()
    times = plan.step_time_us
    moved = sum(c.us for c in plan.collectives)
    assert plan.status == "optimal"
    assert times["hidden_comm"] <= times["compute"] * (1 + 1e-9)
    assert times["total"] >= moved
    assert times["exposed_comm"] + times["hidden_comm"] >= moved * (1 - 1e-9)
    assert "the step waits for it" in " ".join(plan.notes)


def test_alternatives_at_the_memory_limit_are_those_that_fit() -> None:
    """Explain and score agree on what has no plan within the limit, kept activations included."""
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False))
    inputs = (torch.empty(32, 64, device="meta"),)
    limit = 330_000  # a whole first weight takes 360,448 bytes with all that goes with it
    planner = AutoParallel(model, "dp=4", inputs=inputs, device="H100", memory_limit=limit)
    noted = {}
    for alternative in planner.optimize().explain("0.weight").alternatives:
        try:
            best = planner.score({"0.weight": alternative.placements})
        except InfeasibleError:
            noted[alternative.placements] = alternative.note
        else:
            assert best.memory_bytes["total"] <= limit and not alternative.note
    assert set(noted) == {"R"} and "memory limit" in noted["R"]
