"""Float8 recipes: which linears torchao converts, which stay, and why.

Converted: every `nn.Linear` whose two dims are multiples of 16, other than the output head - the module a transformers
model names as its output embeddings, or a linear called lm_head, head, output or unembed whose parent is the model
itself. A head is sensitive to rounding and usually wider than any kernel's gain. A model that the user converted
is taken as it is, head and all.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.integrations.hugging_face import output_head
from autoparallel_fp8.quiet import quiet

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
HEAD_NAMES = ("lm_head", "head", "output", "unembed")
_MULTIPLE = 16  # of both dims of a float8 GEMM operand, aten/src/ATen/native/cuda/ScaledBlas.cpp


def convert(model: nn.Module, recipe: str | None) -> tuple[nn.Module, tuple[tuple[str, str], ...]]:
    """The model with its linears in float8, and (fqn, reason) of each linear left alone.

    Args:
        model: changed in place, so pass a copy.
        recipe: a name in `RECIPES`; None leaves the model as it is.

    Raises:
        UsageError: unknown recipe, torchao missing, nothing to convert, or the model is converted to something else.
    """
    if recipe is None:
        return model, ()
    config = recipe_config(recipe)
    converted = _converted_configs(model)
    if converted:
        return model, _check_same(converted, recipe, config)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head = output_head(model)
    reasons = {name: _reason(name, module, head) for name, module in linears.items()}
    skipped = tuple((name, reason) for name, reason in reasons.items() if reason)
    if len(skipped) == len(linears):
        raise UsageError(
            f"recipe {recipe!r} converts nothing: {_why_nothing(model, skipped)}",
            at=f"model {type(model).__name__}",
            do="plan it with recipe=None, or use nn.Linear layers whose dims are multiples of 16",
        )
    from torchao.float8 import convert_to_float8_training

    with quiet():
        model = convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: not reasons.get(name, "no linear")
        )
    return model, skipped


def recipe_config(recipe: str) -> Any:
    """torchao's Float8LinearConfig for a recipe.

    Raises:
        UsageError: unknown or unsupported recipe, or torchao is not installed.
    """
    if recipe == "mxfp8":
        raise UsageError("recipe 'mxfp8' is not yet supported", at="recipe", do=f"use one of {', '.join(RECIPES)}")
    if recipe not in RECIPES:
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


def _converted_configs(model: nn.Module) -> dict[str, Any]:
    """fqn -> config of every linear that torchao has converted already."""
    return {
        name: module.config
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).__name__ == "Float8Linear"
    }


def _check_same(converted: dict[str, Any], recipe: str, config: Any) -> tuple[tuple[str, str], ...]:
    for name, own in converted.items():
        if own != config:
            raise UsageError(
                f"the model is converted already, and not with recipe {recipe!r}",
                at=name,
                do="pass recipe=None to plan it as it is, or pass the model before conversion",
            )
    return ()


def _reason(name: str, module: nn.Linear, head: nn.Module | None) -> str:
    if module is head or name in HEAD_NAMES:
        return "output head"
    for dim, size in (("in_features", module.in_features), ("out_features", module.out_features)):
        if size % _MULTIPLE:
            return f"{dim} {size} is not a multiple of {_MULTIPLE}"
    return ""


def _why_nothing(model: nn.Module, skipped: tuple[tuple[str, str], ...]) -> str:
    kept = [f"{name} ({reason})" for name, reason in skipped]
    if any(type(module).__name__ == "Conv1D" for module in model.modules()):
        kept.append("its other layers are Conv1D, which torchao does not convert")
    return "; ".join(kept) or "it has no nn.Linear"
