"""Jobs side by side in forked processes: each has what this process has made, and its memory goes when it ends.

Fork, not spawn: a graph has ops that do not pickle, rules that the user registered live in this process alone, and a
fresh process would import torch for seconds. As in torch's DataLoader, a worker holds torch to one thread, since the
threads of this process are not there; it never touches a GPU. Where processes cannot be forked, jobs run here.

A worker leaves Ctrl-C to this process, which kills its workers when it stops waiting for them. Where it dies itself,
their lifeline, a pipe that only this process holds open, ends and they end with it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .cores import num_cores
from .errors import AutoParallelError, SolveError

Job = Callable[[], Any]
MOST = 4
"""Workers by default, at most: each may take gigabytes."""


def default_workers() -> int:
    """One a core that this process may use, at most `MOST`."""
    return min(MOST, num_cores())


class Workers:
    """Up to `count` jobs at a time; one at a time run in this process.

    >>> with Workers(2) as workers:
    ...     sorted(workers.run(iter([("a", lambda: 1), ("b", lambda: 2)])))
    [('a', 1), ('b', 2)]
    """

    def __init__(self, count: int) -> None:
        self.count = count if sys.platform == "linux" and not multiprocessing.current_process().daemon else 1
        self._running: dict[Connection, tuple[Any, Any]] = {}
        self._lifeline: tuple[int, int] | None = None

    def __enter__(self) -> Workers:
        if self.count > 1:
            self._lifeline = os.pipe()
        return self

    def __exit__(self, *_: object) -> None:
        for connection, (_, process) in self._running.items():
            process.kill()
            process.join()
            connection.close()
        self._running.clear()
        for end in self._lifeline or ():
            os.close(end)
        self._lifeline = None

    def run(self, jobs: Iterator[tuple[Any, Job]]) -> Iterator[tuple[Any, Any]]:
        """The key and the result of each job, as they end; a job is taken from the iterator when it can start.

        A result may be an AutoParallelError: the job's, returned instead of raised.

        Raises:
            SolveError: a worker died.
            RuntimeError: a job raised anything else; with its traceback.
        """
        if self.count == 1:
            for key, job in jobs:
                yield key, _result(job)
            return
        is_done = False
        while True:
            while not is_done and len(self._running) < self.count:
                pair = next(jobs, None)
                is_done = pair is None
                if pair is not None:
                    self._start(*pair)
            if not self._running:
                return
            yield self._finished()

    def _start(self, key: Any, job: Job) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(job, theirs, self._lifeline), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork of a process with threads
            process.start()
        theirs.close()
        self._running[ours] = (key, process)

    def _finished(self) -> tuple[Any, Any]:
        ready = wait(list(self._running))
        connection = next(c for c in self._running if c in ready)
        key, process = self._running.pop(connection)
        try:
            is_result, value = connection.recv()
        except EOFError:
            process.join()
            raise SolveError(
                f"a worker died with exit code {process.exitcode}",
                at=str(key),
                do="give the machine more memory, or use workers=1",
            ) from None
        finally:
            connection.close()
        process.join()
        if not is_result:
            raise RuntimeError(f"a worker failed at {key}:\n{value}")
        return key, value


def _result(job: Job) -> Any:
    try:
        return job()
    except AutoParallelError as error:
        return error


def _work(job: Job, connection: Connection, lifeline: tuple[int, int]) -> None:
    """The life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.close(lifeline[1])
    threading.Thread(target=_end_with_parent, args=(lifeline[0],), daemon=True).start()
    gc.freeze()  # what the parent made is not walked, so its pages stay shared
    torch.set_num_threads(1)
    try:
        message = (True, _result(job))
    # Whatever a job raises is told in the parent.
    except Exception:
        message = (False, traceback.format_exc())
    connection.send(message)


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: it returns when the parent is gone
    os._exit(1)
