"""Problem files of the IOPDDL contest: read, solved on the command line, and refused where they are wrong."""

from __future__ import annotations

import copy
import gzip
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_problems import FORBIDDEN, evaluate_file, exhaustive_file, random_file

from autoparallel_fp8.cli import main
from autoparallel_fp8.cores import num_cores
from autoparallel_fp8.errors import ProblemError, UsageError
from autoparallel_fp8.iopddl import parse_iopddl, read_iopddl
from autoparallel_fp8.solver import beside

CHILDREN = "/proc/{0}/task/{0}/children"
SMALL: dict[str, Any] = {
    "problem": {
        "name": "two nodes",
        "nodes": {"costs": [[15, 55, 65], [45, 10]], "usages": [[10, 25, 20], [5, 15]], "intervals": [[0, 10], [3, 7]]},
        "edges": {"nodes": [[0, 1]], "costs": [[30, 40, 50, 60, 70, FORBIDDEN]]},
        "usage_limit": 20,
    }
}


def changed(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The small problem after a change."""
    data = copy.deepcopy(SMALL)
    change(data["problem"])
    return data


def written(folder: Path, data: Any, name: str = "problem.json") -> Path:
    path = folder / name
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command."""
    try:
        code = main(["solve", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("name", ["problem.json", "problem.json.gz"])
def test_solve_prints_cost_bound_gap_and_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    """By hand: 20 leaves option 0 of the first node, beside it 15 + 45 + 30 = 90 or 15 + 10 + 40, which holds 25."""
    path = written(tmp_path, SMALL, name)
    code, out, err = run(capsys, str(path), "--time-limit", "30")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:5] == [
        f"{path}: 2 nodes, 1 edges, 1 tables",
        "cost   90",
        "bound  90",
        "gap    0.0000 % (proven optimal)",
        "usage  15 at most (limit 20)",
    ]
    assert lines[5].startswith("time   ") and lines[5].endswith(" s") and len(lines) == 6


def test_json_holds_the_choices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path, SMALL)
    wanted = {
        "status": "optimal",
        "cost": 90,
        "bound": 90,
        "gap": 0.0,
        "peak_usage": 15,
        "usage_limit": 20,
        "choices": [0, 0],
    }
    code, out, _ = run(capsys, str(path), "--json", str(tmp_path / "answer.json"), "--quiet")
    assert code == 0 and "cost   90" in out
    assert json.loads((tmp_path / "answer.json").read_text()) == wanted
    code, out, _ = run(capsys, str(path), "--json", "-")
    assert code == 0 and json.loads(out) == wanted
    assert out == (tmp_path / "answer.json").read_text()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.2, 0.6, 1.0]))
def test_reading_keeps_costs_and_usages(seed: int, tightness: float) -> None:
    """Every choice costs and holds what an evaluator of the file says; doubled edges add up."""
    data = random_file(seed, 4, 3, tightness)
    problem = parse_iopddl(data, "file")
    for choices in np.ndindex(*(len(cost) for cost in problem.costs)):
        cost, is_kept = problem.cost(choices), problem.peak(choices) <= problem.limit
        assert (cost if is_kept and math.isfinite(cost) else None) == evaluate_file(data, list(choices))


def test_an_edge_from_a_node_to_itself_is_a_cost_of_the_node() -> None:
    data = changed(lambda p: p["edges"].update(nodes=[[1, 1]], costs=[[7, 0, 0, FORBIDDEN]]))
    problem = parse_iopddl(data, "file")
    assert problem.costs[1].tolist() == [52.0, math.inf] and problem.edges == ()


def test_no_limit_and_empty_intervals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = changed(lambda p: (p.pop("usage_limit"), p["nodes"].update(intervals=[[], [3, 7]])))
    code, out, _ = run(capsys, str(written(tmp_path, data)))
    assert code == 0 and "cost   65" in out and "usage  15 at most (without a limit)" in out


def test_infeasible_is_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Too low a limit, and pairs that are all forbidden."""
    wrong = (
        changed(lambda p: p.update(usage_limit=9)),
        changed(lambda p: p["edges"].update(costs=[[FORBIDDEN] * 6])),
        changed(lambda p: p["nodes"].update(costs=[[FORBIDDEN] * 3, [1, 1]])),
    )
    for data in wrong:
        assert exhaustive_file(data) is None
        answer = tmp_path / "answer.json"
        code, out, err = run(capsys, str(written(tmp_path, data)), "--json", str(answer))
        assert (code, out) == (1, "") and not answer.exists()
        assert err.startswith("error: no choices keep the usage limit of ") and "  at: " in err and "  do: " in err


WRONG: list[tuple[Any, str]] = [
    (b"{", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    ([], "problem is missing"),
    ({}, "problem is missing"),
    ({"problem": 3}, "problem is no object"),
    (changed(lambda p: p.pop("nodes")), "problem.nodes is missing"),
    (changed(lambda p: p["nodes"].pop("costs")), "problem.nodes.costs is missing"),
    (changed(lambda p: p["nodes"].update(usages={})), "problem.nodes.usages is no list"),
    (changed(lambda p: p.pop("edges")), "problem.edges is missing"),
    (changed(lambda p: p["nodes"]["costs"].pop()), "the nodes have 1 costs, 2 usages, 2 intervals"),
    (changed(lambda p: p["nodes"]["costs"][0].pop()), "3 usages for 2 costs"),
    (changed(lambda p: p["nodes"].update(costs=[[], [1, 1]], usages=[[], [1, 1]])), "a node without options"),
    (changed(lambda p: p["nodes"]["costs"][0].__setitem__(0, -1)), "-1 is negative"),
    (changed(lambda p: p["nodes"]["usages"][1].__setitem__(0, -0.5)), "-0.5 is negative"),
    (changed(lambda p: p["nodes"]["costs"][0].__setitem__(0, math.nan)), "NaN among the numbers"),
    (changed(lambda p: p["nodes"]["usages"][0].__setitem__(0, math.inf)), "an infinite usage"),
    (changed(lambda p: p["nodes"]["costs"][0].__setitem__(0, "1")), "something that is not a number"),
    (changed(lambda p: p["nodes"]["costs"][0].__setitem__(0, True)), "something that is not a number"),
    (changed(lambda p: p["nodes"]["costs"].__setitem__(0, 3)), "a int where a list of numbers belongs"),
    (changed(lambda p: p["nodes"]["costs"][0].__setitem__(0, 10**400)), "a number of more than 300 digits"),
    (changed(lambda p: p["nodes"]["intervals"].__setitem__(0, [5, 3])), r"\[5, 3\] is no interval"),
    (changed(lambda p: p["nodes"]["intervals"].__setitem__(0, [0.5, 3])), r"\[0.5, 3\] is no interval"),
    (changed(lambda p: p["edges"]["nodes"].__setitem__(0, [0, 2])), "there is no node 2"),
    (changed(lambda p: p["edges"]["nodes"].__setitem__(0, [-1, 1])), "there is no node -1"),
    (changed(lambda p: p["edges"]["nodes"].__setitem__(0, [0])), r"\[0\] is no pair of nodes"),
    (changed(lambda p: p["edges"]["costs"][0].pop()), "5 costs for 3 x 2 options"),
    (changed(lambda p: p["edges"]["costs"][0].__setitem__(1, math.nan)), "NaN among the numbers"),
    (changed(lambda p: p["edges"]["costs"][0].__setitem__(1, -3)), "-3 is negative"),
    (changed(lambda p: p["edges"]["costs"].pop()), "1 pairs of nodes and 0 tables"),
    (changed(lambda p: p.update(usage_limit=-1)), "-1 is no limit"),
    (changed(lambda p: p.update(usage_limit=math.nan)), "NaN is no limit"),
    (changed(lambda p: p.update(usage_limit="20")), '"20" is no limit'),
]


@pytest.mark.parametrize(("data", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_file_is_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Any, message: str
) -> None:
    path = written(tmp_path, data)
    with pytest.raises(ProblemError, match=message) as error:
        read_iopddl(path)
    assert error.value.at is not None and str(path) in error.value.at and error.value.do
    code, out, err = run(capsys, str(path))
    assert (code, out) == (2, "") and err.startswith("error: ") and "Traceback" not in err


def test_files_that_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        read_iopddl(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot read"):
        read_iopddl(tmp_path)
    whole = gzip.compress(json.dumps(SMALL).encode())
    for content in (b"no gzip", whole[:-9], whole[:20] + b"xxxx" + whole[24:]):
        (tmp_path / "broken.json.gz").write_bytes(content)
        with pytest.raises(ProblemError, match=r"not a gzip file|not JSON"):
            read_iopddl(tmp_path / "broken.json.gz")
    assert run(capsys, str(tmp_path / "none.json"))[0] == 2


@pytest.mark.parametrize("limit", ["0", "-3", "nan", "inf", "soon"])
def test_a_wrong_time_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path, limit: str) -> None:
    code, out, err = run(capsys, str(written(tmp_path, SMALL)), f"--time-limit={limit}")
    assert (code, out) == (2, "") and "time" in err and "  do: " in err


def test_an_answer_that_cannot_be_written_is_told_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, str(written(tmp_path, SMALL)), "--json", str(tmp_path / "no" / "answer.json"))
    assert (code, out) == (2, "") and "cannot write" in err


@pytest.mark.skipif(
    num_cores() < 2 or not Path(CHILDREN.format(os.getpid())).exists(),
    reason="reads /proc; on one core the bound has no process of its own",
)
@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_killed_while_solving_nothing_is_left(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """No file but the problem, no process that goes on, whichever signal, once the bound has a process of its own.

    A minute's search finds no choices of this problem, so that it is not solved in between.
    """
    path = written(tmp_path, random_file(6, 1500, 8, 0.05, planted=True))
    options = ["--json", str(tmp_path / "a.json"), "--time-limit", "30"]
    process = subprocess.Popen(
        [sys.executable, "-m", "autoparallel_fp8.cli", "solve", str(path), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    children = Path(CHILDREN.format(process.pid))
    while not children.read_text().split():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(sent)
    assert process.wait(timeout=60) == code
    assert [p.name for p in tmp_path.iterdir()] == ["problem.json"]
    for _ in range(100):
        if not _is_any_left(process.pid):
            break
        time.sleep(0.1)
    assert not _is_any_left(process.pid)


class EndlessAscent:
    """Says at every step more than a pipe holds."""

    bound, best_prices, prices = 0.0, (0.0,), np.zeros(1)

    def step(self) -> None:
        time.sleep(0.01)

    @property
    def dual(self) -> EndlessAscent:
        return self

    def state(self) -> tuple[np.ndarray, ...]:
        return np.zeros(1 << 20), np.zeros(1), np.zeros(1)


def test_a_bound_that_nobody_reads_any_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending to a process that is gone fails, it does not wait."""
    monkeypatch.setattr(beside, "TELL_SECONDS", 0.0)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    ends = (EndlessAscent(), time.monotonic() + 60, sender, receiver, os.getpid())
    process = context.Process(target=beside._raise, args=ends, daemon=True)
    process.start()
    sender.close()
    receiver.close()
    process.join(20)
    try:
        assert process.exitcode == 0
    finally:
        process.kill()


def _is_any_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
