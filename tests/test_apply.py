"""A plan on a process each: results, gradients and buffers are those of one process, whatever goes in and comes out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from apply_samples import (
    LM,
    alike_on_all,
    error,
    gradients,
    message,
    plan_of,
    plans_of,
    simulated,
    stepped,
    tokens,
    unsharded,
    whole,
    with_values,
)
from fork_ranks import run_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoparallel_fp8 import rank as rank_module
from autoparallel_fp8.graph import Graph
from autoparallel_fp8.runner import Runner

pytestmark = pytest.mark.usefixtures("one_thread")

SUMS = 1e-6  # float32 sums of more than two ranks, in another order
ROUNDING = 2e-5  # float32 through a block, against the unsharded model
RECIPES = (None, "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")


@pytest.fixture(scope="module")
def graphs() -> dict[Any, Graph]:
    """Captured graphs, for all tests of this file."""
    return {}


class TestNumbers:
    @pytest.mark.parametrize(("mesh", "num_ranks", "recipes"), [("dp=2", 2, RECIPES[:2]), ("dp=2,tp=2", 4, RECIPES)])
    def test_process_groups_do_what_memory_does(
        self, mesh: str, num_ranks: int, recipes: tuple[str | None, ...], graphs: dict[Any, Graph]
    ) -> None:
        """Loss and every gradient of a step: bit for bit where two ranks sum, for every recipe."""
        model, batch = with_values(LM), (tokens(LM), tokens(LM, 2))
        plans = {(r, k): plan for r in recipes for k, plan in enumerate(plans_of(LM, r, mesh, graphs, model))}

        def run(rank: int) -> dict[Any, Any]:
            return {key: stepped(plan.apply(model), *batch) for key, plan in plans.items()}

        found = run_ranks(num_ranks, run)
        assert alike_on_all(found)
        moved = {(c.kind, c.axis) for plan in plans.values() for c in plan.collectives}
        assert {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"} == {kind for kind, _ in moved}
        assert len({axis for _, axis in moved}) == 2 ** len(mesh.split(",")) - 1
        for key, plan in plans.items():
            wanted = simulated(plan, model, batch)
            most = 0.0 if num_ranks == 2 else SUMS
            assert error(found[0][key]["output"], list(wanted["output"].values())) <= most, key
            assert found[0][key]["gradient"].keys() == wanted["gradient"].keys(), key
            assert error(found[0][key]["gradient"], wanted["gradient"]) <= most, key

    def test_no_recipe_is_the_plain_model(self) -> None:
        """On a mesh, and on one process that nobody started others for."""
        model, batch = with_values(LM), (tokens(LM), tokens(LM, 2))
        wanted = unsharded(model, *batch)
        for mesh, num_ranks in (("dp=1", 1), ("dp=2,tp=2", 4)):
            plan = plan_of(model, mesh, *batch)

            def run(rank: int, plan: Any = plan) -> Any:
                return stepped(plan.apply(model), *batch)

            assert error(run_ranks(num_ranks, run, has_group=num_ranks > 1)[0], wanted) < ROUNDING


class TestModes:
    def test_buffers_that_forward_changes(self) -> None:
        """The new values are there after each call, and a backward that is still to come sees the old ones."""
        sample = replace(LM, buffer="counted", frozen="up", unused=True)
        model, batches = with_values(sample), [(tokens(sample, k), tokens(sample, k + 5)) for k in (1, 2)]
        plan = plan_of(model, "dp=2,tp=2", *batches[0])

        def losses_of(module: nn.Module) -> Any:
            losses = [module(*batch) for batch in batches]
            sum(losses[1:], losses[0]).backward()
            return [whole(x) for x in losses], gradients(module), whole(module.get_buffer("average"))

        def run(rank: int) -> Any:
            parallel = plan.apply(model)
            return losses_of(parallel), list(parallel.state_dict())

        found, names = run_ranks(4, run)[0]
        assert float(model.get_buffer("average").abs().sum()) == 0.0, "the model itself is only read"
        assert names == list(model.state_dict())
        assert error(found, losses_of(model)) < ROUNDING
        assert [name for name, grad in found[1].items() if grad is None] == ["unused", "blocks.0.mlp.up.weight"]

    def test_a_backward_after_the_buffer_changed(self) -> None:
        """It reads the value that its own forward saw."""
        model, x = Averaged(), torch.randn(8, 16)
        plan = plan_of(model, "dp=2", x, batch="S(0)")

        def losses_of(module: nn.Module) -> Any:
            losses = [module(x * k) for k in (1, 2, 3)]
            sum(losses[1:], losses[0]).backward()
            return [whole(loss) for loss in losses], gradients(module), whole(module.get_buffer("average"))

        found = run_ranks(2, lambda rank: losses_of(plan.apply(model)))[0]
        each = singles(Averaged(), x)
        assert error(found[1]["up.weight"], each[0] + each[1] + each[2]) < ROUNDING

    def test_dropout(self) -> None:
        """One seed gives one mask on every mesh; each call has its own; evaluation has none."""
        sample = replace(LM, dropout=True)
        model, batch = with_values(sample), (tokens(sample), tokens(sample, 2))
        found = {}
        for mesh, num_ranks in (("dp=2", 2), ("dp=2,tp=2", 4)):
            plan = plan_of(model, mesh, *batch)

            def run(rank: int, plan: Any = plan) -> Any:
                parallel = plan.apply(model, seed=7)
                training = [stepped(parallel, *batch)]
                parallel.zero_grad()
                training.append(stepped(parallel, *batch))
                parallel.zero_grad()
                evaluated = stepped(parallel.eval(), *batch)
                parallel.train()
                other = whole(plan.apply(model, seed=8)(*batch))
                return training, evaluated, other, whole(plan.apply(model.eval())(*batch))

            results = run_ranks(num_ranks, run)
            assert alike_on_all(results)
            found[mesh] = results[0]
        model.eval()
        wanted = unsharded(model, *batch)
        for training, evaluated, other, of_eval in found.values():
            assert error(evaluated, wanted) < ROUNDING and error([of_eval], wanted["output"]) < ROUNDING
            losses = [float(x) for x in (training[0]["output"][0], training[1]["output"][0], other, of_eval)]
            assert len(set(losses)) == 4
        assert error(found["dp=2"], found["dp=2,tp=2"]) < ROUNDING

    def test_without_gradients(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same results, no autograd, and nothing is kept."""
        model, batch = with_values(LM), (tokens(LM), tokens(LM, 2))
        plan = plan_of(model, "dp=2", *batch)

        def run(rank: int) -> Any:
            parallel = plan.apply(model)
            wanted = whole(parallel(*batch))
            monkeypatch.delattr(Runner, "forward")
            with torch.no_grad():
                made = parallel(*batch)
            assert not made.requires_grad
            frozen = parallel.requires_grad_(False)(*batch)
            return wanted, whole(made), whole(frozen)

        wanted, *found = run_ranks(2, run)[0]
        assert all(error(made, wanted) == 0.0 for made in found)

    def test_backward_twice(self) -> None:
        """With the graph kept it adds up; without it torch says so."""
        model, batch = with_values(LM), (tokens(LM), tokens(LM, 2))
        plan = plan_of(model, "dp=2", *batch)

        def run(rank: int) -> Any:
            parallel = plan.apply(model)
            loss = parallel(*batch)
            loss.backward(retain_graph=True)
            first = gradients(parallel)
            loss.backward()
            return first, gradients(parallel), message(loss.backward, RuntimeError)

        first, second, text = run_ranks(2, run)[0]
        assert error(second, {name: 2 * grad for name, grad in first.items()}) == 0.0
        assert "backward through the graph a second time" in text

    def test_saved_values_go_as_backward_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """When the last op of backward runs, what forward saved for the first ones is freed."""
        model, batch = with_values(LM), (tokens(LM), tokens(LM, 2))
        plan = plan_of(model, "dp=1", *batch)

        def run(rank: int) -> Any:
            saved: list[tuple[StorageWeakRef, int]] = []
            left: list[int] = []
            forward, run_op = Runner.forward, rank_module._run_op

            def noted_forward(self: Runner, call: Any, parameters: Any) -> Any:
                made = forward(self, call, parameters)
                saved.extend((StorageWeakRef(x.untyped_storage()), x.nbytes) for x in made[1])
                return made

            def noted_op(*arguments: Any) -> None:
                left.append(sum(size for storage, size in saved if not storage.expired()))
                run_op(*arguments)

            monkeypatch.setattr(Runner, "forward", noted_forward)
            loss = plan.apply(model)(*batch)
            monkeypatch.setattr(rank_module, "_run_op", noted_op)
            loss.backward()
            return left

        left = run_ranks(1, run, has_group=False)[0]
        assert len(left) > 50 and left[-1] < 0.1 * left[0]


class Averaged(nn.Module):
    """Scales by a running average, which backward needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 16)
        self.register_buffer("average", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.average.clone()
        self.average.copy_(scale * 0.5 + x.mean(0))
        return (self.up(x) * scale).pow(2).sum()


def singles(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The weight's gradient of each of three calls, one after the other."""
    found = []
    for k in (1, 2, 3):
        model.zero_grad()
        model(x * k).backward()
        found.append(whole(model.get_parameter("up.weight").grad))  # type: ignore[arg-type]
    return found
