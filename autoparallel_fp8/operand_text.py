"""A call of an op written on the command line: `--shapes "16x64:e4m3, 64x576:e4m3:t" --arg out_dtype=bf16`.

An operand is `SHAPE[:DTYPE][:ORDER]`. SHAPE: sizes joined by x (`16x64`, `16`), or `scalar`. DTYPE: a short name
(`bf16`, the default; `f32`, `e4m3`, `i64`, ...) or torch's. ORDER: how it lies in memory: `t` has the last two dims
swapped (column-major), `021` names the dims, outermost first. `[a, b]` is a list of operands, `none` an operand that is
left out. Operands go to the op's tensor arguments in order, `--arg` gives the others by name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from .errors import UsageError
from .rules import find_rule
from .rules.op_names import find_op

_DTYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "fp16": torch.float16, "f32": torch.float32, "fp32": torch.float32,
    "f64": torch.float64, "fp64": torch.float64, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2fnuz": torch.float8_e5m2fnuz, "e8m0": torch.float8_e8m0fnu,
    "i64": torch.int64, "i32": torch.int32, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
_MOST_DIGITS, _MOST_BITS = 18, 56
_HOW = 'write operands as SHAPE[:DTYPE][:ORDER], such as "16x64:e4m3, 64x32:e4m3:t, scalar:f32"'


def parse_call(op: str, shapes: str, named: Sequence[str]) -> tuple[Any, list[Any], dict[str, Any]]:
    """The overload and its arguments, tensors on the meta device.

    Args:
        op: its name; without an overload, the first that takes what is given, those with a rule first.
        shapes: operands; may be empty.
        named: `name=value` texts.

    Raises:
        UsageError: no such op, an operand or a value that cannot be read, or no overload that takes them.
    """
    found = find_op(op)
    overloads = [found] if isinstance(found, torch._ops.OpOverload) else _overloads(found)
    operands = parse_operands(shapes)
    pairs = list(map(_name_and_text, named))
    values = dict(pairs)
    twice = sorted({name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1})
    if twice:
        what = f"{', '.join(twice)} is given {sum(name == twice[0] for name, _ in pairs)} times"
        raise UsageError(what, at="--arg", do="give each argument once; a list is one value, such as dim=[0,1]")
    for overload in overloads:
        call = _fill(overload, list(operands), dict(values))
        if call is not None:
            return overload, *call
    schemas = "; ".join(str(overload._schema) for overload in overloads)
    given = [f"{len(operands)} operands", *(f"--arg {name}" for name in values)]
    raise UsageError(
        f"{found} does not take {' and '.join(given)}",
        at="--shapes, --arg",
        do=f"give every argument without a default, tensors by --shapes and others by --arg: {schemas}",
    )


def parse_operands(text: str) -> list[Any]:
    """Meta tensors, lists of them and None.

    >>> [tuple(x.stride()) for x in parse_operands("16x64:e4m3, 64x32:e4m3:t, scalar:f32")]
    [(64, 1), (1, 64), ()]

    Raises:
        UsageError: an operand cannot be read.
    """
    parts = re.findall(r"\[[^\[\]]*\]|[^,\[\]]+", text)
    if re.sub(r"[\s,]", "", "".join(parts)) != re.sub(r"[\s,]", "", text):
        raise UsageError(f"brackets do not match in {text!r}", at="--shapes", do=_HOW)
    found: list[Any] = []
    for part in (part.strip() for part in parts if part.strip()):
        if part.startswith("["):
            found.append([_operand(item.strip()) for item in part[1:-1].split(",") if item.strip()])
        else:
            found.append(_operand(part))
    return found


def parse_dtype(text: str) -> torch.dtype | None:
    """The dtype of a short name or of torch's; None where there is none."""
    name = text.strip().removeprefix("torch.")
    found = _DTYPES.get(name, getattr(torch, name, None))
    return found if isinstance(found, torch.dtype) else None


def _operand(text: str) -> torch.Tensor | None:
    if text.lower() in ("none", "-"):
        return None
    shape_text, *words = text.split(":")
    if not re.fullmatch(r"\d+(x\d+)*|scalar", shape_text.strip()):
        raise UsageError(f"{shape_text!r} in operand {text!r} is no shape", at="--shapes", do=_HOW)
    sizes = [] if shape_text.strip() == "scalar" else shape_text.strip().split("x")
    # No device holds more, and torch counts bytes in 63 bits; Python reads no number of thousands of digits.
    if any(len(size) > _MOST_DIGITS for size in sizes) or prod(map(int, sizes)) >= 2**_MOST_BITS:
        raise UsageError(
            f"operand {text[:60]!r} has more than 2**{_MOST_BITS} elements",
            at="--shapes",
            do="give a shape that fits a mesh",
        )
    shape = tuple(map(int, sizes))
    dtype, order = torch.bfloat16, tuple(range(len(shape)))
    for word in map(str.strip, words):
        named = parse_dtype(word)
        if named is not None:
            dtype = named
        elif word == "t" and len(shape) > 1:
            order = (*order[:-2], order[-1], order[-2])
        elif sorted(word) == [str(d) for d in range(len(shape))] and word:
            order = tuple(map(int, word))
        else:
            dtypes = ", ".join(_DTYPES)
            do = f"dtypes are {dtypes} or torch's names; an order is t or dims, outermost first, such as 021"
            raise UsageError(f"{word!r} in operand {text!r} is neither dtype nor order", at="--shapes", do=do)
    strides = [prod([1, *(max(shape[e], 1) for e in order[order.index(d) + 1 :])]) for d in range(len(shape))]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _name_and_text(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise UsageError(f"--arg {text!r} has no value", at="--arg", do="write NAME=VALUE, such as dim=1 or dtype=bf16")
    return name.strip(), value.strip()


def _overloads(packet: Any) -> list[Any]:
    """Those that make tensors out of others, ops with a rule first."""
    every = [getattr(packet, name) for name in packet.overloads()]
    made = [op for op in every if any("Tensor" in str(result.type) for result in op._schema.returns)]
    kept = [op for op in made if not op._schema.is_mutable]
    return sorted(kept or every, key=lambda op: find_rule(op) is None)


def _fill(overload: Any, operands: list[Any], values: dict[str, str]) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments in schema order; None where the overload lacks one of them or one is missing."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    skipped = False
    for argument in overload._schema.arguments:
        kind = str(argument.real_type)
        if argument.name in values:
            value = _value(argument.name, values.pop(argument.name), kind)
        elif "Tensor" in kind and operands and _holds(kind, operands[0]):
            value = operands.pop(0)
        elif argument.has_default_value():
            skipped = True
            continue
        else:
            return None
        if skipped or argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return None if operands or values else (args, kwargs)


def _holds(kind: str, operand: Any) -> bool:
    """Whether an argument of this type in the schema takes the operand."""
    if operand is None:
        return kind.startswith("Optional")
    return isinstance(operand, list) == ("List" in kind)


def _value(name: str, text: str, kind: str) -> Any:
    """A number, list, truth, dtype or text, as the schema's type wants it."""
    if "ScalarType" in kind:
        dtype = None if text == "None" else parse_dtype(text)
        if dtype is None and text != "None":
            do = f"dtypes are {', '.join(_DTYPES)}, or torch's names"
            raise UsageError(f"{text!r} is no dtype", at=f"--arg {name}", do=do)
        return dtype
    if "MemoryFormat" in kind:
        return getattr(torch, text.removeprefix("torch."), text)
    if "str" in kind:
        return text
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        do = "write a number, a list such as [0, 1], True, False or None"
        raise UsageError(f"{text!r} is no value of type {kind}", at=f"--arg {name}", do=do) from None
    if isinstance(value, tuple):
        return list(value)
    return [value] if "List" in kind and isinstance(value, int) else value
