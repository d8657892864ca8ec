"""Time to build the options of every op of a whole graph: rules, factors, rows, expansion to the mesh.

    python benchmarks/rule_options.py [--repeat 5] [--model llama3-8b] [--recipe tensorwise]

The graph is captured once; medians over the repeats, in seconds, with what was built.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from autoparallel_fp8.capture import capture
from autoparallel_fp8.expansion import expand
from autoparallel_fp8.mesh import parse_mesh
from autoparallel_fp8.models.presets import build

MESHES = ("dp=8,tp=8", "dp=4,cp=4,tp=4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--recipe", default="tensorwise")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    model = build(options.model, num_layers=options.layers)
    tokens = torch.empty(16, 8192, dtype=torch.int64, device="meta")
    graph = capture(model, (tokens,), recipe=options.recipe)
    print(f"{options.model} {options.recipe}: {len(graph.nodes)} nodes, torch {torch.__version__}")
    print(f"{'mesh':16} {'seconds':>8} {'kinds':>6} {'options':>8} {'of all nodes':>13} {'refused':>8}")
    for text in MESHES:
        mesh, seconds = parse_mesh(text), []
        for _ in range(options.repeat):
            started = time.perf_counter()
            space = expand(graph, mesh, architecture="sm90")
            seconds.append(time.perf_counter() - started)
        counts = [len(kind.options) for kind in space.kinds]
        total = sum(counts[number] for number in space.kind_of)
        refused = sum(len(kind.refused) for kind in space.kinds)
        print(f"{text:16} {statistics.median(seconds):8.2f} {len(counts):6} {sum(counts):8} {total:13} {refused:8}")


if __name__ == "__main__":
    main()
