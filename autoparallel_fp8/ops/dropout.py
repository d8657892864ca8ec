"""Dropout as an op of ours, whose mask depends on where an element stands and not on who computes it.

    autoparallel_fp8::dropout(x, p, seed, call) -> out        out = x * keep / (1 - p)

`keep` of an element is a hash of three numbers: the seed of the step (int64 []), the number of the dropout call in the
graph, and the element's linear position in the *global* x, row-major. So every rank can compute the mask of its part,
replicas agree, and backward, which is the same op on the incoming gradient, needs no mask that forward kept.

The hash is two keyed rounds of `lowbias32`, in int64 that never overflows: the same bits on every device, eager or
compiled. Source of its constants: C. Wellons, hash-prospector, README, "Two round functions" (exact bias 0.1735).
Compile `dropout_formula` where speed counts, so that it fuses: bfloat16 [16384, 4096] with p = 0.1 takes 161 us
(torch's own dropout 223, or 115 eager), but 8.5 ms and 32 bytes an element op by op (one H200, torch 2.11, CUDA 13.0).

The seed is a node of the captured graph, kind "seed", int64 []: whoever runs the graph gives it a value, the same on
every rank and another one in every step (`draw_seed`). It is neither an input, since those are the user's own by
position, nor a buffer, since it belongs to no module and no checkpoint, nor an op with a hidden state, since then ranks
could not be held together and a compiled program would bake it in. While a model is traced, `step_seed` stands for it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF  # the lower 32 bits
_Word = TypeVar("_Word", int, Tensor)


def keep_mask(position: Tensor, p: float, seed: Tensor, call: int) -> Tensor:
    """Whether the elements at these positions are kept: bool, False with probability p (to 2 ** -32).

    Args:
        position: int64, 0 or more.
        p: probability of a zero.
        seed: int64 [].
        call: number of the call; those of one seed have masks that do not depend on each other.
    """
    first = _mix((seed & _LOW) ^ _mix(call & _LOW))
    second = _mix((seed >> 32 & _LOW) ^ first)
    mixed = _mix(_mix((position ^ first) & _LOW) ^ (position >> 32) ^ second)
    return mixed >= round(p * 2**32)


def _mix(x: _Word) -> _Word:
    """lowbias32, a bijection of 32-bit words.

    Constants of 2 ** 31 and more are taken less 2 ** 32: the same word comes out, and no product leaves int64.
    """
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & _LOW
    x = x ^ (x >> 15)
    x = x * (0x846CA68B - 2**32) & _LOW
    return x ^ (x >> 16)


def dropout_at(x: Tensor, position: Tensor, p: float, seed: Tensor, call: int) -> Tensor:
    """x, a part of a global tensor, with the elements at these positions of it dropped or scaled; strides as x has.

    The scale is rounded to float32 and the product once to x's dtype, as `aten.native_dropout` does; the CPU path of
    `F.dropout` rounds the scale to x's dtype first. p = 1 gives zeros, as there.
    """
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    return x * keep_mask(position, p, seed, call) * scale


def dropout_formula(x: Tensor, p: float, seed: Tensor, call: int) -> Tensor:
    """The op on a whole tensor."""
    return dropout_at(x, torch.arange(x.numel(), device=x.device).view(x.shape), p, seed, call)


def draw_seed(generator: torch.Generator | None = None) -> Tensor:
    """A seed from torch's default generator or another one: reproducible from `torch.manual_seed`.

    Ranks draw alike only from generators in the same state: one rank's seed has to reach the others, or one start that
    all of them seed a generator of their own with.
    """
    return torch.randint(2**63 - 1, (), dtype=torch.int64, generator=generator)


dropout = torch.library.custom_op("autoparallel_fp8::dropout", dropout_formula, mutates_args=())


@dropout.register_fake
def _dropout_fake(x: Tensor, p: float, seed: Tensor, call: int) -> Tensor:
    return x * torch.empty(x.shape, dtype=torch.bool, device=x.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.p, seed, ctx.call = inputs
    ctx.save_for_backward(seed)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (seed,) = ctx.saved_tensors
    return torch.ops.autoparallel_fp8.dropout(grad, ctx.p, seed, ctx.call), None, None, None


dropout.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("autoparallel_fp8::step_seed", mutates_args=())
def step_seed() -> Tensor:
    """Stands for the step's seed while a model is traced; a captured graph has a node of kind "seed" in its place."""
    raise NotImplementedError("the seed of a step comes from whoever runs the graph")


@step_seed.register_fake
def _step_seed_fake() -> Tensor:
    return torch.empty((), dtype=torch.int64)
