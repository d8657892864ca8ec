"""A model that a plan is applied to is the planned one, and stays it: what differs, or was done to it, is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from apply_samples import LM, error, message, plan_of, tokens, whole, with_values
from fork_ranks import run_ranks
from torch import Tensor, nn

from autoparallel_fp8 import ApplyError, Plan, PlanError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = (tokens(LM), tokens(LM, 2))


def test_another_one_than_planned() -> None:
    """Shape, dtype, names and what is trained are the plan's."""
    plan = plan_of(with_values(replace(LM, frozen="up")), "dp=1", *BATCH)
    others = [
        with_values(replace(LM, inner=96, frozen="up")),
        with_values(replace(LM, frozen="up")).bfloat16(),
        with_values(replace(LM, positions="", frozen="up")),
        with_values(LM),
    ]
    told = [message(lambda m=m: run_alone(plan, m), PlanError) for m in others]
    do = "\n  at: RandomModel\n  do: pass the model that the plan was made for, or plan this one"
    assert told == [
        f"blocks.0.mlp.up.weight is float32 [96, 64], and was planned as float32 [64, 64]{do}",
        f"embed.weight is bfloat16 [64, 64], and was planned as float32 [64, 64]{do}",
        f"the model has no buffer blocks.0.attention.frequencies{do}",
        f"blocks.0.mlp.up.weight requires a gradient, and was planned frozen{do}",
    ]


def test_the_planned_object_itself_after_a_change() -> None:
    """It is captured again where an attribute, a hook, a class or a config is not what it was; tensors may change."""

    class Doubled(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    x, hooks = torch.randn(8, 16), []
    changes: list[tuple[Callable[[nn.Module], Any], str]] = [
        (lambda m: setattr(m, "eps", 0.5), "is called with 0.5, and was planned with 0.001"),
        (lambda m: setattr(m, "act", torch.relu), "is aten.relu.default, and was planned as aten.tanh.default"),
        (lambda m: m.register_forward_hook(lambda *_: _[2] * 2), "mul is aten.mul.Tensor, and"),
        (
            lambda m: m.layers[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
            "mul is aten.mul.Tensor, and",
        ),
        (lambda m: setattr(m, "__class__", Doubled), "mul is aten.mul.Tensor, and"),
        (lambda m: setattr(m.layers[1], "weight", m.layers[0].weight), "are one tensor, and were planned as two"),
    ]
    for change, says in changes:
        model = Stack()
        plan = plan_of(model, "dp=1", x)
        hooks.append(change(model))
        text = message(lambda p=plan, m=model: run_alone(p, m), PlanError)
        assert re.search(says, text), text
        assert text.endswith("do: it was changed after planning: change it back, or plan it again")
    model = Stack()
    plan = plan_of(model, "dp=1", x)
    model.layers[0].weight.data.normal_()
    model.note = ["of no consequence"]
    assert plan.live.planner.is_as_captured() is False and run_alone(plan, model) is not None
    del model.note
    assert plan.live.planner.is_as_captured()


def test_one_that_computes_otherwise() -> None:
    """A live plan is for the planned object, or one with the same graph; the first difference is told."""
    x = torch.randn(8, 16)
    plans = {is_tied: plan_of(Stack(is_tied=is_tied), "dp=1", x) for is_tied in (False, True)}
    others = [
        (False, Stack(3)),
        (False, Stack(1)),
        (False, Stack(is_tied=True)),
        (True, Stack()),
        (False, Stack(eps=0.5)),
        (False, Stack(act=torch.relu)),
        (False, Stack().requires_grad_(False)),
    ]
    told = [message(lambda p=plans[is_tied], m=m: run_alone(p, m), PlanError) for is_tied, m in others]
    do = "\n  at: Stack\n  do: pass the model that the plan was made for, or plan this one"
    assert told[:6] == [
        f"the model has a parameter layers.2.weight, and the plan has none of that name{do}",
        f"the model has no parameter layers.1.weight{do}",
        f"layers.1.weight and layers.0.weight are one tensor, and were planned as two{do}",
        f"layers.1.weight and layers.0.weight are two tensors, and were planned as one{do}",
        told[4],
        told[5],
    ]
    assert "is called with 0.5, and was planned with 0.001" in told[4]
    assert "is aten.relu.default, and was planned as aten.tanh.default" in told[5]
    assert told[6].startswith("layers.0.weight has no gradient, and was planned with one")
    planned_with = plan_of(Stack(drop=0.5), "dp=1", x)
    text = message(lambda: run_alone(planned_with, Stack(drop=0.5).eval()), PlanError)
    assert text.endswith("do: call train() or eval() on it, as on the planned one; or plan this one")
    assert run_alone(plans[False], Stack()) is not None
    assert plans[False].verify(Stack()).is_ok
    with pytest.raises(PlanError, match=r"was planned with 0\.001"):
        plans[False].verify(Stack(eps=0.5))


def test_what_is_done_to_it_later() -> None:
    """A cast and a replaced parameter are told before a step; parts say what they hold, and run nothing."""
    x = torch.randn(8, 16)
    model = Stack()
    plan = plan_of(model, "dp=2", x, pins={"layers.0.weight": "S(0)"}, is_split=False)

    def run(rank: int) -> Any:
        parallel = plan.apply(model)
        wanted = whole(parallel(x))
        shown = str(parallel)
        told = [message(lambda: parallel.to(torch.bfloat16)(x), UsageError)]
        parallel.to(torch.float32)
        kept = parallel.get_submodule("layers.0").weight
        parallel.get_submodule("layers.0").weight = nn.Parameter(torch.randn(16, 16))
        told.append(message(lambda: parallel(x), UsageError))
        parallel.get_submodule("layers.0").weight = kept
        told.append(message(lambda: parallel.get_submodule("layers.0")(x), UsageError))
        hook = parallel.get_submodule("layers.0").register_forward_hook
        told.append(message(lambda: hook(lambda *_: None), UsageError))
        return told, shown, error(whole(parallel(x)), wanted)

    found = run_ranks(2, run)
    told, shown, rounding = found[0]
    assert found[1][0] == told and rounding < 0.1
    assert told[0].startswith("parameter layers.0.weight is bfloat16, and was planned as float32\n  at: Parallel")
    assert told[1].startswith(
        "parameter layers.0.weight is a plain tensor in place of the DTensor that lies as [S(0)]\n"
    )
    assert told[2].startswith("a part of a parallel model does not run by itself")
    assert told[3].startswith("a hook on a part of a parallel model would never run")
    assert "mesh dp=2" in shown and "weight: float32 [16, 16] as [S(0)], here [8, 16]" in shown


def test_a_model_without_values() -> None:
    """On the meta device, where nothing initialises a tensor."""
    with torch.device("meta"):
        model = Bare()
    plan = plan_of(model, "dp=1", torch.randn(8, 16))
    text = message(lambda: run_alone(plan, model), ApplyError)
    assert text.startswith("the model is on the meta device, and nothing initialises weight\n")


class Stack(nn.Module):
    """Linears with what a config changes without a trace in the parameters."""

    def __init__(
        self, num_layers: int = 2, *, eps: float = 1e-3, act: Any = torch.tanh, is_tied: bool = False, drop: float = 0.0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(num_layers))
        if is_tied:
            self.layers[1].weight = self.layers[0].weight
        self.eps, self.act, self.drop = eps, act, nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(self.act(layer(x) + self.eps))
        return x.sum()


class Bare(nn.Module):
    """A parameter that nobody initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def run_alone(plan: Plan, model: nn.Module) -> Any:
    """Applies in this process, and takes the process group away again."""
    try:
        return plan.apply(model)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
