"""Mesh search: the winner is that of planning every mesh, bounds never exceed plans, wrong numbers are told."""

from __future__ import annotations

import doctest
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel_fp8 import AutoParallel, AutoParallelError, InfeasibleError, SolveError, Topology, UsageError
from autoparallel_fp8 import mesh_candidates as candidates_module
from autoparallel_fp8 import mesh_search as search_module
from autoparallel_fp8.cli import main
from autoparallel_fp8.mesh import parse_mesh
from autoparallel_fp8.mesh_candidates import candidates, useless_axis
from autoparallel_fp8.mesh_ranking import MeshSearch
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.plan import Plan
from autoparallel_fp8.workers import Workers


def mlp(width: int, hidden: int, tokens: int) -> nn.Module:
    with torch.device("meta"):
        layers = nn.Linear(width, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, width, bias=False)
        model = nn.Sequential(*layers).to(torch.bfloat16)
    model.example_inputs = (torch.empty(tokens, width, dtype=torch.bfloat16, device="meta"),)
    return model


def auto(model: nn.Module, gpus: int, **options: Any) -> AutoParallel:
    return AutoParallel(model, "auto", gpus=gpus, **{"device": "H100", **options})


# ---- candidates ----


@pytest.mark.parametrize("gpus", [2, 7, 8, 12, 36, 64])
@pytest.mark.parametrize("max_axes", [1, 2, 3])
def test_candidates_are_all_ordered_factorisations(gpus: int, max_axes: int) -> None:
    """Found by trying all tuples of sizes; each once, its axes named as people name them."""
    found = candidates(gpus, max_axes)
    every = set()
    for count in range(1, max_axes + 1):
        sizes = range(2, gpus + 1)
        every |= {s for s in itertools.product(sizes, repeat=count) if prod(s) == gpus} if gpus <= 12 else set()
    assert len(set(found)) == len(found)
    assert all(mesh.num_devices == gpus and min(mesh.sizes) > 1 for mesh in found)
    assert {mesh.names for mesh in found} <= {("dp",), ("dp", "tp"), ("dp", "cp", "tp")}
    if gpus <= 12:
        assert {mesh.sizes for mesh in found} == every
    if gpus == 64:
        assert len(found) == (1, 6, 16)[max_axes - 1]


def test_fewer_axes_come_first_and_then_small_inner_ones() -> None:
    """The order that decides between equal plans."""
    assert [str(m) for m in candidates(12)] == ["dp=12", "dp=6,tp=2", "dp=4,tp=3", "dp=3,tp=4", "dp=2,tp=6"]
    assert doctest.testmod(candidates_module).failed == 0


def test_an_axis_that_divides_no_dim_is_useless() -> None:
    graph = auto(mlp(16, 24, 40), 2).graph()
    assert useless_axis(parse_mesh("dp=4,tp=5"), graph) is None  # of 16, 24 and 40
    assert str(useless_axis(parse_mesh("dp=4,tp=7"), graph)) == "tp=7"
    assert str(useless_axis(parse_mesh("dp=80"), graph)) == "dp=80"


# ---- against planning every mesh ----


def by_brute_force(planner: AutoParallel, max_axes: int) -> dict[str, Plan | AutoParallelError]:
    """The plan on every mesh, each planned on its own; or the error."""
    found: dict[str, Plan | AutoParallelError] = {}
    planner.graph()
    for mesh in candidates(planner.gpus or 0, max_axes):
        try:
            found[str(mesh)] = planner.with_mesh(mesh).optimize()
        except AutoParallelError as error:
            found[str(mesh)] = error
    return found


def assert_wins(planner: AutoParallel, max_axes: int = 2) -> MeshSearch:
    """The winner is the best of all meshes, its plan that of planning it alone, and no bound exceeds a plan."""
    every = by_brute_force(planner, max_axes)
    plans = {name: plan for name, plan in every.items() if isinstance(plan, Plan)}
    found = planner.search_meshes(workers=1, max_axes=max_axes)
    least = min(plan.objective_us for plan in plans.values())
    assert found.plan.objective_us <= least * (1 + 1e-6)
    assert found.lower_bound_us <= least
    assert {str(row.mesh) for row in found.ranked} == set(every)
    for row in found.ranked:
        plan = every[str(row.mesh)]
        if not isinstance(plan, Plan):
            assert row.bound_us == float("inf") and row.step_us is None and row.reason
            continue
        assert 0 < row.bound_us <= plan.objective_us, row
        if row.step_us is not None:
            assert row.step_us == plan.objective_us
            assert row.memory_bytes == plan.memory_bytes["total"] and row.gap == pytest.approx(plan.gap)
        else:
            assert row.bound_us >= found.plan.objective_us * (1 - 1e-6)
    alone = plans[",".join(f"{name}={size}" for name, size in found.plan.mesh.items())]
    assert replace(found.plan, notes=alone.notes).to_json() == alone.to_json()
    return found


CASES = [  # width, hidden, tokens, GPUs, GPUs a node, the best mesh
    (1024, 4096, 512, 8, 8, "dp=8"),
    (2048, 4096, 2048, 8, 4, "dp=2,tp=4"),
    (2048, 6144, 96, 12, 2, "dp=2,tp=6"),
    (256, 512, 64, 4, 2, None),
    (4096, 4096, 40, 4, 1, None),
]


@pytest.mark.parametrize(("width", "hidden", "tokens", "gpus", "node", "best"), CASES)
def test_the_winner_of_an_mlp(width: int, hidden: int, tokens: int, gpus: int, node: int, best: str | None) -> None:
    """Also where the best mesh is not the first one tried, and with three axes."""
    planner = auto(mlp(width, hidden, tokens), gpus, topology=Topology(gpus_per_node=node))
    found = assert_wins(planner, max_axes=3)
    assert best is None or str(found.ranked[0].mesh) == best


@pytest.mark.parametrize(
    ("name", "layers", "recipe", "gpus"), [("llama3-debug", 1, "rowwise", 8), ("gpt2", 2, None, 4)]
)
def test_the_winner_of_a_language_model(name: str, layers: int, recipe: str | None, gpus: int) -> None:
    model = build(name, num_layers=layers)
    assert_wins(auto(model, gpus, recipe=recipe, topology=Topology(gpus_per_node=2), seq=256))


def test_where_some_meshes_have_no_plan() -> None:
    """A pin of two axes is nothing for a mesh of one; the row says so."""
    planner = auto(mlp(2048, 4096, 2048), 8, topology=Topology(gpus_per_node=4))
    planner.pin("0.weight", "R, S(0)")
    found = assert_wins(planner)
    rows = {str(row.mesh): row for row in found.ranked}
    assert len(rows["dp=8"].reason) > 10 and found.ranked[-1] == rows["dp=8"]


# ---- the same whatever the workers, and what the table says ----


@pytest.fixture(scope="module")
def searched() -> MeshSearch:
    return auto(mlp(2048, 6144, 96), 12, topology=Topology(gpus_per_node=2)).search_meshes(workers=1)


@pytest.mark.parametrize("workers", [2, 3, None])
def test_plan_and_table_do_not_depend_on_the_workers(workers: int | None, searched: MeshSearch) -> None:
    """Byte for byte, though workers plan some meshes ahead of their turn."""
    planner = auto(mlp(2048, 6144, 96), 12, topology=Topology(gpus_per_node=2))
    again = planner.search_meshes(workers=workers)
    assert again.plan.to_json() == searched.plan.to_json()
    assert str(again) == str(searched)
    assert again.ranked == searched.ranked


def test_equal_plans_go_to_fewer_axes() -> None:
    """Two axes that do the same as one are not an improvement, whatever the last digits say."""
    found = auto(mlp(1024, 4096, 512), 8).search_meshes(workers=1, max_axes=3)
    assert found.plan.mesh == {"dp": 8}


def test_the_last_digits_of_a_bound_decide_nothing() -> None:
    """Sums in another order differ there; the mesh that stands first goes first, and one without a bound last."""
    meshes = candidates(12)
    with Workers(1) as pool:
        state = search_module._Search(auto(mlp(256, 512, 64), 12), meshes, pool, float("inf"))
    state.bounds = {0: 100.00000000000001, 1: 100.0, 3: 99.0, 4: float("inf")}
    assert state.order() == [3, 0, 1, 2]


def test_what_is_printed(searched: MeshSearch) -> None:
    lines = str(searched).splitlines()
    assert lines[0].startswith("5 meshes of 12 x h100: ") and lines[0].endswith("0 without a plan")
    assert lines[1].startswith("no plan on any of them is faster than 101.8 us (gap ")
    assert lines[5].startswith("dp=2,tp=6  101.8 us  101.8 us  ") and lines[5].endswith("  best")
    assert any("pruned: at least +" in line for line in lines[6:])
    best = next(note for note in searched.plan.notes if "the mesh is" in note)
    assert best.startswith("the mesh is the best of 5 of 12 GPUs: no plan on any is faster (gap ")


def test_optimize_gives_the_plan_of_the_search(searched: MeshSearch, tmp_path: Path) -> None:
    """A plan like any other: it is saved, explains, and verifies."""
    plan = auto(mlp(2048, 6144, 96), 12, topology=Topology(gpus_per_node=2)).optimize()
    assert plan.to_json() == searched.plan.to_json()
    plan.save(str(tmp_path / "plan.json"))
    assert Plan.load(str(tmp_path / "plan.json")).to_json() == plan.to_json()
    assert "chosen" in str(plan.explain("0.weight"))


def test_progress_names_every_mesh() -> None:
    said: list[str] = []
    auto(mlp(256, 512, 64), 4, progress=said.append).search_meshes(workers=1)
    text = "\n".join(said)
    assert "meshes: 2 of 2 bounded" in text and "meshes: planning dp=4" in text
    assert all(str(mesh) in text for mesh in candidates(4))


def test_one_batch_for_all_meshes() -> None:
    """One sequence a GPU by default, so that batch alone can be split over all of them; or the user's."""
    model = build("llama3-debug", num_layers=1)
    assert auto(model, 8, seq=64).inputs[0].shape == (8, 64)
    assert auto(model, 8, seq=64, batch=32).inputs[0].shape == (32, 64)
    assert AutoParallel(model, "dp=8", device="H100", seq=64).inputs[0].shape == (16, 64)


# ---- limits ----


def test_no_mesh_has_enough_memory() -> None:
    """The error lists them; planning one of them says what it needs."""
    planner = auto(mlp(256, 512, 64), 4, memory_limit="1 KiB")
    with pytest.raises(InfeasibleError, match=r"no mesh of 4 GPUs has a plan\n  at: dp=4: no plan fits in 1 KiB; dp=2"):
        planner.search_meshes(workers=1)


def test_an_error_of_every_mesh_is_the_error() -> None:
    planner = auto(mlp(256, 512, 64), 4).pin("nothing", "R")
    with pytest.raises(UsageError, match="no parameter is called 'nothing'"):
        planner.search_meshes(workers=1)


def test_a_time_limit_leaves_meshes_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first in line is planned all the same; table and plan say what was cut, and the bound is honest."""
    clock = iter(range(10**6))
    monkeypatch.setattr(search_module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(search_module, "_left", lambda deadline, least=0.0: None)
    planner = auto(mlp(2048, 6144, 96), 12, time_limit=2.0, topology=Topology(gpus_per_node=2))
    found = planner.search_meshes(workers=1)
    cut = [row for row in found.ranked if row.reason == "time limit"]
    assert cut and found.ranked[0].step_us is not None
    assert found.lower_bound_us == 0.0 and found.gap == 1.0
    assert any(n.startswith(f"the time limit left {len(cut)} of 5 meshes of 12 GPUs") for n in found.plan.notes)
    assert f", {len(cut)} not reached in the time limit, 0 without a plan\n" in str(found)


def test_no_time_at_all() -> None:
    """As for a mesh that is given: an error, or a plan in hand."""
    planner = auto(mlp(256, 512, 64), 4, time_limit=1e-9)
    try:
        assert "the time limit left" in planner.search_meshes(workers=1).plan.notes[0]
    except SolveError as error:
        assert error.message == "no plan was found in the time limit"


# ---- wrong input ----


@pytest.mark.parametrize(
    ("mesh", "gpus", "message"),
    [
        ("auto", None, 'mesh "auto" needs the number of GPUs\n  at: gpus\n  do: give it, such as gpus=64'),
        ("auto", 0, "0 GPUs form no mesh to choose\n  at: gpus\n  do: give 2 or more"),
        ("auto", -8, "-8 GPUs form no mesh to choose"),
        ("auto", 1, '1 GPU forms no mesh to choose\n  at: gpus\n  do: give 2 or more, or the mesh "dp=1"'),
        ("auto", 2.0, "gpus is 2.0, not a whole number"),
        ("auto", True, "gpus is True, not a whole number"),
        ("auto", "64", "gpus is '64', not a whole number"),
        ("auto", 2**21, "more than 1048576 GPUs"),
        ("dp=8", 8, "a mesh and a number of GPUs are given: dp=8 and 8\n  at: mesh and gpus\n  do: give one of them"),
    ],
)
def test_wrong_numbers_of_gpus(mesh: str, gpus: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        AutoParallel(mlp(16, 24, 40), mesh, gpus=gpus, device="H100")
    assert str(caught.value).startswith(message)


def test_a_number_that_splits_nothing() -> None:
    """A prime that no dim divides by; one that the batch divides by is a mesh of one axis like any other."""
    with pytest.raises(
        UsageError, match="no mesh of 7 GPUs splits the model: no dim divides by 7\n  at: gpus, with in"
    ):
        auto(mlp(16, 24, 40), 7).optimize()
    found = auto(mlp(16, 24, 40), 5).search_meshes(workers=1)
    assert found.plan.mesh == {"dp": 5}
    assert "the mesh is the only one of 5 GPUs that splits the model" in found.plan.notes


def test_meshes_with_a_useless_axis_are_listed() -> None:
    """Last, with the reason."""
    found = auto(mlp(4, 4, 12), 8).search_meshes(workers=1)
    assert {str(row.mesh): row.reason for row in found.ranked} == {
        "dp=4,tp=2": "", "dp=2,tp=4": "", "dp=8": "no dim of the model divides by 8"
    }  # fmt: skip
    assert str(found.ranked[-1].mesh) == "dp=8"


def test_what_needs_a_mesh_says_so() -> None:
    planner = auto(mlp(16, 24, 40), 4)
    for call in (planner.space, planner.overlap, lambda: planner.score({"0.weight": "R"})):
        with pytest.raises(UsageError, match='the mesh of 4 GPUs is not chosen yet\n  at: mesh "auto"\n  do: call '):
            call()
    with pytest.raises(UsageError, match=r'the planner has a mesh already\n  at: mesh dp=4\n  do: .*mesh "auto"'):
        AutoParallel(mlp(16, 24, 40), "dp=4", device="H100").search_meshes()
    for name, value in (("workers", 0), ("workers", 1.5), ("max_axes", 0), ("max_axes", 4)):
        with pytest.raises(UsageError, match=f"{name} is {value}\n"):
            planner.search_meshes(**{name: value})  # type: ignore[arg-type]


def test_a_rank_of_a_run_does_not_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun the mesh is there."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with pytest.raises(UsageError, match="meshes are searched before a run, and this process is a rank of one"):
        auto(mlp(16, 24, 40), 4)


# ---- the command ----

SMALL = ["factories:small", "--device", "H100"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_prints_meshes_and_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Silent in a pipe; the same JSON with one worker and with two."""
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for workers, file in enumerate(files, 1):
        arguments = ("plan", *SMALL, "--gpus", "8", "--workers", str(workers), "--json", str(file))
        code, out, err = run(capsys, *arguments)
        assert (code, err) == (0, "")
    assert out.startswith("3 meshes of 8 x h100: ") and "proven optimal" in out
    assert files[0].read_bytes() == files[1].read_bytes()
    assert prod(json.loads(files[0].read_text())["mesh"].values()) == 8


def test_wrong_options_of_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, message in (
        (["--gpus", "8", "--mesh", "dp=8"], "error: a mesh and a number of GPUs are given: dp=8 and 8\n"),
        (["--gpus", "0"], "error: 0 GPUs form no mesh to choose\n"),
        (["--gpus", "7"], "error: no mesh of 7 GPUs splits the model: no dim divides by 7\n"),
        (["--mesh", "auto"], 'error: mesh "auto" needs the number of GPUs\n'),
        (["--workers", "2"], "error: --workers is of a search over meshes\n"),
        (["--gpus", "8", "--max-axes", "4"], "error: --max-axes is 4\n"),
    ):
        code, out, err = run(capsys, "plan", *SMALL, *arguments)
        assert (code, out) == (2, "") and err.startswith(message)
    assert run(capsys, "plan", *SMALL, "--mesh", "dp=2", "--json", str(tmp_path / "plan.json"))[0] == 0
    code, _, err = run(capsys, "verify", str(tmp_path / "plan.json"), "--gpus", "8")
    assert code == 2 and err.startswith("error: --gpus 8 contradicts the plan file")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_command_leaves_nothing(tmp_path: Path) -> None:
    """No worker, no plan, no temporary file."""
    place = Path(__file__).resolve().parent
    arguments = ["plan", "llama3-debug", "--gpus", "8", "--workers", "2", "--json", str(tmp_path / "plan.json")]
    command = [sys.executable, "-m", "autoparallel_fp8.cli", *arguments, "--device", "H100", "--layers", "2"]
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    children: list[int] = []
    while len(children) < 2:
        assert process.poll() is None
        time.sleep(0.02)
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        children = [int(pid) for pid in listed]
    process.send_signal(signal.SIGTERM)
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
