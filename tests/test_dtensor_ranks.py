"""DTensor with our rows on gloo ranks: every op and row bit-equal to the unsplit op, and what DTensor does without."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch
from dtensor_ranks import (
    BIAS,
    ROWWISE,
    TENSORWISE,
    difference,
    distributed,
    failures_on_ranks,
    run_distributed,
    scaled_mm,
)
from op_samples import E4M3, all_samples, numbers
from split_ops import Sample, call_of, map_tensors
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from autoparallel_fp8.integrations import dtensor
from autoparallel_fp8.ops.stand_ins import STAND_INS

aten = torch.ops.aten
ops = torch.ops.autoparallel_fp8
R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


# ---- every op and row --------------------------------------------------------------------------------------------


def check_rows(shape: tuple[int, ...], most: int) -> list[str]:
    """Offered rows of every op: no communication, the row's placements, the unsplit result.

    Args:
        shape: of the mesh.
        most: samples of an op, and combinations of rows of a sample, to try; of more, this many spread over all.
    """
    mesh = init_device_mesh("cpu", shape)
    stand_ins = use_stand_ins()
    failures = []
    for op in dtensor.register():
        samples = [sample for sample in all_samples()[op] if has_fake(sample)]
        failures += [] if samples else [f"{op}: no sample"]
        for sample in spread(samples, most):
            offered = dtensor.shardings(call_of(sample), shape, "cpu")
            for chosen in spread(list(itertools.product(offered, repeat=len(shape))), most):
                sentence = check_combination(sample, mesh, chosen)
                failures += [f"{op}{[list(t.shape) for t in sample.tensors()]}: {sentence}"] if sentence else []
    del stand_ins
    return failures


def spread(items: list[Any], most: int) -> list[Any]:
    return items[:: -(-len(items) // most) or 1]


def use_stand_ins() -> torch.library.Library:
    """Formulas run in place of missing and slow CPU kernels, until the library returned is gone."""
    library = torch.library.Library("aten", "IMPL")
    for op, formula in STAND_INS.items():
        library.impl(op.name().removeprefix("aten::"), formula, "CPU")
    return library


def has_fake(sample: Sample) -> bool:
    """Whether fake tensors take the call: DTensor runs it on them first. In torch 2.13, ragged blocks fail there."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args = map_tensors(sample.args, mode.from_tensor)
        kwargs = tuple((name, map_tensors(value, mode.from_tensor)) for name, value in sample.kwargs)
        try:
            Sample(sample.op, args, kwargs).run()
        except Exception:
            return False
    return True


def check_combination(sample: Sample, mesh: DeviceMesh, chosen: Sequence[dtensor.Sharding]) -> str:
    results, operands = (list(zip(*(row[side] for row in chosen), strict=True)) for side in (0, 1))
    if any(len({p for p in layout if p is not None and p.is_partial()}) > 1 for layout in (*results, *operands)):
        return ""  # DTensor drops sums of maxima by itself
    where = f"{operands} -> {results}"
    try:
        with CommDebugMode() as communication:
            made = run_distributed(sample, mesh, operands)
    except Exception as error:
        return f"{where}: {error}"
    if communication.get_total_counts():
        return f"{where}: communicates, {dict(communication.get_comm_counts())}"
    for tensor, layout, want in zip(made, results, sample.run(), strict=True):
        if want is None:
            continue
        if tensor.placements != tuple(layout):
            return f"{where}: placements {tensor.placements}"
        wrong = difference(tensor, want, mesh, sample.rtol, sample.atol) if sample.is_filled else ""
        if wrong:
            return f"{where}: {wrong}"
    return ""


@pytest.mark.parametrize(("shape", "most"), [((2,), 100), ((2, 2), 7)], ids=["2 ranks", "2x2 ranks"])
def test_every_row_gives_the_unsplit_result_without_communication(shape, most, tmp_path):
    """Operands placed as a row says stay where they are; joined, the results are those of the unsplit op."""
    assert not failures_on_ranks(check_rows, prod(shape), tmp_path, shape, most)


# ---- what DTensor gets wrong by itself -----------------------------------------------------------------------------

Check = Callable[[DeviceMesh], str]
"""A check on one rank; returns what is wrong, or "" ."""


def expect(sample: Sample, operands: Sequence[Any], result: Any) -> Check:
    """The call with one placement an operand has this placement and the unsplit value."""

    def check(mesh: DeviceMesh) -> str:
        (made,) = run_distributed(sample, mesh, [[p] for p in operands])
        wrong = difference(made, sample.run()[0], mesh)
        return wrong or ("" if made.placements == (result,) else f"placement {made.placements}")

    return check


def sum_of_float8(mesh: DeviceMesh) -> str:
    """Operands that are a sum of float8 parts have no right result: they are refused."""
    sample = scaled_mm(ROWWISE)
    part = DTensor.from_local(sample.args[0], mesh, [P], run_check=False)
    others = [distributed(whole, mesh, [R]) for whole in sample.args[1:]]
    try:
        made = aten._scaled_mm.default(part, *others, out_dtype=torch.float32)
    except RuntimeError as error:
        return "" if "self is a partial sum of torch.float8_e4m3fn parts" in str(error) else str(error)
    doubled = (sample.args[0].float() * mesh.size()).to(E4M3)
    want = aten._scaled_mm.default(doubled, *sample.args[1:], out_dtype=torch.float32)
    return difference(made, want, mesh) or "accepted"


def cast_then_multiply(mesh: DeviceMesh) -> str:
    """A float8 cast of a sum reduces it first, and the GEMM after it is right."""
    sample = scaled_mm(ROWWISE)
    high = sample.args[0].float()
    low = distributed(high, mesh, [P]).to(E4M3)
    others = [distributed(whole, mesh, [R]) for whole in sample.args[1:]]
    made = aten._scaled_mm.default(low, *others, out_dtype=torch.float32)
    return difference(made, sample.run()[0], mesh) or (f"cast is {low.placements}" if low.placements == (P,) else "")


def view_of_sum(mesh: DeviceMesh) -> str:
    """A sum is reduced before it is viewed as another dtype."""
    sample = Sample(aten.view.dtype, (numbers(4, 4), torch.int32))
    (made,) = run_distributed(sample, mesh, [[P]])
    return difference(made, sample.run()[0], mesh) or (f"view is {made.placements}" if made.placements == (P,) else "")


def causal_after_not(mesh: DeviceMesh) -> str:
    """Arguments that are no integers belong to the cache's key: a causal call after another has its own placements."""
    q = numbers(2, 2, 8, 4) / 4
    for is_causal, result in ((False, Shard(2)), (True, R)):
        sample = Sample(ops.attention.default, (q, q, q, None, is_causal, 0.5))
        made = run_distributed(sample, mesh, [[Shard(2)], [R], [R]])
        wrong = difference(made[0], sample.run()[0], mesh, atol=1e-6)
        if wrong or made[0].placements != (result,):
            return f"is_causal={is_causal}: {wrong or made[0].placements}"
    return ""


def mx_of_cut_blocks(mesh: DeviceMesh) -> str:
    """Three blocks over two ranks: gathered, not cut."""
    return expect_all(Sample(ops.to_mx.default, (numbers(3, 96), E4M3, 32, 1, "rceil")), [S1], R)(mesh)


def expect_all(sample: Sample, operands: Sequence[Any], result: Any) -> Check:
    def check(mesh: DeviceMesh) -> str:
        made = run_distributed(sample, mesh, [[p] for p in operands])
        for tensor, want in zip(made, sample.run(), strict=True):
            wrong = difference(tensor, want, mesh)
            if wrong or tensor.placements != (result,):
                return wrong or f"placement {tensor.placements}"
        return ""

    return check


def casts_stay(mesh: DeviceMesh) -> str:
    """Casts to 16 bits leave sums, averages, uneven and strided splits where they are."""
    from torch.distributed.tensor.placement_types import _StridedShard  # what FSDP2 over TP makes

    for placement in (P, Partial("avg"), Partial("max"), S0, _StridedShard(0, split_factor=2)):
        local = numbers(3 + (placement == S0) * (1 - 2 * mesh.get_local_rank()), 4)
        whole = (8 if placement == S0 else 6 if not placement.is_partial() else 3, 4)
        x = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole, stride=(4, 1))
        with CommDebugMode() as communication:
            made = x.to(torch.bfloat16)
        if made.placements != (placement,) or communication.get_total_counts():
            return f"{placement}: {made.placements}"
    return ""


RIGHT: dict[str, Check] = {
    "tensorwise, split k": expect(scaled_mm(TENSORWISE), (S1, S0, R, R), P),
    "rowwise, split m": expect(scaled_mm(ROWWISE), (S0, R, S0, R), S0),
    "rowwise, split n": expect(scaled_mm(ROWWISE), (R, S1, R, S1), S1),
    "casts to 16 bits": casts_stay,
}
"""Right with and without us."""

WRONG: dict[str, Check] = {
    "rowwise, split k": expect(scaled_mm(ROWWISE), (S1, S0, R, R), P),
    "bias, split m": expect(scaled_mm(TENSORWISE, BIAS), (S0, R, R, R, R), S0),
    "bias, split n": expect(scaled_mm(TENSORWISE, BIAS), (R, S1, R, R, S0), S1),
    "a sum of float8": sum_of_float8,
    "a cast of a sum": cast_then_multiply,
    "a view of a sum": view_of_sum,
    "attention": expect_all(Sample(ops.attention.default, (numbers(2, 2, 4, 4),) * 3), [S0] * 3, S0),
    "causal attention": causal_after_not,
    "mx blocks": mx_of_cut_blocks,
}
"""Wrong, refused or gathered without us, in torch 2.13."""


def check_before_and_after() -> list[str]:
    """All of the above without our rows, then with them, in the same process: what was decided before is forgotten."""
    mesh = init_device_mesh("cpu", (2,))
    failures = []
    stand_ins = None if torch.__version__ >= "2.13" else use_stand_ins()  # CPUs multiplied tensorwise only
    if torch.__version__.startswith("2.13"):
        failures += [f"without: {name}: {reason(check, mesh)}" for name, check in RIGHT.items() if reason(check, mesh)]
        failures += [f"right without us: {name}" for name, check in WRONG.items() if not reason(check, mesh)]
        dtensor.register([aten._scaled_mm.default])
        failures += [] if reason(cast_then_multiply, mesh) else ["registered an op that was not asked for"]
    if dtensor.register() != dtensor.register():
        failures.append("registered other ops the second time")
    checks = {**RIGHT, **WRONG}
    failures += [f"with: {name}: {reason(check, mesh)}" for name, check in checks.items() if reason(check, mesh)]
    del stand_ins
    return failures


def reason(check: Check, mesh: DeviceMesh) -> str:
    try:
        return check(mesh)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_what_dtensor_gets_wrong_is_right_with_our_rows(tmp_path):
    """Each case is wrong in torch 2.13 as it is, and right once registered."""
    assert not failures_on_ranks(check_before_and_after, 2, tmp_path)
