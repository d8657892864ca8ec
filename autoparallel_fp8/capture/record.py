"""The program that a model runs, block by block: what `shorten` compares before it cuts a deep model short.

The model's own Python code runs once, forward, on meta tensors, and every op that reaches the dispatcher is written
down with where its operands come from. Nothing is computed; 126 blocks take two seconds. A call is one line; two blocks
with equal lines ran the same program on their own parameters. The autograd functions behind the results are part of
the lines, with the settings that they keep for backward.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # no public name in 2.11
from torch.utils._python_dispatch import TorchDispatchMode  # the documented way to see every op; no public name

Line = tuple[Any, ...]


class Unclear(Exception):
    """The program cannot be written down as lines; the reason is its text."""


@dataclass(frozen=True)
class Call:
    """One op, its arguments one after the other (tensors as where they come from), and what came out."""

    op: Any
    arguments: list[Any]
    results: tuple[Tensor, ...]
    is_grad_enabled: bool


@dataclass(frozen=True)
class _From:
    """Where a tensor comes from: a call's result, a parameter or buffer, an argument of the model, or a constant."""

    kind: str
    what: Any
    number: int = 0


class Recorder(TorchDispatchMode):
    """Writes calls down while the model runs.

    Attributes:
        calls: in order.
        starts: module of a stack -> for each of its blocks the number of the first call, in the order they ran.
        ends: module of a stack -> number of the call after its last block.
    """

    def __init__(self, model: nn.Module, arguments: Sequence[Any], stacks: Mapping[str, Sequence[nn.Module]]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.starts: dict[str, list[tuple[int, int]]] = {name: [] for name in stacks}
        self.ends: dict[str, int] = {}
        self._source: dict[int, _From] = {}
        self._alive: list[Any] = []
        self._made: dict[Any, Any] = {}
        for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._remember(tensor, _From("held", (fqn, tensor.requires_grad)))
        for i, tensor in enumerate(arguments):
            self._remember(tensor, _From("argument", i))
        self._hooks = [hook for name, blocks in stacks.items() for hook in self._watch(name, blocks)]

    def __exit__(self, *details: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*details)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat: list[Any] = []
        _flatten((args, kwargs or {}), flat)
        if any(isinstance(leaf, Tensor) and _is_wrapper(leaf) for leaf in flat):
            return NotImplemented  # the wrapper takes itself apart; what it calls comes back here
        arguments = [self._where(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat]
        made = self._result(func, args, kwargs or {}, flat)
        several = made if isinstance(made, (tuple, list)) else (made,)
        results = tuple(one for one in several if isinstance(one, Tensor))
        for i, result in enumerate(results):
            self._remember(result, _From("call", len(self.calls), i))
        self.calls.append(Call(func, arguments, results, torch.is_grad_enabled()))
        return made

    def _result(self, func: Any, args: Any, kwargs: Any, flat: list[Any]) -> Any:
        """What the op returns; where it returns one new tensor, as another call with such operands returned it."""
        if not _makes_one(func):
            return func(*args, **kwargs)
        key = (func, *[(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in flat])
        if key not in self._made:
            made = func(*args, **kwargs)
            self._made[key] = (made.shape, made.stride(), made.dtype) if made.device.type == "meta" else None
            return made
        known = self._made[key]
        if known is None:
            return func(*args, **kwargs)
        return torch.empty_strided(known[0], known[1], dtype=known[2], device="meta")

    def _watch(self, name: str, blocks: Sequence[nn.Module]) -> list[Any]:
        def starts(number: int) -> Any:
            return lambda module, args: self.starts[name].append((number, len(self.calls)))

        def ends(module: nn.Module, args: Any, result: Any) -> None:
            self.ends[name] = len(self.calls)

        last = blocks[-1].register_forward_hook(ends)
        return [last, *(block.register_forward_pre_hook(starts(i)) for i, block in enumerate(blocks))]

    def _remember(self, tensor: Any, source: _From) -> None:
        if isinstance(tensor, Tensor):
            self._source[id(tensor)] = source
            self._alive.append(tensor)  # so that no other tensor gets its id

    def _where(self, value: Tensor) -> _From:
        source = self._source.get(id(value))
        if source is None:
            source = _From("constant", _constant(value))
            self._remember(value, source)
        return source


def _flatten(value: Any, flat: list[Any]) -> None:
    """The leaves of nested arguments one after the other, with marks that tell how they are nested."""
    if isinstance(value, (tuple, list)):
        flat.append(("sequence", len(value)))
        for item in value:
            _flatten(item, flat)
    elif isinstance(value, dict):
        flat.append(("names", *value))
        for item in value.values():
            _flatten(item, flat)
    else:
        flat.append(value)


@functools.cache
def _makes_one(op: Any) -> bool:
    """Whether the op returns one tensor, and that a new one."""
    returns = op._schema.returns
    is_new = all(argument.alias_info is None for argument in (*op._schema.arguments, *returns))
    return is_new and len(returns) == 1 and str(returns[0].type) == "Tensor"


def _is_wrapper(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not isinstance(tensor, nn.Parameter)


def _constant(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.device.type == "meta" or tensor.numel() > 4096:
        raise Unclear("a tensor that no call made")
    return (tuple(tensor.shape), tensor.dtype, tuple(tensor.flatten().tolist()))


@dataclass(frozen=True)
class Program:
    """A run as lines: before the stack, each block, and after it. A block ends where the next one starts."""

    head: list[Line]
    blocks: list[list[Line]]
    tail: list[Line]


def program(recorder: Recorder, stack: str, depth: int, num_first: int) -> Program:
    """The lines of a run around one stack.

    Args:
        recorder: after the run.
        stack: fqn of the module that holds the blocks.
        depth: how many there are.
        num_first: blocks that are counted from the first one where others read them; the rest from the last one.

    Raises:
        Unclear: blocks do not run one after the other, each once; or a block reads what only some blocks have.
    """
    if [number for number, _ in recorder.starts[stack]] != list(range(depth)):
        raise Unclear("the blocks do not run one after the other")
    writer = _Writer(recorder, stack, [at for _, at in recorder.starts[stack]], num_first)
    lines = [writer.line(i) for i in range(len(recorder.calls))]
    bounds = [*writer.starts, recorder.ends[stack]]
    blocks = [lines[a:b] for a, b in itertools.pairwise(bounds)]
    return Program(lines[: bounds[0]], blocks, lines[bounds[-1] :])


class _Writer:
    """Calls as lines in which a block's number does not show."""

    def __init__(self, recorder: Recorder, stack: str, starts: list[int], num_first: int) -> None:
        self.calls, self.stack, self.starts, self.num_first = recorder.calls, stack, starts, num_first
        self.end = recorder.ends[stack]

    def line(self, index: int) -> Line:
        call, block = self.calls[index], self._block(index)
        arguments = tuple(self._token(x, block) if isinstance(x, _From) else x for x in call.arguments)
        results = tuple((tuple(r.shape), r.stride(), r.dtype, _history(r)) for r in call.results)
        return (call.op, arguments, results, call.is_grad_enabled)

    def _block(self, index: int) -> int | None:
        """The block of a call; -1 before the stack, None after it."""
        return None if index >= self.end else bisect_right(self.starts, index) - 1

    def _token(self, source: _From, reader: int | None) -> Line:
        if source.kind == "held":
            return ("held", *self._name(source.what[0], reader), source.what[1])
        if source.kind != "call":
            return (source.kind, source.what)
        block = self._block(source.what)
        if block is None or block == -1:
            return ("outside", block, source.what - (self.end if block is None else 0), source.number)
        start = self.starts[block]
        length = (self.starts[block + 1] if block + 1 < len(self.starts) else self.end) - start
        if block == reader:
            return ("own", source.what - start, source.number)
        if reader is not None and block == reader - 1:
            return ("before", source.what - start - length, source.number)  # the first block may do more at its start
        if block == 0 or reader is None:
            place = block if block < self.num_first else block - len(self.starts)
            return ("block", place, source.what - start, source.number)
        raise Unclear("a block reads another that is not next to it")

    def _name(self, fqn: str, reader: int | None) -> tuple[str, str]:
        head, _, rest = fqn.removeprefix(f"{self.stack}.").partition(".")
        if not fqn.startswith(f"{self.stack}.") or not head.isdecimal():
            return ("", fqn)
        if int(head) != reader:
            raise Unclear("a parameter of a block is read outside of it")
        return ("own", rest)


def _history(tensor: Tensor) -> Any:
    """The autograd function that made the tensor, with the settings it keeps for backward."""
    function = tensor.grad_fn
    if function is None:
        return None
    kept = getattr(function, "__dict__", {}) if hasattr(function, "_forward_cls") else {}
    return type(function), tuple((name, repr(value)) for name, value in kept.items() if not _holds_tensors(value))


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
