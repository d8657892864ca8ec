"""Time and memory of whole planning commands, and of their stages.

    python benchmarks/plan_models.py [--repeat 3] [--only TEXT]

Each job is one `autoparallel-fp8 plan` process: wall-clock seconds and peak resident memory, medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOBS = {
    "llama3-8b bf16 8x8": "llama3-8b --mesh dp=8,tp=8 --device H100",
    "llama3-8b tensorwise 8x8": "llama3-8b --recipe tensorwise --mesh dp=8,tp=8 --device H100",
    "llama3-8b rowwise 8x8": "llama3-8b --recipe rowwise --mesh dp=8,tp=8 --device H100",
    "qwen3-8b tensorwise 8x8": "qwen3-8b --recipe tensorwise --mesh dp=8,tp=8 --device H100",
    "llama3-70b tensorwise 8x8": "llama3-70b --recipe tensorwise --mesh dp=8,tp=8 --device H100",
    "gpt2 bf16 8": "gpt2 --mesh dp=8 --device H100",
    "llama3-debug rowwise 2x2": "llama3-debug --recipe rowwise --mesh dp=2,tp=2 --device H100",
}


def run(arguments: str) -> tuple[float, float, dict[str, object], list[str]]:
    """Seconds, peak GB, the plan and the stage times of one command."""
    with tempfile.TemporaryDirectory() as folder:
        plan_file, log_file = Path(folder) / "plan.json", Path(folder) / "log"
        command = [
            sys.executable,
            "-m",
            "autoparallel_fp8.cli",
            "plan",
            *arguments.split(),
            "--json",
            str(plan_file),
            "--times",
        ]
        started = time.perf_counter()
        with log_file.open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
            _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        text = log_file.read_text()
        if os.waitstatus_to_exitcode(status):
            raise SystemExit(f"{' '.join(command)}\n{text}")
        return seconds, usage.ru_maxrss / 1e6, json.loads(plan_file.read_text()), text.strip().splitlines()[-1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    options = parser.parse_args()
    for name, arguments in JOBS.items():
        if options.only not in name:
            continue
        runs = [run(arguments) for _ in range(options.repeat)]
        seconds = statistics.median(r[0] for r in runs)
        memory = statistics.median(r[1] for r in runs)
        plan, stages = runs[-1][2], runs[-1][3]
        print(
            f"{name:28} {seconds:7.1f} s {memory:6.2f} GB  {plan['status']} gap {plan['gap']:.1e}  {' '.join(stages)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
