"""Example inputs where the user gave none: token ids or images for a Hugging Face model, else its `example_inputs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .capture.arguments import check_arguments
from .errors import AutoParallelError, UsageError
from .integrations.hugging_face import image_shape, is_hugging_face, maximum_length, one_line, takes, usual_length
from .mesh import Mesh

DEFAULT_SEQ = 8192
IMAGES = 32
"""Times the first axis, the default batch of images: they have few tokens, and float8 GEMMs want 16 rows on a rank."""


def default_inputs(
    model: nn.Module,
    mesh: Mesh,
    inputs: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    batch: int | None,
    seq: int | None,
    sequences: int = 2,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs to plan with, tensors on the meta device where they are made up here.

    Args:
        model: decides what is made up.
        mesh: the default batch is its first axis times `sequences`, of images 32 times.
        inputs, kwargs: the user's; taken as they are.
        batch, seq: of made-up token ids (for encoder and decoder each); batch of made-up images.
        sequences: of token ids, by default, for each device of the first axis.

    Raises:
        UsageError: nothing was given and nothing can be made up; an input that cannot be planned with; or sizes beside
            inputs that were given or that the model has.
    """
    for name, size in (("batch", batch), ("seq", seq)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise UsageError(f"{name} is {size!r}", at=name, do="give a whole number of 1 or more")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(
            f"kwargs is a {type(kwargs).__name__}", at="kwargs", do='pass a mapping of names, such as {"mask": mask}'
        )
    if inputs is not None or kwargs:
        if batch is not None or seq is not None:
            raise UsageError(
                "batch and seq are for made-up token ids, but inputs were given",
                at="inputs",
                do="pass one or the other",
            )
        if inputs is not None and (isinstance(inputs, (str, bytes)) or not isinstance(inputs, Sequence)):
            raise UsageError(
                f"inputs is a {type(inputs).__name__}",
                at="inputs",
                do="pass a tuple of the model's arguments, such as (tokens,)",
            )
        args, named = tuple(inputs if inputs is not None else ()), dict(kwargs or {})
        check_arguments(args, named)
        return args, named
    made_up = _made_up(model, mesh.axes[0].size, batch, seq, sequences) if is_hugging_face(model) else None
    if made_up is not None:
        return made_up
    examples = getattr(model, "example_inputs", None)
    if examples is None:
        raise UsageError(
            f"no inputs for a {type(model).__name__}",
            at="inputs",
            do="set model.example_inputs = (x, ...) with the global shapes, as a factory may; or, from Python, inputs=",
        )
    if batch is not None or seq is not None:
        raise UsageError(
            "batch and seq are for made-up token ids, but the model has example_inputs",
            at="batch" if batch is not None else "seq",
            do="leave it out, or change example_inputs to the wanted sizes",
        )
    examples = _called(examples, f"{type(model).__name__}.example_inputs") if callable(examples) else examples
    args = tuple(examples) if isinstance(examples, (tuple, list)) else (examples,)
    check_arguments(args, {})
    return args, {}


def _made_up(
    model: nn.Module, first_axis: int, batch: int | None, seq: int | None, sequences: int
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Token ids, images, or token ids for encoder and decoder, as the model's forward takes them; None for others."""
    shape = image_shape(getattr(model, "config", None))
    if shape is not None and takes(model, "pixel_values") and not takes(model, "input_ids"):
        if seq is not None:
            raise UsageError(
                "seq is the length of token ids, but the model takes images",
                at="seq",
                do="leave it out; image_size of the model's config decides",
            )
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        return (torch.empty(batch or IMAGES * first_axis, *shape, dtype=dtype, device="meta"),), {}
    if not takes(model, "input_ids") or takes(model, "pixel_values"):
        return None
    longest = maximum_length(model)
    length = seq or usual_length(model, DEFAULT_SEQ)
    if longest is not None and length > longest:
        raise UsageError(
            f"seq is {length}, but the model takes at most {longest}", at="seq", do=f"give {longest} or less"
        )
    ids = torch.empty(batch or sequences * first_axis, length, dtype=torch.int64, device="meta")
    if takes(model, "decoder_input_ids"):
        return (), {"input_ids": ids, "decoder_input_ids": torch.empty_like(ids)}
    return (ids,), {}


def _called(examples: Callable[[], Any], name: str) -> Any:
    try:
        return examples()
    except AutoParallelError:
        raise
    # example_inputs is the user's code and may raise anything.
    except Exception as error:
        raise UsageError(
            f"example_inputs() raises {one_line(error)}",
            at=name,
            do="mend it, or set a tuple of tensors",
        ) from error
