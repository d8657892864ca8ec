"""The model on one rank: an `nn.Module` whose parameters are DTensors in the plan's layouts.

Parameters and buffers stand under the names that they have in the model, so that optimizers, `state_dict` and
Distributed Checkpoint find them there. Forward takes the model's arguments and runs the plan's schedule; results are
DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree  # what capture flattened the results with; no public name in 2.11

from .errors import UsageError
from .graph import Graph, Ref, Result
from .held_tensors import rank_part
from .in_range import InRange
from .layout import Layout, R
from .local_inputs import LocalInputs
from .materialize import Place
from .module_tree import tensor_lines
from .placements import as_dtensor
from .runner import Call, Runner
from .same_inputs import SameInputs

RunnerFor = Callable[[tuple[Any, ...], dict[str, Any]], Runner]


class ParallelModule(nn.Module):
    """What `plan.apply(model)` gives: call it as the model.

    Arguments are global tensors, of which each rank takes its part, the rank's own parts, or DTensors as
    `shard_inputs` makes them; only these may have another batch than the planned one. In evaluation (`eval()`)
    dropout does nothing; without gradients (`torch.no_grad()`) nothing is kept.

    Its submodules hold parameters and buffers and are never called: forward is one program. To `torch.compile` that
    is one opaque call; `apply(compile=True)` compiles what is inside.
    """

    def __init__(self, step: Step, training: bool) -> None:
        super().__init__()
        self.train(training)
        self._step = step

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a parallel model holds process groups, which cannot be pickled",
            at="ParallelModule",
            do="save its state_dict() with torch.distributed.checkpoint, and apply the plan again where it is loaded",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with tensors of its own, such as for averaged weights."""
        made = ParallelModule.__new__(ParallelModule)
        memo[id(self)] = made
        made.__dict__.update(deepcopy(self.__dict__, memo))
        return made

    def __getattr__(self, name: str) -> Any:
        if name == "_ddp_params_and_buffers_to_ignore":  # what DistributedDataParallel asks a module first
            raise UsageError(
                "DistributedDataParallel around a parallel model: its plan reduces gradients itself",
                at="DistributedDataParallel",
                do="call the parallel model; for another batch axis plan with a larger mesh",
            )
        return super().__getattr__(name)

    @torch.compiler.disable(reason="a parallel model is one program; plan.apply(model, compile=True) compiles it")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's results, tensors as DTensors.

        Raises:
            UsageError: arguments that were not planned for, or parameters that were cast or replaced; the message says
                which.
            ApplyError: another rank was lost, or has other data where it must have the same.
        """
        if torch.compiler.is_exporting():
            do = "export the model itself; the plan's graphs run under torchrun alone"
            raise UsageError("a parallel model is not exported", at="torch.export", do=do)
        return self._step(self, args, kwargs)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether the next backward reduces gradients (FSDP2's name for it).

        While it is off, gradients add up unreduced, apart: no parameter's `grad` changes. The first backward with it
        on again reduces the sum, once, and adds it to `grad`. As in FSDP2 `optimizer.zero_grad()` does not know of
        the sum; `zero_grad()` of this module drops it.
        """
        self._step.runner.accumulated.is_last = bool(requires_gradient_sync)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """No reduction of gradients inside (DistributedDataParallel's name for it)."""
        was = self._step.runner.accumulated.is_last
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(was)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients, those that wait for their reduction too."""
        super().zero_grad(set_to_none)
        self._step.runner.accumulated.clear()

    def shard_inputs(self, batch: Any) -> Any:
        """A global batch, the same on every rank, as DTensors of which each rank holds its part.

        Args:
            batch: one argument, a tuple or list of them, or a mapping of keyword arguments; of any size that the
                plan's layouts divide.
        """
        return self._step.inputs.sharded(batch)

    def extra_repr(self) -> str:
        """The mesh, and a line for each tensor of its own."""
        return "\n".join(filter(None, (f"mesh {self._step.inputs.mesh}", tensor_lines(self))))

    @property
    def device_mesh(self) -> Any:
        """torch's mesh that the parameters lie on."""
        return self._step.device_mesh


class Step:
    """One call of a `ParallelModule`: everything but its tensors.

    Args:
        runner: of the planned inputs.
        runner_for: makes one for inputs of other sizes.
        inputs: finds this rank's part of the arguments.
        device_mesh: torch's, with the plan's axes.
        device: of parameters and inputs.
        seed: of dropout; every call draws from it.
        same_inputs: whether and how ranks compare what they must have alike.
        in_range: what indices among the inputs may be.
    """

    def __init__(
        self,
        runner: Runner,
        runner_for: RunnerFor,
        inputs: LocalInputs,
        device_mesh: Any,
        device: torch.device,
        seed: int,
        same_inputs: SameInputs,
        in_range: InRange,
    ) -> None:
        self.runner, self.runner_for, self.inputs = runner, runner_for, inputs
        self.device_mesh, self.device = device_mesh, device
        self.same_inputs, self.in_range = same_inputs, in_range
        self.seeds = torch.Generator().manual_seed(seed)
        self.runners: dict[Any, Runner] = {}
        layouts, given = runner.written.program.layouts, runner.calls[True].given
        self.held = {
            kind: {
                name: (given(key.variable, layouts[key]), layouts[key])
                for name, key in runner.keys.get(kind, {}).items()
            }
            for kind in ("parameter", "buffer")
        }

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse_autocast(self.device)
        leaves = self.inputs.leaves(args, kwargs)
        self.in_range.check(leaves)
        parameters, buffers = (self._held(module, kind) for kind in ("parameter", "buffer"))
        runner = self._runner(args, kwargs, leaves)
        seed = torch.randint(2**63 - 1, (), dtype=torch.int64, generator=self.seeds).to(self.device)
        inputs = {name: self._input(runner, name, leaves[name]) for name in runner.keys.get("input", {})}
        self.same_inputs.check(runner, inputs, self.inputs.layouts)
        watched: dict[str, Tensor] = {}
        if torch.is_grad_enabled():
            watched = {**dict(module.named_parameters()), **{name: leaves[name] for name in inputs}}
        call = Call(inputs, buffers, seed, module.training, watched)
        results = runner.call(call, [parameters[name] for name in runner.parameter_names])
        for name, value in call.new_buffers.items():
            self._renew(module, name, value)
        return self._returned(runner, results)

    def _held(self, module: nn.Module, kind: str) -> dict[str, Tensor]:
        """This rank's parts of all parameters, or buffers, by name."""
        return {
            name: rank_part(module, kind, name, spec, layout, self.device)
            for name, (spec, layout) in self.held[kind].items()
        }

    def _renew(self, module: nn.Module, name: str, value: Tensor) -> None:
        """A buffer's new value; the old tensor stays as it is for a backward that is still to come."""
        owner, _, last = name.rpartition(".")
        holder = module.get_submodule(owner)
        old = holder.get_buffer(last)
        if isinstance(old, DTensor):
            shape, stride = old.shape, old.stride()
            value = DTensor.from_local(
                value, self.device_mesh, old.placements, run_check=False, shape=shape, stride=stride
            )
        setattr(holder, last, value.detach())

    def _runner(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Mapping[str, Any]) -> Runner:
        """The planned runner, or one for the global shapes of the DTensors among the arguments."""
        changed = tuple(sorted(self.inputs.changed(leaves).items()))
        if not changed:
            return self.runner
        if changed not in self.runners:
            self.runners[changed] = self.runner_for(*pytree.tree_map_only(Tensor, _meta_like, (args, kwargs)))
        return self.runners[changed]

    def _input(self, runner: Runner, name: str, value: Tensor) -> Tensor:
        key = runner.keys["input"][name]
        spec = runner.space.graph.nodes[key.variable].outputs[0]
        local = runner.calls[True].given(key.variable, runner.written.program.layouts[key])
        return self.inputs.local(name, value, spec, local, self.device)

    def _returned(self, runner: Runner, results: Sequence[Tensor]) -> Any:
        """The results as forward returns them."""
        graph: Graph = runner.space.graph
        left = iter(zip(runner.outputs, results, strict=True))
        found = {}
        for i, output in enumerate(graph.outputs):
            if output.kind == "output":
                key, value = next(left)
                layout = runner.written.program.layouts[key]
                found[i] = self._dtensor(runner, output.ref, layout, value)
        return pytree.tree_map_only(Result, lambda x: found[x.index], graph.returns)

    def _dtensor(self, runner: Runner, ref: Ref, layout: Layout, value: Tensor) -> Tensor:
        spec = runner.space.graph.spec(ref)
        return as_dtensor(value, self.device_mesh, layout, runner.space.factors[ref], spec.shape, spec.stride)

    def placed(self, part: Tensor, place: Place, whole: Tensor) -> Tensor:
        """A parameter or buffer of which `part` is the rank's: a DTensor, but a buffer that is whole everywhere."""
        is_parameter = isinstance(whole, nn.Parameter)
        if not is_parameter and all(p == R for p in place.layout):
            return part
        made = as_dtensor(part, self.device_mesh, place.layout, place.factors, whole.shape, whole.stride())
        return nn.Parameter(made, requires_grad=whole.requires_grad) if is_parameter else made


def _refuse_autocast(device: torch.device) -> None:
    """The ops of a plan have their dtypes; autocast would change those of some."""
    if torch.is_autocast_enabled(device.type):
        raise UsageError(
            "autocast is on, and the plan says in which dtype each op runs",
            at="ParallelModule.forward",
            do="call it outside of autocast; for float32 masters plan with mixed_precision=MixedPrecisionPolicy(...)",
        )


def _meta_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")
