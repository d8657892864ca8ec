"""What kernels demand of parts that the whole tensor keeps and a split may lose."""

from __future__ import annotations

import pytest
import torch

from autoparallel_fp8 import options
from autoparallel_fp8.expansion import expand
from autoparallel_fp8.graph import Graph, Node, Ref, TensorSpec
from autoparallel_fp8.mesh import parse_mesh

aten = torch.ops.aten


def test_one_row_of_a_column_major_operand_is_no_row_major_one() -> None:
    """[1, 64] with strides (1, 1): torch's own check refuses it, so splitting the rows is no way out."""
    a = torch.empty(64, 8, dtype=torch.float8_e4m3fn, device="meta").t()
    b = torch.empty(64, 64, dtype=torch.float8_e4m3fn, device="meta").t()
    one = torch.empty((), device="meta")
    found = options("_scaled_mm", a, b, one, one, out_dtype=torch.bfloat16, mesh="tp=8", device="H100")
    assert not found.options
    assert "mat1 local [1, 64] has strides [1, 1]: it must be row-major" in {r.sentence for r in found.refused}


@pytest.mark.parametrize(("sequence", "splits"), [(24, set()), (32, {"S(1)", "S(1.1)"})])
def test_tokens_that_are_contracted_stay_together_in_runs(sequence: int, splits: set[str]) -> None:
    """Groups end at multiples of 16 tokens in float8; half of a sequence of 24 would move a rank's ends off them."""
    e4m3, batch, m, n, groups = torch.float8_e4m3fn, 4, 32, 32, 2
    tokens = batch * sequence

    def given(name: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Node:
        return Node(name, "parameter", None, (), (), (TensorSpec(shape, stride, dtype),), "forward", name)

    def seen(name: str, ref: Ref, shape: tuple[int, int], stride: tuple[int, int]) -> Node:
        return Node(name, "op", aten.view.default, (ref, shape), (), (TensorSpec(shape, stride, e4m3),), "forward")

    nodes = (
        given("a", (m, batch, sequence), (tokens, sequence, 1), e4m3),
        given("b", (batch, sequence, n), (sequence, 1, tokens), e4m3),
        given("scale_a", (groups * m,), (1,), torch.float32),
        given("scale_b", (groups * n,), (1,), torch.float32),
        given("offs", (groups,), (1,), torch.int32),
        seen("seen_a", Ref(0), (m, tokens), (tokens, 1)),
        seen("seen_b", Ref(1), (tokens, n), (1, tokens)),
        Node("gemm", "op", aten._scaled_grouped_mm.default, tuple(map(Ref, (5, 6, 2, 3, 4))), (),
             (TensorSpec((groups, m, n), (m * n, n, 1), torch.bfloat16),), "forward"),
    )  # fmt: skip
    kind = expand(Graph(nodes, ()), parse_mesh("cp=2"), architecture="sm90").kind(7)
    found = {str(option.operands[0][0]) for option in kind.options}
    assert {text for text in found if text.startswith("S(1")} == splits
