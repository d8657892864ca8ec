"""Convolutions, as implicit GEMMs: batch and output channels split; split input channels leave a part of the sum.

x[n, ci, ...] * weight[co, ci, ...] -> out[n, co, ...]; a transposed one has weight[ci, co, ...]. Windows that overlap
keep the other dims whole, since a part would need its neighbours' edges; patches (stride = kernel, no padding: the
first layer of a vision transformer) split along them too. In grouped convolutions channels stay whole.
"""

from __future__ import annotations

import torch

from .language import OpCall, Signature, einsum, heavy, rule

aten = torch.ops.aten

heavy(aten.convolution.default, aten.convolution_backward.default)


@rule(aten.convolution.default, left_out={r"S\(1\) x S\([01]\) x P\(sum\) -> P\(sum\)": "capture adds the bias after"})
def convolution(op: OpCall) -> Signature:
    """Linear in x and in weight, the bias partial with them; a bias that is whole may be added once only."""
    x, weight, out, sizes, whole = _dims(op)
    if len(op.tensors) == 2:
        return einsum(op, f"{x}, {weight} -> {out}", sizes=sizes, whole=whole, linear=((0,), (1,)))
    bias, channels = ("_", ()) if op.arg("groups") != 1 else ("co", ("ci",))
    text = f"{x}, {weight}, {bias} -> {out}"
    return einsum(op, text, sizes=sizes, whole=(*whole, *channels), linear=((0, 2), (1, 2)))


@rule(
    aten.convolution_backward.default,
    left_out={
        r".* x P\(sum\) -> .*": "weights are no partial sums",
        r".* x P\(sum\) x .* -> .*": "x is not read where nobody wants the weight's gradient",
        r"R x S\(([234])\) x S\(\1\) -> S\(\1\),S\(\1\),R": "one window, as large as x: nobody splits a kernel",
        r"R x S\(1\) x S\([01]\) -> .*,R": "capture sums up the bias's gradient by itself",
    },
)
def convolution_backward(op: OpCall) -> Signature:
    """Gradients of x, weight and bias, each where `output_mask` asks for it; all linear in the incoming one."""
    x, weight, out, sizes, whole = _dims(op)
    wants_x, wants_weight, wants_bias = op.arg("output_mask")
    bias = "co" if wants_bias and op.arg("groups") == 1 else "_"
    results = [x if wants_x else "_", weight if wants_weight else "_", bias]
    unread = [group for group, is_wanted in (((1,), wants_x), ((2,), wants_weight)) if not is_wanted and not wants_bias]
    if wants_bias and op.arg("groups") == 1:
        whole = (*whole, "ci")  # the bias's gradient is the same for every part of ci
    text = f"{out}, {x}, {weight} -> {', '.join(results)}"
    return einsum(op, text, sizes=sizes, whole=whole, linear=((0,), *unread))


def _dims(op: OpCall) -> tuple[str, str, str, dict[str, int], tuple[str, ...]]:
    """The texts of x, weight and out, the sizes that shapes do not tell, and the atoms that stay whole."""
    shape, kernel = op.arg("input").shape[2:], op.arg("weight").shape[2:]
    names = ("stride", "padding", "dilation", "output_padding")
    stride, padding, dilation, extra = (_each(op.arg(name), len(shape)) for name in names)
    outer, inner = [], []
    for d, (size, k) in enumerate(zip(shape, kernel, strict=True)):
        is_patch = stride[d] == k and not padding[d] and (dilation[d] == 1 or k == 1)
        is_even = not extra[d] if op.arg("transposed") else size % k == 0
        outer.append(f"(s{d} k{d})" if is_patch and is_even else "_")
        inner.append(f"s{d}" if is_patch and is_even else "_")
    if op.arg("transposed"):
        inner, outer = outer, inner
    if op.arg("groups") != 1:
        first, second, channels = "_", "_", "_ _"
    else:
        first, second, channels = "ci", "co", "ci co" if op.arg("transposed") else "co ci"
    sizes = {f"k{d}": k for d, k in enumerate(kernel)}
    x, weight, out = ["n", first, *outer], [channels, *"_" * len(kernel)], ["n", second, *inner]
    return " ".join(x), " ".join(weight), " ".join(out), sizes, tuple(sizes)


def _each(value: tuple[int, ...], count: int) -> tuple[int, ...]:
    """One number for every dim, or one for all."""
    return tuple(value) * count if len(value) == 1 else tuple(value)
