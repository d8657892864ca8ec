"""The arguments of forward: what may be passed, and a name for each leaf of theirs.

One way for capture, which names the inputs of a graph, and for a parallel model, which finds them again by these names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # what dynamo flattens arguments and results with; no public name in 2.11

from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.integrations import hugging_face

_PLAIN = (Tensor, bool, int, float, type(None))


PLANNED = "pass positional arguments as inputs=(...) and keyword arguments as kwargs={...}"
CALLED = "call it as the model is called"


def bound(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], loss: str | None, do: str = PLANNED
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments after a check against forward's signature, with labels made up where a loss is wanted of ids alone.

    Args:
        model: whose forward it is.
        inputs, kwargs: positional and keyword arguments.
        loss: "auto" makes labels up.
        do: what the error says to do.

    Raises:
        UsageError: forward does not take them.
    """
    check_arguments(inputs, kwargs)
    ids = kwargs.get("input_ids", inputs[0] if inputs else None)
    if (
        hugging_face.is_causal_lm(model)
        and loss == "auto"
        and len(inputs) < 2
        and "labels" not in kwargs
        and isinstance(ids, Tensor)
    ):
        labels = torch.empty_like(ids, device="meta")
        inputs, kwargs = ((*inputs, labels), kwargs) if inputs else (inputs, {**kwargs, "labels": labels})
    signature = _signature(model)
    try:
        signature.bind(model, *inputs, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"the inputs do not fit the model's forward: {error}",
            at=f"{type(model).__name__}.forward{signature}",
            do=do,
        ) from error
    return inputs, kwargs


def _signature(model: nn.Module) -> inspect.Signature:
    """Of the forward that is traced, `self` first."""
    is_lm = hugging_face.is_causal_lm(model)
    return inspect.signature(hugging_face.CausalLM.forward if is_lm else type(model).forward)


def argument_names(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """A name for each leaf of the arguments: "x", "batch.0", "options.mask"."""
    named = named_arguments(model, args, kwargs)
    return tuple(leaf for name, value in named for leaf in leaf_names(name, value))


def named_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Each argument with its name; of forward's `*args` with its number there."""
    names, rest = positional_names(model)
    shown = [names[i] if i < len(names) else f"{rest or 'args'}.{i - len(names)}" for i in range(len(args))]
    return [*zip(shown, args, strict=True), *kwargs.items()]


def positional_names(model: nn.Module) -> tuple[list[str], str]:
    """Names of forward's positional arguments, and of those that take what is left; "" where there are none."""
    parameters = list(_signature(model).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names, next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")


def defaults(model: nn.Module) -> dict[str, Any]:
    """Each leaf of an argument that may be left out -> what it is then."""
    found: dict[str, Any] = {}
    for parameter in _signature(model).parameters.values():
        if parameter.default is not parameter.empty:
            value = parameter.default
            found.update(zip(leaf_names(parameter.name, value), pytree.tree_leaves(value), strict=True))
    return found


def leaf_names(name: str, value: Any) -> list[str]:
    """The name of each leaf of a nested value, by its path."""
    paths = [path for path, _ in pytree.tree_flatten_with_path(value)[0]]
    return [".".join([name, *(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)]) for path in paths]


def check_arguments(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Tensors, numbers, bools and None can be planned with, in any nesting; text only as an option with a name.

    Raises:
        UsageError: a leaf is something else; the message says which.
    """
    named = [(f"input {i}", "inputs", x) for i, x in enumerate(inputs)]
    named += [(f"keyword input {name!r}", "kwargs", x) for name, x in kwargs.items()]
    for name, at, value in named:
        for leaf in pytree.tree_leaves(value):
            is_option = isinstance(leaf, str) and (at == "kwargs" or leaf is not value)
            if not isinstance(leaf, _PLAIN) and not is_option:
                raise UsageError(
                    f"{name} {'is' if leaf is value else 'holds'} a {type(leaf).__name__}, not a tensor",
                    at=at,
                    do="pass tensors, real or meta; None and plain numbers pass as they are",
                )


def check_token_ids(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Token ids and labels are integers [batch, seq]; a list of numbers is no tensor."""
    named = [*zip(("input_ids", "labels"), inputs, strict=False), *kwargs.items()]
    for i, (name, value) in enumerate(named):
        if name in ("input_ids", "labels") and value is not None and not isinstance(value, Tensor):
            place = f"inputs[{i}]" if i < len(inputs) else f"kwargs[{name!r}]"
            raise UsageError(
                f"{place} is a {type(value).__name__}, not a tensor of token ids",
                at="inputs" if i < len(inputs) else "kwargs",
                do="pass integers [batch, seq], such as torch.empty(8, 2048, dtype=torch.int64, device='meta')",
            )
        is_ids = name in ("input_ids", "labels") and isinstance(value, Tensor)
        if is_ids and (value.is_floating_point() or value.ndim != 2):
            raise UsageError(
                f"{name} is {value.dtype} {list(value.shape)}, not integers [batch, seq]",
                at="inputs" if i < len(inputs) else "kwargs",
                do="pass token ids",
            )
