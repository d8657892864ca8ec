"""What goes into a parallel model and what comes out of it: nests, keywords, parts and wholes, other batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from apply_samples import (
    LM,
    error,
    gradients,
    message,
    plan_of,
    stepped,
    tokens,
    unsharded,
    whole,
    with_values,
)
from family_models import call_of, with_weights
from fork_ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = 2e-5  # float32 through a block, against the unsharded model


class TestArguments:
    def test_what_goes_in(self) -> None:
        """Keywords in any order, None, and each of global tensor, own part and DTensor."""
        sample = replace(LM, keyword="given")
        model, batch = with_values(sample), {"x": tokens(sample), "targets": tokens(sample, 2)}
        batch["scale"] = torch.rand(sample.batch, sample.seq) + 0.5
        plan = plan_of(model, "dp=2", batch["x"], batch["targets"], kwargs={"scale": batch["scale"]}, batch="S(0)")
        without = plan_of(model, "dp=2", batch["x"], batch["targets"], kwargs={"scale": None})
        part = sample.batch // 2
        axes = {name: name for name in batch}

        def run(rank: int) -> Any:
            parallel = plan.apply(model)
            swapped = {name: batch[name] for name in ("scale", "targets", "x")}
            own = {name: x[rank * part : (rank + 1) * part] for name, x in batch.items()}
            made = [stepped(plan.apply(model), **swapped), stepped(plan.apply(model), **own)]
            made.append(stepped(parallel, batch["x"], batch["targets"], batch["scale"]))
            sharded = parallel.shard_inputs(batch)
            assert all(isinstance(sharded[name], DTensor) for name in axes)
            assert all(error(whole(sharded[name]), x) == 0.0 for name, x in batch.items())
            made.append(stepped(plan.apply(model), **sharded))
            one, pair = parallel.shard_inputs(batch["x"]), parallel.shard_inputs([batch["x"], batch["targets"]])
            assert isinstance(one, DTensor) and isinstance(pair, list) and len(pair) == 2
            made.append(stepped(plan.apply(model), one, pair[1], scale=batch["scale"]))
            return made, stepped(without.apply(model), targets=batch["targets"], x=batch["x"], scale=None)

        found, found_without = run_ranks(2, run)[0]
        assert error(found[0], unsharded(model, **batch)) < ROUNDING
        assert all(error(made, found[0]) == 0.0 for made in found)
        assert error(found_without, unsharded(model, batch["x"], batch["targets"])) < ROUNDING

    def test_plain_values(self) -> None:
        """Numbers and bools go in as they were planned, another is an error. A default may be left out or passed."""
        model, x = Scaled(), torch.randn(8, 16)
        plan = plan_of(model, "dp=2", x, 0.5, kwargs={"is_negative": True})
        given, left_out = plan_of(model, "dp=2", x, 0.5, False), plan_of(model, "dp=2", x, 0.5)

        def run(rank: int) -> Any:
            parallel = plan.apply(model)
            other = message(lambda: parallel(x, 0.25, is_negative=True), ValueError)
            with_default = [
                whole(given.apply(model)(x, 0.5)),
                whole(left_out.apply(model)(x, 0.5, is_negative=False)),
            ]
            told = message(lambda: left_out.apply(model)(x, 0.5, is_negative=True), ValueError)
            return stepped(parallel, x, 0.5, is_negative=True), other, with_default, told

        found, other, with_default, told = run_ranks(2, run)[0]
        assert error(found, unsharded(model, x, 0.5, is_negative=True)) < ROUNDING
        assert error(with_default, [model(x, 0.5).detach()] * 2) < ROUNDING
        assert told.startswith("is_negative is True, and was not planned\n")
        assert other.startswith("factor is 0.25, and was planned as 0.5\n  at: Scaled.forward\n  do: pass what was")

    def test_another_batch_size(self) -> None:
        """Through `shard_inputs`, with nothing planned again; its gradients and those of the first one add up."""
        model = with_values(LM)
        plan = plan_of(model, "dp=2,tp=2", tokens(LM), tokens(LM, 2), batch="S(0), R")
        batches = [(tokens(LM, 3, batch), tokens(LM, 4, batch)) for batch in (16, 4)]

        def run(rank: int) -> Any:
            parallel, found = plan.apply(model), []
            for batch in batches:
                parallel.zero_grad()
                found.append(stepped(parallel, *parallel.shard_inputs(batch)))
            parallel.zero_grad()
            with parallel.no_sync():
                parallel(*parallel.shard_inputs(batches[0])).backward()
            parallel(*parallel.shard_inputs(batches[1])).backward()
            refused = message(lambda: parallel.shard_inputs(tokens(LM, 3, 3)), ValueError)
            return found, gradients(parallel), refused

        found, added, refused = run_ranks(4, run)[0]
        wanted = [unsharded(model, *batch) for batch in batches]
        assert error(found, wanted) < ROUNDING
        both = {name: wanted[0]["gradient"][name] + wanted[1]["gradient"][name] for name in added}
        assert error(added, both) < ROUNDING
        assert refused == (
            "x [3, 8] does not divide as [S(0), R]\n  at: mesh dp=2,tp=2\n  do: pass a batch that the mesh axes divide"
        )

    def test_nests(self) -> None:
        """Dicts and lists go in and come out, sharded or not; a NamedTuple of arguments stays one."""
        model, x, scale, mask = Nested(), torch.randn(8, 16), torch.rand(8, 16), torch.ones(8, 16).tril()
        plan = plan_of(model, "dp=2", {"x": x}, scale, kwargs={"options": {"mask": mask}}, batch="S(0)")

        def run(rank: int) -> Any:
            parallel = plan.apply(model)
            batch, other = parallel.shard_inputs(({"x": x}, scale))
            assert isinstance(batch["x"], DTensor)
            named = parallel.shard_inputs({"options": {"mask": mask}})
            made = parallel(batch, other, **named)
            assert made["count"] == 3 and made["all"][1][1] is None and type(made["all"]) is list
            assert type(parallel.shard_inputs(Pair({"x": x}, scale))) is Pair
            return stepped(parallel, batch, other, **named)

        assert error(run_ranks(2, run)[0], unsharded(model, {"x": x}, scale, options={"mask": mask})) < ROUNDING


class TestResults:
    @pytest.mark.parametrize("result", ["both", "dict"])
    def test_nested(self, result: str) -> None:
        """A tuple and a dict come back as such."""
        sample = replace(LM, result=result)
        model, batch = with_values(sample), (tokens(sample), tokens(sample, 2))
        plan = plan_of(model, "dp=2", *batch)

        def run(rank: int) -> Any:
            parallel = plan.apply(model)
            made = parallel(*batch)
            assert type(made) is (tuple if result == "both" else dict)
            assert result == "both" or list(made) == ["logits", "loss"]
            return stepped(parallel, *batch)

        assert error(run_ranks(2, run)[0], unsharded(model, *batch)) < ROUNDING

    def test_a_model_output(self) -> None:
        """transformers' own class, by attribute."""
        model: Any = with_weights("bert-base")
        model.eval()
        ids = call_of(model)["input_ids"]
        plan = plan_of(model, "dp=2", ids)

        def run(rank: int) -> Any:
            made = plan.apply(model)(ids)
            return type(made).__name__, whole(made.last_hidden_state)

        name, hidden = run_ranks(2, run)[0]
        wanted = model(ids)
        assert name == type(wanted).__name__
        assert error(hidden, wanted.last_hidden_state.detach()) < ROUNDING

    def test_a_loss_outside(self) -> None:
        """Results are DTensors with global shapes; ops on them lead back to the parameters."""
        sample = replace(LM, result="logits")
        model, x = with_values(sample), tokens(sample)
        plan = plan_of(model, "dp=2,tp=2", x, outputs=["S(0), S(2)"])

        def loss_of(module: nn.Module) -> Tensor:
            logits = module(x)
            assert logits.shape == (sample.batch, sample.seq, sample.classes)
            loss: Tensor = (F.gelu(logits) ** 2).mean() + logits.float().logsumexp(-1).sum() * 0.01
            loss.backward()
            return loss

        def run(rank: int) -> Any:
            parallel = plan.apply(model)
            return whole(loss_of(parallel)), gradients(parallel)

        wanted = loss_of(model).detach(), gradients(model)
        assert error(run_ranks(4, run)[0], wanted) < ROUNDING

    def test_one_tensor_twice_and_unused_results(self) -> None:
        """A result that comes twice gets both gradients; one that nobody uses gets none."""
        model, x = Twice(), torch.randn(8, 16)
        plan = plan_of(model, "dp=2", x)

        def loss_of(module: nn.Module) -> Tensor:
            a, b, _, count, twice = module(x)
            assert not count.requires_grad and not twice.requires_grad
            loss: Tensor = (a * 2 + b * 3).sum()
            loss.backward()
            return loss

        def run(rank: int) -> Any:
            parallel = plan.apply(model)
            return whole(loss_of(parallel)), gradients(parallel)

        wanted = loss_of(model).detach(), {**gradients(model), "unused.weight": torch.zeros(16, 16)}
        found, grads = run_ranks(2, run)[0]
        grads = {name: torch.zeros(16, 16) if grad is None else grad for name, grad in grads.items()}
        assert error((found, grads), wanted) < ROUNDING


class Pair(NamedTuple):
    """Arguments, some by name."""

    x: Tensor
    targets: Tensor


class Nested(nn.Module):
    """Takes and returns nests, with None and numbers in them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 16)

    def forward(self, batch: dict[str, Any], *others: Tensor, options: Any = None) -> Any:
        y = self.up(batch["x"]) * others[0]
        y = y if options["mask"] is None else y * options["mask"]
        return {"all": [y, (y.sum(), None)], "count": 3}


class Scaled(nn.Module):
    """Has arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor, factor: float, is_negative: bool = False) -> Tensor:
        y = self.up(x) * factor
        return (-y if is_negative else y).sum()


class Twice(nn.Module):
    """Returns one tensor twice, one for nobody, and some without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.unused = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.up(x)
        return y, y, self.unused(x), (x > 0).sum(), x * 2
