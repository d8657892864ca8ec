"""One op of the plan as one rank runs it: shapes among its arguments made local, or the local program of its rows.

In: a `Kind` and the option taken. Out: a `LocalCall`, whose tensors are still places to be filled, so that a rank's
program can be run op by op (`simulate_plan.py`) or written down.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .errors import RuleError
from .expansion import Kind
from .graph import TensorSpec, map_items
from .layout import Layout
from .parts import parts
from .products import Option, local_specs
from .rules import OpCall
from .rules.local import Where, find_program
from .rules.sized_ops import SIZE_ARGUMENT, SQUEEZES

aten = torch.ops.aten


@dataclass(frozen=True)
class Operand:
    """Stands for the tensor that an op reads at this position."""

    number: int


@dataclass(frozen=True)
class LocalCall:
    """What one rank calls.

    Attributes:
        function: the op, or a local program.
        args, kwargs: its arguments, tensors replaced by `Operand`.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def run(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The results on these local tensors, in order."""
        args = [_fill(value, tensors) for value in self.args]
        kwargs = {name: _fill(value, tensors) for name, value in self.kwargs}
        made = self.function(*args, **kwargs)
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def local_call(kind: Kind, option: Option, sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> LocalCall:
    """What the rank at `coordinate` calls for an op under this option.

    Args:
        kind: the op on global tensors.
        option: the layouts of what it reads and makes, and the row on each axis.
        sizes: of the mesh axes.
        coordinate: the rank's position on each axis.

    Raises:
        RuleError: a row names a local program that nobody wrote for this op.
    """
    call = _with_operands(kind.call)
    names = {row.local for row in option.rows if row.local}
    if names:
        (name,) = names
        program = find_program(name, kind.call.op)
        if program is None:
            raise RuleError(f"a row of {kind.call.op} runs {name!r}, and there is no such program for it")

        def where(factors: Sequence[Any], layouts: tuple[Layout, ...]) -> Any:
            return tuple(parts(f, layout, sizes, coordinate) for f, layout in zip(factors, layouts, strict=True))

        place = Where(
            kind.call.op, where(kind.operand_factors, option.operands), where(kind.result_factors, option.results)
        )
        return LocalCall(partial(program, place), call.args, call.kwargs)
    reads = local_specs(kind.call.tensors, kind.operand_factors, option.operands, sizes)
    makes = local_specs(kind.call.out, kind.result_factors, option.results, sizes)
    return localized(kind.call, call, reads, makes)


def _with_operands(call: OpCall) -> LocalCall:
    """The call with its tensors numbered in reading order."""
    numbers = itertools.count()

    def replaced(value: Any) -> Any:
        return map_items(value, TensorSpec, lambda _: Operand(next(numbers)))

    return LocalCall(call.op, replaced(call.args), replaced(call.kwargs))


def _fill(value: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(value, Operand):
        return tensors[value.number]
    return [_fill(item, tensors) for item in value] if isinstance(value, tuple) else value


def localized(
    whole: OpCall, call: LocalCall, reads: tuple[TensorSpec, ...], makes: tuple[TensorSpec, ...]
) -> LocalCall:
    """The plain op with every size among its arguments that of the rank's part."""
    op = whole.op
    if op in SIZE_ARGUMENT:
        return _with_argument(call, SIZE_ARGUMENT[op], makes[0].shape)
    if op is aten.embedding_dense_backward.default:
        return _with_argument(call, "num_weights", makes[0].shape[0])
    if op is aten.repeat.default:
        offset = len(makes[0].shape) - len(reads[0].shape)
        shape = (*[1] * offset, *reads[0].shape)
        times = zip(shape, makes[0].shape, whole.arg("repeats"), strict=True)
        return _with_argument(call, "repeats", tuple(b // a if a else time for a, b, time in times))
    if op in SQUEEZES and reads[0].shape != whole.tensors[0].shape:
        # a split dim may be down to 1 here, and must stay
        return LocalCall(aten.view.default, (call.args[0], makes[0].shape), ())
    return call


def _with_argument(call: LocalCall, name: str, value: Any) -> LocalCall:
    """The call with one argument replaced, wherever it was passed."""
    names = [argument.name for argument in call.function._schema.arguments]
    position = names.index(name)
    if position < len(call.args):
        return LocalCall(call.function, (*call.args[:position], value, *call.args[position + 1 :]), call.kwargs)
    kwargs = tuple((n, value if n == name else v) for n, v in call.kwargs)
    return LocalCall(call.function, call.args, kwargs)


def placement(op: Any, device: torch.device | str, *, has_tensors: bool) -> dict[str, Any]:
    """The keyword that puts what an op makes on a device, where it reads no tensor that says so."""
    takes_device = any(argument.name == "device" for argument in op._schema.arguments)
    return {"device": torch.device(device)} if takes_device and not has_tensors else {}
