"""Hugging Face models: built from a config, causal language models given a loss, captured without an attention mask.

transformers builds an explicit [batch, 1, seq, seq] mask whenever it is traced. `use_planned_attention` points the
model at an attention function of ours that is registered without a mask function, so that no mask is built and
causality stays a flag of one attention op. Written for transformers 5.20 to 5.24, which is imported where it is used.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel_fp8.errors import CaptureError, UsageError
from autoparallel_fp8.integrations.attention_dropout import attention_dropouts, without_attention_dropout
from autoparallel_fp8.quiet import quiet

ATTENTION = "autoparallel_fp8"
T5_LENGTH = 512
"""Tokens a sequence that T5 was trained on (Raffel et al. 2020, 3.1.2); relative positions set no maximum."""
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
    """Whether the model is a transformers model that predicts the next token: head over a vocabulary, causal attention.

    A BERT is built as `...LMHeadModel` too; its attention is not causal unless its config makes it a decoder.
    """
    if not is_hugging_face(model) or not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return False
    flags = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    return any(flags) or not flags  # transformers takes attention without a flag as causal


def build_from_config(
    config: str | Path | Mapping[str, Any], num_layers: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """The model that a config describes, on the meta device: the class in `architectures`, or what the kind is for.

    Dropout of attention weights, which is not planned, is 0 in it, and a note of its plans says so; other dropout is as
    the config has it.

    Args:
        config: path of a config.json, a folder with one, or its content.
        num_layers: number of blocks instead of the config's, in encoder and decoder each.
        dtype: of the parameters.

    Raises:
        UsageError: no such file, not JSON, not a model that transformers knows, or neither a language model nor an
            image classifier.
    """
    values, where = (dict(config), "config") if isinstance(config, Mapping) else _read(Path(config))
    with quiet():
        return _build(values, where, num_layers, dtype)


def _build(values: dict[str, Any], where: str, num_layers: int | None, dtype: torch.dtype) -> nn.Module:
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise UsageError(
            "building a model from a config.json needs transformers, which is not installed",
            at=where,
            do='pip install "autoparallel-fp8[hf]"',
        ) from error
    kind = values.pop("model_type", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise _unknown(kind, where)
    try:
        built = CONFIG_MAPPING[kind].from_dict(values)
        built.use_cache = False
        dropouts = attention_dropouts(built)
        for name in dropouts:
            setattr(built, name, 0.0)
        _check_sizes(built, where)
        if num_layers is not None:
            _set_num_layers(built, num_layers, where)
        made = _model_class(kind, built)
        if made is None:
            raise _unknown(kind, where)
        with torch.device("meta"):
            model: nn.Module = made._from_config(built, dtype=dtype)
        without_attention_dropout(model, dropouts)
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


def _model_class(kind: str, config: Any) -> Any:
    """The class that `architectures` names, where transformers has it for this config; else the kind's usual one."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for name in getattr(config, "architectures", None) or ():
        found: Any = getattr(transformers, str(name), None)
        if isinstance(getattr(found, "config_class", None), type) and isinstance(config, found.config_class):
            return found
    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    usual: Any = {}
    if getattr(config, "is_encoder_decoder", False):
        usual = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    elif kind in causal and (kind not in masked or getattr(config, "is_decoder", False)):
        usual = causal
    elif kind in masked:
        usual = masked
    elif image_shape(config) is not None:
        usual = auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    name = usual.get(kind)
    return getattr(transformers, name if isinstance(name, str) else "", None)


def _unknown(kind: Any, where: str) -> UsageError:
    return UsageError(
        "config has no model_type"
        if kind is None
        else f"model_type {kind!r} is neither a language model nor an image classifier",
        at=where,
        do="pass a config of a language model or an image classifier, or a factory as package.module:function",
    )


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


def pooler_cure(model: nn.Module, module: str) -> str:
    """How to leave out the layer on top of an encoder's first token, where the module is of it: "" where it is not."""
    is_pooler = is_hugging_face(model) and "pooler" in module.split(".")
    owner = model.get_submodule(module.rpartition("pooler")[0].rstrip(".")) if is_pooler else model
    is_free = is_pooler and "add_pooling_layer" in inspect.signature(type(owner).__init__).parameters
    return "build the model with add_pooling_layer=False" if is_free else ""


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes logits, over a vocabulary or over classes, where the model is a transformers model."""
    if not is_hugging_face(model):
        return None
    head = model.get_output_embeddings()  # type: ignore[operator]
    for name in ("classifier", "score"):  # as every ...ForImageClassification and ...ForSequenceClassification has it
        head = head if isinstance(head, nn.Module) else getattr(model, name, None)
    return head if isinstance(head, nn.Module) else None


def maximum_length(model: nn.Module) -> int | None:
    """The longest sequence the config allows; None where it says nothing.

    RoBERTa and its kin count positions from behind the padding id: their tables have as many rows more.
    """
    length = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:  # -1 means no limit, as XLNet has it
        return None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return max(1, length - module.padding_idx - 1) if module.num_embeddings == length else length
    return length


def usual_length(model: nn.Module, most: int) -> int:
    """The sequence length to plan with where none was asked for: the longest, at most `most`."""
    longest = maximum_length(model)
    if longest is None and hasattr(getattr(model, "config", None), "relative_attention_num_buckets"):
        longest = T5_LENGTH
    return min(most, longest or most)


def image_shape(config: Any) -> tuple[int, int, int] | None:
    """[channels, height, width] of the images that a vision model's config asks for; None for other models."""
    channels, size = getattr(config, "num_channels", None), getattr(config, "image_size", None)
    sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    if not isinstance(channels, int) or len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        return None
    return channels, sides[0], sides[1]


def loss_notes(model: nn.Module, input_names: Collection[str]) -> tuple[str, ...]:
    """A sentence where a transformers model is captured without a loss."""
    if not is_hugging_face(model) or "labels" in input_names:
        return ()
    more = "; pass labels to plan the model's own" if takes(model, "labels") else ""
    return (f"no loss in the graph: the gradients of its results come from outside{more}",)


def takes(model: nn.Module, *names: str) -> bool:
    """Whether the model's forward has arguments of these names."""
    return set(names) <= inspect.signature(type(model).forward).parameters.keys()


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    window = kwargs.get("sliding_window")
    if window is not None and window < key.shape[2]:
        raise NotImplementedError(f"attention in a sliding window of {window} is not planned")
    if kwargs.get("softcap") is not None:
        return _attend_capped(module, query, key, value, attention_mask, **kwargs), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _attend_capped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    softcap: float,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **unused: Any,
) -> Tensor:
    """Attention with soft-capped scores (Gemma 2), which `scaled_dot_product_attention` does not know."""
    if dropout:
        raise NotImplementedError(f"attention dropout of {dropout} on capped scores is not planned")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_flag = bool(query.shape[2] > 1 and mask is None and causal)
    capped = torch.ops.autoparallel_fp8.capped_attention
    out: Tensor = capped(query, key, value, mask, is_flag, scaling, softcap)[0]
    return out.transpose(1, 2).contiguous()


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
    for name in ("encoder_layers", "decoder_layers", "num_decoder_layers"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, num_layers)
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
