"""A float8 GEMM with unit scales, multiplied by the real ones after: own scales pass there, and only the right ones."""

import torch
from torch import nn

from autoparallel_fp8 import AutoParallel
from autoparallel_fp8.expansion import Kind

E4M3 = torch.float8_e4m3fn


def scale_of(x: torch.Tensor, dim: int) -> torch.Tensor:
    return 448.0 / x.abs().amax(dim, keepdim=True).float().clamp(min=1e-12)


def cast(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * scale).clamp(-448.0, 448.0).to(E4M3)


class Product(nn.Module):
    """out[m, n] = sum over k of a[k, m] * b[k, n], both cast along k; `other` gives a scale that is not a's."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, a: torch.Tensor, b: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        scale_a, scale_b = scale_of(a, 0), scale_of(b, 0)
        left, right = cast(a, scale_a).t().contiguous(), cast(b, scale_b).t().contiguous().t()
        one = torch.ones((), dtype=torch.float32)
        out = torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)
        undone = scale_of(other, 0) if self.wrong else scale_a
        return out * (undone.reciprocal().t() * scale_b.reciprocal())


def kinds(wrong: bool) -> list[tuple[str, Kind]]:
    inputs = tuple(torch.empty(64, n, dtype=torch.bfloat16, device="meta") for n in (32, 48, 32))
    space = AutoParallel(Product(wrong), "dp=2", inputs=inputs, device="H100").space()
    return [(node.op_name, space.kind(i)) for i, node in enumerate(space.graph.nodes)]


def placements(name: str, found: list[tuple[str, Kind]]) -> set[tuple[str, ...]]:
    """For each option of the ops of that name: kinds of placement of operands and result, on the one axis."""
    return {
        (*(layout[0].kind for layout in option.operands), option.results[0][0].kind)
        for op, kind in found
        if op == name
        for option in kind.options
    }


def test_frozen_operands_give_an_unscaled_part_that_their_scales_complete() -> None:
    found = kinds(wrong=False)
    assert {("F", "F", "R", "R", "Q"), ("F", "S", "R", "R", "Q"), ("S", "F", "R", "R", "Q")} <= placements(
        "aten._scaled_mm.default", found
    )
    muls = placements("aten.mul.Tensor", found)
    assert {("V", "V", "V"), ("V", "R", "V"), ("R", "V", "V")} <= muls  # scale times scale
    assert ("Q", "V", "P") in muls
    assert not any("Q" in placed and placed[-1] != "P" for placed in muls)


def test_scales_of_another_tensor_complete_nothing() -> None:
    """The product of scales holds one that is not of the data: each rank would undo what it never did."""
    assert not any("Q" in placed for placed in placements("aten.mul.Tensor", kinds(wrong=True)))


class LastPosition(nn.Module):
    """Classifies by the last position, so that backward begins with zeros around it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[:, -1])


def test_a_split_begins_where_an_op_keeps_the_dim_whole() -> None:
    """The gradient's sequence dim comes of padding, which splits it nowhere: no scale of a part is traced past it."""
    model, inputs = LastPosition().to(torch.bfloat16), (torch.empty(4, 16, 64, dtype=torch.bfloat16, device="meta"),)
    space = AutoParallel(model, "dp=2", inputs=inputs, recipe="rowwise", device="H100").space()
    assert any(p.kind == "F" for kind in space.kinds for o in kind.options for layout in o.operands for p in layout)
