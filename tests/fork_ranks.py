"""For the tests of parallel models: a function run on the ranks of a gloo group, each a fork of this process.

Forks have what the parent made, plans above all, so that no rank captures or plans again. What a rank returns comes
back as a file. `dtensor_ranks` starts fresh processes instead.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 180.0


def run_ranks(
    num_ranks: int,
    function: Callable[[int], Any],
    *,
    has_group: bool = True,
    lost: Collection[int] = (),
    seconds: float = SECONDS,
) -> list[Any]:
    """What `function(rank)` returns on each rank; None for those that are lost.

    Args:
        num_ranks: processes.
        function: called with the rank; may be a closure, and returns tensors and plain values.
        has_group: whether the default group is there when it is called, and torchrun's environment, as far as a rank
            needs it.
        lost: ranks that may die without a word.
        seconds: after which all are killed.

    Raises:
        AssertionError: a rank failed; with its traceback, of the one that failed first.
        TimeoutError: with what the ranks were doing.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forks and threads; a fork here has one
        folder = Path(name)
        processes = [
            context.Process(target=_run_rank, args=(rank, num_ranks, function, folder, has_group, not lost, seconds))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            _join(processes, folder, lost, time.monotonic() + seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()
        files = [folder / f"{rank}.pt" for rank in range(num_ranks)]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def _join(processes: list[Any], folder: Path, lost: Collection[int], end: float) -> None:
    left = {process.sentinel: rank for rank, process in enumerate(processes)}
    while left:
        ended = wait(list(left), timeout=max(0.0, end - time.monotonic()))
        if not ended:
            doing = "\n".join(f"rank {rank}:\n{_text(folder / f'{rank}.stack')}" for rank in left.values())
            raise TimeoutError(f"ranks {sorted(left.values())} did not finish\n{doing}")
        for sentinel in ended:
            rank = left.pop(sentinel)  # type: ignore[call-overload]
            processes[rank].join()
            code = processes[rank].exitcode
            if code and rank not in lost:
                told = _text(folder / f"{rank}.error") or _text(folder / f"{rank}.stack")
                raise AssertionError(f"rank {rank} ended with {code}\n{told}")


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _run_rank(
    rank: int,
    num_ranks: int,
    function: Callable[[int], Any],
    folder: Path,
    has_group: bool,
    ends_together: bool,
    seconds: float,
) -> None:
    torch.set_num_threads(1)  # the parent's threads are not here
    with open(folder / f"{rank}.stack", "w") as stack:
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(seconds * 0.95, file=stack)
        try:
            if has_group:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
                store = dist.FileStore(str(folder / "store"), num_ranks)
                limit = timedelta(seconds=seconds)
                dist.init_process_group("gloo", rank=rank, world_size=num_ranks, store=store, timeout=limit)
            torch.save(function(rank), folder / f"{rank}.part")
            os.rename(folder / f"{rank}.part", folder / f"{rank}.pt")
            while ends_together and not all((folder / f"{other}.pt").exists() for other in range(num_ranks)):
                time.sleep(0.02)  # whoever leaves closes connections that the others may still use
        except BaseException:  # whatever it is, the parent tells
            (folder / f"{rank}.error").write_text(traceback.format_exc())
            os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # nothing that the parent registered is to run here
