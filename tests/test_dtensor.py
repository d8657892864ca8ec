"""Which of our rows DTensor is offered, and what cannot be registered with it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from autoparallel_fp8.rules import OpCall
from dtensor_ranks import ROWWISE, scaled_mm
from op_samples import E4M3, numbers
from split_ops import Sample, call_of
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # what FSDP2 over TP makes

from autoparallel_fp8.errors import RuleError, UsageError
from autoparallel_fp8.graph import TensorSpec
from autoparallel_fp8.integrations import dtensor
from autoparallel_fp8.ops.stand_ins import stand_in

aten = torch.ops.aten
ops = torch.ops.autoparallel_fp8


# ---- which rows are offered --------------------------------------------------------------------------------------


def offered(sample: Sample, sizes: tuple[int, ...], architecture: str = "sm90") -> list[str]:
    """The rows as `S(0) x R -> S(0)`."""
    found = dtensor.shardings(call_of(sample), sizes, architecture)
    return [f"{' x '.join(map(short, operands))} -> {', '.join(map(short, results))}" for results, operands in found]


def short(placement: Any) -> str:
    if placement.is_partial():
        return f"P({placement.reduce_op})"
    return f"S({placement.dim})" if placement.is_shard() else "R"


def test_rowwise_rows() -> None:
    """A split k wants scales that are whole; no operand is partial."""
    assert sorted(offered(scaled_mm(ROWWISE), (2,), "cpu")) == [
        "R x R x R x R -> R",
        "R x S(1) x R x S(1) -> S(1)",
        "S(0) x R x S(0) x R -> S(0)",
        "S(1) x S(0) x R x R -> P(sum)",
    ]


def test_a_row_that_the_kernel_refuses_is_not_offered() -> None:
    """n = 16 over two ranks is 8 columns: no multiple of 16 on a GPU, fine on a CPU. k = 64 comes apart in four."""
    split_n, split_k = "R x S(1) x R x S(1) -> S(1)", "S(1) x S(0) x R x R -> P(sum)"
    assert split_n in offered(scaled_mm(ROWWISE), (2,), "cpu")
    assert split_n not in offered(scaled_mm(ROWWISE), (2,), "sm90")
    assert split_k in offered(scaled_mm(ROWWISE), (2, 2), "sm90")


def test_a_row_is_offered_only_where_it_may_be_taken_on_every_axis() -> None:
    """k = 64 over 4 x 2 could be split over either axis, but DTensor would also split it over both: 8 rows each."""
    split_k = "S(1) x S(0) x R x R -> P(sum)"
    assert split_k in offered(scaled_mm(ROWWISE), (4,)) and split_k in offered(scaled_mm(ROWWISE), (2,))
    assert split_k not in offered(scaled_mm(ROWWISE), (4, 2))


def test_of_rows_that_do_not_go_together_the_first_is_offered(monkeypatch) -> None:
    """A kernel that takes a split dim but no two of them."""

    def refuse_two(op: Any, operands: Sequence[TensorSpec], architecture: str, call: Any, **_: Any) -> tuple[str, ...]:
        return ("too small",) if operands[0].numel <= 8 * 8 // 4 else ()

    monkeypatch.setattr(dtensor, "broken_constraints", refuse_two)
    sample = Sample(aten._to_copy.default, (numbers(8, 8),), (("dtype", E4M3),))
    assert offered(sample, (2,)) == ["R -> R", "S(0) -> S(0)", "S(1) -> S(1)"]
    assert offered(sample, (2, 2)) == ["R -> R"]


@pytest.mark.parametrize(("k", "sizes", "is_offered"), [(128, (2,), True), (96, (2,), False), (64, (2, 2), False)])
def test_blocks_are_not_cut(k, sizes, is_offered) -> None:
    """Three blocks of 32 do not come apart in two, nor do two in four."""
    a, b = numbers(32, k, dtype=E4M3), numbers(32, k, dtype=E4M3).t()
    scale = torch.ones(32, k // 32).to(torch.float8_e8m0fnu)
    sample = Sample(ops.mx_mm.default, (a, b, scale, scale.t(), torch.float32))
    assert ("S(1) x S(0) x S(1) x S(0) -> P(sum)" in offered(sample, sizes)) == is_offered


@pytest.mark.parametrize("k", [256, 384])
def test_blocks_of_128_are_not_cut(k) -> None:
    """1x128 scales over a split k: three blocks do not come apart in two."""
    a, b = numbers(32, k, dtype=E4M3), numbers(128, k, dtype=E4M3).t()
    scale_a, scale_b = torch.ones(k // 128, 32).t(), torch.ones(k // 128, 128)
    formula = stand_in(aten._scaled_mm.default)
    sample = Sample(
        aten._scaled_mm.default, (a, b, scale_a, scale_b), (("out_dtype", torch.float32),), stand_in=formula
    )
    assert ("S(1) x S(0) x S(1) x S(0) -> P(sum)" in offered(sample, (2,))) == (k == 256)


def test_uneven_parts_are_offered_where_nothing_is_cut() -> None:
    """Ten rows over four ranks: each casts what it has."""
    sample = Sample(aten._to_copy.default, (numbers(10, 3),), (("dtype", E4M3),))
    assert "S(0) -> S(0)" in offered(sample, (4,))


def test_a_partial_result_of_float8_is_not_offered() -> None:
    """A cast to bfloat16 passes a sum, one to float8 does not."""
    high = Sample(aten._to_copy.default, (numbers(4, 4),), (("dtype", torch.bfloat16),))
    low = Sample(aten._to_copy.default, (numbers(4, 4),), (("dtype", E4M3),))
    assert "P(sum) -> P(sum)" in offered(high, (2,)) and "P(sum) -> P(sum)" not in offered(low, (2,))


def test_rows_that_run_a_program_are_not_offered() -> None:
    """A rank that looks up its own rows of a table runs more than the op."""
    tokens = numbers(4, 6, dtype=torch.int64, low=0, high=7)
    assert "S(0) x R -> P(sum)" not in offered(Sample(aten.embedding.default, (numbers(8, 4), tokens)), (2,))


def test_splits_inside_a_dim_are_not_offered() -> None:
    """Query heads are key-value heads times groups: only their leading factor is DTensor's split of the dim."""
    q, kv = numbers(2, 8, 4, 4), numbers(2, 2, 4, 4)
    rows = offered(Sample(ops.attention.default, (q, kv, kv)), (2,))
    assert "S(1) x S(1) x S(1) -> S(1), S(1)" in rows and "S(1) x R x R -> S(1), S(1)" not in rows
    assert "S(1) x S(1) x S(1) -> S(1), S(1)" not in offered(Sample(ops.attention.default, (q, kv, kv)), (4,))


def test_part_sizes_are_those_of_chunks() -> None:
    """DTensor cuts as torch.chunk does, axis after axis."""
    for size, counts in itertools.product((1, 5, 7, 12), ((2,), (4,), (3, 2), (2, 2))):
        parts = [torch.zeros(size)]
        for count in counts:
            cut = [(*part.chunk(count), *(torch.zeros(0),) * count)[:count] for part in parts]
            parts = [part for chunks in cut for part in chunks]
        assert dtensor.part_sizes(size, counts) == tuple(sorted({len(part) for part in parts}, reverse=True))


# ---- what cannot be registered -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (aten._scaled_mm, "is no op overload"),
        (aten.logit.default, "has no rule"),
        (aten.split.Tensor, "returns something else than tensors"),
        (aten.add_.Tensor, "writes its arguments"),
        (aten.searchsorted.Tensor, "takes a tensor by name only"),
        (aten.to_sparse.default, "takes a list by name only"),
    ],
    ids=str,
)
def test_ops_that_cannot_be_registered(op, reason, monkeypatch) -> None:
    """Each is refused before anything is registered."""
    if op is not aten.logit.default:
        monkeypatch.setattr(dtensor, "find_rule", lambda op: lambda call: None)
    with pytest.raises(UsageError, match=reason):
        dtensor.register([op])


@pytest.mark.parametrize(
    ("ops", "reason"),
    [
        (aten._scaled_mm.default, "not a list of overloads"),
        ("aten._scaled_mm.default", "not a list of overloads"),
        (aten._scaled_mm, "not a list of overloads"),
        (3, "3, not a list of overloads"),
        ([[1]], "is no op overload"),
        ([{}], "is no op overload"),
    ],
)
def test_what_is_no_list_of_ops(ops, reason) -> None:
    """A paragraph with a cure, not an error of Python's."""
    with pytest.raises(UsageError, match=reason):
        dtensor.register(ops)


def test_a_torch_without_the_api(monkeypatch) -> None:
    """It is named, with what to do."""
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor.experimental", ModuleType("experimental"))
    with pytest.raises(UsageError, match=r"cannot register shardings[\s\S]*at: torch 2[\s\S]*do: use torch"):
        dtensor.register()


def test_a_torch_that_keeps_shardings_elsewhere(monkeypatch) -> None:
    """Private names that moved are an error, not a silent no-op."""
    monkeypatch.setattr(DTensor, "_op_dispatcher", SimpleNamespace(sharding_propagator=SimpleNamespace()))
    with pytest.raises(UsageError, match="in a place unknown here"):
        dtensor.register([aten._scaled_mm.default])


def test_a_call_that_the_rule_does_not_fit_runs_replicated(monkeypatch) -> None:
    """Whole operands are right for every op; a warning says why."""

    def contradicts(call: OpCall) -> Any:
        raise RuleError("the rule does not fit")

    monkeypatch.setattr(dtensor, "find_rule", lambda op: contradicts)
    with pytest.warns(UserWarning, match="runs replicated: the rule does not fit"):
        found = dtensor.sharding_function(aten._to_copy.default)(dtensor_spec(torch.float32, Shard(0)), dtype=E4M3)
    assert found == [([Replicate()], [Replicate()])]


def dtensor_spec(dtype: torch.dtype, placement: Any) -> Any:
    """What DTensor hands over for a tensor [4, 8] on two ranks."""
    meta = SimpleNamespace(shape=(4, 8), stride=(8, 1), dtype=dtype)
    mesh = SimpleNamespace(shape=(2,), device_type="cpu")
    return SimpleNamespace(placements=(placement,), tensor_meta=meta, mesh=mesh)


@pytest.mark.parametrize(("dtype", "is_offered"), [(torch.int16, True), (torch.float32, False)])
def test_strided_shards_pass_where_every_tensor_has_the_dim(dtype, is_offered) -> None:
    """Two bf16 elements make a float32 one: a strided shard may hold but one of them."""
    strided = _StridedShard(1, split_factor=4)
    found = dtensor.sharding_function(aten.view.dtype)(dtensor_spec(torch.bfloat16, strided), dtype)
    assert (([strided], [strided]) in found) == is_offered
