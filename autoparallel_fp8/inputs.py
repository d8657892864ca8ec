"""Example inputs where the user gave none: token ids for a Hugging Face model, `example_inputs` of any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .errors import UsageError
from .integrations.hugging_face import is_causal_lm, is_hugging_face, maximum_length
from .mesh import Mesh

DEFAULT_SEQ = 8192


def default_inputs(
    model: nn.Module,
    mesh: Mesh,
    inputs: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    batch: int | None,
    seq: int | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs to plan with, tensors on the meta device where they are made up here.

    Args:
        model: decides what is made up.
        mesh: the default batch is twice its first axis.
        inputs, kwargs: the user's; taken as they are.
        batch, seq: of made-up token ids.

    Raises:
        UsageError: nothing was given and nothing can be made up; or sizes beside given inputs.
    """
    for name, size in (("batch", batch), ("seq", seq)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise UsageError(f"{name} is {size!r}", at=name, do="give a whole number of 1 or more")
    if inputs is not None or kwargs:
        if batch is not None or seq is not None:
            raise UsageError(
                "batch and seq are for made-up token ids, but inputs were given",
                at="inputs",
                do="pass one or the other",
            )
        if isinstance(inputs, torch.Tensor) or (inputs is not None and not isinstance(inputs, Sequence)):
            raise UsageError(
                f"inputs is a {type(inputs).__name__}",
                at="inputs",
                do="pass a tuple of the model's arguments, such as (tokens,)",
            )
        return tuple(inputs or ()), dict(kwargs or {})
    if is_hugging_face(model) and is_causal_lm(model):
        longest = maximum_length(model)
        length = seq or min(DEFAULT_SEQ, longest or DEFAULT_SEQ)
        if longest is not None and length > longest:
            raise UsageError(
                f"seq is {length}, but the model takes at most {longest}", at="seq", do=f"give {longest} or less"
            )
        return (torch.empty(batch or 2 * mesh.axes[0].size, length, dtype=torch.int64, device="meta"),), {}
    examples = getattr(model, "example_inputs", None)
    if examples is None:
        raise UsageError(
            f"no inputs for a {type(model).__name__}",
            at="inputs",
            do="pass inputs=(...) with the global shapes, or give the model an attribute example_inputs",
        )
    examples = examples() if callable(examples) else examples
    return (tuple(examples) if isinstance(examples, (tuple, list)) else (examples,)), {}
