"""Samples that nobody here wrote: every call of an op with a rule that PyTorch's own op tests make.

Each entry of PyTorch's OpInfo database is run forward and backward, and every overload that is called on the way is
recorded, so that gradients of ops are met too. A recorded call keeps its shapes, memory orders, dtypes, attributes,
indices and truth values. Floating-point values are replaced by small whole numbers, and by powers of two where the op
divides, so that most ops round nothing and are compared bit for bit; `ROUNDED` says which do round.

`torch.testing._internal` is private; torch ships it for the tests of others too (2.11 to 2.13), and only tests use it.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from autoparallel_fp8.rules import find_rule
from split_ops import Sample, map_tensors, tensors_in
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel_fp8.capture.rewrite import is_contiguous
from autoparallel_fp8.graph import TensorSpec
from autoparallel_fp8.shards import laid_out

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16
ENTRIES = tuple(op_db)
DTYPES = (F32, BF16, torch.int64, torch.bool)
MOST_ELEMENTS = 5000
"""Calls on larger tensors are left out: they split like the small ones and take long."""

# Kernels that leave their result as memory was: nothing but its form is held.
UNFILLED = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default)

# Ops whose kernels round, so that the order of additions or vectorised code shows in the last bits.
ROUNDED = (
    aten.exp.default, aten.exp2.default, aten.log.default, aten.log2.default, aten.cos.default, aten.sin.default,
    aten.tanh.default, aten.sigmoid.default, aten.silu.default, aten.gelu.default, aten.erf.default,
    aten.rsqrt.default, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.silu_backward.default,
    aten.gelu_backward.default, aten.sigmoid_backward.default, aten.tanh_backward.default, aten.mean.dim,
    aten.mean.default, aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
)  # fmt: skip
TOLERANCE, LOW_TOLERANCE = 1e-5, 0.02
"""How far results that are rounded may be off; the second where bfloat16 is among the tensors."""

# Sums, which are rounded in bfloat16 where the tensors have more elements than this.
SUMS = (
    aten.sum.default, aten.sum.dim_IntList, aten.mm.default, aten.bmm.default, aten.cumsum.default,
    aten.convolution.default, aten.convolution_backward.default, aten.scatter_add.default,
    aten.embedding_dense_backward.default,
)  # fmt: skip
MANY = 64

# Ops that add, multiply or divide by a number among their attributes; which operand a division divides by.
_SCALARS = (
    aten.mul.Scalar, aten.div.Scalar, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.add.Tensor,
    aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor,
)  # fmt: skip
_DENOMINATOR = {aten.div.Tensor: 1}
_DROPPED = {"device", "layout", "pin_memory", "non_blocking"}  # as capture drops them

# Entries that are not run, and those that take no tensors with gaps in memory.
NOT_RUN = {
    "jiterator_unary": "CUDA only", "jiterator_binary": "CUDA only", "jiterator_2inputs_2outputs": "CUDA only",
    "jiterator_binary_return_by_ref": "CUDA only", "jiterator_4inputs_with_extra_args": "CUDA only",
    "sparse.sampled_addmm": "sparse tensors", "sparse.mm": "sparse tensors", "to_sparse": "sparse tensors",
}  # fmt: skip
NO_GAPS = ("view_as_complex", "as_strided_scatter", "native_group_norm")


@dataclass(frozen=True)
class Recorded:
    """A call as it was recorded, without its floating-point values.

    Attributes:
        op, args, kwargs: the call; integer and boolean tensors as they were, each other one as its `TensorSpec`.
        is_positive: for each tensor read, whether no element was negative.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    is_positive: tuple[bool, ...]

    @property
    def num_elements(self) -> int:
        """Of all tensors read."""
        return sum(math.prod(t.shape) for t in _leaves((self.args, tuple(value for _, value in self.kwargs))))

    @property
    def is_low(self) -> bool:
        """Whether a tensor read is bfloat16, whose sums may round."""
        return any(t.dtype == BF16 for t in _leaves((self.args, tuple(value for _, value in self.kwargs))))

    def sample(self, order: str = "", draw: int = 0) -> Sample:
        """The call on tensors of small whole numbers.

        Args:
            order: "T": the last two dims swapped in memory.
            draw: which numbers, from a wider range with each; above 0 truth values and indices are drawn too.
        """
        signs = iter(self.is_positive)
        numbers = itertools.count()

        def filled(value: Any) -> Any:
            if isinstance(value, (Tensor, TensorSpec)):
                found = _numbers(value, self.op, next(numbers), next(signs), draw)
                return _swapped(found) if order == "T" else found
            if isinstance(value, tuple):
                return tuple(map(filled, value))
            return _power_of_two(value) if self.op in _SCALARS and type(value) in (int, float) else value

        args = filled(self.args)
        kwargs = tuple((name, filled(value)) for name, value in self.kwargs)
        tensors = tensors_in((*args, *(value for _, value in kwargs)))
        is_low = any(t.dtype == BF16 for t in tensors)
        is_long = self.op in SUMS and max(t.numel() for t in tensors) > MANY
        is_rounded = self.op in ROUNDED or (is_low and is_long)
        tolerance = 0.0 if not is_rounded else LOW_TOLERANCE if is_low else TOLERANCE
        return Sample(self.op, args, kwargs, tolerance, tolerance, self.op not in UNFILLED)


def samples_of(call: Recorded) -> Iterator[Sample]:
    """The call; one on row-major float32 tensors also on column-major ones, where the op takes them."""
    yield call.sample()
    leaves = _leaves((call.args, tuple(value for _, value in call.kwargs)))
    specs = [t for t in leaves if isinstance(t, TensorSpec)]
    if any(len(s.shape) > 1 for s in specs) and all(s.dtype == F32 and is_contiguous(s) for s in specs):
        swapped = call.sample("T")
        try:
            swapped.run()
        except RuntimeError:
            return  # a view that would need a copy
        yield swapped


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value] if isinstance(value, (Tensor, TensorSpec)) else []


def _numbers(value: Tensor | TensorSpec, op: Any, number: int, is_positive: bool, draw: int) -> Tensor:
    divides = _DENOMINATOR.get(op) == number
    generator = torch.Generator().manual_seed(math.prod(value.shape) + 7 * len(value.shape) + number + 1000 * draw)
    if isinstance(value, Tensor) and value.dtype == torch.bool and draw:
        drawn = torch.randint(0, 2, value.shape, generator=generator).to(torch.bool)
        return _laid_out(drawn, tuple(value.stride()))
    if isinstance(value, Tensor):
        found = torch.randint(1, 3, value.shape, generator=generator).to(value.dtype) if divides else value
        order = torch.randperm(found.numel(), generator=generator) if draw else slice(None)
        return _laid_out(found.flatten()[order].reshape(value.shape), tuple(value.stride()))
    most = 2 if value.dtype == BF16 else 4 + 3 * draw
    if divides:
        found = 2.0 ** torch.randint(-1, 2, value.shape, generator=generator)
        found = found if is_positive else found * (torch.randint(0, 2, value.shape, generator=generator) * 2 - 1)
    else:
        found = torch.randint(0 if is_positive else -most, most + 1, value.shape, generator=generator).to(F32)
    return _laid_out(found.to(value.dtype), value.stride)


def _laid_out(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    return laid_out(values, stride) if values.numel() else values


def _swapped(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.ndim > 1 else x


def _power_of_two(value: float) -> float:
    """The one next to a number, of its sign and type; 0 stays."""
    if not value or not math.isfinite(value):
        return value
    power = max(-2 if isinstance(value, float) else 0, min(2, round(math.log2(abs(value)))))
    return type(value)(math.copysign(2.0**power, value))


class _Recorder(TorchDispatchMode):
    """Notes every call of an op that has a rule, each form of it once."""

    def __init__(self, found: dict[Any, Recorded]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if find_rule(op) is not None:
            self._note(op, _as_tuples(args), tuple((k, _as_tuples(v)) for k, v in kwargs.items() if k not in _DROPPED))
        return op(*args, **kwargs)

    def _note(self, op: Any, args: Any, kwargs: Any) -> None:
        kwargs = tuple((name, value) for name, value in kwargs if value is not None)
        tensors = tensors_in((*args, *(value for _, value in kwargs)))
        is_masked = op is aten.index.Tensor and any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])
        is_complex = any(isinstance(value, torch.dtype) and value.is_complex for _, value in kwargs)
        if is_masked or is_complex or not all(map(_is_plain, tensors)):
            return  # what a mask picks has a shape that depends on data, which capture refuses; no rule is of complex
        key = (op, *(repr(map_tensors(value, _form)) for value in (args, kwargs)))
        if key not in self.found:
            signs = tuple(not bool((t < 0).any()) for t in tensors)
            self.found[key] = Recorded(op, map_tensors(args, _kept), map_tensors(kwargs, _kept), signs)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value


def _is_plain(tensor: Tensor) -> bool:
    """Strided, real, not large, and no two elements at one place in memory except along dims that repeat."""
    if tensor.layout != torch.strided or tensor.is_complex() or tensor.numel() > MOST_ELEMENTS:
        return False
    reach = 0
    for step, size in sorted((k, n) for k, n in zip(tensor.stride(), tensor.shape, strict=True) if k and n > 1):
        if step <= reach:
            return False
        reach += step * (size - 1)
    return True


def _form(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _kept(tensor: Tensor) -> Any:
    """Whole numbers and truth values may be indices and masks: they stay."""
    if tensor.dtype.is_floating_point:
        return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    return _laid_out(tensor.detach().clone(), tuple(tensor.stride()))


def record(infos: Iterable[Any], dtypes: Iterable[torch.dtype] = DTYPES) -> list[Recorded]:
    """Calls that these entries make of ops with a rule, each form once; samples as they are and with gaps in memory."""
    found: dict[Any, Recorded] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about beta features and ops that will go
        for info in infos:
            for dtype in dtypes:
                if info.name not in NOT_RUN and info.supports_dtype(dtype, "cpu"):
                    _run(info, dtype, _Recorder(found))
    return list(found.values())


def _run(info: Any, dtype: torch.dtype, recorder: _Recorder) -> None:
    has_gradient = dtype in info.supported_backward_dtypes("cpu") and info.supports_autograd
    torch.manual_seed(0)
    for sample in info.sample_inputs("cpu", dtype, requires_grad=has_gradient, set_seed=False):
        _call(info, sample, recorder)
        if info.name not in NO_GAPS:
            _call(info, sample.noncontiguous(), recorder)


def _call(info: Any, sample: Any, recorder: _Recorder) -> None:
    """Forward, and backward from gradients of ones."""
    with recorder:
        made = info.op(sample.input, *sample.args, **sample.kwargs)
    outs = [t for t in (made if isinstance(made, (tuple, list)) else (made,)) if isinstance(t, Tensor)]
    outs = [t for t in outs if t.requires_grad]
    grads = [torch.ones_like(t) for t in outs]
    if outs:
        with recorder:
            torch.autograd.backward(outs, grads)
