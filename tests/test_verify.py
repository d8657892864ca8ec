"""`plan.verify()` finds a right plan right and a wrong program wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel_fp8 import AutoParallel, Plan, PlanError, simulate_plan
from autoparallel_fp8.cli import main
from autoparallel_fp8.in_memory import exchange
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.verify import BOUND

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(recipe: str | None = None, mesh: str = "dp=2,tp=2", device: str = "H100", **more: Any) -> Plan:
    return AutoParallel(build("llama3-debug", num_layers=1), mesh, recipe=recipe, device=device, **more).optimize()


@pytest.mark.parametrize(
    ("recipe", "device", "scope"),
    [
        (None, "H100", "local"),
        ("tensorwise", "H100", "local"),
        ("tensorwise", "H100", "global"),
        ("rowwise", "H100", "local"),
        ("rowwise_with_gw_hp", "H100", "local"),
        ("mxfp8", "B200", "local"),
    ],
)
def test_a_plan_gives_the_unsharded_models_numbers(recipe: str | None, device: str, scope: str) -> None:
    """Results and every gradient, on all ranks of the mesh."""
    plan = planned(recipe, device=device, scale_scope=scope)
    result = plan.verify()
    assert result.is_ok, str(result)
    assert result.num_ranks == 4 and all(one.bound == BOUND for one in result.compared)
    assert {one.name for one in result.compared if one.kind == "gradient"} == set(plan.parameters)
    assert result.largest_shrunk[1] < result.largest_shrunk[0]


def test_a_model_without_a_loss_and_with_a_float_input() -> None:
    """Tangents are random, so that a gradient of the wrong part shows."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    plan = AutoParallel(model, "dp=2,tp=2", inputs=(torch.empty(64, 64, device="meta"),), device="H100").optimize()
    assert plan.verify().is_ok


class Attention(nn.Module):
    """Has a bias of keys, whose gradient is zero but for rounding, and scores less by the distance, a float of ints."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 64), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (part(x).unflatten(-1, (4, 16)).transpose(1, 2) for part in (self.q, self.k))
        places = torch.arange(x.shape[1], device=x.device)
        slopes = ((places[None, :] - places[:, None]) * 0.1).to(x.dtype)
        return nn.functional.scaled_dot_product_attention(q, k, k.detach(), attn_mask=slopes)


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_what_is_nothing_but_rounding_is_no_error(recipe: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of each tensor follows how much its last bits say; found here whatever a processor's sums leave."""
    inputs = (torch.empty(4, 16, 32, device="meta"),)
    plan = AutoParallel(Attention(), "dp=2,tp=2", inputs=inputs, recipe=recipe, device="H100")
    made = plan.add_parameter_memory_constraint().optimize()
    assert made.verify().is_ok
    monkeypatch.setattr("autoparallel_fp8.verify.BOUND", -1.0)
    bounds = {one.name: one.bound for one in made.verify().compared}
    assert bounds["k.bias"] > 1e-3 and 0 < max(bounds["q.weight"], bounds["k.weight"]) < BOUND


def last_first(given: list[Tensor], made: list[Tensor]) -> list[Tensor]:
    return made[::-1]


def not_done(given: list[Tensor], made: list[Tensor]) -> list[Tensor]:
    return given


def a_little_off(given: list[Tensor], made: list[Tensor]) -> list[Tensor]:
    return [x * 1.25 if x.dtype.is_floating_point else x for x in made]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("all_reduce", not_done),
        ("all_reduce", a_little_off),
        ("reduce_scatter", last_first),
        ("all_gather", a_little_off),
    ],
)
def test_a_wrong_collective_is_caught(kind: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an error beyond the bound, or as ranks that should hold the same and do not."""
    done = []

    def run(ran: str, reduction: str, given: list[Tensor]) -> list[Tensor]:
        made = exchange(ran, reduction, given)
        if ran != kind:
            return made
        done.append(ran)
        return wrong(given, made)

    plan = planned() if kind == "all_reduce" else fully_split()
    monkeypatch.setattr(simulate_plan, "exchange", run)
    try:
        result = plan.verify()
    except AssertionError:
        assert done
        return
    assert done and not result.is_ok
    assert "WRONG" in str(result)


def fully_split() -> Plan:
    """Every parameter a quarter on each rank, so that it is gathered and its gradient scattered."""
    planner = AutoParallel(build("llama3-debug", num_layers=1), "dp=2,tp=2", device="H100")
    return planner.add_parameter_memory_constraint().optimize()


def test_a_plan_from_a_file_says_what_to_do(tmp_path: Any) -> None:
    """It has no graph."""
    planned().save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="holds no graph to run"):
        Plan.load(tmp_path / "plan.json").verify()


def test_the_command_prints_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """With a line a tensor."""
    assert main(["verify", "llama3-debug", "--layers", "1", "--mesh", "tp=2", "--device", "H100"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("all ") and "2 ranks in one process" in out and "lm_head.weight" in out
