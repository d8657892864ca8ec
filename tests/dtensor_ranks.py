"""For the tests of DTensor: ranks in processes over gloo, parts of whole tensors, and ops run on them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from op_samples import E4M3, numbers, powers
from split_ops import Sample, map_tensors
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel_fp8.shards import same_bits

SECONDS = 300
aten = torch.ops.aten


def scaled_mm(scales: tuple[Any, Any], bias: Any = None) -> Sample:
    """a [32, 64] by b [64, 16] in float8; sizes that every kernel takes."""
    a, b = numbers(32, 64, dtype=E4M3), numbers(16, 64, dtype=E4M3, high=3).t()
    more = () if bias is None else (bias,)
    return Sample(aten._scaled_mm.default, (a, b, *scales, *more), (("out_dtype", torch.float32),))


TENSORWISE, ROWWISE = (powers(), powers(1)), (powers(32, 1), powers(1, 16))
BIAS = numbers(16)


def failures_on_ranks(check: Callable[..., list[str]], num_ranks: int, folder: Path, *arguments: Any) -> list[str]:
    """Runs `check(*arguments)` on ranks of a gloo group; returns what it returned on any of them, without repeats.

    Args:
        check: a function of a module, called on every rank, that returns a sentence a failure.
        num_ranks: processes to start.
        folder: empty, for the store and what the ranks report.
    """
    context = mp.spawn(_run_rank, (num_ranks, str(folder), check, arguments), nprocs=num_ranks, join=False)
    end = time.monotonic() + SECONDS
    while not context.join(timeout=max(0.0, end - time.monotonic())):  # True once all are done; raises if one failed
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{num_ranks} ranks did not finish in {SECONDS} s")
    reports = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
    return list(dict.fromkeys(sentence for report in reports for sentence in report))


def _run_rank(
    rank: int, num_ranks: int, folder: str, check: Callable[..., list[str]], arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, store=store)
    report = check(*arguments)
    Path(f"{folder}/rank{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def part_of(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> Tensor:
    """What this rank holds of a tensor, as DTensor lays it out; the parts of a sum or maximum all differ."""
    local = whole
    for axis, placement in enumerate(placements):
        here, count = mesh.get_local_rank(axis), mesh.size(axis)
        if placement.is_shard():
            chunks = local.chunk(count, placement.dim)
            local = chunks[here] if here < len(chunks) else local.narrow(placement.dim, 0, 0)
        elif placement.is_partial("sum"):
            local = _parts_of_sum(local, count)[here]
        elif placement.is_partial("max"):
            held = torch.arange(local.numel()).reshape(local.shape) % count == here
            local = torch.where(held, local, local - 1)
    return local.clone()


def _parts_of_sum(whole: Tensor, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(whole.numel())
    parts = [torch.randint(-3, 4, whole.shape, generator=generator).to(whole.dtype) for _ in range(count - 1)]
    return [whole - sum(parts), *parts]


def distributed(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """The tensor with these placements, without communication (gloo moves no float8)."""
    local = part_of(whole, mesh, placements)
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(local, mesh, list(placements), run_check=False, shape=shape, stride=stride)


def run_distributed(sample: Sample, mesh: DeviceMesh, operands: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """The results of the sample's op on its tensors with these placements."""
    layouts = iter(operands)
    args = map_tensors(sample.args, lambda whole: distributed(whole, mesh, next(layouts)))
    kwargs = tuple(
        (name, map_tensors(v, lambda whole: distributed(whole, mesh, next(layouts)))) for name, v in sample.kwargs
    )
    return Sample(sample.op, args, kwargs).run()


def difference(made: DTensor, want: Tensor, mesh: DeviceMesh, rtol: float = 0.0, atol: float = 0.0) -> str:
    """How a result differs from the unsplit one: "" where shape, dtype and every bit (up to tolerance) are the same."""
    if made.shape != want.shape or made.dtype is not want.dtype:
        return f"{list(made.shape)} {made.dtype} instead of {list(want.shape)} {want.dtype}"
    if any(p.is_partial() for p in made.placements):
        got, target = made.full_tensor(), want
    else:
        got, target = made.to_local(), part_of(want, mesh, made.placements)
    if got.shape != target.shape:
        return f"local shape {list(got.shape)} instead of {list(target.shape)}"
    same = same_bits(got, target) if rtol == atol == 0 else torch.allclose(got, target, rtol, atol, equal_nan=True)
    return "" if same else f"{got.flatten()[:8].tolist()} instead of {target.flatten()[:8].tolist()}"
