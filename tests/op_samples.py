"""Sample calls of every op that has a rule: numbers that vary along every dim, in several shapes and memory orders."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch
from autoparallel_fp8.rules import rule_ops
from grouped_samples import grouped_samples
from mx_samples import mx_mm_samples, shift_samples, to_mx_samples
from scaled_samples import scaled_samples
from split_ops import Sample
from torch import Tensor

aten = torch.ops.aten
ops = torch.ops.autoparallel_fp8
F32, F64, BF16, E4M3 = torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn

_MAKERS: list[Callable[[], list[Sample]]] = []


def samples_for(*names: str) -> Callable[[Callable[[Any], list[Sample]]], None]:
    """Decorator: the function makes samples of the op it is given, for each of these aten overloads."""

    def register(function: Callable[[Any], list[Sample]]) -> None:
        for name in names:
            packet, overload = name.split(".")
            op = getattr(getattr(aten, packet), overload)
            _MAKERS.append(lambda op=op: function(op))

    return register


@cache
def all_samples() -> dict[Any, list[Sample]]:
    """Op -> its samples, in the order of `rule_ops`."""
    found: dict[Any, list[Sample]] = {op: [] for op in rule_ops()}
    for make in _MAKERS:
        for sample in make():
            found.setdefault(sample.op, []).append(sample)
    return found


def numbers(*shape: int, dtype: torch.dtype = F32, low: int = -4, high: int = 4, order: str = "") -> Tensor:
    """Whole numbers from low to high; order "T": the last two dims swapped in memory."""
    generator = torch.Generator().manual_seed(prod(shape) + len(shape) + high)
    stored = (*shape[:-2], shape[-1], shape[-2]) if order == "T" else shape
    made = torch.randint(low, high + 1, stored, generator=generator)
    made = made.to(F32).to(dtype) if dtype.is_floating_point else made.to(dtype)
    return made.transpose(-1, -2) if order == "T" else made


def powers(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Powers of two, so that multiplying by them rounds nothing."""
    return (2.0 ** numbers(*shape, low=-2, high=2)).to(dtype)


def truths(*shape: int) -> Tensor:
    return numbers(*shape) > 0


def counted(x: Tensor, count: int) -> Tensor:
    """x times the count of a mean, so that the mean is whole."""
    return x * count


def distinct(*shape: int, low: int = -9, order: str = "") -> Tensor:
    """Whole numbers from low on, each once, in no order."""
    stored = (*shape[:-2], shape[-1], shape[-2]) if order == "T" else shape
    made = torch.randperm(prod(shape), generator=torch.Generator().manual_seed(1)).to(F32).add(low).reshape(stored)
    return made.transpose(-1, -2) if order == "T" else made


def unary_inputs() -> list[Tensor]:
    return [numbers(12, 8), numbers(4, 1, 12), numbers(12, 8, order="T"), numbers(24, dtype=BF16), numbers()]


@samples_for(
    "abs.default", "neg.default", "sign.default", "floor.default", "ceil.default", "round.default", "relu.default",
    "clone.default", "alias.default", "detach.default", "logical_not.default", "zeros_like.default",
    "ones_like.default", "isnan.default", "isinf.default",
)  # fmt: skip
def unary(op: Any) -> list[Sample]:
    return [Sample(op, (x,)) for x in unary_inputs()]


@samples_for(*(f"{n}.default" for n in ["exp", "exp2", "cos", "sin", "tanh", "sigmoid", "silu", "gelu", "erf"]))
def smooth(op: Any) -> list[Sample]:
    """Vectorised and scalar code may differ in the last bit."""
    return [Sample(op, (x,), rtol=1e-6, atol=1e-6) for x in unary_inputs()[: 1 if op is aten.gelu.default else 3]]


@samples_for(*(f"{n}.default" for n in ["reciprocal", "rsqrt", "sqrt", "log", "log2"]))
def positive(op: Any) -> list[Sample]:
    return [Sample(op, (x,), rtol=1e-6) for x in (powers(12, 8), powers(4, 1, 12), powers(24, 2, dtype=BF16), powers())]


@samples_for("bitwise_not.default")
def bits(op: Any) -> list[Sample]:
    return [Sample(op, (truths(12, 4),)), Sample(op, (numbers(12, 4, dtype=torch.int64),))]


@samples_for("bitwise_and.Tensor", "bitwise_or.Tensor", "logical_and.default", "logical_or.default")
def logic(op: Any) -> list[Sample]:
    return [Sample(op, (truths(12, 4), truths(4))), Sample(op, (truths(4, 1, 6), truths(12, 1)))]


def pairs() -> list[tuple[Any, Any]]:
    x = numbers(12, 8)
    return [
        (x, numbers(12, 8, high=3)), (x, numbers(8)), (numbers(4, 1, 6), numbers(12, 1)), (x, numbers()),
        (numbers(12, 8, high=2, order="T"), x), (x, x), (numbers(), x),
        (numbers(12, 4, dtype=BF16), numbers(12, 1, dtype=BF16)),
    ]  # fmt: skip


@samples_for("add.Tensor", "sub.Tensor", "mul.Tensor", "maximum.default", "minimum.default")
def binary(op: Any) -> list[Sample]:
    scaled = [Sample(op, (a, b), (("alpha", 2),)) for a, b in pairs()[:1]] if "alpha" in str(op._schema) else []
    scalar = [] if op in (aten.maximum.default, aten.minimum.default) else [Sample(op, (numbers(12, 8), 3.0))]
    return [Sample(op, pair) for pair in pairs()] + scaled + scalar


@samples_for("div.Tensor")
def division(op: Any) -> list[Sample]:
    return [Sample(op, (a, b)) for a, b in ((numbers(12, 8), powers(12, 8)), (numbers(12, 8), powers(12, 1)),
            (numbers(12, 8), powers()), (numbers(12), 4.0), (numbers(), powers(4)))]  # fmt: skip


@samples_for("pow.Tensor_Tensor")
def power(op: Any) -> list[Sample]:
    return [Sample(op, (powers(12, 8), numbers(8, low=0, high=3)), rtol=1e-6)]


@samples_for(*(f"{n}.Tensor" for n in ["eq", "ne", "lt", "le", "gt", "ge"]))
def comparison(op: Any) -> list[Sample]:
    return [
        Sample(op, pair) for pair in (*pairs()[:4], (numbers(12, 1, dtype=torch.int64), numbers(6, dtype=torch.int64)))
    ]


@samples_for(
    *(f"{n}.Scalar" for n in ["eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "rsub", "mul", "div"]),
    "pow.Tensor_Scalar",
)
def with_scalar(op: Any) -> list[Sample]:
    neutral = [Sample(op, (numbers(12, 8), 1 if "pow" in str(op) else 0))] if op is not aten.div.Scalar else []
    return [*(Sample(op, (x, 2)) for x in unary_inputs()), *neutral]


@samples_for("clamp.default", "clamp_min.default", "clamp_max.default")
def clamps(op: Any) -> list[Sample]:
    bounds = [(-1.0, 2.0), (0.5,), (None, 1.0)] if op is aten.clamp.default else [(0.0,), (-1.5,)]
    return [Sample(op, (x, *bound)) for x in unary_inputs()[:4] for bound in bounds]


@samples_for("full_like.default")
def full_like(op: Any) -> list[Sample]:
    return [Sample(op, (x, 3.0)) for x in unary_inputs()]


@samples_for("_to_copy.default")
def casts(op: Any) -> list[Sample]:
    targets = (F32, F64, BF16, torch.float16, E4M3, torch.int64, torch.int8, torch.uint8, torch.bool)
    found = [
        Sample(op, (x,), (("dtype", dtype),)) for x in (numbers(12, 8), numbers(6, 4, order="T")) for dtype in targets
    ]
    found += [Sample(op, (numbers(12, 4, dtype=d),), (("dtype", F32),)) for d in (BF16, E4M3, torch.int64)]
    return [*found, Sample(op, (truths(12, 4),), (("dtype", F32),))]


@samples_for("where.self")
def where(op: Any) -> list[Sample]:
    x = numbers(12, 8)
    found = [(truths(12, 8), x, numbers(12, 8, high=3)), (truths(12, 1), x, numbers(8)), (truths(8), x, numbers())]
    return [Sample(op, args) for args in [*found, (truths(12, 1), numbers(1, 4), x[:, :4].contiguous())]]


@samples_for("where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where_scalar(op: Any) -> list[Sample]:
    x = numbers(12, 8)
    order = {"ScalarOther": (x, 0.0), "ScalarSelf": (0.0, x), "Scalar": (1.0, 0.0)}[op._overloadname]
    return [Sample(op, (truths(12, 8), *order)), Sample(op, (truths(12, 1), *order))]


@samples_for("masked_fill.Scalar")
def masked_fill(op: Any) -> list[Sample]:
    return [Sample(op, (numbers(12, 8), mask, value)) for mask in (truths(12, 8), truths(8)) for value in (0, -5.0)]


@samples_for(*(f"{n}_backward.default" for n in ["silu", "gelu", "sigmoid", "tanh"]))
def pointwise_gradients(op: Any) -> list[Sample]:
    """Gradients of both signs at 0, where each derivative is a power of two."""
    zeros = torch.zeros(12, 8) + (0.5 if op is aten.sigmoid_backward.default else 0.0)
    varied = [Sample(op, (numbers(12, 8), numbers(12, 8, high=2)), rtol=1e-5, atol=1e-5)]
    return [Sample(op, (numbers(12, 8), zeros)), Sample(op, (numbers(12, 8, order="T"), zeros)), *varied]


@samples_for("threshold_backward.default")
def threshold(op: Any) -> list[Sample]:
    return [Sample(op, (numbers(12, 8), numbers(12, 8, high=3), 0))]


@samples_for("sum.default")
def sum_all(op: Any) -> list[Sample]:
    return [Sample(op, (x,)) for x in (*unary_inputs(), numbers(12, 4, dtype=torch.int64), truths(12, 4))]


@samples_for("sum.dim_IntList")
def sums(op: Any) -> list[Sample]:
    x, y = numbers(12, 8), numbers(4, 1, 12)
    found = [(x, (0,)), (x, (-1,), True), (y, (0, 2)), (y, (1,)), (y, ()), (numbers(12, 8, order="T"), (1,))]
    found += [(numbers(12, 4, dtype=torch.int64), (0,)), (numbers(8, 24, dtype=BF16), (0, 1), True)]
    return [Sample(op, args) for args in found] + [Sample(op, (numbers(12, 8, dtype=BF16), (0,)), (("dtype", F32),))]


@samples_for("mean.dim", "mean.default")
def means(op: Any) -> list[Sample]:
    """What a partial operand gives is not whole, and is rounded."""
    x, y = counted(numbers(12, 8), 96), counted(numbers(4, 1, 12), 48)
    if op is aten.mean.default:
        return [Sample(op, (z,), rtol=1e-5, atol=1e-5) for z in (x, y, numbers())]
    found = [
        Sample(op, args, rtol=1e-5, atol=1e-5)
        for args in ((x, (0,)), (x, (-1,), True), (y, (0, 2)), (y, (1,)), (x, ()))
    ]
    wide = (("dtype", F32),)
    return [
        *found,
        Sample(op, (numbers(8, 4, dtype=BF16) * 8, (0,))),
        Sample(op, (numbers(8, 4, dtype=BF16) * 8, (0,)), wide),
    ]


@samples_for("amax.default")
def maxima(op: Any) -> list[Sample]:
    x, y = distinct(12, 8), distinct(4, 1, 12, low=-99)
    found = [(x, (0,)), (x, (-1,), True), (y, (0, 2)), (y, (1,)), (y, ()), (distinct(12, 8, order="T"), (1,), True)]
    return [Sample(op, args) for args in found]


@samples_for("max.default")
def maximum_of_all(op: Any) -> list[Sample]:
    return [Sample(op, (x,)) for x in (distinct(12, 8), distinct(4, 1, 12, low=-99), distinct(24, 2).to(BF16))]


@samples_for("cumsum.default")
def running_sum(op: Any) -> list[Sample]:
    return [
        Sample(op, (numbers(12, 8), 0)),
        Sample(op, (numbers(4, 1, 12), -1)),
        Sample(op, (numbers(12, 4, dtype=torch.int64), 1)),
    ]


@samples_for("_softmax.default", "_log_softmax.default")
def softmax(op: Any) -> list[Sample]:
    return [
        Sample(op, (x, dim, False), rtol=1e-5)
        for x, dim in ((numbers(12, 8), -1), (numbers(4, 1, 12), 0), (numbers(12, 8, order="T"), 1))
    ]


@samples_for("_safe_softmax.default")
def safe_softmax(op: Any) -> list[Sample]:
    """A row in which everything is masked gives zeros."""
    x = numbers(12, 8).masked_fill(torch.arange(12)[:, None] == 3, -torch.inf)
    return [Sample(op, (x, -1), rtol=1e-5), Sample(op, (numbers(4, 1, 12), 0), rtol=1e-5)]


@samples_for("_softmax_backward_data.default", "_log_softmax_backward_data.default")
def softmax_gradient(op: Any) -> list[Sample]:
    out = torch.softmax(numbers(12, 8, high=3), -1)
    return [Sample(op, (numbers(12, 8), out, -1, F32), rtol=1e-4, atol=1e-5)]


@samples_for("native_layer_norm.default")
def layer_norm(op: Any) -> list[Sample]:
    found = [(numbers(12, 8), (8,), numbers(8), numbers(8, high=3)), (numbers(4, 2, 12), (12,), None, None)]
    found += [(numbers(12, 2, 4), (2, 4), numbers(2, 4), None)]
    return [Sample(op, (*args, 1e-5), rtol=1e-4, atol=1e-5) for args in found]


@samples_for("native_layer_norm_backward.default")
def layer_norm_gradient(op: Any) -> list[Sample]:
    found = []
    for x, shape, mask in ((numbers(12, 8), (8,), (True, True, True)), (numbers(4, 6, 12), (12,), (True, True, False)),
                           (numbers(4, 1, 12), (12,), (True, False, False))):  # fmt: skip
        weight, bias = numbers(*shape), numbers(*shape)
        _, mean, rstd = aten.native_layer_norm.default(x, shape, weight, bias, 1e-5)
        grad = numbers(*x.shape, high=3)
        found.append(Sample(op, (grad, x, shape, mean, rstd, weight, bias, mask), rtol=1e-4, atol=1e-4))
    return found


@samples_for("view.default", "_unsafe_view.default", "reshape.default")
def views(op: Any) -> list[Sample]:
    moves = [((12, 8), (96,)), ((4, 6, 4), (24, 4)), ((24, 4), (4, 6, 1, 4)), ((12, 8), (8, 12)), ((6, 4), (8, 3)),
             ((4, 1, 12), (4, 12)), ((4, 12), (2, 2, 4, 3)), ((1, 1), ()), ((24,), (-1, 12))]  # fmt: skip
    found = [Sample(op, (numbers(*a), b)) for a, b in moves]
    swapped = numbers(12, 8, order="T")
    return [*found, Sample(op, (swapped, (12, 2, 4)))]


@samples_for("view.dtype")
def views_as_another_dtype(op: Any) -> list[Sample]:
    calls = [(numbers(12, 8), torch.int32), (numbers(4, 6, 4, dtype=E4M3), torch.uint8), (numbers(low=3), torch.int32)]
    calls += [(numbers(12, 8, high=2**23), BF16), (numbers(12, 8, dtype=BF16), F32)]
    calls += [(numbers(12, 2, dtype=BF16), torch.int32), (numbers(12, 8, order="T"), torch.int32)]
    return [Sample(op, call) for call in calls]


@samples_for("t.default")
def t(op: Any) -> list[Sample]:
    return [
        Sample(op, (x,))
        for x in (numbers(12, 8), numbers(12, 8, order="T"), numbers(1, 12), numbers(12), numbers(12, 4, dtype=E4M3))
    ]


@samples_for("transpose.int")
def transpose(op: Any) -> list[Sample]:
    return [Sample(op, (numbers(4, 6, 12), *dims)) for dims in ((0, 1), (-1, 1), (2, 2))] + [
        Sample(op, (numbers(4, 1, 12), 1, 2))
    ]


@samples_for("permute.default")
def permute(op: Any) -> list[Sample]:
    return [Sample(op, (numbers(4, 6, 12), dims)) for dims in ((2, 0, 1), (0, -1, 1))]


@samples_for("unsqueeze.default")
def unsqueeze(op: Any) -> list[Sample]:
    return [Sample(op, (numbers(12, 8), dim)) for dim in (0, 1, -1)] + [Sample(op, (numbers(), 0))]


@samples_for("squeeze.default")
def squeeze_all(op: Any) -> list[Sample]:
    return [Sample(op, (x,)) for x in (numbers(4, 1, 12), numbers(1, 2, 1), numbers(12, 4))]


@samples_for("squeeze.dim", "squeeze.dims")
def squeeze(op: Any) -> list[Sample]:
    def dim(d: int) -> Any:
        return d if op is aten.squeeze.dim else (d,)

    more = [Sample(op, (numbers(4, 1, 1, 6), (1, -2)))] if op is aten.squeeze.dims else []
    return [Sample(op, (numbers(4, 1, 12), dim(d))) for d in (1, 0, -1)] + more


@samples_for("expand.default")
def expand(op: Any) -> list[Sample]:
    found = [
        ((12, 1), (12, 8)),
        ((1, 8), (12, 8)),
        ((8,), (4, 1, 8)),
        ((4, 1, 6), (-1, 2, 6)),
        ((), (12,)),
        ((12, 4), (12, 4)),
    ]
    return [Sample(op, (numbers(*a), b)) for a, b in found]


@samples_for("repeat.default")
def repeat(op: Any) -> list[Sample]:
    found = [((12, 1), (1, 8)), ((1, 8), (12, 1)), ((8,), (4, 1)), ((4, 6), (2, 1)), ((1, 6), (4, 2)), ((12,), (1,))]
    return [Sample(op, (numbers(*a), b)) for a, b in found]


@samples_for("slice.Tensor")
def slices(op: Any) -> list[Sample]:
    x = numbers(12, 8)
    return [Sample(op, (x, *args)) for args in ((0, 0, 6), (1, 2, 9223372036854775807), (1, -4), (-1, 0, 8, 2), (0,))]


@samples_for("select.int")
def select(op: Any) -> list[Sample]:
    return [Sample(op, (numbers(4, 6, 12), dim, index)) for dim, index in ((0, 2), (1, -1), (-1, 5))]


@samples_for("slice_backward.default")
def slice_gradient(op: Any) -> list[Sample]:
    return [Sample(op, (numbers(4, 8), (12, 8), 0, 2, 6, 1)), Sample(op, (numbers(12, 4), (12, 8), -1, 0, 8, 2))]


@samples_for("flip.default")
def flip(op: Any) -> list[Sample]:
    return [Sample(op, (numbers(12, 8), dims)) for dims in ((0,), (-1,), (0, 1), ())]


@samples_for("roll.default")
def roll(op: Any) -> list[Sample]:
    return [Sample(op, (numbers(12, 8), *args)) for args in (((3,), (0,)), ((2, 1), (0, -1)), ((5,), ()), ((5,),))]


@samples_for("constant_pad_nd.default")
def pads(op: Any) -> list[Sample]:
    x = numbers(12, 8)
    return [
        Sample(op, (x, *args))
        for args in (((1, 2), 0.0), ((0, 0, 2, 0), 0), ((0, 4),), ((-2, 0), 0.0), ((1, 1), 5.0), ((0, 0), 5.0))
    ]


@samples_for("cat.default")
def cats(op: Any) -> list[Sample]:
    x, y = numbers(12, 8), numbers(12, 4)
    return [Sample(op, args) for args in (((x, y), 1), ((x, x), 0), ((x, y, x), -1), ((x,), 0), ((x, numbers(4, 8)),))]


@samples_for("split.Tensor")
def split(op: Any) -> list[Sample]:
    return [Sample(op, (numbers(12, 8), size, dim)) for size, dim in ((4, 0), (3, -1), (12, 0))]


@samples_for("split_with_sizes.default")
def split_sizes(op: Any) -> list[Sample]:
    return [Sample(op, (numbers(12, 8), (8, 4), 0)), Sample(op, (numbers(12, 8), (2, 4, 2), 1))]


@samples_for("mm.default")
def mm(op: Any) -> list[Sample]:
    found = [
        ((12, 24), "", (24, 8), "T"),
        ((12, 4), "T", (4, 12), ""),
        ((1, 12), "", (12, 4), ""),
        ((12, 1), "", (1, 12), ""),
    ]
    made = [Sample(op, (numbers(*a, order=p), numbers(*b, order=q))) for a, p, b, q in found]
    return [*made, Sample(op, (numbers(12, 8, dtype=BF16, high=2), numbers(8, 4, dtype=BF16, high=2)))]


@samples_for("bmm.default")
def bmm(op: Any) -> list[Sample]:
    return [
        Sample(op, (numbers(4, 6, 12), numbers(4, 12, 2, order="T"))),
        Sample(op, (numbers(1, 6, 4), numbers(1, 4, 12))),
    ]


@samples_for("_scaled_mm.default")
def scaled_mm(op: Any) -> list[Sample]:
    def call(m: int, k: int, n: int, *scales: Any) -> Sample:
        a, b = numbers(m, k, dtype=E4M3), numbers(n, k, dtype=E4M3, high=3).t()
        return Sample(op, (a, b, *scales), (("out_dtype", F32),))

    tensorwise = [call(12, 24, 8, powers(), powers()), call(4, 12, 16, powers(1, 1), powers(1))]
    rowwise = [call(12, 24, 8, powers(12, 1), powers(1, 8)), call(4, 8, 12, powers(4, 1), powers(1, 12))]
    return [*tensorwise, *rowwise, call(12, 8, 24, powers(), powers(), numbers(24))]


@samples_for("embedding.default")
def embedding(op: Any) -> list[Sample]:
    tokens = numbers(4, 6, dtype=torch.int64, low=0, high=23)
    found = [(numbers(24, 8), tokens), (numbers(24, 4), tokens[0].clone(), 3), (numbers(24, 2), torch.tensor(20))]
    return [Sample(op, args) for args in [*found, (numbers(24, 8, dtype=BF16), tokens)]]


@samples_for("embedding_dense_backward.default")
def embedding_gradient(op: Any) -> list[Sample]:
    tokens = numbers(4, 6, dtype=torch.int64, low=0, high=23)
    few = numbers(12, dtype=torch.int64, low=0, high=5)
    found = [(numbers(4, 6, 8), tokens, 24, -1, False), (numbers(4, 6, 2), tokens, 24, int(tokens[0, 0]), False)]
    by_count = Sample(op, (numbers(12, 4) * 12, few, 12, -1, True), rtol=1e-5, atol=1e-5)
    return [*(Sample(op, args) for args in found), by_count]


@samples_for("gather.default")
def gather(op: Any) -> list[Sample]:
    x = numbers(12, 24)
    index = numbers(12, 4, dtype=torch.int64, low=0, high=23)
    few = numbers(6, 8, dtype=torch.int64, low=0, high=11)
    return [
        Sample(op, (x, 1, index)),
        Sample(op, (x, -1, index)),
        Sample(op, (numbers(12, 8), 0, few)),
        Sample(op, (numbers(12, 8), 0, few[:, :4].clone())),
    ]


@samples_for("scatter.value")
def scatter(op: Any) -> list[Sample]:
    index = numbers(12, 2, dtype=torch.int64, low=0, high=23)
    return [Sample(op, (numbers(12, 24), 1, index, 9.0)), Sample(op, (numbers(12, 24), -1, index[:6].clone(), -1)),
            Sample(op, (numbers(24, 12), 0, index.t().contiguous(), 7.0)),
            Sample(op, (numbers(12, 24), 1, index, 0))]  # fmt: skip


@samples_for("scatter_add.default")
def scatter_add(op: Any) -> list[Sample]:
    index = numbers(12, 4, dtype=torch.int64, low=0, high=7)
    x, source = numbers(12, 8), numbers(12, 4, high=3)
    return [Sample(op, (x, 1, index, source)), Sample(op, (x, -1, index[:6].clone(), source[:6].clone())),
            Sample(op, (numbers(8, 4), 0, index, source))]  # fmt: skip


@samples_for("index.Tensor")
def index(op: Any) -> list[Sample]:
    x, i, j = numbers(6, 4, 12), torch.tensor([3, 0, 3, 1]), torch.tensor([1, 2, 3, 0])
    return [Sample(op, (x, indices)) for indices in ((i,), (None, i), (i, j), (i, None, j), (None, i[:, None], j))]


@samples_for("zeros.default", "ones.default", "empty.memory_format")
def constants(op: Any) -> list[Sample]:
    is_filled = op is not aten.empty.memory_format
    return [Sample(op, (shape,), (("dtype", BF16),), is_filled=is_filled) for shape in ((12, 8), (4, 1, 6), ())]


@samples_for("full.default")
def full(op: Any) -> list[Sample]:
    return [Sample(op, (shape, 2.5)) for shape in ((12, 8), (4, 1, 6), ())]


@samples_for("scalar_tensor.default")
def scalar_tensor(op: Any) -> list[Sample]:
    return [Sample(op, (2.5,))]


@samples_for("arange.default", "arange.start", "arange.start_step")
def arange(op: Any) -> list[Sample]:
    calls = {"default": [(24,), (12.0,)], "start": [(3, 27), (0.5, 12.5)], "start_step": [(0, 24, 2), (0, 1.2, 0.1)]}
    return [Sample(op, args) for args in calls[op._overloadname]]


@samples_for("empty_like.default")
def empty_like(op: Any) -> list[Sample]:
    return [Sample(op, (x,), is_filled=False) for x in unary_inputs()]


@samples_for("new_zeros.default", "new_ones.default", "new_empty.default")
def new(op: Any) -> list[Sample]:
    is_filled = op is not aten.new_empty.default
    return [Sample(op, (numbers(12, 8), shape), is_filled=is_filled) for shape in ((12, 4), (24,), ())]


@samples_for("new_full.default")
def new_full(op: Any) -> list[Sample]:
    return [Sample(op, (numbers(12, 8), shape, 4.0)) for shape in ((12, 4), (24,), ())]


def attention_inputs(kv_heads: int, mask: Any, is_causal: bool) -> tuple[Any, ...]:
    q, k, v = (
        numbers(4, 8, 6, 2, dtype=F64),
        numbers(4, kv_heads, 6, 2, dtype=F64),
        numbers(4, kv_heads, 6, 3, dtype=F64),
    )
    return q, k, v, mask, is_causal


def attention_masks() -> list[tuple[Any, bool]]:
    some = [
        truths(4, 1, 6, 6) | torch.eye(6, dtype=torch.bool),
        truths(6, 6) | torch.eye(6, dtype=torch.bool),
        numbers(4, 8, 6, 6, dtype=F64),
    ]
    return [(None, False), (None, True), *((mask, False) for mask in (*some, numbers(1, 8, 1, 6, dtype=F64)))]


def _attention() -> list[Sample]:
    op = ops.attention.default
    calls = zip((4, 2, 8, 4, 4, 8), attention_masks(), strict=True)
    return [Sample(op, attention_inputs(heads, *mask), rtol=1e-12, atol=1e-6) for heads, mask in calls]


def _attention_backward() -> list[Sample]:
    op, found = ops.attention_backward.default, []
    for heads, mask in zip((4, 8, 2, 1, 4, 4), attention_masks(), strict=True):
        args = attention_inputs(heads, *mask)
        out, logsumexp = ops.attention.default(*args)
        grad = numbers(*out.shape, dtype=F64)
        found.append(Sample(op, (grad, *args[:3], out, logsumexp, *args[3:]), rtol=1e-9, atol=1e-5))
    return found


def _dropout() -> list[Sample]:
    """Scales 2 and 4 are exact; 1 / 0.9 rounds each part of a sum."""
    op, exact = ops.dropout.default, ((0.5, 7), (0.75, 2**62 + 3), (0.5, -1), (0.75, 0), (0.5, 11))
    found = [Sample(op, (x, p, torch.tensor(seed), 3)) for x, (p, seed) in zip(unary_inputs(), exact, strict=True)]
    cubes = [numbers(4, 6, 8), numbers(4, 12, 2, dtype=BF16).transpose(0, 1)]
    found += [Sample(op, (x, 0.5, torch.tensor(1), 0)) for x in cubes]
    ends = [Sample(op, (numbers(12, 4), p, torch.tensor(5), 1)) for p in (0.0, 1.0)]
    return [*found, *ends, Sample(op, (numbers(12, 8), 0.1, torch.tensor(5), 1), rtol=1e-6, atol=1e-6)]


_MAKERS += [_attention, _attention_backward, _dropout]
_MAKERS += [to_mx_samples, mx_mm_samples, shift_samples]


@samples_for("convolution.default")
def convolution(op: Any) -> list[Sample]:
    """Patches and overlapping windows, in one to three dims, grouped and transposed."""
    patches = Sample(op, (numbers(4, 6, 8, 8), numbers(8, 6, 2, 4, high=2), None, *_windows((2, 4))))
    biased = Sample(op, (numbers(4, 4, 12, 4), numbers(6, 4, 3, 2, high=2), numbers(6), *_windows((3, 2))))
    overlapping = Sample(op, (numbers(4, 6, 8), numbers(8, 6, 3, high=2), None, *_windows((1,), (1,))))
    grouped = Sample(op, (numbers(4, 6, 8), numbers(6, 3, 2, high=2), numbers(6), *_windows((1,), groups=2)))
    transposed = numbers(6, 4, 2, 2, high=2), None, *_windows((2, 2), is_transposed=True)
    deep = Sample(op, (numbers(2, 4, 4, 4, 4), numbers(4, 4, 2, 2, 2, high=2), None, *_windows((2, 2, 2))))
    return [patches, biased, overlapping, Sample(op, (numbers(4, 6, 4, 4), *transposed)), grouped, deep]


@samples_for("convolution_backward.default")
def convolution_gradients(op: Any) -> list[Sample]:
    x, weight = numbers(4, 6, 8, 8), numbers(8, 6, 2, 4, high=2)
    grad = numbers(4, 8, 4, 2, high=3)
    masks = [(True, True, False), (False, True, False), (True, False, False), (True, True, True)]
    found = [Sample(op, (grad, x, weight, (8,), *_windows((2, 4)), mask)) for mask in masks]
    line, kernel = numbers(4, 6, 8), numbers(8, 6, 3, high=2)
    return [
        *found,
        Sample(op, (numbers(2, 4, 1, 1), numbers(2, 3, 4, 4), numbers(4, 3, 4, 4), (4,), *_windows((1, 1)), masks[3])),
        Sample(op, (numbers(4, 8, 8, high=3), line, kernel, (8,), *_windows((1,), (1,)), masks[0])),
        Sample(op, (numbers(4, 4, 8, 8), numbers(4, 6, 4, 4), numbers(6, 4, 2, 2, high=2), None,
                    *_windows((2, 2), is_transposed=True), masks[0])),
        Sample(op, (numbers(4, 6, 7), line, numbers(6, 3, 2, high=2), (6,), *_windows((1,), groups=2), masks[0])),
    ]  # fmt: skip


def _windows(stride: Any, padding: Any = None, *, is_transposed: bool = False, groups: int = 1) -> tuple[Any, ...]:
    """A convolution's arguments from stride on."""
    zeros = (0,) * len(stride)
    return stride, padding or zeros, (1,) * len(stride), is_transposed, zeros, groups


def _scored_attention() -> list[Sample]:
    found = []
    for heads, (mask, is_causal) in zip((4, 2, 8, 4, 8, 4), attention_masks(), strict=True):
        args = (*attention_inputs(heads, mask, is_causal), None, 2.0)
        found.append(_with_gradients(ops.capped_attention, ops.capped_attention_backward, args))
        if mask is not None and mask.dtype == F64:
            args = attention_inputs(heads, mask, True)
            found.append(_with_gradients(ops.biased_attention, ops.biased_attention_backward, args))
            found.append(_with_gradients(ops.biased_attention, ops.biased_attention_backward, (*args[:4], False)))
    return [sample for both in found for sample in both]


def _with_gradients(forward: Any, backward: Any, args: tuple[Any, ...]) -> tuple[Sample, Sample]:
    out, logsumexp = forward.default(*args)
    grad = numbers(*out.shape, dtype=F64)
    made = Sample(backward.default, (grad, *args[:3], out, logsumexp, *args[3:]), rtol=1e-9, atol=1e-5)
    return Sample(forward.default, args, rtol=1e-12, atol=1e-6), made


_MAKERS += [_scored_attention]
_MAKERS[:0] = [scaled_samples, grouped_samples]  # first, so that all their reasons for missing rows are met
