"""Random small models on random meshes: every rank of every plan, held against the unsharded model by `verify`.

`make test` draws a few, `make proof` some hundred, the same ones every time. What fails is shrunk, and printed as the
code that makes it again: `verified(case)` of it gives the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from autoparallel_fp8.rules import OpCall, Signature, elementwise, language
from hypothesis import HealthCheck, Phase, given, seed, settings
from random_models import Case, Model, Trial, cases
from random_plans import graph_errors, verified
from torch import Tensor

from autoparallel_fp8 import simulate_plan
from autoparallel_fp8.in_memory import exchange

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten
GRAPH = 1e-4  # largest error of the captured graph against the module, both in float32
SHARDS, DRAWS = 24, 11  # of the proof: some 260 models, with two plans each
SHRINKING = (Phase.generate, Phase.shrink)


def check(shard: int, draws: int, num_trials: int) -> None:
    """The property on so many draws, the same for the same shard.

    Raises:
        AssertionError: a case fails; it is printed.
    """

    @seed(shard)
    @settings(
        max_examples=draws, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=SHRINKING
    )
    @given(cases(num_trials=num_trials))
    def holds(case: Case) -> None:
        for text in problems(case):
            raise AssertionError(text)

    holds()


def problems(case: Case) -> Iterator[str]:
    """What is wrong with the graph of a case and with each of its plans."""
    wrong = {name: error for name, error in graph_errors(case).items() if not error <= GRAPH}
    if wrong:
        yield f"the graph is not the module: {wrong}\n{Case(case.model)!r}"
    for tried in verified(case):
        if not tried.verification.is_ok:
            yield f"{tried.case!r}\n{tried.verification}"


@pytest.mark.parametrize("shard", [1001, 1002])
def test_a_few_random_plans(shard: int) -> None:
    """Results, gradients and buffers of each plan are the unsharded model's."""
    check(shard, 5, 1)


@pytest.mark.proof
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_plans(shard: int) -> None:
    """The same on some hundred models."""
    check(shard, DRAWS, 2)


def test_a_product_with_one_frozen_operand() -> None:
    """Found here: one device has to undo the other operand's scale, which is one for all ranks."""
    model = Model(seq=16, mlp="relu", inner=32)
    trials = tuple(Trial("dp=2", seed=seed, stay=0.9) for seed in (5, 6))
    assert not list(problems(Case(model, "rowwise", trials=trials)))


PLANTED = Case(Model(mlp="relu", residual=True), trials=tuple(Trial("dp=2,tp=2", seed=k, stay=0.9) for k in range(6)))


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial sum through relu: found among a few random choices, none of which is wrong with the right rule."""

    def wrong(op: OpCall) -> Signature:
        return elementwise(op, linear=((0,),))

    assert not list(problems(PLANTED))
    monkeypatch.setitem(language._RULES, aten.relu.default, wrong)
    found = list(problems(PLANTED))
    assert found and "gradient" in found[0] and "Model(mlp='relu', residual=True)" in found[0]


def test_a_wrong_collective_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-to-all whose pieces arrive at the wrong ranks: routes at random have some, the cheapest ones here none."""

    def wrong(kind: str, reduction: str, given: list[Tensor]) -> list[Tensor]:
        made = exchange(kind, reduction, given)
        return made[::-1] if kind == "all_to_all" else made

    planted = replace(PLANTED, trials=tuple(replace(trial, random_routes=True) for trial in PLANTED.trials))
    assert not list(problems(planted))
    monkeypatch.setattr(simulate_plan, "exchange", wrong)
    try:
        found = list(problems(planted))
    except AssertionError as error:
        found = [str(error)]
    assert found and ("WRONG" in found[0] or "differ" in found[0])
