"""Inputs of a model as text, and back: what a plan file says of them is enough to capture the model again.

    int64 [16, 8192]                        a tensor: dtype and global shape
    float32 [8, 4] stride [1, 8]            with its strides, where it is not contiguous
    None, True, 0.5, 'causal'               what is no tensor, as Python writes it
    (int64 [16, 128], {'mask': None})       nested

Something else, such as a cache object, is its type's name, which does not read back.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import PlanError
from .graph import dtype_name, is_contiguous

_TOKEN = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(\w+) \[([\d, ]*)\](?: stride \[([\d, ]*)\])?""")
"""A text in quotes, or a tensor."""
_POSITIONAL = re.compile(r"inputs\[(\d+)\]")


def describe_inputs(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """`inputs[0]`, ... and keywords -> text; keywords sorted, in whatever order they came."""
    described = {f"inputs[{i}]": describe(value) for i, value in enumerate(inputs)}
    return described | {key: describe(value) for key, value in sorted(kwargs.items())}


def describe(value: Any) -> str:
    """One input as text.

    >>> describe((torch.empty(2, 8, dtype=torch.int64), None))
    '(int64 [2, 8], None)'
    """
    if isinstance(value, Tensor):
        shape, stride = tuple(value.shape), tuple(value.stride())
        order = "" if is_contiguous(shape, stride) else f" stride {list(stride)}"
        return f"{dtype_name(value.dtype)} {list(shape)}{order}"
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    if type(value) is tuple:
        return f"({', '.join(map(describe, value))}{',' * (len(value) == 1)})"
    if type(value) is list:
        return f"[{', '.join(map(describe, value))}]"
    if type(value) is dict:
        return "{" + ", ".join(f"{key!r}: {describe(item)}" for key, item in value.items()) + "}"
    return type(value).__name__


def parse_inputs(described: Mapping[str, str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs, tensors on the meta device.

    Raises:
        PlanError: a text that does not read back; the message names the input.
    """
    positional: dict[int, Any] = {}
    named: dict[str, Any] = {}
    for key, text in described.items():
        match = _POSITIONAL.fullmatch(key)
        value = _parse(key, text)
        if match:
            positional[int(match[1])] = value
        else:
            named[key] = value
    return tuple(positional[i] for i in sorted(positional)), named


def _parse(key: str, text: str) -> Any:
    tensors: list[Tensor] = []

    def stand_in(match: re.Match[str]) -> str:
        """Bytes, which no input is made of, number the tensors."""
        if match[1]:
            return match[1]
        tensors.append(_tensor(match[2], match[3], match[4]))
        return repr(str(len(tensors) - 1).encode())

    try:
        return _with_tensors(ast.literal_eval(_TOKEN.sub(stand_in, text)), tensors)
    except (ValueError, SyntaxError, RuntimeError) as error:
        raise PlanError(
            f"the plan file says {text!r} of {key}, which cannot be made again",
            at=key,
            do="pass the model's inputs= and kwargs= too",
        ) from error


def _tensor(dtype: str, shape: str, stride: str | None) -> Tensor:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {dtype}")
    sizes = [int(size) for size in shape.split(",") if size.strip()]
    if stride is None:
        return torch.empty(sizes, dtype=found, device="meta")
    steps = [int(step) for step in stride.split(",") if step.strip()]
    return torch.empty_strided(sizes, steps, dtype=found, device="meta")


def _with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, bytes):
        return tensors[int(value)]
    if isinstance(value, (tuple, list)):
        return type(value)(_with_tensors(item, tensors) for item in value)
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    return value
