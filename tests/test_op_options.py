"""`options(op, ...)`: the layouts a mesh allows of one op, what kernels refuse, what does not divide, and wrong input.

Rules of users are held here too: what a rule may not return, and rules that installed packages bring along.
"""

import dataclasses
import doctest
import json
import logging
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from autoparallel_fp8.rules import (
    Signature,
    einsum,
    elementwise,
    find_rule,
    named_rules,
    op_names,
    plugins,
    reduction,
    rule,
)
from autoparallel_fp8.rules import check as rules_check
from autoparallel_fp8.rules import language as rules_language
from op_samples import all_samples
from split_ops import kind_of
from torch import Tensor

import autoparallel_fp8
from autoparallel_fp8 import RuleError, UsageError, op_options, operand_text
from autoparallel_fp8.capture import one_op
from autoparallel_fp8.cli import main
from autoparallel_fp8.expansion import expand
from autoparallel_fp8.graph import ABSENT, Ref
from autoparallel_fp8.layout import P, R, split
from autoparallel_fp8.mesh import parse_mesh
from autoparallel_fp8.op_options import OpOption, OpOptions, options

aten = torch.ops.aten


@torch.library.custom_op("op_options_tests::half", mutates_args=())
def half(x: Tensor) -> Tensor:
    """An op that nobody has a rule for."""
    return x / 2


@torch.library.custom_op("op_options_tests::third", mutates_args=())
def third(x: Tensor) -> Tensor:
    """Another one."""
    return x / 3


@torch.library.custom_op("op_options_tests::flat", mutates_args=())
def flat(x: Tensor, rows: int) -> Tensor:
    """[rows, the rest] of a flat tensor."""
    return x.view(rows, -1).clone()


flat.register_fake(lambda x, rows: x.new_empty(rows, x.numel() // rows))
for own in (half, third):
    own.register_fake(torch.empty_like)
HALF, THIRD = torch.ops.op_options_tests.half.default, torch.ops.op_options_tests.third.default
E4M3, F32, BF16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
FNUZ = torch.float8_e4m3fnuz


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def scaled_mm(m: int, k: int, n: int, mesh: Any, *, rowwise: bool = False, device: str = "H100") -> OpOptions:
    """a [m, k] times b [k, n], column-major, in e4m3."""
    scales = ((m, 1), (1, n)) if rowwise else ((), ())
    a, b = meta(m, k, dtype=E4M3), meta(n, k, dtype=E4M3).t()
    scale_a, scale_b = (meta(*shape, dtype=F32) for shape in scales)
    return options("_scaled_mm", a, b, scale_a, scale_b, out_dtype=BF16, mesh=mesh, device=device)


def find(found: OpOptions, **placements: str) -> list[OpOption]:
    """The options of a mesh of one axis where the named tensors are placed so."""
    return [o for o in found.options if all(o[name].placements == (text,) for name, text in placements.items())]


def has_own(option: Any) -> bool:
    return any(p.kind in "FVQ" for t in (*option.operands, *option.results) for p in t.layout)


@pytest.fixture
def registry() -> Iterator[None]:
    """Rules registered in the test are gone after it."""
    before = dict(rules_language._RULES), dict(rules_language._LEFT_OUT)
    yield
    for held, kept in zip((rules_language._RULES, rules_language._LEFT_OUT), before, strict=True):
        held.clear()
        held.update(kept)


# ---- what comes back -------------------------------------------------------------------------------------------------


def test_mm_on_one_axis() -> None:
    """m, n and k split, partial sums pass; the local shapes are those of one rank."""
    found = options(aten.mm.default, meta(8, 16), meta(16, 12), mesh="tp=4")
    rows = {
        (*o["self"].placements, *o["mat2"].placements, *o["result"].placements): (
            o["self"].shape, o["mat2"].shape, o["result"].shape, o.notes,
        ) for o in found.options
    }  # fmt: skip
    assert rows == {
        ("R", "R", "R"): ((8, 16), (16, 12), (8, 12), ("replicated",)),
        ("S(0)", "R", "S(0)"): ((2, 16), (16, 12), (2, 12), ("split m",)),
        ("S(1)", "S(0)", "P(sum)"): ((8, 4), (4, 12), (8, 12), ("split k",)),
        ("R", "S(1)", "S(1)"): ((8, 16), (16, 3), (8, 3), ("split n",)),
        ("P(sum)", "R", "P(sum)"): ((8, 16), (16, 12), (8, 12), ("partial sums pass",)),
        ("R", "P(sum)", "P(sum)"): ((8, 16), (16, 12), (8, 12), ("partial sums pass",)),
    }
    assert (found.refused, found.uneven, found.advice) == ((), (), "")
    assert found.options[0]["self"].layout == (R,)
    with pytest.raises(KeyError, match="the op's tensors are self, mat2, result"):
        found.options[0]["other"]


def test_an_op_is_named_in_many_ways() -> None:
    """Overload, packet and name; the overload follows from the arguments; both places of the function are one."""
    x = meta(8, 16)
    names = ["aten.sum.dim_IntList", "aten.sum", "sum", "torch.ops.aten.sum", "aten::sum"]
    ways = [aten.sum.dim_IntList, aten.sum, *names]
    answers = {str(options(way, x, [1], mesh="tp=2")) for way in ways}
    assert len(answers) == 1 and options("sum", x, mesh="tp=2").op is aten.sum.default
    assert autoparallel_fp8.options is autoparallel_fp8.rules.options is options  # type: ignore[attr-defined]
    attention = torch.ops.autoparallel_fp8.attention.default
    assert options("attention", *[meta(2, 4, 8, 16)] * 3, mesh="tp=2").op is attention


def test_only_shape_stride_and_dtype_of_tensors_are_read() -> None:
    """Real tensors and keyword arguments in any order give what meta tensors in place give."""
    wanted = options("mm", meta(8, 16), meta(12, 16).t(), mesh={"dp": 2, "tp": 2})
    real = torch.ones(12, 16, dtype=BF16).t()
    assert str(options("mm", mat2=real, self=torch.ones(8, 16, dtype=BF16), mesh="dp=2,tp=2")) == str(wanted)
    assert options("relu", real, mesh="tp=2").results["result"].stride == (1, 16)


def test_a_call_is_the_graph_that_capture_makes() -> None:
    """Arguments by keyword stand where the schema has them, with the defaults before them; devices are left out."""
    x = meta(4, 8)
    graph = one_op.capture_call(aten.sum.dim_IntList, [], {"dtype": F32, "keepdim": True, "dim": [1], "self": x})
    node = graph.nodes[-1]
    assert (node.args, node.kwargs) == ((Ref(0), (1,), True), (("dtype", F32),))
    scale = meta(dtype=F32)
    a, b = meta(16, 32, dtype=E4M3), meta(16, 32, dtype=E4M3).t()
    node = one_op.capture_call(aten._scaled_mm.default, [a, b, scale], {"out_dtype": BF16, "scale_b": scale}).nodes[-1]
    assert (node.args, node.kwargs) == ((Ref(0), Ref(1), Ref(2), Ref(3), None, None, BF16), ())
    node = one_op.capture_call(aten.full.default, [[4], 1.0], {"device": "cpu", "pin_memory": False}).nodes[-1]
    assert (node.args, node.kwargs) == (((4,), 1.0), ())


def test_mesh_and_device_are_never_the_ops_own() -> None:
    """An op that takes a device is asked about for a device profile, and runs without its own."""
    found = options("aten.arange", 12, mesh="tp=4", device="MI300X", dtype=F32)
    assert found.device == "mi300x" and found.results["result"].dtype is F32
    assert [(o["result"].shape, o.local) for o in found.options] == [((12,), ""), ((3,), "arange_part")]


def test_a_local_program_and_lists_of_tensors() -> None:
    """A table split by rows is looked up by a program of its own; members of lists have names of their own."""
    lookup = options("embedding", meta(32, 8), meta(4, 6, dtype=torch.int64), mesh="tp=2")
    (split_table,) = find(lookup, weight="S(0)")
    assert split_table.local == "masked_lookup" and split_table["result"].layout == (P,)
    joined = options("cat", [meta(4, 8), meta(6, 8)], mesh="tp=2")
    assert list(joined.operands) == ["tensors[0]", "tensors[1]"] and find(joined, **{"tensors[1]": "S(1)"})


def test_a_result_that_is_left_out_is_not_shown() -> None:
    """`native_layer_norm_backward` without a gradient of its bias."""
    x, mean = meta(4, 8, dtype=F32), meta(4, 1, dtype=F32)
    found = options("native_layer_norm_backward", x, x, [8], mean, mean, None, None, [True, False, False], mesh="tp=2")
    assert list(found.results) == ["result0"] and [t.name for t in found.options[0].results] == ["result0"]


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_the_options_are_those_that_are_held_against_the_unsplit_op(mesh: tuple[int, ...]) -> None:
    """For every op with a rule: what `options` shows is what the brute-force tests of rules run on all ranks."""
    for op, samples in all_samples().items():
        for sample in samples[:2]:
            found = options(op, *sample.args, **dict(sample.kwargs), mesh=mesh, device="cpu")
            shown = {
                (tuple(t.layout for t in o.operands), tuple(t.layout for t in o.results))
                for o in found.options
                if not has_own(o)
            }
            kind = kind_of(sample, mesh)
            made = [k for k, spec in enumerate(kind.call.out) if spec is not ABSENT]
            tried = {
                (o.operands, tuple(o.results[k] for k in made))
                for o in kind.options
                if all(p.kind not in "FVQ" for layout in (*o.operands, *o.results) for p in layout)
            }
            assert shown == tried, op


def test_own_scales_are_options_of_scaled_gemms_and_maxima() -> None:
    """A split k may have one scale a shard, on either operand; a maximum may stay each rank's own; nothing else."""
    found = scaled_mm(16, 64, 32, "tp=4", rowwise=True)
    split_k = [o for o in found.options if o["result"].layout == (P,)]
    assert {(*o["self"].placements, *o["scale_a"].placements, *o["scale_b"].placements) for o in split_k} == {
        ("S(1)", "R", "R"), ("S(1)", "R", "Own(0)"), ("Frozen(1)", "Own(1)", "R"), ("Frozen(1)", "Own(1)", "Own(0)"),
    }  # fmt: skip
    assert find(options("amax", meta(8, 16), [1], True, mesh="tp=4"), self="S(1)", result="Own(1)")
    assert not any(map(has_own, options("mul", meta(8, 16), meta(8, 16), mesh="tp=4").options))


# ---- what does not go ------------------------------------------------------------------------------------------------


def test_what_does_not_divide_is_said() -> None:
    """One axis, two axes together where each alone would do, and a factor of a dim."""
    alone = options("mm", meta(6, 32), meta(32, 64), mesh="tp=4").uneven
    assert [(u.note, u.axes, u.sentence) for u in alone] == [
        ("split m", ("tp",), "self: dim 0 of size 6 does not divide over tp=4")
    ]
    together = options("relu", meta(4, 3), mesh="dp=2,tp=4").uneven
    assert [u.sentence for u in together] == [
        "self: dim 0 of size 4 does not divide over dp=2 and tp=4 together",
        "self: dim 1 of size 3 does not divide over dp=2",
        "self: dim 1 of size 3 does not divide over tp=4",
    ]
    factor = options("view", meta(24, 8), [4, 6, 8], mesh="tp=4").uneven
    assert [u.sentence for u in factor] == ["self: factor 1 of dim 0 (24 = 4 x 6) does not divide over tp=4"]
    assert options("relu", meta(4, 1), mesh="tp=4").uneven == ()
    # more ranks than key-value heads: every rank has a part of one head's queries, so the heads do split
    heads = options("attention", meta(4, 8, 16, 8), meta(4, 2, 16, 8), meta(4, 2, 16, 8), mesh="tp=4")
    assert not any("split h" in u.note for u in heads.uneven)


def test_every_row_is_an_option_refused_or_uneven() -> None:
    """Nothing is dropped in silence: on one axis each plain split of the rule is in one of the three."""
    found = scaled_mm(16, 48, 90, "tp=4")
    assert {note for o in found.options for note in o.notes} == set()  # 90 is no multiple of 16 to begin with
    found = scaled_mm(18, 48, 96, "tp=4")
    options_have = {note.split(",")[0] for o in found.options for note in o.notes}
    assert options_have == {"replicated"} and [u.note for u in found.uneven] == ["split m"]
    assert {r["mat2"].layout for r in found.refused if not has_own(r)} == {(split(0),), (split(1),)}


# ---- cases from the field --------------------------------------------------------------------------------------------


def test_a_column_major_operand_stays_so_whichever_dim_is_split() -> None:
    """b = weight.t(): every local b has its k contiguous."""
    weight = meta(32, 64)
    found = options("mm", meta(16, 64), weight.t(), mesh=(4,))
    assert {o["mat2"].placements: (o["mat2"].shape, o["mat2"].stride) for o in found.options} == {
        ("R",): ((64, 32), (1, 64)),
        ("S(0)",): ((16, 32), (1, 16)),
        ("S(1)",): ((64, 8), (1, 64)),
        ("P(sum)",): ((64, 32), (1, 64)),
    }


def test_layer_norm_of_a_permuted_tensor_is_contiguous() -> None:
    """The operand keeps the permuted memory order on every rank, the output has none."""
    x = meta(4, 8, 16).permute(0, 2, 1)
    moved = options("permute", meta(4, 8, 16), [0, 2, 1], mesh=(4,))
    found = options("native_layer_norm", x, [8], None, None, 1e-5, mesh=(4,))
    assert {o["input"].placements: o["input"].stride for o in found.options} == {
        ("R",): (128, 1, 16), ("S(0)",): (128, 1, 16), ("S(1)",): (32, 1, 4),
    }  # fmt: skip
    assert {o["result0"].placements: o["result0"].stride for o in found.options} == {
        ("R",): (128, 8, 1), ("S(0)",): (128, 8, 1), ("S(1)",): (32, 8, 1),
    }  # fmt: skip
    by_layout = {o["result"].layout: o["result"].stride for o in moved.options}
    assert all(by_layout[o["input"].layout] == o["input"].stride for o in found.options)


def test_alignment_is_local() -> None:
    """N = 576: four ways leave 144, eight ways leave 72, which is refused by name. K = 48 over 2 leaves 24."""
    four = scaled_mm(16, 64, 576, "tp=4")
    assert [o["mat2"].shape for o in find(four, result="S(1)", self="R", mat2="S(1)")] == [(64, 144)]
    assert four.refused == ()
    eight = scaled_mm(16, 256, 576, "tp=8")
    assert not find(eight, result="S(1)")
    assert {r.sentence for r in eight.refused} == {"mat2 local [256, 72]: 72 is not a multiple of 16"}
    k = scaled_mm(16, 48, 32, "tp=2", rowwise=True)
    assert not find(k, result="P(sum)")
    assert {(r.sentence, r["result"].placements) for r in k.refused} == {
        ("mat2 local [24, 32]: 24 is not a multiple of 16", ("P(sum)",))
    }
    assert all(o["mat2"].stride[0] == 1 for found in (four, eight, k) for o in (*found.options, *found.refused))


def test_a_call_that_is_illegal_unsplit_has_no_option() -> None:
    """N = 564: no option, the sentence, and what to do; a CPU takes it."""
    found = scaled_mm(16, 64, 564, "tp=4")
    assert found.options == ()
    assert found.refused[0].sentence == "mat2 local [64, 564]: 564 is not a multiple of 16"
    assert found.advice == "pad the layer to a multiple of 16, or keep it in bf16 (leave it out of the conversion)"
    assert "no option: the kernel refuses it even unsplit\n  do: pad the layer" in str(found)
    on_cpu = scaled_mm(16, 64, 564, "tp=4", device="cpu")
    assert find(on_cpu, result="S(1)") and not on_cpu.refused and not on_cpu.advice
    row_major = options("_scaled_mm", *[meta(32, 32, dtype=E4M3)] * 2, *[meta(dtype=F32)] * 2, mesh="tp=2")
    assert row_major.options == () and "mat2.t().contiguous().t()" in row_major.advice


# ---- text and JSON ---------------------------------------------------------------------------------------------------


def test_the_answer_as_text() -> None:
    """Line by line."""
    assert str(options("mm", meta(6, 32), meta(64, 32).t(), mesh="dp=1,tp=4")).splitlines() == [
        "aten.mm.default: self [6, 32] bfloat16, mat2 [32, 64] strides [1, 32] bfloat16 -> result [6, 64] bfloat16",
        "mesh dp=1,tp=4, device h100",
        "",
        "self               mat2                                result             rows (dp, tp)",
        "-" * 103,
        "R, R [6, 32]       R, R [32, 64] strides [1, 32]       R, R [6, 64]       replicated, replicated",
        "R, S(1) [6, 8]     R, S(0) [8, 64] strides [1, 8]      R, P(sum) [6, 64]  replicated, split k",
        "R, R [6, 32]       R, S(1) [32, 16] strides [1, 32]    R, S(1) [6, 16]    replicated, split n",
        "R, P(sum) [6, 32]  R, R [32, 64] strides [1, 32]       R, P(sum) [6, 64]  replicated, partial sums pass",
        "R, R [6, 32]       R, P(sum) [32, 64] strides [1, 32]  R, P(sum) [6, 64]  replicated, partial sums pass",
        "",
        "not split:",
        "  self: dim 0 of size 6 does not divide over tp=4 (split m)",
    ]
    text = str(scaled_mm(6, 48, 32, "tp=4"))
    assert text.startswith("aten._scaled_mm.default: self [6, 48] float8_e4m3fn, mat2 [48, 32] strides [1, 48]")
    assert "\nmesh tp=4, device h100\n" in text
    refused = text[text.index("\nrefused by the kernel:\n") :]
    assert "\n  mat2 local [12, 32]: 12 is not a multiple of 16\n    [" in refused
    assert "\n    [S(1)] x [S(0)] x [R] x [R] -> [P(sum)]\n" in refused
    assert text.endswith("not split:\n  self: dim 0 of size 6 does not divide over tp=4 (split m)")


def test_the_answer_as_json() -> None:
    """Plain data, the same bytes each time, with the parts of the table."""
    found = scaled_mm(6, 48, 32, "tp=4")
    data = json.loads(found.to_json())
    assert found.to_json() == scaled_mm(6, 48, 32, "tp=4").to_json() and data == found.to_dict()
    assert data["mesh"] == {"tp": 4} and data["device"] == "h100" and data["op"] == "aten._scaled_mm.default"
    assert data["operands"][1] == {"name": "mat2", "shape": [48, 32], "stride": [1, 48], "dtype": "float8_e4m3fn"}
    assert data["options"][0]["rows"] == ["replicated"] and data["options"][0]["local"] == ""
    part = {"name": "self", "placements": ["S(1)"], "local_shape": [6, 12], "local_stride": [12, 1]}
    assert part in [option["operands"][0] for option in data["refused"]]
    assert data["uneven"][0]["axes"] == ["tp"] and data["advice"] == ""
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.advice = "x"  # type: ignore[misc]


@pytest.mark.usefixtures("registry")
def test_the_examples_of_docstrings_run() -> None:
    """Of `options`, `rule`, and what parses and finds ops."""
    for module in (op_options, rules_language, op_names, operand_text, one_op):
        done = doctest.testmod(module)
        assert done.attempted and not done.failed, module.__name__


# ---- wrong input -----------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str, str]] = {
    "no op": (lambda: options("aten.mn", mesh="tp=2"), UsageError, "no op is called 'aten.mn'", "aten.mm"),
    "no text": (lambda: options("", mesh="tp=2"), UsageError, "no op is called ''", "autoparallel-fp8 rules"),
    "no overload": (lambda: options("mm.x", mesh="tp=2"), UsageError, "aten.mm has no overload 'x'", "default"),
    "no overload of it": (lambda: options("aten.mm.x", mesh="tp=2"), UsageError, "has no overload 'x'", "default"),
    "a function": (lambda: options(torch.mm, mesh="tp=2"), UsageError, "mm is a builtin_function", "torch.ops.aten.mm"),
    "no rule": (
        lambda: options("aten.nonzero", meta(4), mesh="tp=2"), RuleError,
        "no rule for aten.nonzero.default", "register",
    ),
    "another overload has one": (
        lambda: options(aten.mm.dtype, meta(4, 4), meta(4, 4), F32, mesh="tp=2"), RuleError,
        "no rule for aten.mm.dtype", "aten.mm.default",
    ),
    "shapes": (
        lambda: options("aten.mm.default", meta(4, 8), meta(4, 8), mesh="tp=2"), UsageError,
        "does not take these arguments: a and b must have same reduction dim", "aten::mm(Tensor self, Tensor mat2)",
    ),
    "shapes that torch does not mind": (
        lambda: scaled_mm_of(meta(16, 64, dtype=E4M3), meta(48, 32, dtype=E4M3)), UsageError,
        "[16, 64] and [48, 32] cannot be multiplied", "mend the operands",
    ),
    "dtypes": (
        lambda: options("mm", meta(4, 8), meta(8, 4, dtype=F32), mesh="tp=2"), UsageError,
        "a matrix product of bfloat16 and float32", "mend the operands",
    ),
    "missing argument": (
        lambda: options("aten.mm.default", meta(4, 8), mesh="tp=2"), UsageError,
        "missing value for argument 'mat2'", "call it as",
    ),
    "no overload takes them": (
        lambda: options("mm", meta(4, 8), 3, mesh="tp=2"), UsageError,
        "no overload of aten.mm takes", "aten::mm(Tensor",
    ),
    "unknown keyword": (
        lambda: options("aten.mm.default", meta(4, 8), meta(8, 4), dvice="H100", mesh="tp=2"), UsageError,
        "aten.mm.default has no argument 'dvice'", "call it as",
    ),
    "sparse": (
        lambda: options("mm", torch.eye(4).to_sparse(), meta(4, 4), mesh="tp=2"), UsageError, "sparse", "plain tensor",
    ),
    "mesh": (lambda: options("mm", meta(4, 8), meta(8, 4), mesh="4x4"), UsageError, "not name=size", "dp=8,tp=8"),
    "device": (
        lambda: options("mm", meta(4, 8), meta(8, 4), mesh="tp=2", device="H1000"), UsageError, "H1000", "h100",
    ),
}  # fmt: skip


def scaled_v2(recipe: list[int], scales: int = 1, *shape: int) -> OpOptions:
    """a [32, 64] times b [64, 48], the second operand tensorwise."""
    a, b = meta(32, 64, dtype=E4M3), meta(48, 64, dtype=E4M3).t()
    scale = meta(*shape, dtype=F32)
    return options(
        "_scaled_mm_v2", a, b, [scale] * scales, recipe, [], [meta(dtype=F32)], [0], [], None, BF16, mesh="tp=2"
    )


def heads(q: int, kv: int) -> list[Tensor]:
    return [meta(2, n, 16, 8) for n in (q, kv, kv)]


WRONG |= {
    "quantized": (
        lambda: options("relu", torch._empty_affine_quantized([4], scale=1.0, dtype=torch.quint8), mesh="tp=2"),
        UsageError, "a quantized tensor (quint8)", "plain tensor",
    ),
    "nested": (
        lambda: options("aten.relu.default", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), mesh="tp=2"),
        UsageError, "a nested tensor", "plain tensor",
    ),
    "the seed of a dropout": (
        lambda: options("autoparallel_fp8.dropout", meta(4), 0.1, True, mesh="tp=2"), UsageError,
        "for argument 'seed' but instead found type 'bool'", "Tensor seed",
    ),
    "an index of booleans": (
        lambda: options("index", meta(4, 8), [meta(4, dtype=torch.bool)], mesh="tp=2"), UsageError,
        "the size of the result of aten.index.Tensor depends on data", "shapes are known beforehand",
    ),
    "a number too large": (
        lambda: options("mul", meta(4), 10**30, mesh="tp=2"), UsageError, "no overload of aten.mul takes", "mul.Tensor",
    ),
    "heads that do not group": (
        lambda: options("attention", *heads(8, 3), mesh="tp=2"), UsageError,
        "8 query heads cannot share 3 key-value heads", "mend the operands",
    ),
    "a mask of other scores": (
        lambda: options("attention", *heads(8, 8), meta(7, 7), mesh="tp=2"), UsageError,
        "a mask [7, 7] does not broadcast to the scores [2, 8, 16, 16]", "mend the operands",
    ),
    "attention without heads": (
        lambda: options("attention", *[meta(2, 16, 8)] * 3, mesh="tp=2"), UsageError,
        "attention reads [batch, heads, length, head dim]", "mend the operands",
    ),
    "no scales": (
        lambda: options("_scaled_mm", meta(16, 16, dtype=E4M3), meta(16, 16, dtype=E4M3).t(), None, None, mesh="tp=2"),
        UsageError, "scale_a and scale_b None: both operands have a scale", "mend the operands",
    ),
    "a recipe that is none": (
        lambda: scaled_v2([99]), UsageError, "recipe_a has 99; recipes are 0 tensorwise, 1 rowwise", "mend",
    ),
    "a negative recipe": (lambda: scaled_v2([-1]), UsageError, "recipe_a has -1; recipes are", "mend"),
    "no recipe": (lambda: scaled_v2([]), UsageError, "these are 0 recipes for 1 scales", "mend"),
    "more scales than recipes": (lambda: scaled_v2([0], 2), UsageError, "these are 1 recipes for 2 scales", "mend"),
    "a recipe of other scales": (
        lambda: scaled_v2([1]), UsageError, "recipe_a is 1 (rowwise), which has 32 scales here", "mend",
    ),
    "an op that a plan rewrites": (
        lambda: options("linear", meta(4, 8), meta(6, 8), mesh="tp=2"), RuleError,
        "no rule for aten.linear.default, and a plan needs none: capture writes this call as aten.t.default, "
        "aten.mm.default", "such as aten.mm.default",
    ),
    "attention as torch has it": (
        lambda: options("scaled_dot_product_attention", *heads(8, 8), mesh="tp=2"), RuleError,
        "capture writes this call as autoparallel_fp8.attention.default", "such as autoparallel_fp8.attention.default",
    ),
    "dropout as torch has it": (
        lambda: options("aten.dropout", meta(4, 8), 0.1, True, mesh="tp=2"), RuleError,
        "autoparallel_fp8.dropout.default", "such as",
    ),
    "cross-entropy as torch has it": (
        lambda: options("cross_entropy_loss", meta(4, 8), meta(4, dtype=torch.int64), mesh="tp=2"), RuleError,
        "capture writes this call as aten.arange", "such as",
    ),
    "a convolution": (
        lambda: options("conv2d", meta(1, 4, 8, 8), meta(8, 4, 2, 2), mesh="tp=2"), RuleError,
        "as aten.convolution.default", "such as aten.convolution.default",
    ),
    "a table of torch's": (
        lambda: options("aten.stack", [meta(4), meta(4)], mesh="tp=2"), RuleError, "writes this call as", "aten.cat",
    ),
}  # fmt: skip


def test_an_op_of_a_package_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a rule by name; the cure is to import the package."""
    monkeypatch.setitem(rules_language._NAMED, "nowhere.cast.default", (rules_language.pointwise, {}))
    with pytest.raises(UsageError, match="has a rule, but the op is not here") as caught:
        options("nowhere.cast", meta(32, 32), mesh="tp=2")
    assert "import nowhere first" in str(caught.value.do)


@pytest.mark.parametrize("name", ["chunk", "linear", "logit", "nonzero", "conv2d"])
def test_only_close_names_are_suggested(name: str) -> None:
    """Namespace and overload make no names alike: `linear` was told of `isnan`, `chunk` of `round`."""
    assert op_names.close_ops(f"aten.{name}.default") == []
    assert op_names.close_ops("aten.softmax") == ["aten._softmax"] and "aten.mm" in op_names.close_ops("mn")


def test_operands_that_can_be_read_but_once() -> None:
    """A generator of tensors is a list."""
    wanted = options("cat", [meta(4, 8), meta(4, 8)], 0, mesh="tp=2")
    assert str(options("cat", (meta(4, 8) for _ in range(2)), 0, mesh="tp=2")) == str(wanted)
    assert str(options("cat", tensors=iter([meta(4, 8)] * 2), mesh="tp=2")) == str(wanted)


def test_the_answer_pickles() -> None:
    """Although torch's overloads do not."""
    found = scaled_mm(16, 64, 576, "tp=8")
    copied = pickle.loads(pickle.dumps(found))
    assert copied == found and copied.op is aten._scaled_mm.default and str(copied) == str(found)


def scaled_mm_of(a: Tensor, b: Tensor) -> OpOptions:
    return options("_scaled_mm", a, b, meta(dtype=F32), meta(dtype=F32), mesh="tp=2")


@pytest.mark.filterwarnings("ignore:.*nested|.*quantized")  # torch's, of how tensors are made
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_told_with_its_cure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours with place and cure; torch's own log of the failure stays silent."""
    call, kind, words, cure = WRONG[name]
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handle", records.append)
    with pytest.raises(kind) as caught:
        call()
    assert not records
    assert words in str(caught.value) and cure in str(caught.value.do) and caught.value.at  # type: ignore[attr-defined]


# ---- rules of users --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("registry")
def test_a_users_rule_is_used() -> None:
    """Registered with the decorator, written with a helper."""

    @rule(HALF)
    def whole_rows(op):
        signature = elementwise(op)
        return dataclasses.replace(signature, whole=frozenset(["d1"]))

    found = options("half", meta(8, 16), mesh="tp=4")
    assert [o["x"].placements for o in found.options] == [("R",), ("S(0)",)]


D0 = (("a",), ("b",))
SIZES = {"a": 8, "b": 6}
NONSENSE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda op: None, "it is a NoneType, not a Signature"),
    "rows": (lambda op: [("S(0)", "S(0)")], "it is a list, not a Signature"),
    "tensors read": (lambda op: Signature((D0, D0), (D0,), SIZES), "it has 2 tensors read where the op has 1"),
    "tensors made": (lambda op: Signature((D0,), (), SIZES), "it has 0 tensors made where the op has 1"),
    "dims": (lambda op: Signature((D0[:1],), (D0,), SIZES), "x of shape [8, 6] has 1 dims in it"),
    "unknown atom": (
        lambda op: Signature((D0,), ((("a",), ("c",)),), SIZES), "result 0 has an atom 'c' without a size",
    ),
    "sizes": (lambda op: Signature((D0,), (D0,), {"a": 8, "b": 5}), "dim 1 of x has size 6, not b=5"),
    "size of one": (lambda op: Signature((D0,), (D0,), {"a": 8, "b": 1}), "sizes above 1, not 'b' of size 1"),
    "size as text": (lambda op: Signature((D0,), (D0,), {"a": 8, "b": "6"}), "sizes above 1, not 'b' of size '6'"),
    "atom twice": (
        lambda op: Signature(((("a",), ("a",)),), (D0,), {"a": 8, "b": 6}), "x has the atom 'a' twice",
    ),
    "reduced atom": (lambda op: Signature((D0,), (D0,), SIZES, reduced={"k": "P"}), "reduced names k"),
    "reduced how": (lambda op: Signature((D0,), (D0,), SIZES, reduced={"a": "sum"}), 'reduced says "P" or "M"'),
    "linear": (lambda op: Signature((D0,), (D0,), SIZES, linear=((1,),)), "linear names an operand beyond the 1"),
    "program": (lambda op: Signature((D0,), (D0,), SIZES, local={"a": "nowhere"}), "it runs 'nowhere'"),
    "einsum of other tensors": (lambda op: einsum(op, "m k, k n -> m n"), "does not have the tensors of op_options"),
    "einsum of other dims": (lambda op: einsum(op, "m -> m"), "does not fit shape (8, 6)"),
    "einsum of no arrow": (lambda op: einsum(op, "m n, m n"), "has no arrow"),
    "einsum of two arrows": (lambda op: einsum(op, "m n -> m n -> m n"), "has 2 arrows"),
    "einsum of a bracket": (lambda op: einsum(op, "(m n -> m n"), "has brackets that do not match in '(m n'"),
    "einsum of a closing bracket": (lambda op: einsum(op, "m n -> m n)"), "has brackets that do not match in 'm n)'"),
    "einsum of brackets in brackets": (lambda op: einsum(op, "((a m)) n -> m n"), "has brackets that do not match"),
    "einsum in square brackets": (lambda op: einsum(op, "[m n] -> [m n]"), "has '[m' for an atom"),
    "einsum of a result's own atom": (lambda op: einsum(op, "m n -> m z"), "'z' that no tensor read has"),
    "einsum of an unknown reduced": (lambda op: einsum(op, "m n -> m n", reduced={"z": "P"}), "reduced names 'z'"),
    "einsum of a kept reduced": (
        lambda op: einsum(op, "m n -> m n", reduced={"m": "P"}), "reduced names m, which every result of",
    ),
    "einsum of an unknown whole": (lambda op: einsum(op, "m n -> m n", whole=("zz",)), "whole names 'zz'; the atoms"),
    "einsum of a text for whole": (lambda op: einsum(op, "m n -> m n", whole="m"), "whole is the text 'm'"),
    "einsum of an unknown local": (lambda op: einsum(op, "m n -> m n", local={"zz": "x"}), "local names 'zz'"),
    "einsum of bare operands": (lambda op: einsum(op, "m n -> m n", linear=(0, 1)), "linear is (0, 1), and takes"),
    "elementwise of bare operands": (lambda op: elementwise(op, linear=(0, 1)), "linear is (0, 1), and takes"),
    "elementwise of an unknown whole": (lambda op: elementwise(op, whole=("d2",)), "whole names 'd2'"),
    "reduction of an unknown whole": (lambda op: reduction(op, [0], whole=("d2",)), "whole names 'd2'"),
    "bare operands": (
        lambda op: Signature((D0,), (D0,), SIZES, linear=(0,)), "linear is (0,), not groups",  # type: ignore[arg-type]
    ),
    "a negative operand": (lambda op: Signature((D0,), (D0,), SIZES, linear=((-1,),)), "an operand beyond the 1"),
    "a group of none": (lambda op: Signature((D0,), (D0,), SIZES, linear=((),)), "a group without operands"),
    "dims as text": (
        lambda op: Signature(("a b",), (D0,), SIZES), "operands is ('a b',), not the atoms",  # type: ignore[arg-type]
    ),
    "finer": (
        lambda op: Signature((D0,), (D0,), SIZES, finer=3), "finer is a int, not a Signature",  # type: ignore[arg-type]
    ),
    "dims swapped": (
        lambda op: Signature((D0,), ((("b",), ("a",)),), {"a": 8, "b": 6}), "dim 0 of result 0 has size 8, not b=6",
    ),
    "raises": (lambda op: op.tensors[1], "the rule raises IndexError: tuple index out of range"),
    "takes nothing": (lambda: None, "the rule raises TypeError"),  # type: ignore[misc, dict-item]
}  # fmt: skip


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("name", NONSENSE)
def test_a_rule_that_returns_nonsense_is_named(name: str) -> None:
    """At expansion, for `options` and plans alike: op, rule and what is wrong with its answer."""
    function, words = NONSENSE[name]
    rule(HALF)(function)
    with pytest.raises(RuleError) as caught:
        options(HALF, meta(8, 6), mesh="tp=2")
    assert words in str(caught.value)
    assert "test_op_options.<lambda> (test_op_options.py, line " in str(caught.value.at)
    assert "op_options_tests.half.default([8, 6])" in str(caught.value.at)
    graph = one_op.capture_call(HALF, [meta(8, 6)], {})
    with pytest.raises(RuleError, match=r"rule .* of op_options_tests\.half\.default"):
        expand(graph, parse_mesh("tp=2"), architecture="sm90")


@pytest.mark.usefixtures("registry")
def test_rows_of_a_users_rule_are_tried_on_parts() -> None:
    """A plan would go wrong where a rank's own result is not what a row says: the row is named."""
    square, rolled = meta(6, 6), torch.ops.op_options_tests.flat.default

    @rule(HALF)
    def swapped(op):
        return einsum(op, "m n -> n m")

    with pytest.raises(RuleError, match=r"-> S\(1\) \(split m\): over 2 ranks result 0 is \[3, 6\], not \[6, 3\]"):
        options(HALF, square, mesh="tp=2")

    @rule(rolled)
    def flat(op):
        return einsum(op, "(m n) -> m n", sizes={"m": op.arg("rows")})

    with pytest.raises(RuleError, match=r"-> S\(0\) \(split m\): over 2 ranks result 0 is \[4, 3\], not \[2, 6\]"):
        options(rolled, meta(24), 4, mesh="tp=2")

    @rule(rolled)
    def kept(op):
        return einsum(op, "(m n) -> m n", sizes={"m": op.arg("rows")}, whole=("m",))

    assert [o["x"].placements for o in options(rolled, meta(24), 4, mesh="tp=2").options] == [("R",), ("S(0.1)",)]

    @rule(HALF)
    def other_shape(op):
        return einsum(op, "m n -> _ n")

    with pytest.raises(RuleError, match=r"-> P\(sum\) \(split m\): over 2 ranks result 0 is \[3, 6\], not \[6, 6\]"):
        options(HALF, square, mesh="tp=2")


@pytest.mark.usefixtures("registry")
def test_built_in_rules_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests prove them, and planning is not to pay for it; a user's rule for the same op is tried."""
    tried: list[Any] = []
    monkeypatch.setattr(rules_check, "wrong_rows", lambda signature, call: tried.append(call.op) or iter(()))
    options("mm", meta(4, 8), meta(8, 4), mesh="tp=2")
    options("relu", meta(4, 8), mesh="tp=2")
    assert not tried
    rule(aten.relu.default)(lambda op: elementwise(op))
    options("relu", meta(4, 8), mesh="tp=2")
    assert tried == [aten.relu.default]


def test_what_a_rule_is_registered_with() -> None:
    """Reasons are text under patterns, a rule is a function."""
    for left_out, words in (([1], "left_out is a list"), ({"(": "x"}, "no pattern"), ({"x": 1}, "not both text")):
        with pytest.raises(RuleError, match=words):
            rule(HALF, left_out=left_out)  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="the rule is a int, not a function"):
        rule(HALF)(3)  # type: ignore[arg-type]
    assert find_rule(HALF) is None


def test_public_names_of_rules() -> None:
    """What rules of users may rely on; a new name is a decision."""
    assert {"Where", "program", "rule", "rule_by_name", "named_rules"} <= set(autoparallel_fp8.rules.__all__)  # type: ignore[attr-defined]
    assert all(hasattr(autoparallel_fp8.rules, name) for name in autoparallel_fp8.rules.__all__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ops", [(), (torch.mm,), (aten.mm,), ("aten.mm.default",)])
def test_a_rule_for_what_is_no_overload_is_refused_at_once(ops: tuple[Any, ...]) -> None:
    """Also where the decorator is written without its parentheses."""
    with pytest.raises(RuleError, match="name overloads, such as"):
        rule(*ops)
    with pytest.raises(RuleError, match="which is no op overload"):

        @rule
        def bare(op):
            return elementwise(op)


# ---- rules of installed packages -------------------------------------------------------------------------------------

GOOD = """
import torch
from autoparallel_fp8.rules import elementwise, rule, rule_by_name

def register():
    rule(torch.ops.op_options_tests.half.default)(elementwise)

def replace():
    rule(torch.ops.aten.mm.default)(elementwise)

def fail():
    rule(torch.ops.op_options_tests.half.default)(elementwise)
    rule_by_name("op_options_tests.gone.default")(elementwise)
    raise KeyError("half of it")

def leave():
    raise SystemExit(3)

NUMBER = 3
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None) -> Callable[..., None]:
    """Puts a distribution with entry points where Python finds it, as pip does: a module and its dist-info."""
    monkeypatch.setattr(plugins, "_notes", None)
    monkeypatch.syspath_prepend(tmp_path)

    def put(package: str, *values: str, source: str = GOOD) -> None:
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"r{i} = {value}" for i, value in enumerate(values)]
        (info / "entry_points.txt").write_text("\n".join(["[autoparallel_fp8.rules]", *lines, ""]))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return put


def test_a_package_brings_rules(install: Callable[..., None]) -> None:
    """By a function that registers, or a module that does so when imported; loaded once, without a warning."""
    source = GOOD + "\nregister()\ncalls = globals().setdefault('calls', 0) + 1\n"
    install("plugin-function", "plugin_function:register")
    install("plugin-module", "plugin_module", source=source.replace("half", "third"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_rule(HALF) is None
        found = options(HALF, meta(8, 6), mesh="tp=2")
        assert len(found.options) == 3 and len(options(THIRD, meta(8, 6), mesh="tp=2").options) == 3
    assert plugins.load_plugins() == () and sys.modules["plugin_module"].calls == 1


def test_a_plan_loads_them_too(install: Callable[..., None]) -> None:
    """Expansion of a graph is their first use as much as `options`."""
    install("plugin-plan", "plugin_plan:register")
    space = expand(one_op.capture_call(HALF, [meta(8, 6)], {}), parse_mesh("tp=2"), architecture="sm90")
    assert space.replicated_ops == () and len(space.kind(1).options) == 3


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("plugin_broken:fail", "KeyError: 'half of it'"),
        ("plugin_broken:leave", "SystemExit: 3"),
        ("plugin_broken:absent", "AttributeError: module 'plugin_broken' has no attribute 'absent'"),
        ("plugin_absent", "ModuleNotFoundError: No module named 'plugin_absent'"),
        ("plugin_broken:NUMBER", "TypeError: plugin_broken:NUMBER is a int, neither a module nor a function"),
    ],
)
def test_a_broken_package_is_warned_about_and_left_out(install: Callable[..., None], value: str, reason: str) -> None:
    """Package and error in one sentence; planning goes on, and nothing that it registered stays."""
    install("plugin-broken", value)
    with pytest.warns(UserWarning) as caught:
        assert len(options("mm", meta(4, 8), meta(8, 4), mesh="tp=2").options) == 6
    assert [str(w.message) for w in caught] == [f"rules of plugin-broken ({value}) are not loaded: {reason}"]
    assert find_rule(HALF) is None and "op_options_tests.gone.default" not in named_rules()
    assert plugins.load_plugins() == (str(caught[0].message),)


@pytest.mark.parametrize(
    ("device", "dtype", "sentence", "do"),
    [
        ("A100", E4M3, "sm80 has no float8 GEMM: it needs sm89, sm90 or later", "plan for a device that has one"),
        ("MI300X", E4M3, "mat1 is float8_e4m3fn: gfx942 multiplies float8_e4m3fnuz", "cast to the device's float8"),
        ("H100", FNUZ, "mat1 is float8_e4m3fnuz: sm90 multiplies float8_e4m3fn", "cast to the device's float8"),
        ("MI300X", FNUZ, "", ""),
        ("L40S", E4M3, "", ""),
    ],
)
def test_a_device_without_the_kernel_refuses_every_layout(device: str, dtype: Any, sentence: str, do: str) -> None:
    """And says why, and what to do."""
    a, b = meta(64, 64, dtype=dtype), meta(64, 64, dtype=dtype).t()
    scale = meta(dtype=F32)
    found = options("_scaled_mm", a, b, scale, scale, out_dtype=BF16, mesh="tp=4", device=device)
    assert bool(found.options) == (not sentence) and bool(found.refused) == bool(sentence)
    assert all(r.sentence.startswith(sentence) for r in found.refused) and found.advice.startswith(do)


def test_a_bias_of_another_length_is_a_mistake_of_the_call() -> None:
    """63 elements for 64 columns."""
    a, b, scale = meta(32, 64, dtype=E4M3), meta(64, 64, dtype=E4M3).t(), meta(dtype=F32)
    for number in (63, 1):
        with pytest.raises(UsageError, match=rf"a bias of shape \[{number}\] for 64 columns"):
            options("_scaled_mm", a, b, scale, scale, bias=meta(number), out_dtype=BF16, mesh="tp=4")
        with pytest.raises(UsageError, match=rf"a bias of shape \[{number}\] for 64 columns"):
            options("_scaled_mm", a, b, scale, scale, meta(number), None, BF16, mesh="tp=4")


def test_a_package_that_replaces_a_rule_is_said_so(install: Callable[..., None]) -> None:
    """Which package, which op, whose rule it was."""
    install("plugin-replaces", "plugin_replaces:replace")
    with pytest.warns(UserWarning, match=r"plugin-replaces .* replaces the rule of aten\.mm\.default"):
        plugins.load_plugins()
    assert "autoparallel_fp8.rules.matmul" in plugins.load_plugins()[0] and find_rule(aten.mm.default) is elementwise


def test_the_command_line_says_what_it_loaded(install: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    """A note on standard error; the rule of the package is in the list, without a docstring by what it returns."""
    install("plugin-listed", "plugin_listed:register", "plugin_listed:fail")
    assert main(["rules"]) == 0
    out, err = capsys.readouterr()
    assert "op_options_tests.half.default" in out
    assert err == "note: rules of plugin-listed (plugin_listed:fail) are not loaded: KeyError: 'half of it'\n"


def test_importing_the_library_loads_no_package(install: Callable[..., None], tmp_path: Path) -> None:
    """Only the first use does."""
    install("plugin-late", "plugin_late:register", source="raise RuntimeError('too early')")
    code = "import sys, autoparallel_fp8, autoparallel_fp8.rules; print('plugin_late' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"
