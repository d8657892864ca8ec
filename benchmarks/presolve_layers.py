"""Times presolve and solve on a made-up problem of the real kind: equal layers, shared tables, a few hubs.

    python benchmarks/presolve_layers.py --layers 32 --ops 400

A layer is a chain of ops with branches. An option of an op names the placement of each operand and of its output on two
mesh axes; an edge costs what it takes to turn the producer's placement into the consumer's. Every layer reads one hub
(as attention masks and rotary tables are read). Prints sizes and seconds of each phase, and the peak memory.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import time

import numpy as np

from autoparallel_fp8.problem import Array, Edge, Problem, Row
from autoparallel_fp8.solver.presolve import presolve
from autoparallel_fp8.solver.solve import solve

PLACEMENTS = ("R", "S(0)", "S(1)", "S(2)", "P")
OP_ROWS = {  # one axis: placements of (first operand, second operand, output)
    "pointwise": [("R", "R", "R"), ("S(0)", "S(0)", "S(0)"), ("S(1)", "S(1)", "S(1)"), ("S(2)", "S(2)", "S(2)")],
    "add": [(p, p, p) for p in PLACEMENTS],
    "matmul": [
        ("R", "R", "R"),
        ("S(0)", "R", "S(0)"),
        ("R", "S(1)", "S(1)"),
        ("S(1)", "S(0)", "P"),
        ("S(2)", "S(2)", "S(2)"),
        ("P", "R", "P"),
    ],
    "reduce": [("R", "R", "R"), ("S(0)", "S(0)", "S(0)"), ("S(1)", "R", "P"), ("P", "R", "P")],
}


def move_us(source: str, target: str) -> float:
    """Microseconds per MB to turn one placement of an axis into another; inf where there is no such step."""
    if source == target:
        return 0.0
    if target == "P":
        return float("inf")
    return {"R": 0.01, "P": 20.0 if target == "R" else 10.0}.get(source, 10.0 if target == "R" else 2.5)


def make_problem(num_layers: int, num_ops: int, seed: int = 0, row_share: float | None = None) -> Problem:
    """Equal layers of `num_ops` ops, one after the other; `row_share`: memory limit between the least and the most."""
    random = np.random.default_rng(seed)
    plan = [_plan_op(random, k) for k in range(num_ops)]
    options = {kind: list(itertools.product(rows, repeat=2)) for kind, rows in OP_ROWS.items()}
    cache: dict[tuple[str, str, int, int], Array] = {}

    def table(producer: str, consumer: str, operand: int, size: int) -> Array:
        key = (producer, consumer, operand, size)
        if key not in cache:
            cache[key] = np.array(
                [
                    [
                        size * sum(move_us(a[2], b[operand]) for a, b in zip(p, c, strict=True))
                        for c in options[consumer]
                    ]
                    for p in options[producer]
                ]
            )
        return cache[key]

    kinds, names, costs, links = ["pointwise"], ["hub"], [np.zeros(len(options["pointwise"]))], {}
    for layer in range(num_layers):
        base = len(kinds)
        for k, (kind, back, other, size, work) in enumerate(plan):
            v = len(kinds)
            kinds.append(kind)
            names.append(f"layers.{layer}.op{k}")
            share = [0.125 ** sum("R" not in row[2] for row in option) for option in options[kind]]
            costs.append(work * np.array(share))
            for operand, u in enumerate(
                dict.fromkeys((max(0, v - back), other if other <= 0 else max(0, base + k - other)))
            ):
                if u != v and (layer or u == 0 or u >= base):
                    links[u, v] = table(kinds[u], kind, operand, size)
    numbers = {id(t): n for n, t in enumerate(cache.values())}
    edges = tuple(Edge(u, w, numbers[id(t)]) for (u, w), t in links.items())
    problem = Problem(tuple(names), tuple(costs), edges, tuple(cache.values()))
    return problem if row_share is None else _with_row(problem, kinds, options, plan, row_share)


def _plan_op(random: np.random.Generator, k: int) -> tuple[str, int, int, int, float]:
    kind = str(random.choice(list(OP_ROWS), p=[0.5, 0.15, 0.2, 0.15]))
    far = int(random.integers(2, 30)) if random.random() < 0.8 else int(random.integers(30, 120))
    other = 0 if random.random() < 0.03 else (far if kind in ("add", "matmul") or random.random() < 0.1 else 1)
    return kind, 1, other, int(random.choice([1, 4, 16])), float(random.choice([5.0, 50.0, 400.0]))


def _with_row(problem: Problem, kinds: list[str], options: dict, plan: list, share: float) -> Problem:
    terms = {}
    for v in range(1, problem.num_variables, 40):
        kept = [0.125 ** sum("R" not in row[2] for row in option) for option in options[kinds[v]]]
        terms[v] = 1e9 * plan[(v - 1) % len(plan)][3] * np.array(kept)
    least, most = (sum(float(f(c)) for c in terms.values()) for f in (np.min, np.max))
    row = Row("memory", least + share * (most - least), terms)
    return Problem(problem.names, problem.costs, problem.edges, problem.tables, (row,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ops", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--row-share", type=float, help="add a memory row, limit at this share between least and most")
    parser.add_argument("--time-limit", type=float)
    args = parser.parse_args()
    start = time.perf_counter()

    def report(text: str) -> None:
        print(f"{time.perf_counter() - start:7.2f} s  {text}")

    problem = make_problem(args.layers, args.ops, args.seed, args.row_share)
    report(f"made: {_size(problem)}")
    small, _ = presolve(problem)
    report(f"presolved: {_size(small)}")
    solution = solve(problem, time_limit=args.time_limit, progress=report)
    report(f"{solution.status}, objective {solution.objective:.6f}, gap {solution.gap:.2e}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def _size(problem: Problem) -> str:
    return (
        f"{problem.num_variables} variables, {problem.num_options} options, {len(problem.edges)} edges, "
        f"{problem.num_pairs} pairs, {len(problem.tables)} tables"
    )


if __name__ == "__main__":
    main()
