"""Small models of Hugging Face's families, from configs as their config.json has them: two blocks, no dropout."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel_fp8.capture import capture
from autoparallel_fp8.graph import Graph
from autoparallel_fp8.integrations.hugging_face import build_from_config, image_shape, takes

BATCH, SEQ, VOCAB = 4, 8, 96
_LM = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "attention_dropout": 0.0,
}  # fmt: skip
_GROUPED = {**_LM, "num_key_value_heads": 2}
_ENCODER = {**_LM, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5 = {
    "model_type": "t5", "vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "architectures": ["T5ForConditionalGeneration"],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_GROUPED, "model_type": "llama"},
    "qwen3": {**_GROUPED, "model_type": "qwen3", "head_dim": 16},
    "mistral": {**_GROUPED, "model_type": "mistral", "sliding_window": None},
    "gemma": {**_LM, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 16},
    "gemma2": {**_GROUPED, "model_type": "gemma2", "head_dim": 16, "attn_logit_softcapping": 2.0, "sliding_window": 16},
    "phi": {**_LM, "model_type": "phi", "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": {**_LM, "model_type": "gpt_neox", "hidden_dropout": 0.0, "rotary_pct": 0.25},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 16,
        "bos_token_id": 0, "eos_token_id": 0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "opt": {
        **_LM, "model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0, "pad_token_id": 1,
    },
    "falcon": {**_LM, "model_type": "falcon", "hidden_dropout": 0.0},
    "t5": _T5,
    "t5-gated": {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bert": {**_ENCODER, "model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "bert-base": {**_ENCODER, "model_type": "bert", "architectures": ["BertModel"]},
    "vit": {
        **_ENCODER, "model_type": "vit", "image_size": 16, "patch_size": 4, "num_channels": 4, "num_labels": 16,
        "architectures": ["ViTForImageClassification"],
    },
}  # fmt: skip


def family(name: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The family's model on the meta device."""
    return build_from_config(FAMILIES[name], dtype=dtype)


def with_weights(name: str) -> Any:
    """The same in float32 on the CPU, with random weights and the buffers its own code makes."""
    shell: Any = family(name, torch.float32)
    torch.manual_seed(0)
    model = type(shell)(shell.config).to(torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model


def call_of(model: nn.Module, dtype: torch.dtype = torch.float32, batch: int = BATCH) -> dict[str, Tensor]:
    """Arguments by name: images, token ids, or token ids for encoder and decoder."""
    generator = torch.Generator().manual_seed(0)

    def tokens() -> Tensor:
        return torch.randint(2, VOCAB, (batch, SEQ), generator=generator)

    if takes(model, "pixel_values"):
        shape = image_shape(model.config)
        assert shape is not None
        return {"pixel_values": torch.randn(batch, *shape, generator=generator).to(dtype)}
    names = ["input_ids", "decoder_input_ids"] if takes(model, "decoder_input_ids") else ["input_ids"]
    return {name: tokens() for name in names}


@cache
def family_graph(name: str, recipe: str | None = None) -> Graph:
    """The graph of the family's model, with its loss where it is a causal language model."""
    model = family(name)
    named = call_of(model, torch.bfloat16)
    if len(named) == 1:
        return capture(model, tuple(named.values()), recipe=recipe)
    return capture(model, (), kwargs=named, recipe=recipe)
