"""Train a small float8 Llama on a text, bytes as tokens: plan, apply, AdamW.

torchrun --nproc-per-node 4 examples/train_llama.py --mesh dp=2,tp=2 --recipe tensorwise

On GPUs it runs over NCCL with the GPU's float8 kernels, on CPUs over gloo with formulas in their place.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoparallel_fp8 import AutoParallel, Plan
from autoparallel_fp8.mesh import parse_mesh

TEXT = Path(__file__).parent / "data" / "declaration.txt"
BATCH, SEQ = 8, 64


def small_llama(seed: int = 0) -> nn.Module:
    """Two layers, float32, 256 tokens: one a byte."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=SEQ, attention_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def planned(model: nn.Module, mesh: str, recipe: str | None, *, scale_scope: str = "local") -> Plan:
    """float32 masters, bfloat16 compute; the batch split over dp, every parameter over all ranks."""
    tokens = torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    planner = AutoParallel(
        model, mesh, inputs=(tokens, tokens), recipe=recipe, device="B200" if recipe == "mxfp8" else "H100",
        mixed_precision=policy, scale_scope=scale_scope,
    )  # fmt: skip
    placement = ", ".join("S(0)" if axis.name == "dp" else "R" for axis in planner.mesh.axes)
    return planner.add_input_constraints([placement] * 2).add_parameter_memory_constraint().optimize()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, the token after each), the same on every rank, without end."""
    data = torch.tensor(list(TEXT.read_bytes()))
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(data) - SEQ - 1, (BATCH,), generator=generator)
        rows = torch.stack([data[start : start + SEQ + 1] for start in starts])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train(plan: Plan, model: nn.Module, steps: int, *, compile: bool = False) -> list[float]:
    """The loss of every step, the same on every rank."""
    parallel = plan.apply(model, compile=compile)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-3)
    losses = []
    for _, (tokens, labels) in zip(range(steps), batches(), strict=False):
        loss = parallel(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach().full_tensor()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=1")
    parser.add_argument("--recipe", help="tensorwise, rowwise, rowwise_with_gw_hp or mxfp8")
    parser.add_argument("--scale-scope", default="local")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="let Inductor compile forward and backward")
    options = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))  # of torchrun; apply looks too, but planning comes first here
    if parse_mesh(options.mesh).num_devices != world:
        parser.error(f"--mesh {options.mesh} has {parse_mesh(options.mesh).num_devices} ranks, and {world} run")
    model = small_llama()
    plan = planned(model, options.mesh, options.recipe, scale_scope=options.scale_scope)
    losses = train(plan, model, options.steps, compile=options.compile)
    if torch.distributed.get_rank() == 0:
        for step, loss in enumerate(losses):
            print(f"step {step:3}  loss {loss:.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
