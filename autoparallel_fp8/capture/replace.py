"""Calls that capture replaces in dynamo's graph, before autograd is traced through it.

`scaled_dot_product_attention` becomes `autoparallel_fp8::attention`, one op for all machines, and the copies of key and
value heads that models make for grouped queries fold away into it. `cross_entropy` becomes the splittable form of
`decompose`, dropout the op of `ops.dropout`. Calls that the replacements do not cover stay as they are and are
decomposed by torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autoparallel_fp8.capture import decompose
from autoparallel_fp8.capture.dropout import replace_dropout
from autoparallel_fp8.errors import CaptureError
from autoparallel_fp8.ops import attention as _registers_the_op  # noqa: F401
from autoparallel_fp8.ops import scored_attention as _registers_more  # noqa: F401

_ATTENTION_ARGS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_ATTENTION_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
_CROSS_ENTROPY_ARGS = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """`scaled_dot_product_attention` through the op of ours; a mask that is trained gets its gradient."""
    ops = torch.ops.autoparallel_fp8
    op = ops.biased_attention if mask is not None and mask.requires_grad else ops.attention
    out: Tensor = op(q, k, v, mask, is_causal, scale)[0]
    return out


def replace_calls(root: fx.GraphModule, module_of: Callable[[fx.Node], str], dropout_cure: str) -> None:
    """Replaces attention, cross-entropy and dropout in a dynamo graph and its subgraphs, in place; clones results.

    Args:
        root: dynamo's graph.
        module_of: fqn of the module that made a node.
        dropout_cure: how the model's attention dropout is turned off.

    Raises:
        CaptureError: attention with dropout.
    """
    for module in root.modules():
        if isinstance(module, fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
                    _replace_attention(node, module_of(node), dropout_cure)
                elif node.op == "call_function" and node.target is F.cross_entropy:
                    _replace_cross_entropy(node)
    replace_dropout(root)
    clone_results(root)
    root.recompile()


def clone_results(root: fx.GraphModule) -> None:
    """Clones every tensor result: AOTAutograd returns a view's base in its place; simplify drops the clones again."""
    graph = root.graph
    (end,) = (node for node in graph.nodes if node.op == "output")

    def cloned(value: fx.Node) -> fx.Node:
        if not isinstance(value.meta.get("example_value"), Tensor):
            return value
        with graph.inserting_before(end):
            copy = graph.call_function(torch.clone, (value,))
        copy.meta = dict(value.meta)
        return copy

    end.args = fx.map_arg(end.args, cloned)


@contextmanager
def inner_attention(dropout_cure: str) -> Iterator[None]:
    """Replaces attention that dynamo's graph does not show while torch's own functions are traced through.

    `multi_head_attention_forward` looks the function up in `torch.nn.functional`, where ours stands for the while.

    Raises:
        CaptureError: attention with dropout; whoever traces adds the place.
    """
    real = F.scaled_dot_product_attention

    def inner(*args: Any, **kwargs: Any) -> Tensor:
        call = _attention_call(args, kwargs)
        _refuse_dropout(call, None, dropout_cure)
        q, k, v, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
        if not _is_covered(q, k, v):
            return real(*args, **kwargs)
        return attend(q, k, v, mask, bool(call["is_causal"]), call["scale"])

    F.scaled_dot_product_attention = inner
    try:
        yield
    finally:
        F.scaled_dot_product_attention = real


def _attention_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**_ATTENTION_DEFAULTS, **dict(zip(_ATTENTION_ARGS, args, strict=False)), **kwargs}


def _refuse_dropout(call: Mapping[str, Any], where: str | None, cure: str) -> None:
    if call["dropout_p"]:
        raise CaptureError(f"attention dropout is not planned: dropout_p is {call['dropout_p']}", at=where, do=cure)


def _is_covered(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the op takes these; where not, torch decomposes attention."""
    is_batched = all(x.ndim == 4 and x.shape[0] == q.shape[0] for x in (q, k, v))
    return is_batched and q.shape[1] % k.shape[1] == 0 and k.shape[1] == v.shape[1]


def _replace_attention(node: fx.Node, module: str, dropout_cure: str) -> None:
    call = _attention_call(node.args, node.kwargs)
    _refuse_dropout(call, module or "scaled_dot_product_attention", dropout_cure)
    q, k, v, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    shown_q, shown_k, shown_v = (item.meta["example_value"] for item in (q, k, v))
    if not _is_covered(shown_q, shown_k, shown_v):
        return
    if shown_q.shape[1] == shown_k.shape[1]:
        whole_k, whole_v = unrepeated(k), unrepeated(v)
        if whole_k is not None and whole_v is not None and whole_k[1] == whole_v[1]:
            k, v = whole_k[0], whole_v[0]
    with node.graph.inserting_before(node):
        new = node.graph.call_function(attend, (q, k, v, mask, bool(call["is_causal"]), call["scale"]))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _replace_cross_entropy(node: fx.Node) -> None:
    call: dict[str, Any] = {**dict(zip(_CROSS_ENTROPY_ARGS, node.args, strict=False)), **node.kwargs}
    logits, target = (call[name].meta["example_value"] for name in ("input", "target"))
    is_plain = all(call.get(name) is None for name in ("weight", "size_average", "reduce"))
    if not is_plain or call.get("label_smoothing") or logits.ndim != 2 or target.is_floating_point():
        return
    args = (call["input"], call["target"], call.get("ignore_index", -100), call.get("reduction", "mean"))
    with node.graph.inserting_before(node):
        new = node.graph.call_function(decompose.cross_entropy, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def unrepeated(node: Any) -> tuple[fx.Node, int] | None:
    """Keys or values [b, hkv, t, d] before each head was repeated n times in a row, and n; None if they were not.

    Seen through: `x[:, :, None].expand(...).reshape(...)` and `repeat_interleave` on dim 1, or on dim 2 of
    [b, t, hkv, d] followed by `transpose(1, 2)`.
    """
    if _is_call(node, "transpose") and set(node.args[1:]) in ({1, 2}, {-3, -2}, {1, -2}, {2, -3}):
        found = _before_repeat(node.args[0], 2)
        if found is None:
            return None
        with node.graph.inserting_before(node):
            moved = node.graph.call_method("transpose", (found[0], 1, 2))
        moved.meta = {**node.meta, "example_value": found[0].meta["example_value"].transpose(1, 2)}
        return moved, found[1]
    return _before_repeat(node, 1)


def _before_repeat(node: Any, dim: int) -> tuple[fx.Node, int] | None:
    """The same for x with heads at `dim`."""
    if _is_call(node, "repeat_interleave"):
        call = dict(zip(("input", "repeats", "dim"), node.args, strict=False)) | dict(node.kwargs)
        is_fit = isinstance(call.get("repeats"), int) and call.get("dim") in (dim, dim - 4)
        return (call["input"], call["repeats"]) if is_fit else None
    if not any(_is_call(node, name) for name in ("reshape", "view", "flatten")):
        return None
    expanded = node.args[0]
    if not _is_call(expanded, "expand"):
        return None
    single = expanded.args[0]
    if not (_is_call(single, "unsqueeze") or (isinstance(single, fx.Node) and single.target is operator.getitem)):
        return None
    source, repeated = single.args[0], expanded.meta["example_value"].shape
    shape = tuple(source.meta["example_value"].shape)
    one = (*shape[: dim + 1], 1, *shape[dim + 1 :])
    copies = repeated[dim + 1] if len(repeated) == 5 else 0
    many = (*shape[: dim + 1], copies, *shape[dim + 1 :])
    merged = (*shape[:dim], shape[dim] * copies, *shape[dim + 1 :])
    is_fit = (
        len(shape) == 4
        and tuple(single.meta["example_value"].shape) == one
        and tuple(repeated) == many
        and tuple(node.meta["example_value"].shape) == merged
    )
    return (source, copies) if is_fit else None


def _is_call(node: Any, name: str) -> bool:
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_method":
        return node.target == name
    return node.op == "call_function" and getattr(node.target, "__name__", "") == name
