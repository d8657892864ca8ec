"""On one GPU: every recipe's plan verified with real kernels, and the compute of one rank beside the plan's own figure.

    python benchmarks/rank_on_gpu.py [--parts verify,compute] [--layers N] [--json FILE]

`verify` runs all ranks of dp=2,tp=2 in this process on the GPU (`plan.verify(device="cuda")`). `compute` runs one rank
of dp=8, tp=8 and dp=8,tp=8 plans of Llama-3-8B at full size, forward and backward, eager and compiled, with
collectives that give memory of the right size and move nothing; the median of several steps is set beside the compute
that the plan predicts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoparallel_fp8 import AutoParallel, Plan
from autoparallel_fp8.apply import schedule_of
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.program import RunStep
from autoparallel_fp8.rank_steps import RankStep, received
from autoparallel_fp8.report.text import format_table
from autoparallel_fp8.runner import Call, Runner

RECIPES = (None, "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
STEPS = 7


@torch.library.custom_op("autoparallel_fp8_benchmarks::stub", mutates_args=())
def stub(flat: Tensor, numel: int) -> Tensor:
    """Memory of the size that a collective gives; an op, so that a compiler keeps what leads to it."""
    return flat.new_empty(numel)


@stub.register_fake
def _stub_fake(flat: Tensor, numel: int) -> Tensor:
    return flat.new_empty(numel)


class Stubs:
    """Collectives that give memory of the right size, with whatever is in it."""

    def begin(self, steps: Sequence[RankStep], axes: tuple[int, ...], flats: list[Tensor]) -> list[Tensor]:
        sizes = [received(flat.numel(), step) for flat, step in zip(flats, steps, strict=True)]
        return [stub(flat, size) for flat, size in zip(flats, sizes, strict=True)]

    def end(self, started: list[Tensor], moves: Sequence[RunStep]) -> list[Tensor]:
        return started


def planned(recipe: str | None, mesh: str, layers: int, name: str = "llama3-8b") -> Plan:
    device = "B200" if recipe == "mxfp8" else "H200"
    return AutoParallel(build(name, num_layers=layers), mesh, recipe=recipe, device=device).optimize()


def verified(recipe: str | None) -> dict[str, Any]:
    """The largest error of a plan with real kernels, and of one device."""
    start = time.perf_counter()
    result = planned(recipe, "dp=2,tp=2", 1, "llama3-debug").verify(device="cuda")
    worst = max(result.compared, key=lambda one: one.error / one.bound)
    return {
        "recipe": recipe or "bf16",
        "is_ok": result.is_ok,
        "worst": worst.name,
        "error": worst.error,
        "bound": worst.bound,
        "largest": max(one.error for one in result.compared),
        "seconds": time.perf_counter() - start,
    }


def measured(recipe: str | None, mesh: str, layers: int, is_compiled: bool) -> dict[str, Any]:
    """Milliseconds of one rank's forward and backward."""
    plan = planned(recipe, mesh, layers)
    live = plan.live
    assert live is not None
    device = torch.device("cuda")
    runner = Runner(live.space, live.choices, schedule_of(live), 0, Stubs(), device, is_compiled=is_compiled)
    torch.manual_seed(0)
    parts: dict[str, dict[str, Tensor]] = {}
    for kind, keys in runner.keys.items():
        for name, key in keys.items():
            spec = runner.calls[True].given(key.variable, runner.written.program.layouts[key])
            if spec.dtype.is_floating_point:
                made = torch.randn(spec.shape, device=device, dtype=torch.float32).mul_(0.02).to(spec.dtype)
            else:
                made = torch.randint(0, 1000, spec.shape, device=device, dtype=spec.dtype)
            parts.setdefault(kind, {})[name] = made
    parameters = [p.requires_grad_() for p in parts["parameter"].values()]

    def step() -> None:
        call = Call(parts.get("input", {}), parts.get("buffer", {}), torch.tensor(0, device=device), True)
        results = runner.call(call, parameters)
        torch.autograd.backward([x for x in results if x.requires_grad], [torch.ones_like(x) for x in results])
        for p in parameters:
            p.grad = None

    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    step()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    predicted = plan.step_time_us["compute"] / 1e3
    return {
        "recipe": recipe or "bf16",
        "mesh": mesh,
        "mode": "compiled" if is_compiled else "eager",
        "measured_ms": statistics.median(times),
        "predicted_ms": predicted,
        "ratio": statistics.median(times) / predicted,
        "first_call_s": first,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "planned_gib": plan.memory_bytes["total"] / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="verify,compute")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--recipes", default="bf16,tensorwise,rowwise")
    parser.add_argument("--meshes", default="dp=8 tp=8 dp=8,tp=8")
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after so long")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a GPU")
    started = time.perf_counter()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layers": options.layers,
    }
    if "verify" in options.parts:
        found["verify"] = [verified(recipe) for recipe in RECIPES]
        rows = [("recipe", "", "worst tensor", "error", "bound", "largest error", "seconds")]
        for one in found["verify"]:
            rows.append((one["recipe"], "ok" if one["is_ok"] else "WRONG", one["worst"], f"{one['error']:.1e}",
                         f"{one['bound']:.1e}", f"{one['largest']:.1e}", f"{one['seconds']:.1f}"))  # fmt: skip
        print(format_table(rows), flush=True)
    if "compute" in options.parts:
        rows = [("recipe", "mesh", "mode", "measured", "predicted", "ratio", "first call", "peak", "planned")]
        found["compute"] = []
        for mode in options.modes.split(","):
            for recipe in options.recipes.split(","):
                for mesh in options.meshes.split():
                    if time.perf_counter() - started > options.seconds:
                        continue
                    one = measured(None if recipe == "bf16" else recipe, mesh, options.layers, mode == "compiled")
                    torch.cuda.empty_cache()
                    found["compute"].append(one)
                    took = f"{one['measured_ms']:.2f} ms", f"{one['predicted_ms']:.2f} ms"
                    rows.append((one["recipe"], mesh, mode, *took,
                                 f"{one['ratio']:.2f}", f"{one['first_call_s']:.0f} s", f"{one['peak_gib']:.1f} GiB",
                                 f"{one['planned_gib']:.1f} GiB"))  # fmt: skip
                    print(rows[-1], flush=True)
        print(format_table(rows), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
