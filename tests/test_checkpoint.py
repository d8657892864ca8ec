"""Parameters that lie as a plan says, in the hands of torch: checkpoints, optimizers and clipping see whole tensors."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dtensor_ranks import failures_on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from autoparallel_fp8.layout import Layout, split, universe
from autoparallel_fp8.parts import coordinates
from autoparallel_fp8.placements import dtensor_placements, is_block, obstacle
from autoparallel_fp8.shards import same_bits, shard

SIZES = {"up": (8, 16), "down": (16, 8), "narrow": (8, 4)}


class Layers(nn.Module):
    """Linears in a row, the same values on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, (inner, outer) in SIZES.items():
            setattr(self, name, nn.Linear(inner, outer))


def factors_of(tensor: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple((size,) if size > 1 else () for size in tensor.shape)


def layouts_of(tensor: Tensor, sizes: tuple[int, ...]) -> tuple[Layout, ...]:
    factors = factors_of(tensor)
    return universe(factors, sizes, tuple((d, 0) for d in range(tensor.ndim)), "").layouts


def distributed(whole: Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    sizes, factors = tuple(mesh.shape), factors_of(whole)
    rank = coordinates(sizes).index(tuple(mesh.get_coordinate() or ()))
    local = shard(whole.detach(), factors, layout, sizes)[rank].clone()
    placements = dtensor_placements(layout, factors, sizes)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=tuple(whole.stride()))


def planned(mesh: DeviceMesh, number: int, is_empty: bool = False) -> nn.Module:
    """The layers with each parameter in a layout of its own; the numbers together give every layout to each.

    Args:
        is_empty: zeros instead of the values.
    """
    model = Layers()
    for k, (name, p) in enumerate(list(model.named_parameters())):
        layouts = layouts_of(p, tuple(mesh.shape))
        whole = torch.zeros_like(p) if is_empty else p
        owner, _, last = name.rpartition(".")
        made = nn.Parameter(distributed(whole, layouts[(number + k) % len(layouts)], mesh))
        setattr(model.get_submodule(owner), last, made)
    return model


def numbers(mesh: DeviceMesh) -> range:
    return range(max(len(layouts_of(p, tuple(mesh.shape))) for p in Layers().parameters()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps on gradients that are the same, elementwise, however the parameters lie."""
    for step in steps:
        for k, p in enumerate(model.parameters()):
            whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + k))
            p.grad = like(whole, p)
        optimizer.step()


def like(whole: Tensor, p: Tensor) -> Tensor:
    """The tensor as the parameter lies."""
    if not isinstance(p, DTensor):
        return whole
    layouts = layouts_of(whole, tuple(p.device_mesh.shape))
    placed = {dtensor_placements(la, factors_of(whole), tuple(p.device_mesh.shape)): la for la in layouts}
    return distributed(whole, placed[tuple(p.placements)], p.device_mesh)


def differences(model: nn.Module, want: nn.Module) -> list[str]:
    """Parameters of which this rank holds something else than its part of the other's, bit for bit."""
    found, wanted = (dict(m.named_parameters()) for m in (model, want))
    return [
        f"{name} under {p.placements}"
        for name, p in found.items()
        if not same_bits(part(p), part(like(wanted[name], p)))
    ]


def part(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


# ---- what ranks check; each returns a sentence a failure -------------------------------------------------------------


def check_steps(folder: Path) -> list[str]:
    mesh, found = init_device_mesh("cpu", (2, 2)), []
    for foreach in (True, False):
        for number in numbers(mesh):
            models = [planned(mesh, number), Layers()]
            for model in models:
                train(model, torch.optim.AdamW(model.parameters(), foreach=foreach), range(2))
            found += [f"foreach {foreach}: {text}" for text in differences(*models)]
    return found


def check_clipping(folder: Path) -> list[str]:
    mesh, found = init_device_mesh("cpu", (2, 2)), []
    for norm_type in (2.0, torch.inf):
        models = [nn.ModuleList(planned(mesh, number) for number in numbers(mesh)), nn.ModuleList()]
        models[1].extend(Layers() for _ in numbers(mesh))
        norms = []
        for model in models:
            for k, p in enumerate(model.parameters()):
                p.grad = like(torch.full(p.shape, k + 1.0), p)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        found += [] if torch.allclose(*norms) else [f"norm {norms[0]} of order {norm_type} instead of {norms[1]}"]
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            found += (
                [] if torch.allclose(part(p.grad), part(like(q.grad, p))) else [f"order {norm_type}: {p.placements}"]
            )
    return found


def check_writing(folder: Path) -> list[str]:
    """Writes what the other checks read."""
    mesh = init_device_mesh("cpu", (2, 2))
    dcp.save({str(n): get_model_state_dict(planned(mesh, n)) for n in numbers(mesh)}, checkpoint_id=folder / "ours")
    model = planned(mesh, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    dcp.save(training_state(model, optimizer), checkpoint_id=folder / "trained")
    dcp.save({"0": get_model_state_dict(fsdp_model())}, checkpoint_id=folder / "fsdp")
    dcp.save({"0": get_model_state_dict(fsdp_tp_model(mesh))}, checkpoint_id=folder / "fsdp_tp")
    return []


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def fsdp_model() -> nn.Module:
    return fully_shard(Layers(), mesh=init_device_mesh("cpu", (4,)))


def fsdp_tp_model(mesh: DeviceMesh) -> nn.Module:
    named = init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=("dp", "tp"))
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel(), "narrow": ColwiseParallel()}
    return fully_shard(parallelize_module(Layers(), named["tp"], styles), mesh=named["dp"])


def check_reading(folder: Path, sizes: tuple[int, ...]) -> list[str]:
    """Our checkpoint on another mesh, every parameter in another layout than it was written in."""
    mesh = init_device_mesh("cpu", sizes)
    written = dcp.FileSystemReader(folder / "ours").read_metadata().state_dict_metadata
    models = {n: planned(mesh, int(n) + 1, is_empty=True) for n in dict.fromkeys(name[0] for name in written)}
    return read(folder / "ours", models)


def read(folder: Path, models: dict[str, nn.Module]) -> list[str]:
    dcp.load({name: get_model_state_dict(model) for name, model in models.items()}, checkpoint_id=folder)
    return [text for model in models.values() for text in differences(model, Layers())]


def check_others(folder: Path) -> list[str]:
    """What FSDP2 wrote, with and without tensor parallelism, into our layouts; and ours into FSDP2's."""
    mesh, found = init_device_mesh("cpu", (2, 2)), []
    for name in ("fsdp", "fsdp_tp"):
        for number in numbers(mesh):
            found += [f"{name}: {text}" for text in read(folder / name, {"0": planned(mesh, number, is_empty=True)})]
    for name, model in (("fsdp", fsdp_model()), ("fsdp_tp", fsdp_tp_model(mesh))):
        for p in model.parameters():
            p.data.zero_()
        found += [f"into {name}: {text}" for text in read(folder / "ours", {"0": model})]
    strided = dtensor_placements((split(0), split(0)), ((16,), (8,)), (2, 2))
    found += [] if model.up.weight.placements == strided else [f"FSDP2 has {model.up.weight.placements}"]
    return found


def check_training_on(folder: Path, sizes: tuple[int, ...]) -> list[str]:
    """Parameters and optimizer state on another mesh; a step later they are as if nothing had happened."""
    mesh, want = init_device_mesh("cpu", sizes), Layers()
    train(want, torch.optim.AdamW(want.parameters()), range(2))
    model = planned(mesh, 1, is_empty=True)
    optimizer = torch.optim.AdamW(model.parameters())
    state = training_state(model, optimizer)
    dcp.load(state, checkpoint_id=folder / "trained")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, range(1, 2))
    return differences(model, want)


def check_full_state(folder: Path) -> list[str]:
    """A state dict of whole tensors on rank 0 goes out to all, and comes back."""
    mesh, found = init_device_mesh("cpu", (2, 2)), []
    for number in numbers(mesh):
        model = planned(mesh, number, is_empty=True)
        whole = Layers().state_dict() if dist.get_rank() == 0 else {}
        set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        found += differences(model, Layers())
        back = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        found += [f"{n} came back" for n, p in Layers().state_dict().items() if not same_bits(back[n], p)]
    return found


def check_parts_that_are_no_blocks(folder: Path) -> list[str]:
    """What `is_block` is for: torch refuses to write such a parameter and reads wrong values into it, silently."""
    mesh, factors, layout = init_device_mesh("cpu", (4,)), ((2, 8), (8,)), (split(0, 1),)
    if obstacle(layout, factors, (4,)):
        return []  # torch 2.11 makes no whole of it either
    whole = Layers().up.weight.detach()
    local = shard(whole, factors, layout, (4,))[dist.get_rank()]
    placements = dtensor_placements(layout, factors, (4,))
    p = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    found = ["a block"] if is_block(layout, factors, (4,)) or not torch.equal(p.full_tensor(), whole) else []
    try:
        dcp.save({"p": p}, checkpoint_id=folder / "strided")
        found.append("written")
    except dcp.CheckpointException as error:
        found += [] if "overlapping chunks" in str(error) else [str(error)]
    dcp.load({"0": {"up.weight": p}}, checkpoint_id=folder / "ours")
    return [*found, "read rightly"] if torch.equal(p.full_tensor(), whole) else found


def run_checks(folder: Path, checks: list[tuple[Callable[..., list[str]], tuple[Any, ...]]]) -> list[str]:
    """Each failure with the name of its check in front."""
    warnings.simplefilter("ignore")
    found = []
    for check, arguments in checks:
        try:
            found += [f"{check.__name__}: {text}" for text in check(folder, *arguments)]
        except Exception:
            found.append(f"{check.__name__}: {traceback.format_exc()}")
    return found


FOUR: list[tuple[Callable[..., list[str]], tuple[Any, ...]]] = [
    (check_steps, ()),
    (check_clipping, ()),
    (check_writing, ()),
    (check_reading, ((4,),)),
    (check_others, ()),
    (check_training_on, ((4,),)),
    (check_full_state, ()),
    (check_parts_that_are_no_blocks, ()),
]
TWO: list[tuple[Callable[..., list[str]], tuple[Any, ...]]] = [
    (check_reading, ((2,),)),
    (check_training_on, ((2,),)),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def failures(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Of a check, on four ranks and then on two: processes are started once for all tests."""
    found = failures_on_ranks(run_checks, 4, tmp_path_factory.mktemp("four"), written, FOUR)
    found += failures_on_ranks(run_checks, 2, tmp_path_factory.mktemp("two"), written, TWO)
    return lambda name: [text for text in found if text.startswith(f"{name}: ")]


# ---- the tests -------------------------------------------------------------------------------------------------------


def test_adamw_steps_as_on_whole_tensors(failures: Callable[[str], list[str]]) -> None:
    """Every layout, plain and foreach, two steps, bit for bit."""
    assert not failures("check_steps")


def test_clipping_sees_whole_gradients(failures: Callable[[str], list[str]]) -> None:
    """Norm and gradients over parameters in all layouts at once: a replicated one counts once."""
    assert not failures("check_clipping")


def test_a_checkpoint_reads_into_other_layouts_on_other_meshes(failures: Callable[[str], list[str]]) -> None:
    """Written on (2, 2), read on (4,) and (2,)."""
    assert not failures("check_writing") + failures("check_reading")


def test_a_checkpoint_reads_into_plain_tensors(failures: Callable[[str], list[str]], written: Path) -> None:
    """One process, no process group."""
    state = {"3": {name: torch.zeros_like(p) for name, p in Layers().named_parameters()}}
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load(state, checkpoint_id=written / "ours", no_dist=True)
    assert all(same_bits(state["3"][name], p.detach()) for name, p in Layers().named_parameters())


def test_checkpoints_of_fsdp_read_into_our_layouts(failures: Callable[[str], list[str]]) -> None:
    """FSDP2, and FSDP2 over tensor parallelism; and back."""
    assert not failures("check_others")


def test_training_goes_on_from_a_checkpoint(failures: Callable[[str], list[str]]) -> None:
    """With the optimizer's state, on (4,) and (2,)."""
    assert not failures("check_training_on")


def test_whole_state_dicts_go_out_and_come_back(failures: Callable[[str], list[str]]) -> None:
    """The way a pretrained checkpoint takes."""
    assert not failures("check_full_state")


def test_what_is_no_block_has_no_checkpoint(failures: Callable[[str], list[str]]) -> None:
    """No parameter lies so; torch 2.13 and 2.14 would read it wrongly."""
    assert not failures("check_parts_that_are_no_blocks")
