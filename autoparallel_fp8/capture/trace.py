"""From a model and example inputs to a `Graph`: one joint forward and backward graph of global aten ops.

    meta copy -> recipe -> dynamo (functional capture) -> attention and cross-entropy replaced
              -> joint aten graph (AOTAutograd) -> plain `Graph` -> mixed precision -> simplify

The model is only read and needs no memory: a copy on the meta device is converted and traced, and of inputs nothing but
shape, stride and dtype is used. Private torch names stand in this file alone, each with its reason; all exist in torch
2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree  # what dynamo flattens arguments and results with; no public name in 2.11

from autoparallel_fp8.capture import decompose
from autoparallel_fp8.capture.arguments import argument_names, bound, check_token_ids, leaf_names
from autoparallel_fp8.capture.dropout import seed_as_source
from autoparallel_fp8.capture.from_fx import graph_from_fx, spec_of
from autoparallel_fp8.capture.lengthen import lengthen
from autoparallel_fp8.capture.meta_copy import aliases_of, meta_copy, meta_like, put_tensors
from autoparallel_fp8.capture.precision import apply_mixed_precision, model_in_param_dtype
from autoparallel_fp8.capture.replace import inner_attention, replace_calls
from autoparallel_fp8.capture.shorten import Stack, as_in_whole, cut, shorten
from autoparallel_fp8.capture.simplify import simplify
from autoparallel_fp8.capture.slots import SlotReader
from autoparallel_fp8.capture.trace_errors import traced_model
from autoparallel_fp8.errors import CaptureError, UsageError
from autoparallel_fp8.graph import Graph, Result
from autoparallel_fp8.integrations import hugging_face
from autoparallel_fp8.integrations.attention_dropout import attention_dropout_cure, build_notes
from autoparallel_fp8.quiet import quiet
from autoparallel_fp8.recipes import check_dtypes, convert


def capture(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    recipe: str | None = None,
    loss: str | None = "auto",
    mixed_precision: Any = None,
    share_blocks: bool = True,
) -> Graph:
    """The joint graph of model(*inputs, **kwargs), simplified.

    >>> graph = capture(torch.nn.Linear(8, 4, bias=False), (torch.empty(2, 8),))
    >>> [node.op_name for node in graph.nodes if node.kind == "op"]
    ['aten.t.default', 'aten.mm.default', 'aten.t.default', 'aten.mm.default']

    Args:
        model: any module; only read, may live on the meta device.
        inputs: global example inputs, real or meta; None and plain values pass as they are. For a Hugging Face causal
            language model token ids [batch, seq], and labels of the same shape or none (then made up).
        kwargs: keyword arguments of forward.
        recipe: float8 recipe to convert linears with, see `recipes.convert`; None plans the model as it is.
        loss: "auto" puts cross-entropy into the graph of a Hugging Face causal language model; None leaves it out.
        mixed_precision: torch's MixedPrecisionPolicy; parameters stay masters and are cast in the graph.
        share_blocks: trace six blocks of a stack of equal ones; the graph is the same either way.

    Raises:
        CaptureError: the model cannot be traced; says where and why.
        UsageError: arguments do not fit the model or the recipe.
    """
    with quiet(), torch.enable_grad():
        call = _bind(model, tuple(inputs), dict(kwargs or {}), loss)
        notes = build_notes(model) + hugging_face.loss_notes(model, call.names)
        copied, skipped = convert(meta_copy(model), recipe)
        masters = {name: spec_of(parameter) for name, parameter in copied.named_parameters()}
        if mixed_precision is not None:
            model_in_param_dtype(copied, mixed_precision.param_dtype)
        check_dtypes(copied)
        _prepare_hugging_face(copied, call)

        def finished(graph: Graph) -> Graph:
            graph = replace(graph, skipped=skipped, notes=notes)
            if mixed_precision is not None:
                graph = apply_mixed_precision(graph, masters, mixed_precision)
            return simplify(graph)

        stack = _repeated(copied, call, mixed_precision) if share_blocks else None
        with cut(copied, stack):
            trace = _Trace(copied, call, mixed_precision)
            notes += _checkpoint_notes(trace.captured)
            graph = trace.joint()
        if stack is None:
            return finished(graph)
        shared = lengthen(finished(as_in_whole(graph, stack)), stack)
        return shared or finished(_Trace(copied, call, mixed_precision).joint())


def _repeated(model: nn.Module, call: _Call, policy: Any) -> Stack | None:
    """A deep stack of equal blocks; None without one, or where a tensor in a block goes by two names."""
    if any(name != first for name, first in aliases_of(model).items() if re.search(r"\.\d+\.", name)):
        return None
    root, _ = _root(model, call, policy)
    tensors = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    return shorten(model, lambda: root(*call.args, **call.kwargs), tensors)


@dataclass(frozen=True)
class _Call:
    """A call of the traced module: meta arguments, a name for each leaf of theirs and for the result."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    result: str
    is_causal_lm: bool


class _Mixed(nn.Module):
    """The model with floating inputs and results cast as a mixed precision policy says."""

    def __init__(self, model: nn.Module, policy: Any) -> None:
        super().__init__()
        self.model = model
        self.input_dtype = policy.param_dtype if getattr(policy, "cast_forward_inputs", True) else None
        self.output_dtype = policy.output_dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast_floats((args, kwargs), self.input_dtype)
        return _cast_floats(self.model(*args, **kwargs), self.output_dtype)


def _cast_floats(values: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return values
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)


def _bind(model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], loss: str | None) -> _Call:
    """The call on meta tensors, after a check of the arguments against forward's signature."""
    if loss not in ("auto", None):
        raise UsageError(f"loss is {loss!r}", at="loss", do='pass "auto" or None')
    inputs, kwargs = bound(model, inputs, kwargs, loss)
    args, kwargs = pytree.tree_map_only(Tensor, meta_like, (inputs, kwargs))
    names = argument_names(model, args, kwargs)
    is_lm = hugging_face.is_causal_lm(model)
    if is_lm:
        check_token_ids(args, kwargs)
    has_loss = is_lm and any(name == "labels" for name in names)
    return _Call(args, kwargs, names, "loss" if has_loss else "logits" if is_lm else "output", is_lm)


def _prepare_hugging_face(model: nn.Module, call: _Call) -> None:
    """Switches a copied transformers model to attention without a mask, unless the user passes one."""
    leaves = dict(zip(call.names, pytree.tree_leaves((call.args, call.kwargs)), strict=True))
    lengths = [x.shape[1] for x in leaves.values() if isinstance(x, Tensor) and x.ndim == 2]
    hugging_face.without_cache(model)
    if leaves.get("attention_mask") is None:
        hugging_face.use_planned_attention(model, max(lengths, default=0))


class _Trace:
    """Dynamo's graph of the prepared copy, taken once, and joint graphs traced from it."""

    def __init__(self, model: nn.Module, call: _Call, policy: Any) -> None:
        # Functional capture: a dynamo graph without breaks that keeps the module's parameters (2.11 to 2.14).
        from torch._dynamo.functional_export import dynamo_graph_capture_for_export

        # Tensors without data that claim a device. On the meta device itself autograd is wrong: composite ops that have
        # a meta kernel lose their gradient (where with a scalar, nll_loss; torch 2.13).
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.model, self.call = model, call
        self.root, self.prefix = _root(model, call, policy)
        self.module_of = _module_finder(model)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            put_tensors(model, _on_cpu)
            self.args, self.kwargs = pytree.tree_map_only(Tensor, _on_cpu, (call.args, call.kwargs))
        try:
            with traced_model(model, self.module_of), _static_shapes():
                self.captured = dynamo_graph_capture_for_export(self.root)(*self.args, **self.kwargs)
        except CaptureError as error:
            # where no tensor comes out, dynamo ends in an assertion of its own or writes code that does not parse
            if isinstance(error.__cause__, (AssertionError, SyntaxError)):
                with fake, traced_model(model, self.module_of):
                    _check_returned(self.root(*self.args, **self.kwargs), model)
            raise
        self.dropout_cure = attention_dropout_cure(model)
        replace_calls(self.captured, self.module_of, self.dropout_cure)

    def joint(self) -> Graph:
        """The plain joint graph of dynamo's graph as it stands."""
        # The joint forward and backward graph, each input and output described (2.11 to 2.14).
        from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

        attention = inner_attention(self.dropout_cure)
        with traced_model(self.model, self.module_of), attention, contextlib.ExitStack() as stack:
            joint = aot_export_joint_with_descriptors(
                stack, self.captured, self.args, self.kwargs, decompositions=_decompositions()
            )
        return _plain_graph(joint, self.model, self.call, self.prefix, self.module_of)


def _checkpoint_notes(root: fx.GraphModule) -> tuple[str, ...]:
    """What is said of `torch.utils.checkpoint` in the model, through a wrapper or by itself."""
    graphs = [module.graph for module in root.modules() if isinstance(module, fx.GraphModule)]
    if any(str(node.target) == "tag_activation_checkpoint" for graph in graphs for node in graph.nodes):
        return ("activation checkpointing in the model is left out: recompute= says what backward makes again",)
    return ()


def _check_returned(returned: Any, model: nn.Module) -> None:
    if not any(isinstance(leaf, (Tensor, fx.Node)) for leaf in pytree.tree_leaves(returned)):
        raise CaptureError(
            f"forward returns no tensor, but {'None' if returned is None else 'a ' + type(returned).__name__}",
            at=f"{type(model).__name__}.forward",
            do="return the tensors that the step computes, such as the loss",
        )


def _on_cpu(tensor: Tensor) -> Tensor:
    """The same tensor on the CPU, as the fake tensor mode around the call makes it."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def _root(model: nn.Module, call: _Call, policy: Any) -> tuple[nn.Module, str]:
    """What is traced, and the prefix it puts before the model's own fqns."""
    if call.is_causal_lm:
        return hugging_face.CausalLM(model, None if policy is None else policy.output_dtype), "model."
    return (model, "") if policy is None else (_Mixed(model, policy), "model.")


def _static_shapes() -> Any:
    # Another capture of the same code with other shapes must not turn sizes into symbols (2.11 to 2.14).
    return torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, assume_static_by_default=True, specialize_int=True, specialize_float=True
    )


def _decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import get_decompositions  # torch's own table, the one Inductor uses; no public name

    return {**get_decompositions(decompose.FROM_TORCH), **decompose.OWN}


def _plain_graph(joint: Any, model: nn.Module, call: _Call, prefix: str, module_of: Callable[[fx.Node], str]) -> Graph:
    """The joint graph with descriptors read into slots."""
    kept = aliases_of(model)
    traced = joint.graph_module.graph
    (end,) = (node for node in traced.nodes if node.op == "output")
    result_names = _result_names(joint.out_spec, call.result)
    slot = SlotReader(kept, prefix, call.names, result_names)
    placeholders = {node: slot.of_input(node) for node in traced.nodes if node.op == "placeholder"}
    values = list(zip(end.args[0], end.meta["desc"], strict=True))
    slots = [(value, slot.of_output(value, described)) for value, described in values]
    order = {"output": 0, "gradient": 1, "buffer": 2}
    slots.sort(key=lambda item: order[item[1].kind] if item[1] else 3)
    graph = seed_as_source(graph_from_fx(traced, placeholders, slots, module_of))
    aliases = tuple((name, first) for name, first in kept.items() if name != first)
    leaves = {described.idx: value for value, described in values if type(described).__name__ == "PlainAOTOutput"}
    found = {output.target: Result(i) for i, output in enumerate(graph.outputs) if output.kind == "output"}
    returns = [found.get(name, leaves.get(i)) for i, name in enumerate(result_names)]
    return replace(graph, aliases=aliases, returns=pytree.tree_unflatten(returns, joint.out_spec))


def _result_names(spec: Any, name: str) -> list[str]:
    if spec.is_leaf():
        return [name]
    paths = leaf_names("", pytree.tree_unflatten(range(spec.num_leaves), spec))
    return [path.removeprefix(".") for path in paths]


def _module_finder(model: nn.Module) -> Callable[[fx.Node], str]:
    """Finds the fqn of the module whose code made a node; dynamo keys a node's module stack by id(module)."""
    fqns = {str(id(module)): name for name, module in model.named_modules()}

    def module_of(node: fx.Node) -> str:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        known = [fqns[key] for key in (key.split("@")[0] for key in stack) if key in fqns]
        return known[-1] if known else ""

    return module_of
