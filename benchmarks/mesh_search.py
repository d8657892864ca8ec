"""Time and memory of `autoparallel-fp8 plan MODEL --gpus N`, workers included.

    python benchmarks/mesh_search.py [--workers 1 2 4] [--only TEXT]

Each job is one command: wall-clock seconds, CPU seconds of all its processes, and the peak of what they hold together
(proportional set size, so that pages which workers share with the command count once; Linux). Under each the table of
its meshes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOBS = {
    "llama3-8b tensorwise 64": "llama3-8b --recipe tensorwise --gpus 64 --device H100",
    "llama3-debug rowwise 8": "llama3-debug --recipe rowwise --gpus 8 --device H100",
}
INTERVAL = 0.5  # seconds between two looks at the memory


def family(pid: int) -> list[int]:
    """The process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(below for child in children for below in family(int(child)))]


def held_bytes(pids: list[int]) -> int:
    """Proportional set size of all of them."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it ended
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def run(arguments: str, workers: int) -> str:
    """Runs one command and says what it took."""
    command = [sys.executable, "-m", "autoparallel_fp8.cli", "plan", *arguments.split(), "--workers", str(workers)]
    with tempfile.TemporaryFile("w+") as out:
        before, started, peak, most = os.times(), time.perf_counter(), 0, 0
        process = subprocess.Popen(command, stdout=out)
        while process.poll() is None:
            pids = family(process.pid)
            peak, most = max(peak, held_bytes(pids)), max(most, len(pids) - 1)
            time.sleep(INTERVAL)
        seconds, after = time.perf_counter() - started, os.times()
        out.seek(0)
        table = out.read().split("\n\n")
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    head = f"{seconds:7.1f} s, {cpu:7.1f} s of CPU, {peak / 1e9:.2f} GB, at most {most} worker processes"
    return "\n".join([head, *table[:2]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    options = parser.parse_args()
    for name, arguments in JOBS.items():
        for workers in options.workers:
            if options.only in name:
                print(f"{name}, workers={workers}: {run(arguments, workers)}\n", flush=True)


if __name__ == "__main__":
    main()
