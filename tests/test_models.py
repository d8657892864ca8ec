"""Presets, config files, factories and float8 recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel_fp8.capture.meta_copy import meta_copy
from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.integrations.hugging_face import build_from_config
from autoparallel_fp8.models.presets import build, preset_config, preset_names
from autoparallel_fp8.recipes import TORCHAO_RECIPES, convert, recipe_config

# published parameter counts; llama: "The Llama 3 Herd of Models", qwen3: its model card, gpt2: 124M
PARAMETERS = {
    "gpt2": 124_439_808,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3-debug": 6_270_208,
    "qwen3-8b": 8_190_735_360,
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def mlp_of_depth(num_layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_layers)))


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_presets_have_the_published_size(name: str) -> None:
    """Every preset builds on the meta device, in bfloat16, with the published number of parameters."""
    model = build(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert preset_names() == tuple(sorted(PARAMETERS))


def test_num_layers_and_dtype_are_what_was_asked_for() -> None:
    """The other sizes stay the config's."""
    model: Any = build("llama3-debug", num_layers=2, dtype=torch.float32)
    assert len(model.model.layers) == 2
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_an_unknown_preset_names_the_closest() -> None:
    """And lists all."""
    with pytest.raises(
        UsageError, match=r"no preset is called 'llama3-8'\n.*\n  do: did you mean llama3-8b\? presets: gpt2, "
    ):
        build("llama3-8")


def test_config_files_build(tmp_path: Path) -> None:
    """A file, its folder, and a config with names of older transformers (rope_theta, torch_dtype)."""
    config = {**preset_config("llama3-debug"), "rope_theta": 1e6, "torch_dtype": "bfloat16", "use_cache": True}
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json", str(tmp_path / "config.json")):
        model: Any = build(path, num_layers=1)
        assert model.config.rope_parameters["rope_theta"] == 1e6
        assert model.config.use_cache is False


def test_a_bad_config_file_says_what_is_wrong(tmp_path: Path) -> None:
    """Missing, not JSON, no object, not a language model, not buildable."""
    path = tmp_path / "config.json"
    with pytest.raises(UsageError, match=r"no such config file\n  at: .*config.json"):
        build(path)
    for text, message in [
        ("{", "config is not JSON"),
        ("[]", "a JSON list, not an object"),
        ("{}", "config has no model_type"),
        ('{"model_type": "clip"}', "model_type 'clip' is neither a language model nor an image classifier"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "transformers cannot build this config"),
    ]:
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            build(path)
    with pytest.raises(UsageError, match="num_layers is 0"):
        build_from_config(preset_config("llama3-debug"), num_layers=0)


def test_factories_build_on_the_meta_device() -> None:
    """By name or as a function; num_layers reaches those that take it."""
    assert next(build(f"{__name__}:mlp").parameters()).device.type == "meta"
    assert next(build(mlp).parameters()).device.type == "meta"
    assert len(build(f"{__name__}:mlp_of_depth", num_layers=3)) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.at_all:f", "cannot import 'nowhere.at_all'"),
        ("os:nothing", "os has no function 'nothing'"),
        ("os:getcwd", "returned a str, not an nn.Module"),
    ],
)
def test_a_bad_factory_says_what_is_wrong(name: str, message: str) -> None:
    """Import, name and result are each checked."""
    with pytest.raises(UsageError, match=message):
        build(name)


def test_num_layers_needs_a_factory_that_takes_it() -> None:
    """It is not dropped in silence."""
    with pytest.raises(UsageError, match="takes no num_layers"):
        build(mlp, num_layers=2)


@pytest.mark.parametrize("recipe", TORCHAO_RECIPES)
def test_a_recipe_converts_all_linears_but_the_head(recipe: str) -> None:
    """Float8Linear with torchao's config of that name, and the reason for each linear left alone."""
    model, skipped = convert(meta_copy(build("llama3-debug", num_layers=1)), recipe)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert skipped == (("lm_head", "output head"),)
    assert {type(module).__name__ for name, module in linears.items() if name != "lm_head"} == {"Float8Linear"}
    assert linears["model.layers.0.mlp.up_proj"].config == recipe_config(recipe)


def test_linears_with_odd_dims_are_skipped() -> None:
    """Kernels take multiples of 16."""
    model, skipped = convert(meta_copy(mlp()), "tensorwise")
    assert skipped == (("2", "out_features 10 is not a multiple of 16"),)
    assert type(model[0]).__name__ == "Float8Linear"  # type: ignore[index]


def test_a_linear_called_output_is_a_head_at_the_top_only() -> None:
    """`output` of an inner block is a projection like others."""
    block = nn.ModuleDict({"output": nn.Linear(16, 16)})
    _, skipped = convert(nn.ModuleDict({"block": block, "output": nn.Linear(16, 16)}), "rowwise")
    assert skipped == (("output", "output head"),)


def test_a_recipe_that_converts_nothing_says_why() -> None:
    """gpt2's layers are Conv1D."""
    with pytest.raises(UsageError, match=r"converts nothing: lm_head \(output head\); its other layers are Conv1D"):
        convert(meta_copy(build("gpt2", num_layers=1)), "tensorwise")
    with pytest.raises(UsageError, match=r"converts nothing: it has no nn.Linear"):
        convert(nn.Sequential(nn.ReLU()), "rowwise")


def test_a_converted_model_is_taken_as_it_is() -> None:
    """With the same recipe too; another one is an error."""
    model, _ = convert(meta_copy(mlp()), "rowwise")
    assert convert(model, None) == (model, ())
    assert convert(model, "rowwise") == (model, ())
    with pytest.raises(UsageError, match=r"converted already, and not with recipe 'tensorwise'\n  at: 0"):
        convert(model, "tensorwise")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("int8", r"no recipe is called 'int8'\n.*\n.*tensorwise"), ("nvfp4", r"no recipe is called 'nvfp4'\n.*\n.*mxfp8")],
)
def test_other_recipes_are_refused(recipe: str, message: str) -> None:
    """The list of names is in the message."""
    with pytest.raises(UsageError, match=message):
        convert(mlp(), recipe)


def test_a_meta_copy_shares_what_the_model_shares() -> None:
    """Ties, strides, dtypes and requires_grad are kept; the model is not touched; plain tensors become buffers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model[1].bias = nn.Parameter(torch.zeros(8, dtype=torch.float64)[::2])
    model[0].table = torch.arange(3)
    copied: Any = meta_copy(model)
    assert copied[1].weight is copied[0].weight and copied[0].weight.is_meta
    assert not copied[0].bias.requires_grad and copied[1].bias.requires_grad
    assert (copied[1].bias.stride(), copied[1].bias.dtype) == ((2,), torch.float64)
    assert [name for name, _ in copied.named_buffers()] == ["0.table"]
    assert model[0].weight.device.type == "cpu" and "table" in vars(model[0])
