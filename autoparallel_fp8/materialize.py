"""A rank's part of every parameter and buffer of a model: cut from values that are there, or made without the whole.

Values of a model on a real device are taken as they are. A model on the meta device is initialised module by module:
one is given memory on the rank's device, initialised whole, cut, and freed, so that more than the parts there is never
but one module's tensors. Random numbers are seeded by the seed and the module's name: the values depend neither on the
mesh nor on what other modules there are (but on the kind of device, whose generators differ).

A module is initialised as if it were built on a real device: `reset_parameters` of torch's modules, transformers'
`_init_weights` for its models (5.20 to 5.24: `initialize_weights` calls it on each module, children first), then the
user's `init`. Each is called on the module and then on those around it, innermost first, because an outer one may have
the last word (GPT-2 scales the weights of its projections so). To these the rest of the model is still on the meta
device, where initialising does nothing and draws no random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .capture.meta_copy import aliases_of, meta_copy
from .errors import ApplyError
from .integrations.hugging_face import is_hugging_face
from .layout import Factors, Layout, local_stride
from .parts import parts
from .shards import _take, laid_out

Init = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Place:
    """How the mesh holds a parameter or buffer: the factors of its dims, its layout, the dtype of the parts."""

    factors: Factors
    layout: Layout
    dtype: torch.dtype


def local_part(
    whole: Tensor,
    factors: Factors,
    layout: Layout,
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    """The part of a tensor that one rank holds: a tensor of its own, dense in the memory order of `stride`.

    >>> from autoparallel_fp8.layout import split
    >>> local_part(torch.arange(4), ((4,),), (split(0),), (2,), (1,), (1,))
    tensor([2, 3])

    Args:
        whole: on any device; the part is there too.
        factors: of its dims.
        layout: without partial placements.
        sizes: of the mesh axes.
        coordinate: of the rank.
        stride: of the global tensor as the graph has it.
    """
    held = _take(whole, parts(factors, layout, sizes, coordinate))
    return laid_out(held, local_stride(tuple(whole.shape), stride, tuple(held.shape)))


def materialize(
    model: nn.Module,
    place: Callable[[str], Place],
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    *,
    device: torch.device | str,
    seed: int = 0,
    init: Init | None = None,
) -> dict[str, Tensor]:
    """Name -> the rank's part of every parameter and buffer, a plain tensor on the device; the model is only read.

    Names are those of the graph: tensors under several names (tied weights) come once, under the first; a module's
    plain tensor attributes count as buffers.

    Args:
        model: with values, on the meta device, or each in part.
        place: tells how the tensor of a name lies.
        sizes: of the mesh axes.
        coordinate: of the rank.
        device: where the parts go, and where modules are initialised.
        seed: of the values that are initialised.
        init: called on modules after their own initialisation, as in `model.apply(init)`.

    Raises:
        ApplyError: some values are on the meta device, and nothing initialises them.
        UsageError, CaptureError: the model cannot be copied, as `meta_copy` says.
    """
    device = torch.device(device)
    copied = meta_copy(model)
    names = list(dict.fromkeys(aliases_of(copied).values()))
    given = {name: plain(name, tensor_of(model, name)) for name in names}

    def cut(name: str, whole: Tensor) -> Tensor:
        at = place(name)
        stride = tuple(given[name].stride())
        return local_part(whole, at.factors, at.layout, sizes, coordinate, stride).to(device, at.dtype)

    found = {name: cut(name, value) for name, value in given.items() if not value.is_meta}
    filler = _Filler(copied, given, device, seed, init)
    for prefix, wanted in _by_module(name for name in names if name not in found).items():
        filled = filler.fill(prefix, wanted)
        found |= {name: cut(name, whole) for name, whole in filled.items() if whole is not None}
        del filled  # before the next module gets its memory
    if len(found) < len(names):
        raise _unfilled([name for name in names if name not in found])
    return {name: found[name] for name in names}


def _by_module(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def _unfilled(names: list[str]) -> ApplyError:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return ApplyError(
        f"the model is on the meta device, and nothing initialises {shown}",
        at="model",
        do="pass init=, a function that is called on every module and fills what it holds, or give the model its "
        "values first (to_empty(), then load a checkpoint)",
    )


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """The parameter, buffer or plain tensor attribute of that name."""
    owner, _, last = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), last)
    return found


def plain(name: str, tensor: Tensor) -> Tensor:
    """The tensor without autograd, and without torchao's wrapper around it."""
    tensor = tensor.detach()
    if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
        inner, _ = tensor.__tensor_flatten__()
        if len(inner) != 1:
            raise ApplyError(
                f"the values of a {type(tensor).__name__} are {len(inner)} tensors, which have no part for one rank",
                at=name,
                do="apply the plan to the model as it was before its weights were converted",
            )
        return plain(name, getattr(tensor, inner[0]))
    return tensor


class _Filler:
    """Initialises modules of a copy on the meta device, one at a time, and leaves the copy as it was."""

    def __init__(
        self, copied: nn.Module, given: Mapping[str, Tensor], device: torch.device, seed: int, init: Init | None
    ) -> None:
        self.copied, self.device, self.seed, self.init = copied, device, seed, init
        self.metas = {name: tensor_of(copied, name) for name in given}
        self.given = {id(self.metas[name]): value for name, value in given.items()}

    def fill(self, prefix: str, names: list[str]) -> dict[str, Tensor | None]:
        """Name -> whole values; None where nothing initialises them.

        Args:
            prefix: of the module.
            names: of tensors that it holds, to be initialised.
        """
        around = _around(self.copied, prefix)
        module = around[0]
        held = [held for outer in around for held in (outer._parameters, outer._buffers)]
        before = [dict(tensors) for tensors in held]
        try:
            with torch.no_grad(), _seeded(f"{self.seed} {prefix}", self.device):
                self._give_memory(module, {id(self.metas[name]) for name in names})
                self._initialise(around, prefix, names)
                return {name: self._value(module, name) for name in names}
        finally:
            for tensors, old in zip(held, before, strict=True):
                tensors.clear()
                tensors.update(old)  # type: ignore[arg-type]  # parameters to parameters, buffers to buffers

    def _give_memory(self, module: nn.Module, wanted: set[int]) -> None:
        """Memory for what is wanted, copies of what has values; what was initialised under another name stays meta."""
        made: dict[int, Tensor] = {}
        for held in (module._parameters, module._buffers):
            for name, meta in held.items():
                if meta is None or (id(meta) not in wanted and self.given[id(meta)].is_meta):
                    continue
                if id(meta) not in made:
                    is_wanted, there = id(meta) in wanted, self.given[id(meta)]
                    values = _unfilled_like(meta, self.device) if is_wanted else there.to(self.device, copy=True)
                    is_parameter = isinstance(meta, nn.Parameter)
                    made[id(meta)] = nn.Parameter(values, meta.requires_grad) if is_parameter else values
                held[name] = made[id(meta)]  # type: ignore[assignment]

    def _initialise(self, around: list[nn.Module], prefix: str, names: list[str]) -> None:
        """As building the module on a real device would."""

        def run(way: Init) -> None:
            for outer in around:
                way(outer)

        try:
            run(lambda outer: _init_weights(around, outer))
            if any(self._value(around[0], name) is None for name in names):
                run(_reset)
                run(lambda outer: _init_weights(around, outer))
            if self.init is not None:
                run(self.init)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError, ValueError) as error:
            raise ApplyError(
                f"initialising a {type(around[0]).__name__} failed: {error}",
                at=prefix or type(around[0]).__name__,
                do="initialise each module from what it holds itself (the others are on the meta device), or give the "
                "model its values first",
            ) from error

    def _value(self, module: nn.Module, name: str) -> Tensor | None:
        last = name.rpartition(".")[2]
        value = getattr(module, last).detach()
        shape = tuple(self.metas[name].shape)
        if tuple(value.shape) != shape:
            raise ApplyError(f"initialised with shape {list(value.shape)} instead of {list(shape)}", at=name)
        return None if value.is_meta or _is_unfilled(value) else value


def _around(model: nn.Module, prefix: str) -> list[nn.Module]:
    """The module of that name, and those around it, innermost first."""
    path = prefix.split(".") if prefix else []
    return [model.get_submodule(".".join(path[:k])) for k in range(len(path), -1, -1)]


def _reset(module: nn.Module) -> None:
    """torch's own initialisation; attention and transformers have it under a name with an underscore."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()


def _init_weights(around: list[nn.Module], module: nn.Module) -> None:
    """transformers' initialisation of one module: the business of the innermost model at or around it."""
    for outer in around[around.index(module) :]:
        if is_hugging_face(outer):
            outer._init_weights(module)  # type: ignore[operator]
            return


@contextmanager
def _seeded(text: str, device: torch.device) -> Iterator[None]:
    """Random numbers that depend on the text alone; those of the caller go on as before."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(number)
            yield
        return
    machine = torch.get_device_module(device)
    with machine.device(device), torch.random.fork_rng(devices=[machine.current_device()], device_type=device.type):
        torch.default_generator.manual_seed(number)
        machine.manual_seed(number)
        yield


def _unfilled_like(meta: Tensor, device: torch.device) -> Tensor:
    """Memory for the tensor, every byte of which says that nothing was written: NaN in floats, nonsense elsewhere."""
    made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
    _stored_bytes(made).fill_(_mark(meta.dtype))
    return made


def _is_unfilled(values: Tensor) -> bool:
    """Whether nothing was written, or, in floats of two bytes or more, not everywhere. Takes no memory."""
    if values.numel() == 0:
        return False
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.is_floating_point() and values.dtype.itemsize > 1:
        return bool(values.amin().isnan())
    stored = _stored_bytes(values)
    return bool((stored.amin() == _mark(values.dtype)) & (stored.amax() == _mark(values.dtype)))


def _stored_bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _mark(dtype: torch.dtype) -> int:
    return 0xFF if dtype.is_floating_point or dtype.is_complex else 0xAA
