"""A plan on a GPU: one rank over NCCL, with the GPU's own float8 kernels, eager and compiled."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from autoparallel_fp8 import AutoParallel
from autoparallel_fp8.models.presets import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_llama.py"
RECIPES = (None, "tensorwise", "rowwise", "rowwise_with_gw_hp")
CLOSE = 2e-2
"""Largest relative difference of losses, float8 against bfloat16 and compiled against eager."""
CHECKPOINT = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
sys.path.insert(0, sys.argv[1])
from train_llama import batches, planned, small_llama
model = small_llama()
plan = planned(model, "dp=1", "rowwise")
parallel = plan.apply(model)
assert all(p.device.type == "cuda" for p in parallel.parameters()) and dist.get_backend() == "nccl"
tokens, labels = next(batches())
first = parallel(tokens, labels).item()
state = parallel.state_dict()
dcp.save(state, checkpoint_id=sys.argv[2])
with torch.no_grad():
    for p in parallel.parameters():
        p.zero_()
assert parallel(tokens, labels).item() != first
dcp.load(state, checkpoint_id=sys.argv[2])
assert parallel(tokens, labels).item() == first
assert parallel(tokens.cuda(), labels.cuda()).item() == first
dist.destroy_process_group()
print("the same")
"""


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@cache
def losses(recipe: str | None, *options: str) -> list[float]:
    """Of 20 steps of AdamW on the GPU."""
    wanted = ("--recipe", recipe) if recipe else ()
    return [float(x) for x in re.findall(r"loss ([0-9.]+)", run(str(EXAMPLE), *wanted, *options))]


@pytest.mark.parametrize("options", [(), ("--compile",)], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training(recipe: str | None, options: tuple[str, ...]) -> None:
    """Losses fall, and stay by those of bfloat16 without a compiler."""
    found, wanted = losses(recipe, *options), losses(None)
    assert len(found) == 20 and found[-1] < 0.6 * found[0]
    assert max(abs(a - b) / b for a, b in zip(found, wanted, strict=True)) < CLOSE


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    """Bit for bit, through torch.distributed.checkpoint; inputs may lie on either device."""
    assert run("-c", CHECKPOINT, str(EXAMPLE.parent), str(tmp_path / "saved")).endswith("the same\n")


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8"])
def test_verify_with_the_gpus_kernels(recipe: str | None) -> None:
    """All ranks of dp=2,tp=2 in this process."""
    device = "B200" if recipe == "mxfp8" else "H200"
    plan = AutoParallel(build("llama3-debug", num_layers=1), "dp=2,tp=2", recipe=recipe, device=device).optimize()
    assert plan.verify(device="cuda").is_ok
