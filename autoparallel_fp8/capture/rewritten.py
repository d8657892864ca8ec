"""What capture makes of an op that no plan ever has, because it is written in simpler ones: `linear` as `t` and `mm`.

Asked where such an op has no rule, so that the answer names the ops to ask about instead. Nothing is listed by hand but
the three functions that `replace.py` looks for: a call is traced with the decompositions that a model is traced with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoparallel_fp8.ops import dropout as _registers_the_op  # noqa: F401
from autoparallel_fp8.quiet import quiet

from .decompose import FROM_TORCH, OWN, cross_entropy
from .replace import attend

aten = torch.ops.aten


def _attention(
    q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, causal: bool = False, **more: Any
) -> Any:
    return attend(q, k, v, mask, causal, more.get("scale"))


def _cross_entropy(
    logits: Any, target: Any, weight: Any = None, reduction: int = 1, ignored: int = -100, *_: Any
) -> Any:
    return cross_entropy(logits, target, ignored, ("none", "mean", "sum")[reduction])


def _dropout(x: Any, p: float, train: bool) -> Any:
    seed = torch.empty((), dtype=torch.int64)
    return torch.ops.autoparallel_fp8.dropout(x, p, seed, 0) if train else x.clone()


REPLACED = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.dropout.default: _dropout,
}
"""The aten op of each function that `replace_calls` replaces -> what it becomes."""


def is_rewritten(op: Any) -> bool:
    """Whether capture writes the overload in simpler ops: by a table of its own, or as torch composes it."""
    if op in REPLACED or op in OWN or op in FROM_TORCH or op.overloadpacket in FROM_TORCH:
        return True
    # Torch's own mark of an op that is nothing but a function of others; no public name tells it (2.11 to 2.14).
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def rewritten_as(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the ops that a call becomes, in order, without repeats; () where it stays or cannot be traced.

    Args:
        op: the overload.
        args, kwargs: as called.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # as in `trace.py`
    from torch.fx.experimental.proxy_tensor import make_fx

    from .trace import _decompositions

    if not is_rewritten(op):
        return ()
    tensors: list[Tensor] = []

    def taken(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype))
            return _Place(len(tensors) - 1)
        return [taken(item) for item in value] if isinstance(value, (list, tuple)) else value

    def called(*given: Tensor) -> Any:
        def filled(value: Any) -> Any:
            if isinstance(value, _Place):
                return given[value.number]
            return [filled(item) for item in value] if isinstance(value, list) else value

        return REPLACED.get(op, op)(*map(filled, places), **{name: filled(value) for name, value in named.items()})

    with FakeTensorMode(), torch.no_grad(), quiet():
        places, named = [taken(value) for value in args], {name: taken(value) for name, value in kwargs.items()}
        try:
            graph = make_fx(called, decomposition_table=_decompositions())(*tensors).graph
        # A call may be wrong in any way, and then there is nothing to say of it.
        except Exception:
            return ()
    made = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    names = tuple(dict.fromkeys(map(str, made)))
    return () if str(op) in names else names


class _Place:
    """Stands for a tensor among the arguments."""

    def __init__(self, number: int) -> None:
        self.number = number
