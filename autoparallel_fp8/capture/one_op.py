"""One call of an op as a graph: an input node for every tensor it reads, then the op.

In go an overload and its arguments, out comes what capture would have made of a model that does just this: tensors
are read for shape, stride and dtype alone, results are those of the op on tensors without data. These claim to be on
the CPU, so that kernels' demands on a GPU's operands are left to the constraints, which say them of every shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.graph import ABSENT, Graph, Node, Ref, TensorSpec, dtype_name, is_contiguous
from autoparallel_fp8.quiet import quiet

from .call_checks import check_tensors, wrong_call
from .from_fx import _DROPPED, spec_of


def capture_call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Graph:
    """The graph of one call; its last node is the op.

    Args:
        op: the overload.
        args, kwargs: as the op is called; real, meta and fake tensors do alike. Where a tensor lives is left out.

    Raises:
        UsageError: the op does not take these arguments, or what it returns depends on data.
    """
    args, kwargs = list(args), {name: value for name, value in kwargs.items() if name not in _DROPPED}
    unknown = sorted(set(kwargs) - {argument.name for argument in op._schema.arguments})
    if unknown:
        what = f"{op} has no argument {', '.join(map(repr, unknown))}"
        raise UsageError(what, at=str(op), do=f"call it as {op._schema}")
    tensors = _tensors([args, list(kwargs.values())])
    check_tensors(op, tensors)
    wrong = wrong_call(op, args, kwargs, list(map(spec_of, tensors)))
    if wrong:
        what, _, cure = f"{op} does not take these arguments: {wrong}".partition(": pass ")
        at = ", ".join(format_spec(spec_of(tensor)) for tensor in tensors)
        raise UsageError(
            what,
            at=at or "no tensor",
            do=f"pass {cure}" if cure else "mend the operands' dtypes and shapes, and the arguments",
        )
    return _graph(op, args, kwargs, results_on(op, args, kwargs))


def results_on(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """What the op returns of these arguments.

    Args:
        op: the overload.
        args, kwargs: as the op is called; tensors, or specs of them.

    Raises:
        UsageError: the op does not take these arguments, or what it returns depends on data.
    """
    # Tensors without data that claim a device, and what they raise where they would need it; as in `trace.py`
    # (2.11 to 2.14).
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    def fake(tensor: Any) -> Tensor:
        shape, stride = (tensor.shape, tensor.stride if isinstance(tensor, TensorSpec) else tensor.stride())
        return torch.empty_strided(shape, stride, dtype=tensor.dtype)

    with FakeTensorMode(), torch.no_grad(), quiet():
        fakes, named = _mapped(list(args), fake), {name: _mapped(value, fake) for name, value in kwargs.items()}
        specs = [spec_of(tensor) for tensor in _tensors([fakes, list(named.values())])]
        try:
            made = op(*fakes, **named)
        # What an op raises of wrong arguments is its own choice, from RuntimeError to AssertionError.
        except Exception as error:
            at = ", ".join(map(format_spec, specs)) or "no tensor"
            if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
                what = f"the size of the result of {op} depends on data, so it cannot be planned"
                raise UsageError(what, at=at, do="use ops whose shapes are known beforehand, such as where") from error
            raise UsageError(
                f"{op} does not take these arguments: {_first_line(error)}", at=at, do=f"call it as {op._schema}"
            ) from error
    return _results(op, made)


def without_iterators(value: Any) -> Any:
    """Arguments as plain values: what can be read but once becomes a list."""
    if isinstance(value, Iterator):
        return [without_iterators(item) for item in value]
    return value


def overload_of(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The overload of an op that takes these arguments, as torch itself resolves it.

    Raises:
        UsageError: none does.
    """
    kwargs = {name: value for name, value in kwargs.items() if name not in _DROPPED}
    name, overloads = packet._qualified_op_name, packet.overloads()
    check_tensors(packet, _tensors([list(args), list(kwargs.values())]))
    if len(overloads) == 1:
        return getattr(packet, overloads[0])  # its own error says more than that none is found
    try:
        # The choice that calling the packet makes, without the call; no public function tells it (2.11 to 2.14).
        return getattr(packet, torch._C._jit_resolve_packet(name, *args, **kwargs))
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        schemas = "; ".join(str(getattr(packet, overload)._schema) for overload in overloads)
        raise UsageError(
            f"no overload of {packet} takes these arguments", at=_first_line(error, 1), do=f"call it as {schemas}"
        ) from error


def format_spec(spec: TensorSpec) -> str:
    """`[16, 32] bfloat16`, with strides where the tensor is not row-major and dense.

    >>> format_spec(TensorSpec((16, 32), (1, 16), torch.float8_e4m3fn))
    '[16, 32] strides [1, 16] float8_e4m3fn'
    """
    return f"{format_shape(spec.shape, spec.stride)} {dtype_name(spec.dtype)}"


def format_shape(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    """`[16, 32]`, with strides where the tensor is not row-major and dense."""
    return f"{list(shape)}" if is_contiguous(shape, stride) else f"{list(shape)} strides {list(stride)}"


def _graph(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: tuple[TensorSpec, ...]) -> Graph:
    nodes: list[Node] = []

    def read(tensor: Tensor) -> Ref:
        spec = spec_of(tensor)
        nodes.append(Node(f"input{len(nodes)}", "input", None, (), (), (spec,), "forward", f"input{len(nodes)}"))
        return Ref(len(nodes) - 1)

    placed, named = _in_schema_order(op, args, kwargs)
    refs = _tuples(_mapped(placed, read))
    names = tuple((name, _tuples(_mapped(value, read))) for name, value in named.items() if value is not None)
    return Graph((*nodes, Node("op", "op", op, refs, names, outputs, "forward")), ())


def _in_schema_order(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments as a traced graph has them: positional where the schema lets them be, keywords in its order."""
    arguments = op._schema.arguments
    named = {a.name: kwargs[a.name] for a in arguments if a.name in kwargs}
    placed = list(args)
    last = max((i for i, a in enumerate(arguments) if a.name in named and not a.kwarg_only), default=-1)
    for argument in arguments[len(placed) : last + 1]:
        placed.append(named.pop(argument.name, argument.default_value))
    return placed, named


def _results(op: Any, made: Any) -> tuple[TensorSpec, ...]:
    values = list(made) if isinstance(made, (tuple, list)) else [made]
    for value in values:
        if not isinstance(value, (Tensor, type(None))):
            raise UsageError(
                f"{op} returns a {type(value).__name__}", at=str(op._schema), do="ask about an op that returns tensors"
            )
    return tuple(ABSENT if value is None else spec_of(value) for value in values)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, (Tensor, TensorSpec)):
        return function(value)
    return [_mapped(item, function) for item in value] if isinstance(value, (list, tuple)) else value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _first_line(error: Exception, line: int = 0) -> str:
    lines = [text.strip() for text in str(error).splitlines() if text.strip()] or [type(error).__name__]
    return lines[min(line, len(lines) - 1)].split(" Declaration: ")[0].rstrip(".")
