"""When a rank runs what: gathers ahead, reductions behind, few calls, and just the collectives of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel_fp8 import ApplyError, AutoParallel, Plan
from autoparallel_fp8.apply import schedule_of
from autoparallel_fp8.items import Begin, End, Item, gives, starts
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.ops.stand_ins import stand_in
from autoparallel_fp8.program import Key, RunOp
from autoparallel_fp8.rank import Calls
from autoparallel_fp8.reread import reread
from autoparallel_fp8.schedule import Schedule


@cache
def fully_split(recipe: str | None = None) -> Plan:
    """Every parameter a quarter on each rank: it is gathered, and its gradient scattered."""
    planner = AutoParallel(build("llama3-debug", num_layers=3), "dp=2,tp=2", recipe=recipe, device="H100")
    return planner.add_parameter_memory_constraint().optimize()


def read_again(plan: Plan, written: Schedule) -> dict[Key, int]:
    live = plan.live
    assert live is not None
    sizes = live.space.mesh.sizes
    calls = Calls(live.space, live.choices, (0,) * len(sizes), stand_in, device="meta")
    return reread(written, calls, plan.collectives, names=live.space.mesh.names)


def places(plan: Plan, items: Sequence[Item], layer: str, kind: type, test: Any) -> list[int]:
    """Where the items of a kind stand that are ops of a layer, or move weights or gradients of it."""
    assert plan.live is not None
    nodes = plan.live.space.graph.nodes

    def names(item: Item) -> list[str]:
        if isinstance(item, RunOp):
            return [nodes[item.node].name]
        return [nodes[m.ref.node].name for m in (item.moves if isinstance(item, (Begin, End)) else (item,))]

    return [
        i
        for i, item in enumerate(items)
        if isinstance(item, kind) and all(layer in name for name in names(item)) and test(item)
    ]


def reduces(plan: Plan, item: Begin | End) -> bool:
    return hides(plan, item) and item.moves[0].step.reduction == "sum"


def gathers(plan: Plan, item: Begin | End) -> bool:
    return hides(plan, item) and item.moves[0].step.kind == "all_gather"


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_everything_is_there_when_it_is_read(recipe: str | None) -> None:
    """Each list makes each value once, before it is read; what was begun ends, once."""
    written = schedule_of(fully_split(recipe).live)  # type: ignore[arg-type]
    given = {key for _, key in written.program.given}
    for items, more in (
        (written.inference, ()),
        (written.forward, ()),
        (written.backward, written.saved),
        (written.unreduced, written.saved),
    ):
        there = given | set(more)
        open_: set[int] = set()
        for item in items:
            assert set(starts(item)) <= there, item
            assert not set(gives(item)) & there, item
            there.update(gives(item))
            if isinstance(item, Begin):
                open_.add(item.number)
            elif isinstance(item, End):
                open_.remove(item.number)
        assert not open_


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_weights_are_gathered_a_layer_ahead(recipe: str | None) -> None:
    """Their gathers start while the layer before computes, and are waited for in their own; so in backward."""
    plan = fully_split(recipe)
    written = schedule_of(plan.live)  # type: ignore[arg-type]
    for items, layer, before in (
        (written.forward, "layers.1.", "layers.0."),
        (written.backward, "layers.1.", "layers.2."),
    ):
        begun = places(plan, items, layer, Begin, lambda x: gathers(plan, x))
        ended = places(plan, items, layer, End, lambda x: gathers(plan, x))
        gemms = places(plan, items, before, RunOp, lambda x: is_gemm(plan, x))
        own = places(plan, items, layer, RunOp, lambda x: is_gemm(plan, x))
        assert len(begun) == len(ended) and 1 <= len(begun) <= 3
        assert max(begun) < gemms[-1] < min(ended) < own[-1]
        assert begun[0] > gemms[0] - 60  # not at the start of the program


def test_reductions_of_a_layer_go_together_and_are_waited_for_later() -> None:
    """One call a kind, group and dtype, begun when the layer's backward is done, ended a layer later."""
    plan = fully_split("tensorwise")
    items = schedule_of(plan.live).backward  # type: ignore[arg-type]
    begun, *others = places(plan, items, "layers.2.", Begin, lambda x: reduces(plan, x))
    ended = places(plan, items, "layers.2.", End, lambda x: reduces(plan, x))[0]
    assert not others or items[others[0]].moves[0].step != items[begun].moves[0].step  # type: ignore[union-attr]
    own = places(plan, items, "layers.2.", RunOp, lambda x: is_gemm(plan, x))
    after = places(plan, items, "layers.1.", RunOp, lambda x: is_gemm(plan, x))
    assert len(items[begun].moves) == 9  # type: ignore[union-attr]  # seven linears, two norms
    assert own[-1] < begun < after[0] and after[-1] < ended


def test_small_maxima_of_a_layer_are_reduced_in_one_call() -> None:
    """The amaxes of its weights, where these are cast before they are gathered."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(3))) for _ in "ab"))
    planner = AutoParallel(
        model.bfloat16(), "dp=4", inputs=(torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta"),),
        recipe="tensorwise", device="H100",
    )  # fmt: skip
    plan = planner.add_parameter_memory_constraint().optimize()
    items = schedule_of(plan.live).forward  # type: ignore[arg-type]
    maxima = [x for x in items if isinstance(x, Begin) and x.moves[0].step.reduction == "max"]
    assert [len(x.moves) for x in maxima] == [3, 3]


def hides(plan: Plan, item: Begin | End) -> bool:
    return all(plan.live.shape.links[move.link].is_hideable for move in item.moves)  # type: ignore[union-attr]


def is_gemm(plan: Plan, item: RunOp) -> bool:
    return plan.live.space.graph.nodes[item.node].op_name in ("aten.mm.default", "aten._scaled_mm.default")  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise"])
def test_the_program_sends_what_the_plan_says(recipe: str | None) -> None:
    """And keeps for backward what the plan's memory counts, within a tenth."""
    plan = fully_split(recipe)
    saved = read_again(plan, schedule_of(plan.live))  # type: ignore[arg-type]
    assert sum(saved.values()) == pytest.approx(plan.memory_bytes["activations"], rel=0.1)


def test_a_wrong_program_is_caught_by_reading_it_again() -> None:
    """Another kind, other axes, half the bytes, another dtype, one more collective."""
    plan = fully_split("tensorwise")
    written = schedule_of(plan.live)  # type: ignore[arg-type]
    first = next(x for x in written.forward if isinstance(x, Begin) and x.moves[0].step.kind == "all_gather")
    twice = [Begin(10**6, first.moves[:1]), End(10**6, first.moves[:1])]
    at = written.forward.index(first)
    more = replace(written, forward=(*written.forward[:at], *twice, *written.forward[at:]))
    with pytest.raises(ApplyError, match=r"sends more than the plan has: all_gather over .* 1 times"):
        read_again(plan, more)
    axes = replaced(written, first, lambda step: replace(step, axes=(0,)))
    with pytest.raises((ApplyError, RuntimeError, AssertionError)):
        read_again(plan, axes)
    fewer = replace(plan, collectives=plan.collectives[1:])
    with pytest.raises(ApplyError, match="sends more than the plan has"):
        read_again(fewer, written)
    wide = tuple(replace(c, dtype="bfloat16") if c.dtype == "float8_e4m3fn" else c for c in plan.collectives)
    with pytest.raises(ApplyError, match="float8_e4m3fn"):
        read_again(replace(plan, collectives=wide), written)


def replaced(written: Schedule, begin: Begin, change: Any) -> Schedule:
    """The schedule with the steps of one call changed."""
    moves = tuple(replace(move, step=change(move.step)) for move in begin.moves)
    other: dict[Item, Item] = {
        begin: Begin(begin.number, moves),
        End(begin.number, begin.moves): End(begin.number, moves),
    }
    return replace(written, forward=tuple(other.get(x, x) for x in written.forward))


class Square(nn.Module):
    """Its gradient's reduction is followed by nothing but a view."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x).square().sum()


def test_what_waits_for_the_last_batch_is_what_is_reduced() -> None:
    """Without reductions the gradient's own addends wait; results need none of it."""
    model = Square()
    asked = AutoParallel(model, "dp=4", inputs=(torch.empty(4096, 64, device="meta"),), device="H100")
    plan = asked.add_input_constraints(["S(0)"]).optimize()
    written = schedule_of(plan.live)  # type: ignore[arg-type]
    reduced = [x for x in written.backward if isinstance(x, Begin) and x.moves[0].step.reduction]
    assert len(reduced) == 1 == len(written.waiting)
    assert not any(isinstance(x, Begin) and x.moves[0].step.reduction for x in written.unreduced)
    assert written.waiting[0] in {key for x in written.unreduced for key in gives(x)}


class Positions(nn.Module):
    """What is made of a weight reads a constant too."""

    def __init__(self) -> None:
        super().__init__()
        self.wpe, self.l = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x + self.wpe(torch.arange(64).unsqueeze(0)))


def test_constants_that_weights_read_come_before_them() -> None:
    """Position embeddings: a lookup of numbers that nobody passes."""
    plan = AutoParallel(Positions(), "dp=2", inputs=(torch.empty(8, 64, 64, device="meta"),), device="H100").optimize()
    assert plan.verify().is_ok
