"""Scaled and grouped GEMMs on a GPU's own kernels: what no constraint refuses runs, and gives what its formula gives.

Every option of every sample is run on each rank's part, local programs included, wherever the device's constraints let
the parts through. It shows constraints that are too weak (the kernel raises) and formulas that read scales otherwise
than the kernel does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from autoparallel_fp8.rules import broken_constraints
from grouped_samples import grouped_samples
from scaled_samples import scaled_samples
from split_ops import OnRanks, Sample, kind_of

from autoparallel_fp8.lower import local_call
from autoparallel_fp8.products import format_option, local_specs
from autoparallel_fp8.rank import with_stand_ins

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = 2.0**-6
"""bfloat16 results of sums that tensor cores round on the way."""


def architecture() -> str:
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def in_bfloat16(sample: Sample) -> Sample:
    """The same call with a bfloat16 result and bias, which every kernel has."""

    def changed(value: Any) -> Any:
        if value is torch.float32:
            return torch.bfloat16
        is_bias = isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value is bias
        return value.to(torch.bfloat16) if is_bias else value

    position = {"_scaled_mm": 4, "_scaled_mm_v2": 8}.get(sample.op._schema.name.split("::")[1], 99)
    bias = sample.args[position] if position < len(sample.args) else None
    args, kwargs = tuple(map(changed, sample.args)), tuple((name, changed(value)) for name, value in sample.kwargs)
    return replace(sample, args=args, kwargs=kwargs)


def is_held(sample: Sample) -> bool:
    """Whether every token is some group's: results of the others are as memory was."""
    ends = [t for t in sample.tensors() if t.dtype == torch.int32]
    return not ends or sample.tensors()[0].ndim == 3 or int(ends[0][-1]) in sample.tensors()[0].shape


def test_what_no_constraint_refuses_runs_as_its_formula() -> None:
    """Axes of 2 and 4, one rank after the other."""
    wrong: list[str] = []
    tried: dict[str, int] = {}
    for sample in map(in_bfloat16, [*scaled_samples(), *filter(is_held, grouped_samples())]):
        for ways in (2, 4):
            kind = kind_of(sample, (ways,))
            on_ranks = OnRanks(sample, kind, (ways,))
            for option in kind.options:
                local = local_specs(kind.call.tensors, kind.operand_factors, option.operands, (ways,))
                layouts = [p for layout in option.operands for p in layout]
                if any(p.kind not in "RS" for p in layouts) or broken_constraints(
                    sample.op, local, architecture(), kind.call
                ):
                    continue
                tried[str(sample.op)] = tried.get(str(sample.op), 0) + 1
                said = difference(sample, on_ranks, option, ways)
                if said:
                    shapes = [tuple(t.shape) for t in sample.tensors()]
                    wrong.append(f"{sample.op} {shapes} over {ways}: {format_option(option)}: {said}")
    print(tried)
    assert tried and not wrong, f"{len(wrong)} of {tried}\n" + "\n".join(wrong[:40])


def difference(sample: Sample, on_ranks: OnRanks, option: Any, ways: int) -> str:
    """What is wrong with the kernel's results on the ranks' parts; "" where nothing is."""
    shards = [on_ranks.shards(k, layout) for k, layout in enumerate(option.operands)]
    for rank in range(ways):
        call = local_call(on_ranks.kind, option, (ways,), (rank,))
        mine = [local[rank] for local in shards]
        want = with_stand_ins(call).run(mine)[0].float()
        try:
            made = call.run([to_device(t) for t in mine])[0].float().cpu()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        if not torch.allclose(made, want, rtol=TOLERANCE, atol=TOLERANCE):
            return f"off by {(made - want).abs().max()} of {want.abs().max()}"
    return ""


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """On the GPU with the same strides; float8 and float4 travel as bytes."""
    small = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=torch.uint8 if small else tensor.dtype, device="cuda"
    )
    made.copy_(tensor.view(torch.uint8) if small else tensor)
    return made.view(tensor.dtype)
