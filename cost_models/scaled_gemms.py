"""Time of scaled and grouped GEMMs on one rank: the recipe whose kernel runs, and the products that it comes to.

A grouped GEMM is priced with groups of one size, which routing aims at: tokens of other ranks' experts are not
multiplied (`rules/local_grouped.py` moves a rank's own to the front).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..graph import TensorSpec
from ..ops.scaling import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    ROWWISE,
    TENSORWISE,
    inferred_scales,
    values_in,
)
from ..rules import OpCall
from .device import DeviceProfile

aten = torch.ops.aten

_RECIPES = {
    TENSORWISE: "tensorwise",
    ROWWISE: "rowwise",
    BLOCK_1X16: "nvfp4",
    BLOCK_1X32: "mxfp8",
    BLOCK_1X128: "blockwise",
    BLOCK_128X128: "blockwise",
}
_TORCHAO = {
    "torchao.blockwise_scaled_mm.default": "blockwise",
    "torchao.triton_fp8_gemm_1x128_128x128.default": None,  # triton kernels, which run wherever float8 does
    "torchao.triton_fp8_gemm_1x128_128x1.default": None,
}
_PLAIN = {aten._scaled_mm.default, aten._scaled_mm_v2.default}
_GROUPED = {aten._grouped_mm.default, aten._scaled_grouped_mm.default, aten._scaled_grouped_mm_v2.default}


def is_scaled_gemm(call: OpCall) -> bool:
    """Whether this file prices the op."""
    return call.op in _PLAIN or call.op in _GROUPED or str(call.op) in _TORCHAO


def recipe_of(call: OpCall) -> str | None:
    """The recipe whose kernel the op runs; None for bfloat16 and for triton's kernels."""
    op = call.op
    if str(op) in _TORCHAO:
        return _TORCHAO[str(op)]
    if op is aten._grouped_mm.default:
        return None
    if op in (aten._scaled_mm_v2.default, aten._scaled_grouped_mm_v2.default):
        return _RECIPES[call.arg("recipe_a")[0]]
    if op is aten._scaled_grouped_mm.default:
        return "mxfp8" if call.tensors[2].dtype is torch.float8_e8m0fnu else "rowwise"
    found = inferred_scales(*call.tensors[:4])
    return _RECIPES[found[0].recipe] if found else "blockwise"


def scaled_gemm_us(
    call: OpCall,
    operands: Sequence[TensorSpec],
    results: Sequence[TensorSpec],
    device: DeviceProfile,
    gemm_us: Callable[..., float],
    *,
    emulate: bool = False,
) -> float:
    """Time of the op, in microseconds.

    Args:
        call: the op on whole tensors.
        operands, results: local specs, in order.
        device: rates.
        gemm_us: `compute.gemm_us`.
        emulate: a recipe without a kernel on the device is dequantised and multiplied in bfloat16.

    Raises:
        CostError: the device has no rate for the dtype, or no kernel for the recipe.
    """
    recipe = recipe_of(call)
    a, b = products(call, operands, results) if call.op in _GROUPED else _unpacked(operands[0], operands[1])
    emulated = emulate and recipe is not None and recipe not in device.recipes
    return gemm_us(a, b, recipe, device, emulated=emulated)


def products(
    call: OpCall, operands: Sequence[TensorSpec], results: Sequence[TensorSpec]
) -> tuple[TensorSpec, TensorSpec]:
    """A grouped GEMM as a batch of equal products, of the rank's experts and their share of its tokens.

    Args:
        call: the op on whole tensors.
        operands, results: local specs.
    """
    a, b = operands[:2]
    whole = call.tensors
    if len(a.shape) == len(b.shape) == 3:
        return a, b
    if len(a.shape) == len(b.shape) == 2:
        experts, share = results[0].shape[0], _part(a.shape[1], call.out[0].shape[0])
        return _batch(experts, (a.shape[0], share), a), _batch(experts, (share, b.shape[1]), b)
    weights, number = (b, 1) if len(b.shape) == 3 else (a, 0)
    experts, all_experts = weights.shape[0], whole[number].shape[0]
    if number == 1:
        share = _part(a.shape[0], all_experts)
        return _batch(experts, (share, a.shape[1]), a), b
    share = _part(b.shape[1], all_experts)
    return a, _batch(experts, (b.shape[0], share), b)


def _part(tokens: int, experts: int) -> int:
    return max(1, math.ceil(tokens / experts))


def _batch(count: int, shape: tuple[int, int], like: TensorSpec) -> TensorSpec:
    return TensorSpec((count, *shape), (shape[0] * shape[1], shape[1], 1), like.dtype)


def _unpacked(a: TensorSpec, b: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    """Operands with an element for every value: two float4 values lie in one stored element.

    Their bytes come out twice what they are, so a float4 GEMM bound by memory is priced at most twice too high.
    """
    count = values_in(a.dtype)
    if count == 1:
        return a, b
    (m, k), n = a.shape, b.shape[1]
    return TensorSpec((m, k * count), (k * count, 1), a.dtype), TensorSpec((k * count, n), (1, k * count), b.dtype)
