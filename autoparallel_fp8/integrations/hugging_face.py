"""Hugging Face causal language models: built from a config, given a loss, and captured without an attention mask.

transformers builds an explicit [batch, 1, seq, seq] mask whenever it is traced. `use_planned_attention` points the
model at an attention function of ours that is registered without a mask function, so that no mask is built and
causality stays a flag of one attention op. Written for transformers 5.20 to 5.24, which is imported where it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel_fp8.errors import CaptureError, UsageError
from autoparallel_fp8.quiet import quiet

ATTENTION = "autoparallel_fp8"
_REPLACED = (None, "sdpa", "eager")


class CausalLM(nn.Module):
    """A Hugging Face causal language model as a function of token ids: the loss, or the logits without labels.

    forward(input_ids [batch, seq], labels [batch, seq]): labels are aligned with the logits, that is, each is the token
    after the one at its place; -100 is not counted.
    """

    def __init__(self, model: nn.Module, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.output_dtype = output_dtype

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        logits: Tensor = self.model(input_ids, use_cache=False, **kwargs).logits
        if self.output_dtype is not None:
            logits = logits.to(self.output_dtype)
        if labels is None:
            return logits
        flat = logits.reshape(-1, logits.shape[-1]).float()
        return nn.functional.cross_entropy(flat, labels.reshape(-1), ignore_index=-100)


def causal_lm_wrapper(model: nn.Module) -> nn.Module:
    """The model with its loss: forward(input_ids, labels) -> loss, forward(input_ids) -> logits."""
    return CausalLM(model)


def is_hugging_face(model: nn.Module) -> bool:
    """Whether the model is a transformers model, decided without importing transformers."""
    return any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)


def is_causal_lm(model: nn.Module) -> bool:
    """Whether the model is a transformers model that generates text: it has an output head over a vocabulary."""
    return is_hugging_face(model) and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def build_from_config(
    config: str | Path | Mapping[str, Any], num_layers: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """A causal language model on the meta device.

    Args:
        config: path of a config.json, a folder with one, or its content.
        num_layers: number of blocks instead of the config's.
        dtype: of the parameters.

    Raises:
        UsageError: no such file, not JSON, not a model that transformers knows, or not a causal language model.
    """
    values, where = (dict(config), "config") if isinstance(config, Mapping) else _read(Path(config))
    with quiet():
        return _build(values, where, num_layers, dtype)


def _build(values: dict[str, Any], where: str, num_layers: int | None, dtype: torch.dtype) -> nn.Module:
    try:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise UsageError(
            "building a model from a config.json needs transformers, which is not installed",
            at=where,
            do='pip install "autoparallel-fp8[hf]"',
        ) from error
    kind = values.pop("model_type", None)
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UsageError(
            "config has no model_type" if kind is None else f"model_type {kind!r} is not a causal language model",
            at=where,
            do="pass a config of a causal language model, or a factory as package.module:function",
        )
    try:
        built = CONFIG_MAPPING[kind].from_dict(values)
        built.use_cache = False
        _check_sizes(built, where)
        if num_layers is not None:
            _set_num_layers(built, num_layers, where)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(built, dtype=dtype)
    except UsageError:
        raise
    # Every model's own code reads the config here, and its validators raise errors of their own: there is no list.
    except Exception as error:
        reason = one_line(error) if isinstance(error, KeyError) else one_line(error).partition(": ")[2]
        raise UsageError(
            f"transformers cannot build this config: {reason or type(error).__name__}",
            at=where,
            do="compare it with the model's published config",
        ) from error
    return model


def use_planned_attention(model: nn.Module, sequence: int) -> bool:
    """Points a (copied) transformers model at the attention function without a mask; whether anything changed.

    Raises:
        CaptureError: the model attends to a window shorter than the sequence.
    """
    changed = False
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or not is_hugging_face(module):
            continue
        _check_window(config, sequence)
        if getattr(config, "_attn_implementation", None) in _REPLACED and _can_switch(module):
            _register_attention()
            # set past the setter, which only takes names that it can verify (transformers 5.24)
            config._attn_implementation_internal = ATTENTION
            changed = True
    return changed


def without_cache(model: nn.Module) -> None:
    """Switches key and value caches off in every config of a (copied) transformers model."""
    for module in model.modules():
        if is_hugging_face(module) and getattr(module.config, "use_cache", False):
            module.config.use_cache = False  # type: ignore[union-attr]


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes logits, where the model is a transformers model and names one."""
    if not is_hugging_face(model):
        return None
    head = model.get_output_embeddings()  # type: ignore[operator]
    return head if isinstance(head, nn.Module) else None


def maximum_length(model: nn.Module) -> int | None:
    """The longest sequence the config allows; None where it says nothing."""
    length = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None  # -1 means no limit, as XLNet has it


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    window = kwargs.get("sliding_window")
    if window is not None and window < key.shape[2]:
        raise NotImplementedError(f"attention in a sliding window of {window} is not planned")
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _register_attention() -> None:
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)


def _can_switch(module: nn.Module) -> bool:
    check = getattr(module, "_can_set_attn_implementation", None)  # True: attention goes through AttentionInterface
    return bool(check()) if callable(check) else False


def _check_window(config: Any, sequence: int) -> None:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    is_used = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    if isinstance(window, int) and window < sequence and is_used:
        raise CaptureError(
            f"attention in a sliding window is not planned: window {window}, sequence {sequence}",
            at=f"{type(config).__name__}.sliding_window",
            do=f"plan a sequence of at most {window}, or set sliding_window to None to plan full attention",
        )


def _read(path: Path) -> tuple[dict[str, Any], str]:
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UsageError(
            "no such config file",
            at=str(path),
            do="pass the config.json that comes with a Hugging Face model, or a preset",
        ) from error
    except OSError as error:
        raise UsageError(
            f"cannot read the config file: {error.strerror}", at=str(path), do="pass a file that can be read"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"config is not JSON: {error}",
            at=str(path),
            do="pass the config.json that comes with a Hugging Face model, or a preset",
        ) from error
    if not isinstance(values, dict):
        raise UsageError(
            f"config is a JSON {type(values).__name__}, not an object",
            at=str(path),
            do="pass the config.json that comes with a Hugging Face model, or a preset",
        )
    return values, str(path)


def _set_num_layers(config: Any, num_layers: int, where: str) -> None:
    if num_layers < 1:
        raise UsageError(f"num_layers is {num_layers}", at=where, do="ask for at least 1 layer")
    config.num_hidden_layers = num_layers
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = [kinds[index % len(kinds)] for index in range(num_layers)]


def _check_sizes(config: Any, where: str) -> None:
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            raise UsageError(f"config has {name} {size}", at=where, do="give 1 or more")


def one_line(error: BaseException) -> str:
    """An exception of code that is not ours in one line, "ValueError: reason"."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:297] + '...'}".removesuffix(": ")
