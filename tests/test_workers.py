"""Jobs in forked processes: results and errors come back, and no process is left, whatever ends the search."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autoparallel_fp8.errors import AutoParallelError, InfeasibleError, SolveError, UsageError
from autoparallel_fp8.workers import Workers, default_workers

forked = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


def jobs(count: int, started: list[int], job: Callable[[int], Any]) -> Iterator[tuple[int, Callable[[], Any]]]:
    for k in range(count):
        started.append(k)
        yield k, lambda k=k: job(k)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_with_their_keys(count: int) -> None:
    """As many as there are jobs; closures see what this process made."""
    offset = object()
    with Workers(count) as workers:
        found = dict(workers.run(jobs(5, [], lambda k: (k * k, offset is not None))))
    assert found == {k: (k * k, True) for k in range(5)}


@pytest.mark.parametrize("count", [1, 2])
def test_a_job_is_taken_when_it_can_start(count: int) -> None:
    """So that what ended may decide whether another one starts at all."""
    started: list[int] = []
    with Workers(count) as workers:
        results = workers.run(jobs(10, started, lambda k: k))
        next(results)
        assert started == list(range(count))
        next(results)
        assert started == list(range(count + 1))


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_the_library_is_a_result(count: int) -> None:
    def job(k: int) -> int:
        if k == 1:
            raise InfeasibleError("nothing fits", at="here", do="buy more")
        return k

    with Workers(count) as workers:
        found = dict(workers.run(jobs(3, [], job)))
    error = found.pop(1)
    assert found == {0: 0, 2: 2} and type(error) is InfeasibleError
    assert (error.message, error.at, error.do) == ("nothing fits", "here", "buy more")


def test_errors_pickle() -> None:
    """With their three parts, of every kind."""
    for kind in (AutoParallelError, UsageError):
        for error in (kind("what", at="where", do="cure"), kind("what")):
            again = pickle.loads(pickle.dumps(error))
            assert type(again) is kind and str(again) == str(error)


@forked
def test_other_errors_are_raised_with_their_traceback() -> None:
    with Workers(2) as workers, pytest.raises(RuntimeError, match=r"failed at 0:(.|\n)*ZeroDivisionError"):
        list(workers.run(jobs(1, [], lambda k: 1 // k)))


@forked
def test_a_worker_that_dies_is_told() -> None:
    with Workers(2) as workers, pytest.raises(SolveError, match="a worker died with exit code -9\n  at: 0\n  do: "):
        list(workers.run(jobs(1, [], lambda k: os.kill(os.getpid(), signal.SIGKILL))))


def is_alive(pid: int) -> bool:
    """Not gone and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.05)


@forked
def test_nothing_runs_on_after_an_interrupt(tmp_path: Path) -> None:
    """Workers end with the block, also in the middle of a job."""

    def job(k: int) -> int:
        (tmp_path / f"{k}").write_text(str(os.getpid()))
        if k == 2:
            return k
        time.sleep(600)
        return k

    with pytest.raises(KeyboardInterrupt), Workers(3) as workers:
        for _ in workers.run(jobs(3, [], job)):
            while len(list(tmp_path.iterdir())) < 3:
                time.sleep(0.05)
            raise KeyboardInterrupt
    assert_gone([int(path.read_text() or 0) for path in tmp_path.iterdir()])


SLEEPERS = """
import os, sys, time
from pathlib import Path
from autoparallel_fp8.workers import Workers
folder = Path(sys.argv[1])
def job():
    (folder / f"{os.getpid()}.part").touch()
    (folder / f"{os.getpid()}.part").rename(folder / str(os.getpid()))
    time.sleep(600)
with Workers(2) as workers:
    list(workers.run(iter([(0, job), (1, job)])))
"""


@forked
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_a_process_that_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    """However it is: nothing of it can clean up after SIGKILL."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPERS, str(tmp_path)], stderr=subprocess.DEVNULL)
    while len([p for p in tmp_path.iterdir() if p.suffix != ".part"]) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(how)
    process.wait()
    assert_gone([int(p.name) for p in tmp_path.iterdir()])


def test_by_default_one_worker_a_core_and_four_at_most() -> None:
    assert 1 <= default_workers() <= 4
