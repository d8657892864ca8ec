"""Sample calls of torchao's ops. Where torchao has not registered one, it is defined here with torchao's own schema.

Definitions run the formulas of `ops/torchao_formulas.py`; a test holds the schemas against torchao's where it has them.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from scaled_samples import BF16, E8M0, F32, powers, whole
from split_ops import Sample

from autoparallel_fp8.ops.scaling import BLOCK_1X128, BLOCK_128X128
from autoparallel_fp8.ops.stand_ins import stand_in
from autoparallel_fp8.ops.torchao_formulas import FORMULAS

_CAST = "(Tensor x, SymInt block_size=128, ScalarType dtype=24) -> (Tensor, Tensor)"
_MX = '(Tensor x, SymInt inner_block_size=32, str scaling_mode="rceil") -> (Tensor, Tensor)'
_GEMM = "(Tensor a, Tensor b, Tensor a_s, Tensor b_s, SymInt block_size=128, ScalarType out_dtype=6) -> Tensor"
SCHEMAS = {
    "triton_fp8_blockwise_act_quant_lhs": _CAST,
    "triton_fp8_blockwise_act_quant_rhs": _CAST,
    "triton_fp8_blockwise_act_quant_transposed_lhs": _CAST,
    "triton_fp8_blockwise_weight_quant_rhs": _CAST,
    "triton_fp8_blockwise_weight_quant_transposed_rhs": _CAST,
    "triton_fp8_gemm_1x128_128x128": _GEMM,
    "triton_fp8_gemm_1x128_128x1": _GEMM,
    "blockwise_scaled_mm": "(Tensor a, Tensor b, Tensor a_s, SymInt scale_recipe_a, Tensor b_s, SymInt scale_recipe_b, "
    "ScalarType out_dtype) -> Tensor",
    "triton_to_mxfp8_dim0": _MX,
    "triton_to_mxfp8_dim1": _MX,
    "mxfp8_quantize": "(Tensor input, bool rowwise, bool colwise, int scale_dim_x, int scale_dim_y, str fp8_format, "
    "str scaling_mode) -> (Tensor, Tensor, Tensor, Tensor)",
    "triton_mx_block_rearrange": "(Tensor scale_tensor) -> Tensor",
}
"""As torchao 0.18 registers them. Source: `torch._C._jit_get_all_schemas()` with triton installed; kernels.py."""

if find_spec("triton") and find_spec("torchao"):  # what torchao registers comes before what is defined here
    for module in ("blockwise_fp8_training.kernels", "mx_formats.kernels"):
        import_module(f"torchao.prototype.{module}")
_LIBRARY = torch.library.Library("torchao", "FRAGMENT")


def op_of(name: str) -> Any:
    """torchao's op, or one like it."""
    if not hasattr(torch.ops.torchao, name):
        _LIBRARY.define(f"{name}{SCHEMAS[name]}")
        _LIBRARY.impl(name, FORMULAS[f"torchao.{name}.default"], "CPU")
    return getattr(torch.ops.torchao, name).default


def call(name: str, *args: Any) -> Sample:
    op = op_of(name)
    return Sample(op, args, stand_in=stand_in(op))


def torchao_samples() -> list[Sample]:
    """Values of 3 powers of two, so that blocks differ; sums of the GEMMs are exact."""
    tall, wide = whole(384, 256, most=7, dtype=F32) * powers(384, 256), whole(256, 512, most=5, dtype=F32)
    found = []
    for name in ("act_quant_lhs", "act_quant_rhs", "act_quant_transposed_lhs", "weight_quant_rhs",
                 "weight_quant_transposed_rhs"):  # fmt: skip
        found += [call(f"triton_fp8_blockwise_{name}", x) for x in (tall, wide)]
    found.append(call("triton_fp8_blockwise_act_quant_rhs", whole(192, 128, most=7, dtype=F32) * powers(192, 128)))
    found.append(call("triton_fp8_blockwise_act_quant_lhs", whole(8, 256, most=7, dtype=F32), 64))
    for x in (tall.to(BF16), wide.to(BF16)):
        found += [call("triton_to_mxfp8_dim0", x), call("triton_to_mxfp8_dim1", x)]
        for rowwise, colwise in ((True, False), (False, True), (True, True)):
            found.append(call("mxfp8_quantize", x, rowwise, colwise, 1, 32, "e4m3", "rceil"))
    found.append(call("triton_to_mxfp8_dim0", whole(4, 6, 128, most=7, dtype=BF16), 32, "floor"))
    found += [call("triton_mx_block_rearrange", powers(*s, dtype=E8M0)) for s in ((512, 8), (192, 8), (256, 6))]
    for m, k, n in ((12, 512, 384), (8, 384, 256), (8, 192, 256), (8, 256, 192)):
        a, b, kb, nb = whole(m, k), whole(k, n, most=1, order="T"), -(-k // 128), -(-n // 128)
        rows, square = powers(m, kb, order="T"), powers(kb, nb, order="T")
        found.append(call("triton_fp8_gemm_1x128_128x128", a, b, rows, square))
        found.append(call("triton_fp8_gemm_1x128_128x1", a, b, rows, powers(kb, n)))
        found.append(call("blockwise_scaled_mm", a, b, rows, BLOCK_1X128, square, BLOCK_128X128, F32))
        found.append(call("blockwise_scaled_mm", a, b, rows, BLOCK_1X128, powers(n, kb, order="T"), BLOCK_1X128, F32))
    return found
