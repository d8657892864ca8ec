"""Small models of every preset's kind, captured once, and made-up tensors for the calls in their graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from autoparallel_fp8.rules import OpCall
from split_ops import Sample

from autoparallel_fp8.capture import capture
from autoparallel_fp8.graph import ABSENT, Graph, TensorSpec
from autoparallel_fp8.integrations.hugging_face import build_from_config
from autoparallel_fp8.models.presets import preset_config
from autoparallel_fp8.shards import laid_out

aten = torch.ops.aten
ops = torch.ops.autoparallel_fp8

RECIPES = (None, "tensorwise", "rowwise", "rowwise_with_gw_hp")
GRAPHS = [*(("llama3-debug", recipe) for recipe in RECIPES), *(("qwen3-8b", r) for r in RECIPES), ("gpt2", None)]
BATCH, SEQ, VOCAB = 4, 8, 96
_SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "n_embd": 64, "n_head": 4, "n_positions": 16, "max_position_embeddings": 16, "vocab_size": VOCAB,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_ROUNDED = (
    aten.mean.dim, aten.native_layer_norm.default, aten.native_layer_norm_backward.default, aten.exp.default,
    ops.attention.default, ops.attention_backward.default, aten.tanh.default, aten.cos.default, aten.sin.default,
    aten.rsqrt.default, aten.log.default, aten.log2.default, aten.exp2.default, aten.silu_backward.default,
    aten.gelu_backward.default, aten.tanh_backward.default, aten.convolution.default, aten.convolution_backward.default,
    ops.biased_attention.default, ops.biased_attention_backward.default, ops.capped_attention.default,
    ops.capped_attention_backward.default,
)  # fmt: skip


def small_config(model: str) -> dict[str, Any]:
    """The preset's config with small dims."""
    config = preset_config(model)
    return {**config, **{key: value for key, value in _SMALL.items() if key in config}}


@cache
def captured(model: str, recipe: str | None, dtype: torch.dtype = torch.bfloat16) -> Graph:
    """The graph of one block of the model with its loss."""
    tokens = torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta")
    return capture(build_from_config(small_config(model), 1, dtype), (tokens,), recipe=recipe)


def sample_of(call: OpCall) -> Sample:
    """The call on made-up tensors: small whole numbers, powers of two for scales, indices that are in range."""
    made = iter([_values(spec, k, call) for k, spec in enumerate(call.tensors)])

    def filled(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return next(made)
        return tuple(map(filled, value)) if isinstance(value, tuple) else value

    args = filled(call.args)
    kwargs = tuple((name, filled(value)) for name, value in call.kwargs)
    is_rounded = call.op in _ROUNDED or (call.op in (aten.mul.Tensor, aten.div.Tensor) and len(call.tensors) == 1)
    is_low = any(spec.dtype == torch.bfloat16 for spec in call.out)
    tolerance = (0.05 if is_low else 1e-5) if is_rounded else 0.0
    return Sample(call.op, args, kwargs, rtol=tolerance, atol=tolerance)


def _values(spec: TensorSpec, number: int, call: OpCall) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number + 1)
    most = 1 if call.op in (aten.mm.default, aten._scaled_mm.default) else 4
    if call.op is aten._scaled_mm.default and number >= 2:
        values = 2.0 ** torch.randint(-2, 3, spec.shape, generator=generator)
    elif spec.dtype == torch.bool:
        values = torch.randint(0, 2, spec.shape, generator=generator)
    elif spec.dtype.is_floating_point:
        values = torch.randint(-most, most + 1, spec.shape, generator=generator).to(torch.float32)
    else:
        values = torch.randint(0, min([VOCAB, *_rows_read(call, spec)]), spec.shape, generator=generator)
    return laid_out(values.to(spec.dtype), spec.stride)


def _rows_read(call: OpCall, index: TensorSpec) -> list[int]:
    """Sizes that an index must stay below: of the dims it reads, or of the table beside it."""
    if call.op is aten.gather.default:
        return [call.tensors[0].shape[call.arg("dim")]]
    if call.op is aten.index.Tensor:
        return list(call.tensors[0].shape)
    return [spec.shape[0] for spec in call.tensors if spec.shape and spec.dtype != index.dtype]


def in_float32(graph: Graph) -> Graph:
    """The graph with every bfloat16 a float32, so that what is left of rounding is float8's."""
    return retyped(graph, {torch.bfloat16: torch.float32})


def retyped(graph: Graph, dtypes: Mapping[torch.dtype, torch.dtype]) -> Graph:
    """The graph with dtypes in place of others, wherever they stand."""

    def wide(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return TensorSpec(value.shape, value.stride, wide(value.dtype))
        if isinstance(value, tuple):
            return tuple(map(wide, value))
        return dtypes.get(value, value) if isinstance(value, torch.dtype) else value

    nodes = [
        replace(
            n, args=wide(n.args), kwargs=wide(n.kwargs), outputs=tuple(o if o is ABSENT else wide(o) for o in n.outputs)
        )
        for n in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))
