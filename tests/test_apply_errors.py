"""What goes wrong when a plan is put to work is told on every rank, in the library's own words, and soon."""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from apply_samples import LM, error, message, plan_of, stepped, tokens, unsharded, with_values
from fork_ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from autoparallel_fp8 import ApplyError, Plan, UsageError
from autoparallel_fp8.process_groups import ProcessGroups

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = (tokens(LM), tokens(LM, 2))
SOON = 20.0  # seconds, on a loaded machine


@cache
def lm() -> nn.Module:
    """The model that is planned: the same object, so that no rank captures it again."""
    return with_values(LM)


@cache
def planned(mesh: str = "dp=2") -> Plan:
    return plan_of(lm(), mesh, *BATCH, batch=", ".join(["S(0)", *["R"] * mesh.count(",")]))


def on_each(num_ranks: int, function: Callable[[int], Any], **options: Any) -> list[str]:
    """What ApplyError says on each rank, which is one for all of them or one a rank."""
    return run_ranks(num_ranks, lambda rank: message(lambda: function(rank), ApplyError), **options)


class TestArguments:
    def test_each_wrong_one_is_named(self) -> None:
        """Size, dtype, what is missing or too much, and a gradient that nobody planned."""
        x, targets = BATCH
        sample = replace(LM, vocab=0, result="logits")
        floats = torch.randn(sample.batch, sample.seq, sample.hidden)
        float_model = with_values(sample)
        plan, plan_floats = planned(), plan_of(float_model, "dp=2", floats, batch="S(0)")

        def run(rank: int) -> list[str]:
            elsewhere = distribute_tensor(targets, init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")))
            parallel, of_floats = plan.apply(lm()), plan_floats.apply(float_model)
            calls: list[Callable[[], Any]] = [
                lambda: parallel(x[:3], targets),
                lambda: parallel(x.to(torch.int32), targets),
                lambda: parallel(x),
                lambda: parallel(x, None),
                lambda: parallel(x, targets, scale=torch.ones(8, 8)),
                lambda: parallel(x, targets, mask=None),
                lambda: parallel(x.flatten(), targets),
                lambda: of_floats(floats.clone().requires_grad_()),
                lambda: of_floats(floats.bfloat16()),
                lambda: parallel(parallel.shard_inputs(x), elsewhere),
                lambda: parallel.shard_inputs({"x": x, "labels": targets}),
                lambda: parallel(x, targets, None, x),
                lambda: parallel(x.tolist(), targets),
                lambda: parallel.shard_inputs((x, targets, None, x)),
                lambda: parallel.shard_inputs((x[0], targets[0])),
                lambda: parallel.shard_inputs((x[:0], targets[:0])),
                lambda: parallel.shard_inputs((x.to(torch.int32), targets)),
                lambda: parallel.shard_inputs("abc"),
                lambda: parallel.shard_inputs(None),
                lambda: parallel.shard_inputs(part for part in (x, targets)),
            ]
            return [message(call, UsageError) for call in calls]

        found = run_ranks(2, run)
        assert found[0] == found[1]
        at = "\n  at: RandomModel.forward"
        replan = f"{at}\n  do: cast it to the planned dtype, or plan with these inputs"
        dims = f"{at}\n  do: pass as many dims as planned, or plan with these inputs"
        pass_planned = f"{at}\n  do: pass what was planned, or plan with these inputs"
        assert found[0] == [
            "x is [3, 8]: neither the planned [8, 8] of all ranks together nor one rank's [4, 8]"
            f"{at}\n  do: pass one of the two; for another batch what shard_inputs(batch) gives",
            f"x is int32 [8, 8], and was planned as int64 [8, 8]{replan}",
            f"targets is missing, and was planned as int64 [8, 8]{pass_planned}",
            f"targets is None, and was planned as int64 [8, 8]{pass_planned}",
            f"scale is float32 [8, 8], and was not planned{pass_planned}",
            found[0][5],
            f"x is int64 [64], and was planned as int64 [8, 8]{dims}",
            "x requires a gradient, and gradients of inputs are not planned\n  at: x\n  do: pass x.detach()",
            f"x is bfloat16 [8, 8, 64], and was planned as float32 [8, 8, 64]{replan}",
            "targets is a DTensor on another DeviceMesh than the parameters"
            f"{at}\n  do: pass what shard_inputs(batch) gives, or plain tensors",
            "labels is no tensor that was planned; those are x, targets\n  at: shard_inputs\n"
            "  do: pass those, by position or by these names; or plan with this one among the inputs",
            found[0][11],
            f"x is a list, and was planned as int64 [8, 8]{at}\n  do: pass a tensor",
            "the batch is 4 positional arguments, and forward takes 3: x, targets, scale\n  at: shard_inputs\n"
            "  do: pass these, or a mapping of keyword arguments",
            f"x is int64 [8], and was planned as int64 [8, 8]{dims}",
            "x [0, 8] is empty\n  at: mesh dp=2\n  do: pass a batch that the mesh axes divide",
            f"x is int32 [8, 8], and was planned as int64 [8, 8]{replan}",
            *(
                f"the batch is a {kind} without a tensor in it\n  at: shard_inputs\n"
                "  do: pass a tensor, a tuple of positional arguments, or a mapping of keyword arguments"
                for kind in ("str", "NoneType", "generator")
            ),
        ]
        assert found[0][11].startswith("the inputs do not fit the model's forward: too many positional arguments")
        assert all(found[0][i].endswith("\n  do: call it as the model is called") for i in (5, 11))
        assert found[0][5].startswith("the inputs do not fit the model's forward: got an unexpected keyword argument")

    def test_indices_that_no_table_has(self) -> None:
        """A rank with a part of the vocabulary would take such an index for another rank's, and count on."""
        x, targets = BATCH
        plan, none_counted = planned("dp=2"), torch.full_like(targets, -100)
        none_counted[:, 0] = 0

        def run(rank: int) -> list[str]:
            parallel, never = plan.apply(lm()), plan.apply(lm(), check_inputs="never")
            wrong = torch.where(x == x[-1, -1], LM.vocab, x)
            calls: list[Callable[[], Any]] = [
                lambda: parallel(wrong, targets),
                lambda: parallel(x, wrong),
                lambda: parallel(x, targets - LM.vocab),
                lambda: parallel(*parallel.shard_inputs((x, wrong))) if rank else parallel(x, wrong),
            ]
            found = [message(call, UsageError) for call in calls]
            assert bool(parallel(x, none_counted).isfinite()) and bool(never(x, wrong).isfinite())
            return found

        found = run_ranks(2, run)
        do = "make the model's vocabulary as large as the tokenizer's, or mend the data"
        end = f"\n  at: RandomModel.forward\n  do: {do}"
        counts = f"the cross-entropy takes 0 to {LM.vocab - 1}, and -100 for what is not counted{end}"
        assert found[0] == found[1]
        assert re.match(f"x has {LM.vocab}, and .*embed.* takes 0 to {LM.vocab - 1}{end}", found[0][0])
        assert found[0][1] == found[0][3] == f"targets has {LM.vocab}, and {counts}"
        assert re.match(rf"targets has -\d+, and {counts}", found[0][2])

    def test_what_is_done_around_a_parallel_model(self) -> None:
        """Wrappers and contexts that would change what the plan says, or take it for a plain module."""

        def run(rank: int) -> list[str]:
            parallel = planned("dp=1").apply(lm())

            def under_autocast() -> Any:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return parallel(*BATCH)

            calls: list[Callable[[], Any]] = [
                under_autocast,
                lambda: parallel(BATCH[0].to("meta"), BATCH[1]),
                lambda: planned("dp=1").apply(parallel),
                lambda: torch.save(parallel, io.BytesIO()),
                lambda: DistributedDataParallel(parallel),
            ]
            told = [message(call, UsageError) for call in calls]
            assert len(parallel.get_submodule("blocks")) == 1  # type: ignore[arg-type]
            copied = deepcopy(parallel)
            for parameter in copied.parameters():
                parameter.data.zero_()
            assert not torch.equal(copied(*BATCH).to_local(), parallel(*BATCH).to_local())
            del parallel.get_submodule("embed").weight
            return [*told, message(lambda: parallel(*BATCH), UsageError)]

        assert [text.partition("\n")[0] for text in run_ranks(1, run)[0]] == [
            "autocast is on, and the plan says in which dtype each op runs",
            "x is on the meta device and has no values",
            "the model is a parallel one already, which a plan was applied to",
            "a parallel model holds process groups, which cannot be pickled",
            "DistributedDataParallel around a parallel model: its plan reduces gradients itself",
            "parameter embed.weight is gone",
        ]

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"model": "model"}, "the model is a str, not an nn.Module\n  at: model"),
            ({"mesh": "dp=2"}, "mesh is a str\n  at: mesh\n  do: pass torch's DeviceMesh"),
            ({"seed": "x"}, "seed is 'x'\n  at: seed\n  do: pass a whole number"),
            ({"compile": "yes"}, "compile is 'yes'\n  at: compile\n  do: pass True or False"),
            ({"init": 3}, "init is a int\n  at: init\n  do: pass a function of a module"),
            ({"check_inputs": True}, "check_inputs is True\n  at: check_inputs\n  do: use one of first, always, never"),
        ],
    )
    def test_those_of_apply(self, options: dict[str, Any], text: str) -> None:
        """Told before anything is started."""
        with pytest.raises(UsageError) as caught:
            planned().apply(**{"model": lm(), **options})
        assert str(caught.value).startswith(text) and not dist.is_initialized()

    def test_other_data_where_it_must_be_the_same(self) -> None:
        """Once for each size of the inputs, at every call or never; parts of a rank's own are left alone."""
        model, x = nn.Linear(16, 16), torch.randn(4, 16, 16)
        plan = plan_of(model, "dp=2,tp=2", x[0], batch="S(0), R")

        def run(rank: int) -> Any:
            first, always, never = (plan.apply(model, check_inputs=when) for when in ("first", "always", "never"))
            own, wrong = x[0, :8] + rank // 2, x[rank, :8]
            first(own)
            told = [message(lambda: always(wrong), ApplyError), bool(never(wrong).isfinite().all())]
            first(wrong)  # not looked at again
            larger = first.shard_inputs(x[rank].repeat(2, 1))
            return [*told, message(lambda: first(larger), ApplyError), bool(always(own).isfinite().all())]

        found = run_ranks(4, run)
        assert found == [found[0]] * 4
        assert (
            found[0][0]
            == found[0][2]
            == (
                "rank 1 and rank 0 have other values of input, and must have the same\n  at: input [S(0), R] on mesh "
                "dp=2,tp=2\n  do: pass one batch to all ranks along tp: pick data by the coordinate on the other axes, "
                "not by the rank; or the whole batch, the same, to every rank"
            )
        )


class TestRanks:
    def test_another_number_of_them(self) -> None:
        """Each says how many it sees."""
        assert on_each(2, lambda rank: planned("dp=4").apply(lm())) == [
            f"the plan is for 4 ranks (dp=4), and 2 run\n  at: rank {rank}\n"
            "  do: start torchrun with as many processes, or plan for a mesh of 2"
            for rank in range(2)
        ]

    def test_no_process_group(self) -> None:
        """Nobody started the others."""
        assert on_each(1, lambda rank: planned().apply(lm()), has_group=False) == [
            "the plan is for 2 ranks (dp=2), and there is no process group\n  at: torch.distributed\n"
            "  do: start the script with torchrun --nproc-per-node=... for 2 processes in all"
        ]

    def test_other_plans_models_or_arguments(self) -> None:
        """All ranks say which ranks differ, in what, and how that is cured."""
        plans = [planned(), plan_of(lm(), "dp=2", *BATCH, recipe="tensorwise")]
        mesh = [planned(), plan_of(lm(), "tp=2", *BATCH)]
        frozen = with_values(LM).requires_grad_(False)
        applied: list[tuple[str, Callable[[int], Any]]] = [
            ("plan: rank 1 unlike rank 0\n  at: apply\n  do: plan once, ", lambda r: plans[r].apply(lm())),
            ("plan: rank 1 unlike rank 0\n  at: apply\n  do: plan once, ", lambda r: mesh[r].apply(lm())),
            ("seed: rank 1 unlike rank 0\n  at: apply\n  do: pass", lambda r: plans[0].apply(lm(), seed=r)),
            ("compile: rank 1 unlike", lambda r: plans[0].apply(lm(), compile=bool(r))),
            ("model: rank 1 unlike", lambda r: plans[0].apply([lm(), frozen][r])),
            ("values of the model: rank 1 unlike rank 0\n  at: apply\n  do: call torch.manual_seed with one seed",
             lambda r: plans[0].apply(with_values(LM, r))),
        ]  # fmt: skip
        found = run_ranks(2, lambda rank: [message(partial(call, rank), ApplyError) for _, call in applied])
        assert found[0] == found[1]
        for text, (start, _) in zip(found[0], applied, strict=True):
            assert text.startswith(f"ranks do not have the same {start}")

    def test_plans_that_come_out_otherwise_when_restored(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One file, and yet other programs: all ranks say so."""
        from autoparallel_fp8 import restore

        other = plan_of(lm(), "dp=2", *BATCH, is_split=False, batch="R")
        planned().save(tmp_path / "plan.json")

        def run(rank: int) -> Plan:
            if rank:
                monkeypatch.setattr(restore, "restore", lambda plan, model: other)
            plan: Any = Plan.load(tmp_path / "plan.json").apply(lm())
            return plan

        texts = on_each(2, run)
        assert texts[0] == texts[1]
        assert texts[0].startswith("ranks do not have the same restored plan: rank 1 unlike rank 0")

    def test_a_mesh_of_ones_own(self) -> None:
        """A DeviceMesh of some of the ranks will do; its axes are the plan's, and its ranks ascend."""
        plan, model = planned("dp=2,tp=2"), lm()

        def run(rank: int) -> Any:
            groups = [[[0, 1], [3, 4]], [[0, 3], [1, 4]]]
            meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")) for ranks in groups]
            named = DeviceMesh("cpu", groups[0], mesh_dim_names=("tp", "dp"))
            if rank == 2:
                return message(lambda: plan.apply(model, mesh=meshes[0]), ApplyError)
            told = [message(lambda mesh=mesh: plan.apply(model, mesh=mesh), ApplyError) for mesh in (meshes[1], named)]
            return told, stepped(plan.apply(model, mesh=meshes[0]), *BATCH)

        assert any(c.axis == "dp+tp" for c in plan.collectives)
        found = run_ranks(5, run)
        assert found[2] == "rank 2 is not on the mesh\n  at: mesh\n  do: call apply on the ranks of the mesh alone"
        told, step = found[4]
        assert told[0].startswith("the ranks of the mesh over dp+tp do not ascend: 0, 3, 1, 4\n  at: mesh\n  do: pass")
        assert told[1].startswith("the DeviceMesh is tp=2,dp=2, the plan is for dp=2,tp=2\n  at: mesh\n  do: pass")
        assert error(step, unsharded(model, *BATCH)) < 2e-5

    @pytest.mark.parametrize("calls_before", [0, 3])
    def test_one_that_dies(self, calls_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the middle of a step: the others say which collective failed, within seconds."""
        plan = planned("dp=2,tp=2")
        start = time.monotonic()

        def run(rank: int) -> str:
            parallel = plan.apply(lm())
            parallel(*BATCH).backward()
            begin, left = ProcessGroups.begin, [calls_before]

            def dies(*arguments: Any) -> list[Tensor]:
                left[0] -= 1
                if rank == 1 and left[0] < 0:
                    os._exit(7)
                return begin(*arguments)

            monkeypatch.setattr(ProcessGroups, "begin", dies)
            first = message(lambda: [parallel(*BATCH).backward() for _ in range(3)], ApplyError)
            message(lambda: parallel(*BATCH), ApplyError)  # nor does it go on afterwards
            return first

        found = run_ranks(4, run, lost=(1,))
        assert found[1] is None
        for rank in (0, 2, 3):
            assert found[rank].startswith(f"rank {rank} lost the others: ")
            assert "\n  do: look for the rank that failed first; start all of them again from" in found[rank]
        assert any(f"\n  at: {c.kind} over {c.axis}\n" in found[0] for c in plan.collectives)
        assert time.monotonic() - start < SOON

    def test_one_that_dies_before(self) -> None:
        """While the others compare plans."""

        def run(rank: int) -> str:
            dist.barrier()  # both have the group
            if rank == 1:
                os._exit(7)
            return message(lambda: planned().apply(lm()), ApplyError)

        assert run_ranks(2, run, lost=(1,))[0].startswith("rank 0 lost the others: ")


def test_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts of docs/running.md, on two processes: a plan from a file, a model without values; it learns."""
    text = (Path(__file__).parent.parent / "docs" / "running.md").read_text()
    for name in ("make_plan.py", "train.py"):
        (script,) = re.findall(rf"^```python\n(# {name}.*?)^```$", text, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(script.replace("dp=2,tp=2", "dp=1,tp=2"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("make_plan.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"]
    command[3:3] = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 4 and 5 < losses[0] < 9 and losses == sorted(losses, reverse=True)
