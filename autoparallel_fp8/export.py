"""The nearest form of a plan that is written by hand: a Python module with `parallelize(model, device_mesh)`.

The text is what people write for torchtitan: torchao's conversion, parallel styles for one tensor parallel axis
(`tensor_styles.py`), checkpoint wrappers, `fully_shard` or `replicate` for the other axes (`shard_units.py`). It needs
torch (and torchao), not this library, and is made of the plan's data alone. Its head lists each parameter that lies
otherwise than in the plan, and what else is not as planned (`export_notes.py`). Same plan, same text.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

from .export_notes import differences, gathers_float8, notes
from .plan import Plan
from .plan_reading import GEMMS, layer_of, read_plan, split_name
from .shard_units import ShardUnits, Unit, shard_units
from .tensor_styles import TensorStyles, tensor_styles

ATTENTION_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
"""Of scaled_dot_product_attention, as aten calls them."""
_LAYOUT_TYPES = ("Replicate", "Shard")
_STYLES = ("ColwiseParallel", "PrepareModuleInput", "PrepareModuleOutput", "RowwiseParallel", "SequenceParallel")


def to_parallelize(plan: Plan) -> str:
    """The plan as Python text, with `make_mesh` and `parallelize(model, device_mesh)`."""
    reading = read_plan(plan)
    tensor = tensor_styles(plan, reading)
    units = shard_units(plan, reading, tensor)
    parts = [
        _convert(plan, gathers_float8(plan, reading, units)),
        _tensor_parallel(tensor),
        _recompute(plan),
        _data_parallel(plan, units),
    ]
    body = "\n\n".join([_make_mesh(plan), *filter(None, parts), _parallelize(plan, tensor, units)])
    head = [
        *_comment(f"{plan.model}, {plan.recipe or 'no recipe'}, on {plan.device}: the nearest form by hand of a plan"),
        "#",
        *(_comment("Every parameter lies as in the plan.") if not (moved := differences(plan, units)) else ()),
        *(_comment("Parameters that lie otherwise than in the plan (plan -> here):") if moved else ()),
        *(line for text in moved for line in _comment(text, "  ", "      ")),
        *(line for text in notes(plan, reading, tensor, units) for line in _comment(text, "- ", "  ")),
    ]
    return "\n".join([*head, "", *_imports(body), "", "", body])


def _comment(text: str, first: str = "", later: str = "") -> list[str]:
    """The text as comment lines; nothing in it ends a line early."""
    lines = textwrap.wrap(text, 116, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
    return [f"# {line}" for line in lines]


def _imports(body: str) -> Iterator[str]:
    """What the body names."""
    found = set(re.findall(r"\w+", re.sub(r'"[^"\n]*"|#.*', "", body)))
    if "replace" in found:
        yield "from dataclasses import replace"
    if "partial" in found:
        yield "from functools import partial"
    if found & {"replace", "partial"}:
        yield ""
    if "torch" in found:
        yield "import torch"
    yield "from torch import nn"
    if "checkpoint_wrapper" in found:
        yield "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper"
    if "replicate" in found:
        yield "# data parallelism that fully_shard takes beside it; torch 2.13 has it under no public name"
        yield "from torch.distributed._composable.replicate_with_fsdp import replicate"
    yield "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh"
    places = {
        "torch.distributed.fsdp": ("MixedPrecisionPolicy", "fully_shard"),
        "torch.distributed.tensor": _LAYOUT_TYPES,
        "torch.distributed.tensor.parallel": (*_STYLES, "parallelize_module"),
        "torch.utils.checkpoint": ("create_selective_checkpoint_contexts",),
        "torchao.float8": ("Float8LinearConfig", "convert_to_float8_training"),
        "torchao.prototype.moe_training.config": ("MXFP8TrainingOpConfig", "MXFP8TrainingRecipe"),
        "torchao.quantization": ("quantize_",),
    }
    for place, names in places.items():
        if used := [name for name in names if name in found]:
            line = f"from {place} import {', '.join(used)}"
            yield line if len(line) <= 120 else f"from {place} import (\n    " + ",\n    ".join(used) + ",\n)"


def _make_mesh(plan: Plan) -> str:
    sizes, names = tuple(plan.mesh.values()), ", ".join(map(json.dumps, plan.mesh))
    end = "," if len(sizes) == 1 else ""
    return (
        'def make_mesh(device_type: str = "cuda") -> DeviceMesh:\n'
        f'    """The plan\'s mesh, for {prod(sizes)} ranks."""\n'
        f"    return init_device_mesh(device_type, {sizes}, mesh_dim_names=({names}{end}))\n"
    )


def _parallelize(plan: Plan, tensor: TensorStyles, units: ShardUnits) -> str:
    lines = [
        "def parallelize(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:",
        '    """The model, converted, split and wrapped; parameters are DTensors where they are split."""',
    ]
    if plan.recipe:
        lines.append("    model = convert(model)")
    if tensor.styles:
        lines.append(f"    tensor_parallel(model, device_mesh[{json.dumps(tensor.axis)}])")
    if _recompute(plan):
        lines.append("    recompute(model)")
    if units.units:
        lines.append("    data_parallel(model, device_mesh)")
    return "\n".join([*lines, "    return model", ""])


# ---- precision ----


def _convert(plan: Plan, gathers: bool) -> str:
    if not plan.recipe:
        return ""
    lines = ["def convert(model: nn.Module) -> nn.Module:"]
    lines.append('    """Linears in low precision, other than the ones that the plan left alone."""')
    test = "True"
    if plan.skipped:
        lines += [
            "    skipped = {",
            *(f"        {json.dumps(name)},  # {_inline(r)}" for name, r in plan.skipped.items()),
        ]
        lines.append("    }")
        test = "name not in skipped"
    if plan.recipe == "mxfp8":
        is_emulated = plan.settings.get("emulate")
        name = "MXFP8_EMULATED_RCEIL" if is_emulated else "MXFP8_RCEIL"
        lines += [
            f"    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.{name})",
            f"    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and {test})",
            "    return model",
        ]
        return "\n".join([*lines, ""])
    lines.append(f"    config = Float8LinearConfig.from_recipe_name({json.dumps(plan.recipe)})")
    if gathers:
        lines.append("    config = replace(config, enable_fsdp_float8_all_gather=True)")
    call = "convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "
    return "\n".join([*lines, f"    return {call}{test})", ""])


def _inline(text: str) -> str:
    return " ".join(text.split())


# ---- tensor parallelism ----


def _tensor_parallel(tensor: TensorStyles) -> str:
    if not tensor.styles:
        return ""
    lines = [
        "def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:",
        f'    """Tensor{" and sequence" if tensor.sequence_dim is not None else ""} parallelism over {tensor.axis}."""',
    ]
    depth = max(map(len, tensor.styles.values()))
    for turn in range(depth):
        styles = {module: made[turn] for module, made in tensor.styles.items() if len(made) > turn}
        lines.append("    styles = {}" if turn == 0 else "    styles = {}  # a second one for the same modules")
        lines += _looped(styles, lambda name, style: _setting(name, style))
        lines.append("    parallelize_module(model, mesh, styles)")
    return "\n".join([*lines, ""])


def _setting(name: str, style: str) -> list[str]:
    return _broken(f"styles[{name}] = {style}")


def _broken(line: str) -> list[str]:
    """A line that ends in a call, an argument a line where it is long; no argument holds a comma."""
    if len(line) <= 108:
        return [line]
    opening = line.index("(", line.find(" = ") + 1) + 1
    return [line[:opening], *(f"    {part}," for part in line[opening:-1].split(", ")), ")"]


# ---- recomputation ----


def _recompute(plan: Plan) -> str:
    mode = plan.settings.get("recompute")
    if mode not in ("full", "selective"):
        return ""
    layers = {
        f"{stack}.{i}".lstrip("."): "" for stack, i in dict.fromkeys(filter(None, map(layer_of, plan.parameters)))
    }
    layers = {name: said for name, said in layers.items() if name not in plan.parameters}
    is_full = mode == "full"
    kept = "their inputs alone" if is_full else "results of GEMMs and attention"
    contexts = [] if is_full else ["    contexts = partial(create_selective_checkpoint_contexts, KEPT)"]
    options = "" if is_full else ", context_fn=contexts"
    lines = [
        *([] if is_full else ["KEPT = [", *(f"    torch.ops.{op}," for op in _kept(plan)), "]", "", ""]),
        "def recompute(model: nn.Module) -> None:",
        f'    """Layers keep {kept}, and run again in backward."""',
        *_looped(layers, lambda name, _: [f"wrap(model, {name})"]),
        "",
        "",
        "def wrap(model: nn.Module, name: str) -> None:",
        '    parent, _, child = name.rpartition(".")',
        *contexts,
        f"    layer = checkpoint_wrapper(model.get_submodule(name){options})",
        "    model.get_submodule(parent).register_module(child, layer)",
    ]
    return "\n".join([*lines, ""])


def _kept(plan: Plan) -> list[str]:
    """The ops that run for what selective recomputation keeps."""
    found = sorted({node.op for node in plan.nodes} & set(GEMMS))
    if "autoparallel_fp8.mx_mm.default" in found:
        found.remove("autoparallel_fp8.mx_mm.default")
        found += ["aten._scaled_mm.default", "aten._scaled_mm_v2.default"]
    if any("attention" in node.op.split(".")[1] for node in plan.nodes if "." in node.op):
        found += [f"aten._scaled_dot_product_{kernel}.default" for kernel in ATTENTION_KERNELS]
    return list(dict.fromkeys(found))


# ---- data parallelism ----


def _data_parallel(plan: Plan, units: ShardUnits) -> str:
    if not units.units:
        return ""
    meshes: dict[str, str] = {}
    calls = {unit.module: _call(plan, units, unit, meshes) for unit in units.units}
    root = calls.pop("")
    lines = [
        "def data_parallel(model: nn.Module, device_mesh: DeviceMesh) -> None:",
        f'    """Each rank of {", ".join(units.axes)} takes other tokens; what is split is gathered where used."""',
        *(f"    {name} = {made}" for made, name in meshes.items()),
        *_policy(plan),
        *_sets(plan, units),
        *_looped(calls, lambda name, call: _broken(call.replace("MODULE", f"model.get_submodule({name})"))),
        *(f"    {line}" for line in _broken(root.replace("MODULE", "model"))),
    ]
    return "\n".join([*lines, ""])


def _call(plan: Plan, units: ShardUnits, unit: Unit, meshes: dict[str, str]) -> str:
    """The call for a unit, with MODULE in place of it; its mesh is named in `meshes`."""
    axes = unit.split or unit.whole
    if unit.split and unit.whole:
        order = [axis for axis in plan.mesh if axis in (*unit.split, *unit.whole)]
        mesh = _mesh(meshes, order, "hybrid", f"device_mesh[{', '.join(map(json.dumps, order))}]")
    elif len(axes) > 1:
        flat = "_".join(axes)
        while flat in plan.mesh:
            flat += "_flat"
        mesh = _mesh(meshes, axes, "", f"device_mesh[{', '.join(map(json.dumps, axes))}]._flatten({json.dumps(flat)})")
    else:
        mesh = _mesh(meshes, axes, "", f"device_mesh[{json.dumps(axes[0])}]")
    options = [f"mesh={mesh}"]
    if unit.split:
        options.append(f"reshard_after_forward={unit.reshard_after_forward}")
    if unit.split and units.dims:
        options.append("shard_placement_fn=split_dim")
    if plan.settings.get("mixed_precision"):
        options.append("mp_policy=policy")
    if units.ignored:
        options.append("ignored_params=scalars")
    return f"{'fully_shard' if unit.split else 'replicate'}(MODULE, {', '.join(options)})"


def _mesh(meshes: dict[str, str], axes: Iterable[str], kind: str, made: str) -> str:
    if made not in meshes:
        name = base = re.sub(r"\W", "_", "_".join([*filter(None, (kind,)), *axes, "mesh"]))
        while name in meshes.values():
            name = f"{base}_{len(meshes)}"
        meshes[made] = name
    return meshes[made]


def _policy(plan: Plan) -> list[str]:
    policy: Mapping[str, str | bool] | None = plan.settings.get("mixed_precision")
    if not policy:
        return []
    words = (f"{name}={f'torch.{value}' if isinstance(value, str) else value}" for name, value in policy.items())
    return [f"    policy = MixedPrecisionPolicy({', '.join(words)})"]


def _sets(plan: Plan, units: ShardUnits) -> Iterator[str]:
    """Parameters that `fully_shard` splits on another dim than 0, and the ones that it does not take."""
    if units.dims:
        yield "    dims = {}"
        add = lambda name, dim: [f"dims[id(model.get_parameter({name}))] = {dim}"]  # noqa: E731
        yield from _looped({name: str(dim) for name, dim in units.dims.items()}, add)
        yield ""
        yield "    def split_dim(parameter: nn.Parameter) -> Shard:"
        yield "        return Shard(dims.get(id(parameter), 0))"
        yield ""
    if units.ignored:
        yield f"    scalars = {{model.get_parameter(name) for name in {units.ignored!r}}}"


# ---- layers in loops ----


def _looped(items: Mapping[str, str], write: Callable[[str, str], Sequence[str]]) -> list[str]:
    """Lines for every item; equal ones of several layers in a loop, the ones of a whole layer after those inside it.

    Args:
        items: name of a module or parameter -> what is said of it.
        write: lines of one item, given its name as a Python expression.
    """
    numbers: dict[tuple[str, str, str], list[int]] = {}
    for name, said in items.items():
        stack, number, tail = split_name(name) or ("\0", -1, name)
        numbers.setdefault((stack, tail, said), []).append(number)
    loops: dict[tuple[str, tuple[int, ...]], list[tuple[str, str]]] = {}
    for (stack, tail, said), layers in numbers.items():
        loops.setdefault((stack, tuple(sorted(layers))), []).append((tail, said))
    lines: list[str] = []
    for (stack, found), inside in sorted(loops.items(), key=lambda loop: any(not tail for tail, _ in loop[1])):
        if stack == "\0":
            lines += [f"    {line}" for name, said in inside for line in write(json.dumps(name), said)]
            continue
        lines.append(f"    for i in {_numbers(found)}:")
        for tail, said in inside:
            name = json.dumps((f"{stack}." if stack else "") + "{i}" + tail)
            lines += [f"        {line}" for line in write(f"f{name}", said)]
    return lines


def _numbers(found: Sequence[int]) -> str:
    if found == tuple(range(found[0], found[0] + len(found))) and len(found) > 1:
        return f"range({len(found)})" if not found[0] else f"range({found[0]}, {found[-1] + 1})"
    return str(found)
