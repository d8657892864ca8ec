"""Cost, bound, time and memory of `autoparallel-fp8 solve` on instances of the IOPDDL contest.

    python benchmarks/iopddl.py FOLDER [--names A,B] [--json FILE]

FOLDER holds A.json.gz, B.json.gz, ... Each instance is one process with the contest's time limit for the whole command.
The answer is evaluated here again, from the file's numbers alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Best known cost, cost of XLA's production solver, seconds; ASPLOS 2025 / EuroSys 2025 contest: google/iopddl.
KNOWN: dict[str, tuple[float, float | None, float]] = {
    "A": (6_548_641_531, 13_214_846_074, 60.0),
    "B": (532_843, 990_205, 60.0),
    "C": (84_102_445_260, 4_195_881_092_919, 60.0),
    "K": (2_274_276_676, None, 180.0),
    "M": (49_928_200_000, None, 180.0),
    "P": (651_833_115_436, 651_833_115_436, 240.0),
    "S": (1_511_377_982, None, 240.0),
}
SECONDS = 60.0  # for an instance that is not listed
FORBIDDEN = 10**18


def evaluate(problem: dict[str, Any], choices: list[int]) -> int | None:
    """The cost of choices; None where they are not allowed."""
    nodes, edges = problem["nodes"], problem["edges"]
    paid = [cost[x] for cost, x in zip(nodes["costs"], choices, strict=True)]
    for (u, w), table in zip(edges["nodes"], edges["costs"], strict=True):
        paid.append(table[choices[u] * len(nodes["costs"][w]) + choices[w]])
    changes: dict[int, int] = {}
    for usage, interval, x in zip(nodes["usages"], nodes["intervals"], choices, strict=True):
        if interval:
            changes[interval[0]] = changes.get(interval[0], 0) + usage[x]
            changes[interval[1]] = changes.get(interval[1], 0) - usage[x]
    held, peak = 0, 0
    for moment in sorted(changes):
        held += changes[moment]
        peak = max(peak, held)
    is_allowed = max(paid, default=0) < FORBIDDEN and peak <= problem.get("usage_limit", peak)
    return sum(paid) if is_allowed else None


def run(path: Path, seconds: float) -> dict[str, Any]:
    """One command: its answer, wall-clock seconds and peak resident memory, children included."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "autoparallel_fp8.cli", "solve", str(path), "--json", str(target), "--quiet"]
        started = time.perf_counter()
        process = subprocess.Popen([*command, "--time-limit", str(seconds)], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - started
        code = os.waitstatus_to_exitcode(status)
        if code:
            return {"code": code, "seconds": took, "peak_gb": usage.ru_maxrss / 1e6}
        answer = json.loads(target.read_text())
    with gzip.open(path) as file:
        cost = evaluate(json.load(file)["problem"], answer.pop("choices"))
    is_right = cost == answer["cost"]
    return {**answer, "code": code, "is_right": is_right, "seconds": took, "peak_gb": usage.ru_maxrss / 1e6}


def shown(name: str, found: dict[str, Any], best: float | None, xla: float | None, limit: float) -> str:
    """A row of the table."""
    if found["code"]:
        return f"| {name} | none, exit code {found['code']} | | | | | | {found['seconds']:.0f} s of {limit:.0f} s | |"
    cost, note = found["cost"], "" if found["is_right"] else " (WRONG)"
    gap = "optimal" if found["status"] == "optimal" else f"{100 * found['gap']:.2f} %"
    known, by_xla = (f"{x:,.0f}" if x else "none" for x in (best, xla))
    ratio = f"{cost / best:.5f}" if best else ""
    bound = f"{found['bound']:,.0f}"
    time_ = f"{found['seconds']:.0f} s of {limit:.0f} s"
    cells = (name, f"{cost:,.0f}{note}", known, ratio, by_xla, bound, gap, time_, f"{found['peak_gb']:.2f} GB")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--names", default="", help="such as A,B; default: all in the folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as data too")
    options = parser.parse_args()
    names = [name for name in options.names.split(",") if name]
    names = names or sorted(path.name.removesuffix(".json.gz") for path in options.folder.glob("*.json.gz"))
    print("| file | cost | best known | cost / best | XLA | bound | gap | time | peak memory |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    figures = {}
    for name in names:
        best, xla, seconds = KNOWN.get(name, (None, None, SECONDS))
        figures[name] = run(options.folder / f"{name}.json.gz", seconds)
        print(shown(name, figures[name], best, xla, seconds), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
