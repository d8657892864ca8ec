"""What a rank runs where the plain op on its parts would be wrong: programs that rows name in `AxisRow.local`.

A program gets the op's arguments with the rank's own tensors in place of the whole ones, and `Where`: which positions
of each dim these are. To add one: a function under `@program(name, op)`, and the name in a rule's `local`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..ops import attention as _ops  # noqa: F401  (defines torch.ops.autoparallel_fp8.attention)
from ..ops import scored_attention as _more_ops  # noqa: F401  (defines torch.ops.autoparallel_fp8.capped_attention)
from ..ops.dropout import dropout_at
from ..parts import Part

aten = torch.ops.aten
ops = torch.ops.autoparallel_fp8


@dataclass(frozen=True)
class Where:
    """The op, and the rank's part of every dim of each tensor that it reads and makes."""

    op: Any
    operands: tuple[tuple[Part, ...], ...]
    results: tuple[tuple[Part, ...], ...]


Program = Callable[..., Any]
_PROGRAMS: dict[tuple[str, Any], Program] = {}


def program(name: str, *ops: Any) -> Callable[[Program], Program]:
    """Decorator: the function stands in for these op overloads where a row says `local=name`.

    It is called as `function(where, *args, **kwargs)`, with the arguments of the op.
    """

    def register(function: Program) -> Program:
        for op in ops:
            _PROGRAMS[name, op] = function
        return function

    return register


def find_program(name: str, op: Any) -> Program | None:
    """The program of that name for an op overload, or None."""
    return _PROGRAMS.get((name, op))


@program("masked_lookup", aten.embedding.default)
def lookup_rows(where: Where, weight: Tensor, indices: Tensor, *unused: Any, **kwargs: Any) -> Tensor:
    """Rows that the rank holds; zero for indices of other ranks' rows."""
    local, here = where.operands[0][0].find(indices)
    found = aten.embedding.default(weight, local)
    return torch.where(here.unsqueeze(-1), found, found.new_zeros(())).contiguous()  # as embedding lays its result


@program("masked_lookup", aten.embedding_dense_backward.default)
def add_rows(
    where: Where,
    grad: Tensor,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    """Gradients of the rows that the rank holds; what belongs to other ranks goes to a row that is cut off."""
    rows = where.results[0][0]
    local, here = rows.find(indices)
    target = torch.where(here & (indices != padding_idx), local, rows.size)
    found = aten.embedding_dense_backward.default(grad, target, rows.size + 1, rows.size, scale_grad_by_freq)
    return found.narrow(0, 0, rows.size)


@program("masked_lookup", aten.gather.default)
def gather_own(where: Where, x: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
    """Elements that the rank holds; zero for those of other ranks."""
    local, here = where.operands[0][dim].find(index)
    found = aten.gather.default(x, dim, local)
    return torch.where(here, found, found.new_zeros(())).contiguous()  # as gather lays its result, whatever the index


@program("masked_write", aten.scatter.value)
def write_own(where: Where, x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """The value where the index is the rank's; what belongs to other ranks hits a place that is cut off."""
    local, here = where.operands[0][dim].find(index)
    size = x.shape[dim]
    hits = x.new_zeros([n + (d == dim % x.ndim) for d, n in enumerate(x.shape)], dtype=torch.bool)
    hits = aten.scatter.value(hits, dim, torch.where(here, local, size), True).narrow(dim, 0, size)
    return x.masked_fill(hits, value)


@program("masked_write", aten.scatter_add.default)
def add_own(where: Where, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Adds where the index is the rank's; elsewhere it adds nothing."""
    local, here = where.operands[0][dim].find(index)
    added = source if source.shape == index.shape else source[tuple(map(slice, index.shape))]
    return aten.scatter_add.default(x, dim, local, torch.where(here, added, added.new_zeros(())))


@program("own_heads", ops.attention.default, ops.capped_attention.default)
def attend_own_heads(where: Where, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    """Some of the queries of key-value heads that the rank picks out of those it holds."""
    heads = _heads_of(where.operands[0][1], where.operands[1][1])
    return where.op(q, k[:, heads], v[:, heads], *rest)


@program("own_heads", ops.attention_backward.default, ops.capped_attention_backward.default)
def attend_own_heads_backward(where: Where, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    """Gradients of keys and values are the rank's share of those heads', zero in the others."""
    heads = _heads_of(where.operands[1][1], where.operands[2][1])
    dq, *shares = where.op(grad, q, k[:, heads], v[:, heads], *rest)
    grads = []
    for whole, share in zip((k, v), shares, strict=True):
        batch, count, length, size = whole.shape
        made = whole.new_zeros(batch, length, count, size).transpose(1, 2)  # the memory order of the op's gradients
        made[:, heads] = share
        grads.append(made)
    return (dq, *grads)


def _heads_of(queries: Part, keys: Part) -> slice | list[int]:
    """Where the rank holds the key-value heads of these query heads, in the queries' order."""
    used = Counter(position * keys.full_size // queries.full_size for position in queries.positions())
    assert len(set(used.values())) == 1, f"key-value heads with different numbers of queries: {used}"
    held = {position: local for local, position in enumerate(keys.positions())}
    heads = [held[head] for head in used]
    is_run = heads == list(range(heads[0], heads[0] + len(heads)))
    return slice(heads[0], heads[0] + len(heads)) if is_run else heads


@program("mean_of_part", aten.mean.dim, aten.mean.default)
def mean_of_part(
    where: Where, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The sum of the rank's part over the count of the whole, so that the parts add up to the mean."""
    dims = [d % x.ndim for d in dim] if dim else list(range(x.ndim))
    count = prod(where.operands[0][d].full_size for d in dims)
    wide = torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32
    return (x.sum(dims, keepdim=keepdim, dtype=wide) / count).to(dtype or x.dtype)


@program("arange_part", aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange_part(where: Where, *args: Any, **kwargs: Any) -> Tensor:
    """The rank's numbers out of all of them, rounded as the op itself rounds them."""
    part = where.results[0][0]
    numbers = where.op(*args, **kwargs).reshape(part.factors)
    for k, (start, count) in enumerate(zip(part.starts, part.counts, strict=True)):
        numbers = numbers.narrow(k, start, count)
    return numbers.reshape(-1)


@program("dropout_part", torch.ops.autoparallel_fp8.dropout.default)
def dropout_part(where: Where, x: Tensor, p: float, seed: Tensor, call: int) -> Tensor:
    """The mask of the rank's own elements, at their places in the whole tensor."""
    return dropout_at(x, global_positions(where.operands[0], x.device), p, seed, call)


def global_positions(parts: tuple[Part, ...], device: torch.device) -> Tensor:
    """Linear position in the whole tensor, row-major, of every element that the rank holds: int64, its local shape."""
    found = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        for size, start, count in zip(part.factors, part.starts, part.counts, strict=True):
            found = found.unsqueeze(-1) * size + torch.arange(start, start + count, device=device)
    return found.reshape([part.size for part in parts])
