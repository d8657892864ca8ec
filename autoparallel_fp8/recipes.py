"""Low-precision recipes: which linears are converted, which stay, and why.

tensorwise, rowwise and rowwise_with_gw_hp are torchao's float8 recipes; mxfp8 swaps in `ops.mx_linear.MXLinear`.
Converted: every `nn.Linear` whose two dims are multiples of what the recipe's kernels take (16, or MX blocks of 32),
other than the output head - the module a transformers model names as its output embeddings, or a linear called
lm_head, head, output or unembed whose parent is the model itself. A head is sensitive to rounding and usually wider
than any kernel's gain. A model that the user converted is taken as it is, head and all.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.graph import dtype_name
from autoparallel_fp8.integrations.hugging_face import output_head
from autoparallel_fp8.modules import with_submodules
from autoparallel_fp8.ops.to_mx import BLOCK_SIZE, SOURCES
from autoparallel_fp8.quiet import quiet

TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
RECIPES = (*TORCHAO_RECIPES, "mxfp8")
HEAD_NAMES = ("lm_head", "head", "output", "unembed")
_CONVERTED = ("Float8Linear", "MXFP8Linear", "MXLinear")  # torchao's float8 and MX linears, and ours
SHOWN = 3  # names that share a reason, the others counted
_MULTIPLE = 16  # of both dims of a float8 GEMM operand, aten/src/ATen/native/cuda/ScaledBlas.cpp


def convert(model: nn.Module, recipe: str | None) -> tuple[nn.Module, tuple[tuple[str, str], ...]]:
    """The model with its linears in low precision, and (fqn, reason) of each linear left alone.

    Args:
        model: changed in place, so pass a copy.
        recipe: a name in `RECIPES`; None leaves the model as it is.

    Raises:
        UsageError: unknown recipe, torchao missing, nothing to convert, or the model is converted to something else.
    """
    if recipe is None:
        return model, ()
    config = None if recipe == "mxfp8" else recipe_config(recipe)
    converted = {name: m for name, m in model.named_modules() if type(m).__name__ in _CONVERTED}
    if converted:
        return model, _check_same(converted, recipe, config)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head, multiple = output_head(model), BLOCK_SIZE if recipe == "mxfp8" else _MULTIPLE
    reasons = {name: _reason(name, module, head, multiple) for name, module in linears.items()}
    if recipe == "mxfp8":
        reasons = {name: reason or _own_forward(linears[name]) for name, reason in reasons.items()}
    skipped = tuple((name, reason) for name, reason in reasons.items() if reason)
    if len(skipped) == len(linears):
        raise UsageError(
            f"recipe {recipe!r} converts nothing: {_why_nothing(model, skipped)}",
            at=f"model {type(model).__name__}",
            do=f"plan it with recipe=None, or use nn.Linear layers whose dims are multiples of {multiple}",
        )
    if recipe == "mxfp8":
        return _with_mx_linears(model, [m for name, m in linears.items() if not reasons[name]]), skipped
    from torchao.float8 import convert_to_float8_training

    with quiet():
        model = convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: not reasons.get(name, "no linear")
        )
    return model, skipped


def check_dtypes(model: nn.Module) -> None:
    """Weights of MXFP8 linears have a dtype that is cast to MX.

    Args:
        model: as it is traced, in the dtype of its mixed precision.

    Raises:
        UsageError: one has not; the message names the first.
    """
    from autoparallel_fp8.ops.mx_linear import MXLinear  # brings dynamo

    for name, module in model.named_modules():
        if isinstance(module, MXLinear) and module.weight.dtype not in SOURCES:
            found, taken = (_shown(dtype) for dtype in ((module.weight.dtype,), SOURCES))
            raise UsageError(
                f"MXFP8 is cast from {taken}, and the linears of the {type(model).__name__} are {found}",
                at=name or type(model).__name__,
                do="plan model.to(torch.bfloat16), or mixed_precision with param_dtype=torch.bfloat16",
            )


def _shown(dtypes: Collection[torch.dtype]) -> str:
    return " or ".join(dtype_name(dtype) for dtype in dtypes)


def recipe_config(recipe: str) -> Any:
    """torchao's Float8LinearConfig for one of its recipes.

    Raises:
        UsageError: unknown or unsupported recipe, or torchao is not installed.
    """
    if recipe not in TORCHAO_RECIPES:
        raise UsageError(f"no recipe is called {recipe!r}", at="recipe", do=f"use one of {', '.join(RECIPES)}, or None")
    try:
        with quiet():
            from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise UsageError(
            f"recipe {recipe!r} needs torchao, which is not installed",
            at="recipe",
            do='pip install "autoparallel-fp8[torchao]"',
        ) from error
    return Float8LinearConfig.from_recipe_name(recipe)


def _with_mx_linears(model: nn.Module, linears: list[nn.Module]) -> nn.Module:
    """The model with these linears replaced, under each of their names."""
    from autoparallel_fp8.ops.mx_linear import MXLinear  # brings dynamo

    made = {id(linear): MXLinear.from_linear(linear) for linear in linears if isinstance(linear, nn.Linear)}
    named = model.named_modules(remove_duplicate=False)
    return with_submodules(model, {name: made[id(module)] for name, module in named if id(module) in made})


def _check_same(converted: dict[str, nn.Module], recipe: str, config: Any) -> tuple[tuple[str, str], ...]:
    from autoparallel_fp8.ops.mx_linear import MXLinear  # brings dynamo

    for name, module in converted.items():
        is_same = isinstance(module, MXLinear) if recipe == "mxfp8" else getattr(module, "config", None) == config
        if not is_same:
            raise UsageError(
                f"the model is converted already, and not with recipe {recipe!r}",
                at=name,
                do="pass recipe=None to plan it as it is, or pass the model before conversion",
            )
    return ()


def _reason(name: str, module: nn.Linear, head: nn.Module | None, multiple: int) -> str:
    if module is head or name in HEAD_NAMES:
        return "output head"
    for dim, size in (("in_features", module.in_features), ("out_features", module.out_features)):
        if size % multiple:
            return f"{dim} {size} is not a multiple of {multiple}"
    return ""


def _own_forward(module: nn.Module) -> str:
    """Why a linear's class is not replaced by another: it computes something else."""
    name = type(module).__name__
    return "" if type(module).forward is nn.Linear.forward else f"its class {name} has a forward of its own"


def _why_nothing(model: nn.Module, skipped: tuple[tuple[str, str], ...]) -> str:
    reasons: dict[str, list[str]] = {}
    for name, reason in skipped:
        reasons.setdefault(reason, []).append(name or type(model).__name__)
    kept = []
    for reason, names in reasons.items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        kept.append(f"{', '.join(names[:SHOWN])}{more} ({reason})")
    if any(type(module).__name__ == "Conv1D" for module in model.modules()):
        kept.append("its other layers are Conv1D, which is not converted")
    return "; ".join(kept) or "it has no nn.Linear"
