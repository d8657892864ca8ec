"""Time of one op on one rank, in microseconds, from the local shapes of what it reads and makes.

GEMMs: the larger of arithmetic (whole tiles, the device's reached share of its peak) and memory. Attention: FLOPs at
its own share. Everything else: bytes that really move (see `fusion.py`) over the reached memory bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..errors import CostError
from ..graph import TensorSpec
from ..rules import OpCall
from .device import DeviceProfile, matmul_efficiency, matmul_peak_flops
from .fusion import Traffic
from .scaled_gemms import is_scaled_gemm, scaled_gemm_us

aten = torch.ops.aten
ours = torch.ops.autoparallel_fp8

TILE_M, TILE_N = 128, 128
"""Smallest output tile that large GEMM kernels work on; a narrower operand wastes the rest of it."""


ATTENTION_SHARE = 0.64
"""Of the rate of large GEMMs: flash attention forward and backward ran at 0.43 of peak where GEMMs reach 0.67 (four
layers of 32 heads x 128, 4096 tokens; measured on one H200, torch 2.11, CUDA 13.0, 2026-11-30)."""


_ATTENTION = (ours.attention.default, ours.biased_attention.default, ours.capped_attention.default)
_ATTENTION_BACKWARD = (
    ours.attention_backward.default,
    ours.biased_attention_backward.default,
    ours.capped_attention_backward.default,
)


def op_us(
    call: OpCall,
    traffic: Traffic,
    operands: Sequence[TensorSpec],
    results: Sequence[TensorSpec],
    device: DeviceProfile,
    *,
    emulate: bool = False,
) -> float:
    """Time of one op, in microseconds.

    Args:
        call: the op on global tensors, for its attributes.
        traffic: what it reads and writes, from `fusion.fuse`.
        operands, results: local specs, in order.
        device: rates.
        emulate: a float8 GEMM without a kernel on the device is dequantised and multiplied in bfloat16.

    Raises:
        CostError: the device has no FLOP rate for a GEMM's dtype.
    """
    if traffic.is_view:
        return 0.0
    launch = device.launch_us if traffic.starts_kernel else 0.0
    if call.op in (aten.mm.default, aten.bmm.default):
        return launch + gemm_us(operands[0], operands[1], None, device)
    if is_scaled_gemm(call):
        return launch + scaled_gemm_us(call, operands, results, device, gemm_us, emulate=emulate)
    if call.op is ours.mx_mm.default:
        return launch + mx_mm_us(operands, device, emulated=emulate and "mxfp8" not in device.recipes)
    if call.op in _ATTENTION:
        return launch + attention_us(call, operands[0], operands[1], operands[2], device, matmuls=2)
    if call.op in _ATTENTION_BACKWARD:
        return launch + attention_us(call, operands[1], operands[2], operands[3], device, matmuls=5)
    if call.op is aten.convolution.default:
        return launch + convolution_us(call, operands[0], operands[1], results[0], device)
    if call.op is aten.convolution_backward.default:
        grad, x, weight = operands[:3]
        num_gemms = sum(call.arg("output_mask")[:2])
        return launch + num_gemms * convolution_us(call, x, weight, grad, device)
    if traffic.is_own_kernel:
        made = sum(spec.num_bytes for spec in results)
        small = sum(spec.num_bytes for spec in operands if spec.num_bytes <= made)
        return launch + memory_us(made + max(small, made), device)
    num_bytes = sum(operands[i].numel * itemsize for i, itemsize in traffic.reads)
    num_bytes += sum(results[i].num_bytes for i in traffic.writes)
    return launch + memory_us(num_bytes, device)


def memory_us(num_bytes: float, device: DeviceProfile) -> float:
    """Time to move bytes through device memory at the reached share of its bandwidth."""
    return num_bytes / (device.bandwidth_bytes_per_s * device.memory_efficiency) * 1e6


def gemm_us(
    a: TensorSpec, b: TensorSpec, recipe: str | None, device: DeviceProfile, *, emulated: bool = False
) -> float:
    """a[..., m, k] @ b[..., k, n]: the larger of arithmetic on whole tiles and memory traffic, in microseconds.

    Output tiles go to the compute units in waves; the last wave counts in full, softened by split-k where there are
    fewer tiles than units.
    """
    batch = math.prod(a.shape[:-2])
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    peak = matmul_peak_flops(device, a.dtype, recipe, emulated=emulated)
    reached = peak * matmul_efficiency(device, a.dtype, recipe, emulated=emulated)
    tiles = batch * math.ceil(m / TILE_M) * math.ceil(n / TILE_N)
    units = device.num_compute_units
    waves = tiles / units
    occupied = math.ceil(waves) / waves if waves >= 1 else 1.0
    flops = 2.0 * tiles * TILE_M * TILE_N * k
    arithmetic = flops / reached * 1e6 * (1 + (occupied - 1) / 2)
    moved = a.num_bytes + b.num_bytes + batch * m * n * 2
    return max(arithmetic, memory_us(moved, device))


def mx_mm_us(operands: Sequence[TensorSpec], device: DeviceProfile, *, emulated: bool = False) -> float:
    """An MX GEMM of a, b, scale_a, scale_b, and what comes before it on every rank, in microseconds.

    The scales are swizzled, a small kernel for each operand that reads and writes them; emulated, each operand is
    dequantised: one byte an element is read, two are written, and the GEMM runs in bfloat16.
    """
    a, b, *scales = operands
    if emulated:
        wide = [replace(spec, dtype=torch.bfloat16) for spec in (a, b)]
        before = sum(device.launch_us + memory_us(spec.num_bytes + 2 * spec.numel, device) for spec in (a, b))
        return before + gemm_us(wide[0], wide[1], None, device)
    before = sum(device.launch_us + memory_us(2 * spec.num_bytes, device) for spec in scales)
    return before + gemm_us(a, b, "mxfp8", device)


def convolution_us(call: OpCall, x: TensorSpec, weight: TensorSpec, out: TensorSpec, device: DeviceProfile) -> float:
    """A convolution as the implicit GEMM that libraries run: windows x (channels and kernel) x output channels.

    Its backward's two GEMMs, for the gradients of x and of weight, have as many FLOPs each.
    """
    places = x if call.arg("transposed") else out
    depth = weight.numel // weight.shape[0]
    a = TensorSpec((places.numel // places.shape[1], depth), (depth, 1), x.dtype)
    b = TensorSpec((depth, weight.shape[0]), (1, depth), x.dtype)
    return gemm_us(a, b, None, device)


def attention_us(
    call: OpCall, q: TensorSpec, k: TensorSpec, v: TensorSpec, device: DeviceProfile, *, matmuls: int
) -> float:
    """Flash attention: `matmuls` products of [s, t, d] a head, half of them under a causal mask."""
    batch, heads, s, d = q.shape
    t = k.shape[2]
    share = 0.5 if call.arg("is_causal") and s == t else 1.0
    flops = 2.0 * matmuls * batch * heads * s * t * (d + v.shape[3]) / 2 * share
    reached = matmul_peak_flops(device, q.dtype) * matmul_efficiency(device, q.dtype) * ATTENTION_SHARE
    moved = (2 if matmuls == 2 else 4) * (q.num_bytes + k.num_bytes)
    return max(flops / reached * 1e6, memory_us(moved, device))


__all__ = ["CostError", "attention_us", "gemm_us", "memory_us", "mx_mm_us", "op_us"]
