"""What is wrong with a call of an op although torch takes it on tensors without data.

Kernels of tensors without data let pass what no device computes: matrices of different dtypes, heads that do not group,
recipes of scaled GEMMs that do not exist, tensors of other layouts. Each is a sentence about the *call*, before a rule
is asked, so that nobody looks for the mistake in the rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.graph import TensorSpec, dtype_name
from autoparallel_fp8.ops.scaling import NAMES, ROWWISE, SWIZZLE_32_4_4, TENSORWISE, bias_fault

from .from_fx import _MATMULS

aten = torch.ops.aten
_SCALED = {aten._scaled_mm.default, aten._scaled_mm_v2.default}
_MX_V2 = {aten._scaled_mm_v2.default, aten._scaled_grouped_mm_v2.default}


def check_tensors(op: Any, tensors: Sequence[Tensor]) -> None:
    """Plain strided tensors alone have a shape, strides and a dtype that say what a rank holds.

    Raises:
        UsageError: one is sparse, nested, quantized or of a class of its own.
    """
    from torch._subclasses.fake_tensor import FakeTensor  # tensors without data; as in `trace.py` (2.11 to 2.14)

    for tensor in tensors:
        how = ""
        if tensor.is_nested:
            how = "nested tensor"
        elif tensor.is_quantized:
            how = f"quantized tensor ({dtype_name(tensor.dtype)})"
        elif tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter, FakeTensor):
            how = f"{type(tensor).__name__} ({tensor.layout})"
        if how:
            raise UsageError(
                f"an argument is a {how}",
                at=str(op),
                do="pass a plain tensor of the global shape, such as torch.empty(..., device='meta')",
            )


def wrong_call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], specs: Sequence[TensorSpec]) -> str:
    """What is wrong with the call, in words; "" where nothing is known to be.

    Args:
        op: the overload.
        args, kwargs: as called.
        specs: of the tensors among them, in order.
    """
    named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | dict(kwargs)
    dtypes = sorted({dtype_name(spec.dtype) for spec in specs})
    if op in _MATMULS and len(dtypes) > 1:
        return f"a matrix product of {' and '.join(dtypes)}"
    if op in _SCALED and len(specs) > 1 and specs[0].shape[-1:] != specs[1].shape[:1]:
        return f"{list(specs[0].shape)} and {list(specs[1].shape)} cannot be multiplied"
    bias, mat2 = named.get("bias"), named.get("mat2")
    if op in _SCALED and isinstance(bias, Tensor) and isinstance(mat2, Tensor) and mat2.ndim == 2:
        fault = bias_fault(mat2.shape, bias.shape)
        if fault:
            return f"{fault}: pass a bias of {mat2.shape[1]} elements"
    if op is aten._scaled_mm.default:
        missing = [name for name in ("scale_a", "scale_b") if name in named and named[name] is None]
        if missing:
            return f"{' and '.join(missing)} None: both operands have a scale, [] float32 where it is one for all"
    if op in _MX_V2:
        return _wrong_recipes(op, named, "a") or _wrong_recipes(op, named, "b")
    if op.namespace == "autoparallel_fp8" and {"q", "k", "v"} <= set(named):
        return _wrong_attention(named)
    return ""


def _wrong_recipes(op: Any, named: Mapping[str, Any], operand: str) -> str:
    """Of one operand of `_scaled_mm_v2`: recipes that exist, as many as scales."""
    recipes, scales = named.get(f"recipe_{operand}"), named.get(f"scale_{operand}")
    swizzles = named.get(f"swizzle_{operand}")
    if not isinstance(recipes, (list, tuple)) or not isinstance(scales, (list, tuple)):
        return ""
    known = ", ".join(f"{number} {name}" for number, name in NAMES.items())
    wrong = [recipe for recipe in recipes if recipe not in NAMES]
    if wrong:
        return f"recipe_{operand} has {wrong[0]!r}; recipes are {known}"
    if not recipes or len(recipes) != len(scales):
        count = f"{len(recipes)} recipes for {len(scales)} scales"
        return f"recipe_{operand} and scale_{operand} go together, and these are {count}; recipes are {known}"
    data, scale = named.get("self" if operand == "a" else "mat2"), scales[0]
    if (
        isinstance(data, Tensor)
        and isinstance(scale, Tensor)
        and data.ndim == 2
        and recipes[0] in (TENSORWISE, ROWWISE)
    ):
        outer = data.shape[0 if operand == "a" else 1]
        wanted = 1 if recipes[0] == TENSORWISE else outer
        if op is aten._scaled_mm_v2.default and scale.numel() != wanted:
            name, found = NAMES[recipes[0]], list(scale.shape)
            takes = f"recipe_{operand} is {recipes[0]} ({name}), which has {wanted} scales here"
            return f"{takes}, and scale_{operand} is {found}"
    if isinstance(swizzles, (list, tuple)) and any(not 0 <= int(s) <= SWIZZLE_32_4_4 for s in swizzles):
        return f"swizzle_{operand} is {list(swizzles)}; swizzles are 0 none, 1 in tiles of 128 x 4"
    return ""


def _wrong_attention(named: Mapping[str, Any]) -> str:
    """q [b, hq, s, d], k [b, hkv, t, d], v [b, hkv, t, e], hq a multiple of hkv, the mask broadcast to scores."""
    q, k, v, mask = (named.get(name) for name in ("q", "k", "v", "mask"))
    if not all(isinstance(x, Tensor) for x in (q, k, v)):
        return ""
    shapes = {name: list(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}  # type: ignore[union-attr]
    flat = [f"{name} {shape}" for name, shape in shapes.items() if len(shape) != 4]
    if flat:
        return f"attention reads [batch, heads, length, head dim], and there is {', '.join(flat)}"
    b, hq, s, d = shapes["q"]
    _, hkv, t, _ = shapes["k"]
    if not hkv or hq % hkv:
        return f"{hq} query heads cannot share {hkv} key-value heads: it must be a multiple"
    if shapes["k"] != [b, hkv, t, d] or shapes["v"][:3] != [b, hkv, t]:
        return f"q {shapes['q']}, k {shapes['k']} and v {shapes['v']} do not go together"
    if isinstance(mask, Tensor):
        scores, found = [b, hq, s, t], list(mask.shape)
        pairs = zip(reversed(found), reversed(scores), strict=False)
        if len(found) > 4 or any(size not in (1, whole) for size, whole in pairs):
            return f"a mask {found} does not broadcast to the scores {scores}"
    return ""
