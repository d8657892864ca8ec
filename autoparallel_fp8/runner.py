"""A schedule as autograd runs it on one rank: forward, what is kept in between, backward.

`Runner.call` takes the rank's parts of parameters and inputs and gives its parts of the results, with a backward that
gives each parameter's gradient in the parameter's own layout. Eager, or compiled by Inductor: both directions are
traced to one graph each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .errors import UsageError
from .expansion import Space
from .ops.stand_ins import kernels_of
from .parts import coordinates
from .program import Key
from .rank import Calls, Collectives, run_items
from .rank_steps import in_order
from .schedule import Schedule


@dataclass
class Accumulated:
    """Gradients that wait for the last of several batches.

    All wait, as in FSDP2, those too that need no reduction: what an optimizer sees of an unfinished sum would else be
    some of the parameters.

    Attributes:
        is_last: whether the next backward reduces them.
        sums: value of the schedule that a reduction reads -> sum so far.
        whole: parameter -> sum so far of a gradient that needs no reduction at the end.
    """

    is_last: bool = True
    sums: dict[Key, Tensor] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        """Lets go of the sums."""
        self.sums.clear()
        self.whole.clear()


@dataclass
class Call:
    """One call of the model: everything but the parameters.

    Attributes:
        inputs, buffers: the rank's parts, by name.
        seed: of dropout.
        is_training: whether dropout drops.
        watched: the caller's own tensors, by name, which backward needs as forward saw them.
        new_buffers: what forward gives.
    """

    inputs: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    seed: Tensor
    is_training: bool
    watched: Mapping[str, Tensor] = field(default_factory=dict)
    new_buffers: dict[str, Tensor] = field(default_factory=dict)


class Runner:
    """Runs one schedule on one rank.

    Args:
        space, choices: options, and the one of every variable.
        written: the schedule.
        rank: of this process on the mesh.
        collectives: how it reaches the others.
        device: that it runs on.
        is_compiled: whether Inductor compiles forward and backward.
        accumulated: shared by runners of the same parameters.
    """

    def __init__(
        self,
        space: Space,
        choices: Sequence[int],
        written: Schedule,
        rank: int,
        collectives: Collectives,
        device: torch.device,
        *,
        is_compiled: bool = False,
        accumulated: Accumulated | None = None,
    ) -> None:
        self.space, self.written, self.collectives, self.device = space, written, collectives, device
        place = coordinates(space.mesh.sizes)[rank]
        self.calls = {
            flag: Calls(space, choices, place, kernels_of(device), device=device, is_training=flag)
            for flag in (True, False)
        }
        self.is_compiled = is_compiled
        self.accumulated = accumulated or Accumulated()
        nodes, ends = space.graph.nodes, written.program.ends
        self.keys: dict[str, dict[str, Key]] = {}
        for node, key in written.program.given:
            self.keys.setdefault(nodes[node].kind, {})[nodes[node].target] = key
        self.outputs = [ends[o.kind, o.target] for o in space.graph.outputs if o.kind == "output"]
        self.output_names = [o.target for o in space.graph.outputs if o.kind == "output"]
        self.buffers = {o.target: ends[o.kind, o.target] for o in space.graph.outputs if o.kind == "buffer"}
        self.gradients = {name: key for (kind, name), key in ends.items() if kind == "gradient"}
        early = written.parts["unreduced"].ends
        self.early = {name: key for name, key in self.gradients.items() if key in early}
        self._compiled: dict[Any, Callable[..., Any]] = {}

    @property
    def parameter_names(self) -> list[str]:
        return list(self.keys.get("parameter", {}))

    def call(self, call: Call, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The rank's parts of the results; parameters in the order of `parameter_names`."""
        has_gradient = torch.is_grad_enabled() and any(p.requires_grad for p in parameters) and self.gradients
        if has_gradient:
            return list(_Step.apply(self, call, *parameters))
        with torch.no_grad():
            made = self.run("inference", call, self._given(call, parameters))
        self._take_buffers(call, made)
        return [made[key] for key in self.outputs]

    def forward(self, call: Call, parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Results, and what is saved."""
        made = self.run("forward", call, self._given(call, parameters))
        self._take_buffers(call, made)
        return [made[key] for key in self.outputs], [made[key] for key in self.written.saved]

    def backward(
        self, call: Call, parameters: Sequence[Tensor], saved: list[Tensor], tangents: Sequence[Tensor | None]
    ) -> dict[str, Tensor]:
        """Gradients by parameter; none where they wait for the last of several batches.

        What was saved is let go of once it was read for the last time: `saved` is empty then.
        """
        held = self._given(call, parameters)
        held.update(zip(self.written.saved, saved, strict=True))
        saved.clear()
        by_name = dict(zip(self.output_names, tangents, strict=True))
        for name, key in self.keys.get("tangent", {}).items():
            spec = self.calls[True].given(key.variable, self.written.program.layouts[key])
            value = by_name[name]
            if value is None:
                value = torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)
            held[key] = in_order(value.to(spec.dtype), spec.stride)
        sums, whole = self.accumulated.sums, self.accumulated.whole
        if self.accumulated.is_last:
            made = self.run("backward", call, held, sums)
            found = {name: made[key] for name, key in self.gradients.items()}
            found.update({name: found[name] + value for name, value in whole.items()})
            self.accumulated.clear()
            return self._apart(found, parameters, tangents)
        made = self.run("unreduced", call, held)
        for key in self.written.waiting:
            sums[key] = sums[key] + made[key] if key in sums else made[key]
        found = self._apart({name: made[key] for name, key in self.early.items()}, parameters, tangents)
        whole.update({name: whole[name] + value if name in whole else value for name, value in found.items()})
        return {}

    def _apart(
        self, gradients: dict[str, Tensor], parameters: Sequence[Tensor], others: Sequence[Tensor | None]
    ) -> dict[str, Tensor]:
        """The gradients, each in memory of its own, in its parameter's order: autograd adds to them in place."""
        taken = {x.untyped_storage().data_ptr() for x in others if x is not None}
        order = dict(zip(self.parameter_names, parameters, strict=True))
        for name, value in gradients.items():
            made = in_order(value, order[name].stride())
            made = made.clone() if made.untyped_storage().data_ptr() in taken else made
            taken.add(made.untyped_storage().data_ptr())
            gradients[name] = made
        return gradients

    def run(
        self, name: str, call: Call, held: dict[Key, Tensor], added: Mapping[Key, Tensor] | None = None
    ) -> dict[Key, Tensor]:
        """What a part of the schedule is to give."""
        part, calls, added = self.written.parts[name], self.calls[call.is_training], added or {}
        if not self.is_compiled:
            return run_items(part, calls, self.collectives, held, added)
        from .compiled import compiled

        key = name, call.is_training, tuple(added)
        if key not in self._compiled:
            self._compiled[key] = compiled(part, calls, self.collectives, held, added)
        return self._compiled[key](held, added)

    def _given(self, call: Call, parameters: Sequence[Tensor]) -> dict[Key, Tensor]:
        held = dict(zip(self.keys.get("parameter", {}).values(), parameters, strict=True))
        for kind, values in (("input", call.inputs), ("buffer", call.buffers)):
            for name, key in self.keys.get(kind, {}).items():
                held[key] = values[name]
        for key in self.keys.get("seed", {}).values():
            held[key] = call.seed
        return held

    def _take_buffers(self, call: Call, made: Mapping[Key, Tensor]) -> None:
        call.new_buffers = {name: made[key] for name, key in self.buffers.items()}


class _Step(torch.autograd.Function):
    """Forward and backward of a runner, on local tensors."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, call: Call, *parameters: Tensor) -> tuple[Tensor, ...]:
        outputs, saved = runner.forward(call, parameters)
        ctx.runner, ctx.call, ctx.versions = runner, call, _versions(call)
        ctx.save_for_backward(*parameters, *saved)
        ctx.set_materialize_grads(False)
        names = runner.keys.get("tangent", {})
        ctx.mark_non_differentiable(
            *(x for name, x in zip(runner.output_names, outputs, strict=True) if name not in names)
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        runner: Runner = ctx.runner
        _check_unchanged(ctx.call, ctx.versions)
        names = runner.parameter_names
        tensors = ctx.saved_tensors
        parameters, saved = tensors[: len(names)], list(tensors[len(names) :])
        del tensors
        # What AOTAutograd calls to let go of saved tensors while backward runs; no public name in 2.11 to 2.14.
        ctx.maybe_clear_saved_tensors()
        found = runner.backward(ctx.call, parameters, saved, tangents)
        needed = zip(names, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(found.get(name) if is_needed else None for name, is_needed in needed))


def _versions(call: Call) -> dict[str, int]:
    """How often each tensor was changed in place so far; those made in inference mode do not count."""
    # Autograd's own count, which it checks what it saved by; no public name in 2.11 to 2.14.
    return {name: x._version for name, x in call.watched.items() if not x.is_inference()}


def _check_unchanged(call: Call, before: Mapping[str, int]) -> None:
    changed = [name for name, version in _versions(call).items() if version != before.get(name, version)]
    if changed:
        raise UsageError(
            f"{changed[0]} was changed in place between forward and backward"
            + (f", and {len(changed) - 1} more" if len(changed) > 1 else ""),
            at=changed[0],
            do="call backward before optimizer.step() and before a batch's memory is used again",
        )
