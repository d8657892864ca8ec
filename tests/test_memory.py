"""The memory limit holds for all that a plan keeps: parameters, gradients, optimizer state and activations."""

import re

import pytest

from autoparallel_fp8 import AutoParallel, InfeasibleError, Plan
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.settings import parse_bytes


def plan_within(limit: int | None, batch: int) -> Plan:
    model = build("llama3-debug", num_layers=1)
    return AutoParallel(
        model, "dp=2,tp=2", batch=batch, seq=64, device="H100", memory_limit=limit, time_limit=6
    ).optimize()


@pytest.mark.parametrize("batch", [2, 16])  # parameters, then activations, take the most
def test_a_plan_within_a_limit_is_no_faster_and_fits_or_the_least_is_named(batch: int) -> None:
    free = plan_within(None, batch)
    total = free.memory_bytes["total"]
    outcomes = set()
    for share in (0.9, 0.5, 0.1):
        limit = int(total * share)
        try:
            plan = plan_within(limit, batch)
        except InfeasibleError as error:
            outcomes.add("infeasible")
            found = re.search(r"fits in (.*) a device; the smallest needs (.*)", error.message)
            assert found
            least = parse_bytes(found[2], 0)
            assert least > limit
            smallest = plan_within(least, batch)  # the cure works
            assert smallest.memory_bytes["total"] <= least
        else:
            outcomes.add("fits")
            assert plan.memory_bytes["total"] <= limit == plan.memory_bytes["limit"]
            assert plan.objective_us >= free.objective_us * (1 - 1e-9)
            assert plan.lower_bound_us <= plan.objective_us * (1 + 1e-9)
    assert outcomes == {"fits", "infeasible"}
