"""Training a parallel model: names and checkpoints, optimizers, several batches an update, values made on the spot."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from apply_samples import (
    LM,
    alike_on_all,
    error,
    gradients,
    plan_of,
    simulated,
    stepped,
    tokens,
    unsharded,
    whole,
    with_values,
)
from fork_ranks import run_ranks
from random_models import Trial
from random_plans import fast_links, random_plan
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from autoparallel_fp8 import AutoParallel, Plan
from autoparallel_fp8 import compiled as compiled_module
from autoparallel_fp8.apply import schedule_of
from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.items import Begin, Item
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.process_groups import ProcessGroups
from autoparallel_fp8.program import RunStep, reads_of
from autoparallel_fp8.saving import halves

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = 2e-5
WHOLE = replace(LM, tied=True, buffer="counted", frozen="norm", unused=True)
"""Every kind of parameter and buffer: tied, frozen, unused; persistent and not."""


class TestNames:
    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_state_dict_and_checkpoints(self, tmp_path: Path) -> None:
        """The model's names and the plan's placements; what one mesh saves, another, FSDP2 and no mesh at all load."""
        model, other, batch = with_values(WHOLE), with_values(WHOLE, 1), (tokens(WHOLE), tokens(WHOLE, 2))
        for one in (model, other):
            one.again = one.get_submodule("blocks.0.mlp")
        pins = {"*norm*": "R, R", "*.attention.?.weight": "S(0), S(0)", "*.up.weight": "R, S(1)"}
        plans = [plan_of(model, "dp=2,tp=2", *batch, is_split=False, pins=pins), plan_of(other, "dp=4", *batch)]

        def run(rank: int) -> Any:
            square, row = plans[0].apply(model), plans[1].apply(other)
            found: dict[str, Any] = {"names": [names_of(square), names_of(row)], "placements": placements_of(square)}
            assert all(isinstance(p, DTensor) for p in square.parameters())
            dcp.save(square.state_dict(), checkpoint_id=tmp_path / "square")
            before = whole(row.eval()(*batch))
            state = row.state_dict()
            dcp.load(state, checkpoint_id=tmp_path / "square")
            row.load_state_dict(state)
            found["loss"] = [before, whole(square.eval()(*batch)), whole(row(*batch))]
            sharded = fully_shard(deepcopy(other), mesh=init_device_mesh("cpu", (4,)))
            dcp.save(sharded.state_dict(), checkpoint_id=tmp_path / "fsdp")
            state = square.state_dict()
            dcp.load(state, checkpoint_id=tmp_path / "fsdp")
            found["loss"].append(whole(square(*batch)))
            return found

        found = run_ranks(4, run)[0]
        assert found["names"] == [names_of(model)] * 2
        assert found["placements"] == {name: p.placements for name, p in plans[0].parameters.items()}
        assert {"S(0), S(0)", "R, R", "R, S(1)"} <= {", ".join(p) for p in found["placements"].values()}
        wanted = [whole(m(*batch)) for m in (other, model)]
        assert error(found["loss"], [wanted[0], wanted[1], wanted[1], wanted[0]]) < ROUNDING
        state = other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "square", no_dist=True)
        assert error(other.state_dict(), {**model.state_dict(), "average": other.average}) == 0.0
        shutil.rmtree(tmp_path)


def names_of(module: nn.Module) -> list[list[str]]:
    """Of everything, in order."""
    return [
        list(module.state_dict()),
        [name for name, _ in module.named_parameters()],
        [name for name, _ in module.named_parameters(remove_duplicate=False)],
        [name for name, _ in module.named_buffers()],
        [name for name, p in module.named_parameters() if p.requires_grad],
    ]


def placements_of(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """As a plan writes them."""
    return {
        name: tuple("R" if q.is_replicate() else f"S({q.dim})" for q in p.placements)  # type: ignore[attr-defined]
        for name, p in module.named_parameters()
    }


class TestOptimizers:
    def test_adamw_as_in_one_process(self) -> None:
        """Losses, gradient norms and parameters over five updates with clipping, in float32."""
        model = with_values(LM)
        plan = plan_of(model, "dp=2,tp=2", tokens(LM), tokens(LM, 2))

        def run(rank: int) -> Any:
            return trained(plan.apply(model))

        found = run_ranks(4, run)
        assert alike_on_all(found)
        assert error(found[0], trained(model)) < 1e-5

    def test_float32_masters(self) -> None:
        """Parameters and gradients stay float32 around a bfloat16 step."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model, batch = with_values(LM), (tokens(LM), tokens(LM, 2))
        plan = plan_of(model, "dp=2", *batch, mixed_precision=policy)

        def run(rank: int) -> Any:
            parallel = plan.apply(model)
            assert {p.dtype for p in parallel.parameters()} == {torch.float32}
            return stepped(parallel, *batch)

        found, wanted = run_ranks(2, run)[0], simulated(plan, model, batch)
        assert error(found["gradient"], wanted["gradient"]) == 0.0
        assert {g.dtype for g in found["gradient"].values()} == {torch.float32}
        assert 1e-4 < error(found["gradient"], unsharded(model, *batch)["gradient"]) < 0.2


def trained(module: nn.Module) -> Any:
    """Losses, norms and the parameters in the end."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(5):
        optimizer.zero_grad()
        loss = module(tokens(LM, step), tokens(LM, step + 9))
        loss.backward()
        losses.append(whole(loss))
        norms.append(whole(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        optimizer.step()
    return losses, norms, [whole(p) for p in module.parameters()]


class TestSeveralBatches:
    @pytest.mark.parametrize("recipe", [None, "tensorwise"])
    def test_one_reduction_an_update(self, recipe: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """Gradients of three batches are reduced once, by the plan's reductions, and are the sum of each one's."""
        model, batches = with_values(LM), [(tokens(LM, k), tokens(LM, k + 9)) for k in range(3)]
        plan = plan_of(model, "dp=2,tp=2", *batches[0], recipe=recipe, batch="S(0), R")

        def run(rank: int) -> Any:
            calls = counted_calls(monkeypatch)
            parallel = plan.apply(model)
            singly: list[Any] = []
            for batch in batches:
                parallel.zero_grad()
                parallel(*batch).backward()
                singly.append(gradients(parallel))
            parallel.zero_grad()
            calls.clear()
            with parallel.no_sync():
                for batch in batches[:2]:
                    parallel(*batch).backward()
            quiet = Counter(calls)
            assert all(p.grad is None for p in parallel.parameters())
            optimizer = torch.optim.SGD(parallel.parameters(), lr=1.0)
            optimizer.step()  # nothing is there yet for it, and nothing to clear
            optimizer.zero_grad()
            calls.clear()
            parallel(*batches[2]).backward()
            last, once = Counter(calls), gradients(parallel)
            for p in parallel.parameters():
                p.grad = None
            for k, batch in enumerate(batches):
                parallel.set_requires_gradient_sync(k == 2)
                parallel(*batch).backward()
            again = gradients(parallel)
            with parallel.no_sync():
                parallel(*batches[0]).backward()
            parallel.zero_grad()  # what waits is gone, too
            parallel(*batches[0]).backward()
            assert error(gradients(parallel), singly[0]) == 0.0
            return quiet, last, singly, once, again

        quiet, last, singly, once, again = run_ranks(4, run)[0]
        assert plan.live is not None
        written = schedule_of(plan.live)
        assert last == calls_in(written.forward) + calls_in(written.backward)
        once_quiet = calls_in(written.forward) + calls_in(written.unreduced)
        assert quiet == once_quiet + once_quiet
        reduced = last - calls_in(written.forward) - calls_in(written.unreduced)
        assert reduced and not any("gather" in kind for kind in reduced)
        assert 5 < len(written.waiting) < len(once)
        total = {name: sum(grads[name] for grads in singly[1:]) + singly[0][name] for name in once}
        assert error(once, total) < 1e-6 and error(again, once) == 0.0

    def test_values_that_others_read_are_not_summed(self) -> None:
        """What waits for a reduction may lead on to earlier layers: then it is reduced at once. Gradients are apart."""
        torch.manual_seed(0)
        model, batches = Added(), [torch.randn(8, 16) for _ in range(3)]
        made = AutoParallel(model, "dp=2", inputs=batches[:1], device=fast_links("H100"))
        trials = [Trial("dp=2", seed=seed) for seed in range(12)]
        plans = [made.plan_of(random_plan(made, made._prepare(), trial), made.overlap()) for trial in trials]
        assert sum(map(has_shared_values, plans)) >= 2

        def run(rank: int) -> Any:
            return [accumulated(plan.apply(model), batches) for plan in [made.optimize(), *plans]]

        wanted = accumulated(model, batches)
        assert all(error(grads, wanted) < ROUNDING for grads in run_ranks(2, run)[0])

    def test_what_comes_from_outside_is_summed(self) -> None:
        """The gradient of a result, added to one that waits for its reduction."""
        torch.manual_seed(0)
        model, batches = Returned(), [torch.randn(8, 16) for _ in range(3)]
        plan = plan_of(model, "dp=2", batches[0], is_split=False, batch="S(0)", pins={"weight": "R"})

        def run(rank: int) -> Any:
            return accumulated(plan.apply(model), batches)

        assert error(run_ranks(2, run)[0], accumulated(model, batches)) < ROUNDING


def has_shared_values(plan: Plan) -> bool:
    """Whether a value that is summed up for a gradient is read on another way, too."""
    live = plan.live
    assert live is not None
    backward = halves(schedule_of(live).program, live.space.graph, live.pricing.fusion.kept).backward
    reduced = [i for i in backward if isinstance(i, RunStep) and live.shape.links[i.link].is_hideable]
    sources = Counter(key for i in backward for key in reads_of(i))
    return any(sources[i.source] > 1 for i in reduced if i.step.reduction == "sum")


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts collectives from here on, by kind and axes, on this rank."""
    calls: Counter[str] = Counter()
    begin = ProcessGroups.begin

    def counted(self: ProcessGroups, steps: Sequence[Any], axes: tuple[int, ...], flats: list[Tensor]) -> list[Tensor]:
        calls.update(f"{step.kind} {axes}" for step in steps)
        return begin(self, steps, axes, flats)

    monkeypatch.setattr(ProcessGroups, "begin", counted)
    return calls


def calls_in(items: Sequence[Item]) -> Counter[str]:
    """What `counted_calls` counts when the items run."""
    return Counter(f"{m.step.kind} {m.step.axes}" for item in items if isinstance(item, Begin) for m in item.moves)


def accumulated(module: Any, batches: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Gradients of all batches together, where possible reduced in the end."""
    for batch in batches[:-1]:
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(False)
        summed(module(batch)).backward()
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(True)
    summed(module(batches[-1])).backward()
    return gradients(module)


def summed(results: Any) -> Tensor:
    """All results, added up."""
    return sum((x.sum() for x in results[1:]), results[0].sum()) if isinstance(results, tuple) else results


class Returned(nn.Module):
    """Uses a parameter, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ self.weight).pow(2).sum(), self.weight * 1 + 1


class Added(nn.Module):
    """Parameters as large as the activations, whose gradients are values on the way to others."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.added, self.same, self.more = (nn.Parameter(torch.randn(8, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x)) + self.added + self.same + self.more)
        return (y + self.more).pow(2).sum()


class TestCompiled:
    @pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
    @pytest.mark.parametrize("recipe", [None, pytest.param("tensorwise", marks=pytest.mark.proof)])
    def test_it_computes_what_eager_does(self, recipe: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """Results and gradients to rounding, over two batches an update too; the graph is ops and collectives alone."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
        model, batches = model.to(torch.bfloat16), torch.randn(2, 32, 64, dtype=torch.bfloat16).unbind()
        plan = plan_of(model, "dp=2", batches[0], recipe=recipe, batch="S(0)")

        def run(rank: int) -> Any:
            graphs: list[fx.GraphModule] = []
            traced = compiled_module.traced

            def noted(*arguments: Any) -> fx.GraphModule:
                graphs.append(traced(*arguments))
                return graphs[-1]

            monkeypatch.setattr(compiled_module, "traced", noted)
            found = []
            for is_compiled in (False, True):
                parallel = plan.apply(model, compile=is_compiled)
                found.append([stepped(parallel, batches[0])])
                parallel.zero_grad()
                with parallel.no_sync():
                    parallel(batches[0]).sum().backward()
                parallel(batches[1]).sum().backward()
                found[-1].append(gradients(parallel))
                with torch.no_grad():
                    found[-1].append(whole(parallel(batches[1])))
            ops = {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"}
            return found, len(graphs), sorted({node.op for g in graphs for node in g.graph.nodes}), ops

        (eager, compiled), num_graphs, kinds, ops = run_ranks(2, run)[0]
        assert error(compiled, eager) < 1e-2
        assert num_graphs == 5  # forward, backward, unreduced, backward that adds, inference
        assert kinds == ["call_function", "output", "placeholder"]
        others = {op for op in ops if not op.startswith(("aten.", "_c10d_functional.", "prims."))}
        assert all(op.startswith(("autoparallel_fp8.", "<built-in function getitem")) for op in others)

    def test_torch_compile_leaves_it_alone(self) -> None:
        """As a whole and within a function; it says what to do where nothing may be left alone."""
        model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(8, 16)
        plan = plan_of(model, "dp=1", x)
        try:
            parallel = plan.apply(model)
            wanted = stepped(parallel, x)

            def within(x: Tensor) -> Tensor:
                made: Tensor = parallel(x) * 1
                return made

            for function in (torch.compile(parallel, backend="eager"), torch.compile(within, backend="eager")):
                parallel.zero_grad()
                made = function(x)
                made.sum().backward()
                assert error([whole(made)], wanted["output"]) == 0.0
                assert error(gradients(parallel), wanted["gradient"]) == 0.0
            with pytest.raises(RuntimeError, match=r"apply\(model, compile=True\)"):
                torch.compile(lambda x: parallel(x) + 1, backend="eager", fullgraph=True)(x)
        finally:
            dist.destroy_process_group()


class TestMetaDevice:
    def test_values_do_not_depend_on_the_mesh(self) -> None:
        """One seed gives the same model on every mesh, another seed another; what cannot be random comes right."""
        model = build("llama3-debug", num_layers=1)
        batch = torch.zeros(4, 16, dtype=torch.int64)
        found, other = [], None
        for mesh, num_ranks in (("dp=1", 1), ("dp=2", 2), ("dp=2,tp=2", 4)):
            plan = plan_of(model, mesh, batch)

            def run(rank: int, plan: Plan = plan) -> Any:
                made = [plan.apply(model, seed=seed) for seed in (3, 4)]
                ones = plan.apply(model, init=lambda module: ones_in(module))
                return [dict_of(m) for m in (*made, ones)]

            results = run_ranks(num_ranks, run, has_group=num_ranks > 1)
            assert alike_on_all(results)
            found.append(results[0])
        first, other, ones = found[0]
        assert all(error(values, found[0]) == 0.0 for values in found)
        weights = [name for name in first if name.endswith("proj.weight")]
        assert len(weights) == 7 and all(not torch.equal(first[name], other[name]) for name in weights)
        assert all(0.01 < float(first[name].float().std()) < 0.03 for name in weights)
        assert all(bool((ones[name] == 1).all()) for name in weights)
        rotary = first["model.rotary_emb.inv_freq"]
        config: Any = model.config
        wanted = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
        assert rotary.shape == wanted.shape and error(rotary, wanted) < 1e-6


def ones_in(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)


def dict_of(module: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers by name."""
    return {name: whole(x) for name, x in [*module.named_parameters(), *module.named_buffers()]}


def test_what_backward_needs_may_not_change_before_it() -> None:
    """A step of the optimizer, or a batch's memory written anew, between forward and backward; frozen by clones."""
    model = with_values(LM)
    batch = (tokens(LM), tokens(LM, 2))
    plan = plan_of(model, "tp=2", *batch)

    def run(rank: int) -> list[str]:
        parallel = plan.apply(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        first, second = parallel(*batch), parallel(*batch)
        first.backward()
        optimizer.step()
        found = [message(second.backward)]
        own = [x.clone() for x in batch]
        loss = parallel(*own)
        own[0].zero_()
        found.append(message(loss.backward))
        loss = parallel(*batch)
        loss.backward()
        return found

    for found in run_ranks(2, run):
        assert all("changed in place between forward and backward" in text for text in found), found
        assert "input_ids" not in found[0]


def message(act: Any) -> str:
    try:
        act()
    except UsageError as error:
        return str(error)
    return "no error"
