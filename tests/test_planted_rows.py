"""Wrong rows are caught: one is planted for each way in which rules and frameworks are known to go wrong.

Nothing is registered: a test makes the options of a call, adds or changes one, and asks the same check that holds every
rule (`split_ops.problems`). Beside each wrong row stands the right one, which passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from autoparallel_fp8.rules import AxisRow, OpCall, Signature, einsum, moved, partial_kinds
from op_samples import BF16, E4M3, F32, numbers, powers
from split_ops import Sample, kind_of, problems, spec_of, ways_of
from torch import Tensor

from autoparallel_fp8.expansion import Kind
from autoparallel_fp8.layout import M, P, Placement, R, frozen, own, split
from autoparallel_fp8.products import Option

aten = torch.ops.aten
BLOCK = 32


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    """Two casts as low-precision libraries have them: along blocks of a row, and along the columns."""
    with torch.library._scoped_library("planted", "DEF") as library:
        library.define("cast_blocks(Tensor x) -> (Tensor, Tensor)")
        library.impl("cast_blocks", cast_blocks, "CPU")
        library.define("cast_columns(Tensor x) -> (Tensor, Tensor)")
        library.impl("cast_columns", cast_columns, "CPU")
        yield torch.ops.planted


def cast_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """x[m, k] -> data[m, k] in float8, scale[m, k / 32]; a row that is shorter than a block is one."""
    blocks = x.reshape(x.shape[0], -1, min(BLOCK, x.shape[1]))
    scale = 2.0 ** torch.floor(torch.log2(blocks.abs().amax(-1)))
    return (blocks / scale.unsqueeze(-1)).reshape(x.shape).to(E4M3), scale


def cast_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """x[m, k] -> data[m, k] in float8 that is stored column by column, scale[k, 1] of each column."""
    scale = 2.0 ** torch.floor(torch.log2(x.abs().amax(0)))
    return (x / scale).t().contiguous().t().to(E4M3), scale.unsqueeze(-1).clone()


def with_option(kind: Kind, operands: list[Placement], results: list[Placement]) -> Kind:
    """The call with this one option, on one axis."""
    row = AxisRow(tuple(operands), tuple(results), "planted")
    option = Option(tuple((p,) for p in operands), tuple((p,) for p in results), (row,))
    return Kind(0, kind.name, kind.call, kind.operand_factors, kind.result_factors, (option,), ())


def found(sample: Sample, operands: list[Placement], results: list[Placement], ways: int = 2, rule: Any = None) -> str:
    """What the check says of one row; "" where it holds."""
    kind = with_option(kind_of(sample, (ways,), rule=rule), operands, results)
    return "\n".join(problems(sample, kind, (ways,)))


def test_a_wrong_output_dim():
    """A square transpose whose result is split at the dim its operand is: every shape fits, the numbers do not."""
    sample = Sample(aten.t.default, (numbers(8, 8),))
    assert not found(sample, [split(0)], [split(1)])
    assert found(sample, [split(0)], [split(0)])


def test_a_rule_with_a_wrong_output_dim():
    """The same as a whole rule, whose every split is wrong."""

    def wrong(op: OpCall) -> Signature:
        return moved(op, (0, 1))

    sample = Sample(aten.t.default, (numbers(8, 8),))
    assert not list(problems(sample, kind_of(sample, (2,)), (2,)))
    wrongs = list(problems(sample, kind_of(sample, (2,), rule=wrong), (2,)))
    assert len([text for text in wrongs if "[S(" in text]) == 2, wrongs


def test_a_partial_sum_that_is_lost():
    """k is split and the result is called whole: every rank has a part of the sum."""
    sample = Sample(aten.mm.default, (numbers(4, 8), numbers(8, 6)))
    assert not found(sample, [split(1), split(0)], [P])
    assert "differ" in found(sample, [split(1), split(0)], [R])
    assert found(Sample(aten.sum.default, (numbers(12),)), [P], [R])


def test_a_partial_sum_through_an_op_that_is_not_linear():
    """Parts of a sum are shared out with both signs, so that |a| + |b| = |a + b| by luck is ruled out."""
    positive = numbers(8, 8, low=1)
    assert found(Sample(aten.abs.default, (positive,)), [P], [P])
    assert found(Sample(aten.relu.default, (positive,)), [P], [P])
    assert found(Sample(aten.add.Tensor, (positive, positive.clone())), [P, R], [P])


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2, torch.int32, torch.bool], ids=str)
def test_a_partial_sum_cast_to_few_bits(dtype):
    """Rounding does not add up: 8 bits cannot hold a part of a sum, so the rows have none, and a planted one fails."""
    sample = Sample(aten._to_copy.default, (numbers(8, 8, low=-30, high=30) / 2,), (("dtype", dtype),))
    assert "P" not in partial_kinds(spec_of(sample.run()[0]))
    assert all(P not in row.operands for row in ways_of(sample).axis_rows)
    with_sums = Sample(aten._to_copy.default, sample.args, (("dtype", BF16),))
    assert any(P in row.operands for row in ways_of(with_sums).axis_rows)
    assert found(with_sums, [P], [P]) == ""
    assert found(sample, [P], [P])


@pytest.mark.parametrize("op", [aten.clone.default, aten.t.default, aten.view.default], ids=str)
def test_a_frozen_split_that_is_gathered(op):
    """What each rank has scaled by its own scale stays frozen; as a plain split it would be gathered and mixed."""
    after = [(4, 2, 8)] if op is aten.view.default else []
    sample = Sample(op, (numbers(8, 8), *after))
    to = 1 if op is aten.t.default else 0
    assert not found(sample, [frozen(0)], [frozen(to)])
    assert found(sample, [frozen(0)], [split(to)])
    assert found(sample, [frozen(0)], [R])


def test_an_own_scale_that_is_lost():
    """x times each rank's own scale is frozen, and a GEMM gives plain numbers only where it gets that scale."""
    scaled = Sample(aten.mul.Tensor, (numbers(8, 8), powers()))
    assert not found(scaled, [split(0), own(0)], [frozen(0)])
    assert found(scaled, [split(0), own(0)], [split(0)])
    largest = Sample(aten.max.default, (numbers(8, 8),))
    assert not found(largest, [split(0)], [own(0)]) and not found(largest, [split(0)], [M])
    a, b = numbers(16, 16, dtype=E4M3), numbers(16, 16, dtype=E4M3, high=3).t()
    gemm = Sample(aten._scaled_mm.default, (a, b, powers(), powers()), (("out_dtype", F32),))
    assert not found(gemm, [frozen(0), R, own(0), R], [split(0)])
    assert found(gemm, [frozen(0), R, R, R], [split(0)])
    assert not found(gemm, [frozen(1), frozen(0), own(1), own(0)], [P])
    assert found(gemm, [frozen(1), split(0), own(1), own(0)], [P])


def test_a_scale_cut_across_a_block(ops):
    """A row of two blocks over four ranks: each rank would make a scale of half a block."""

    def whole_blocks(op: OpCall) -> Signature:
        return einsum(op, "m (kb b) -> m (kb b), m kb", sizes={"b": BLOCK}, whole=("b",))

    def any_column(op: OpCall) -> Signature:
        return einsum(op, "m (b kb) -> m (b kb), m kb", sizes={"b": BLOCK}, whole=("b",))

    x = numbers(4, 64, low=-7, high=7) * 2.0 ** (torch.arange(64) // 16)  # every half of a block has its own range
    sample = Sample(ops.cast_blocks.default, (x,))
    for ways in (2, 4):
        assert not list(problems(sample, kind_of(sample, (ways,), rule=whole_blocks), (ways,)))
    assert not any(option.operands[0] == (split(1),) for option in kind_of(sample, (4,), rule=whole_blocks).options)
    assert found(sample, [split(1)], [split(1), R], ways=4, rule=whole_blocks)
    assert list(problems(sample, kind_of(sample, (2,), rule=any_column), (2,)))


def test_a_transposed_output_with_its_dims_swapped(ops):
    """Data stored column by column still has its operand's dims; only the scale of the columns has theirs.

    torchao's rule for the cast along dim 1 tags the data with the swapped dim.
    """

    def right(op: OpCall) -> Signature:
        return einsum(op, "m k -> m k, k _", whole=("m",))

    def swapped(op: OpCall) -> Signature:
        return einsum(op, "m k -> k m, k _", whole=("m",))

    sample = Sample(ops.cast_columns.default, (numbers(8, 8, low=-400, high=400),))
    assert not list(problems(sample, kind_of(sample, (2,), rule=right), (2,)))
    wrongs = list(problems(sample, kind_of(sample, (2,), rule=swapped), (2,)))
    assert any("[S(1)] -> [S(0)], [S(0)]" in text for text in wrongs), wrongs
