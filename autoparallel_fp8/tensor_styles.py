"""Tensor and sequence parallelism of a plan as torch's parallel styles: one axis, one style (or two) a module.

The axis is the one whose weights stay split in their GEMM (columns: the result stays split; rows: the result is a
sum) more than they are gathered before it. Columns up to the rows that take them make a block inside which activations
are plain local tensors: heads, or hidden features. A column or row outside such a block gathers or cuts for itself.

With sequence parallelism, activations between blocks are DTensors, split as the plan's norms are: their shapes are the
global ones, which a model asks for (positions, masks), and where two layouts meet, DTensor redistributes. A norm hands
its result to columns gathered once. This is said with the norm's output and not the block's input, as a plan knows
values and not whether a block is called by position or by keyword.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from .plan import Plan
from .plan_reading import Reading, Used, layer_of, size_of

LOCAL_INPUT = "PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True)"


@dataclass(frozen=True)
class TensorStyles:
    """What `parallelize_module` is given.

    Attributes:
        axis: of the mesh; None where the plan has no tensor parallelism that this form takes.
        sequence_dim: of activations between blocks, that the axis splits; None where they are whole.
        styles: module -> constructors of its styles, in the order in which they are applied.
        dims: parameter -> its dim that the axis splits.
        notes: what the styles do not do as the plan does.
        is_vocabulary_split: the logits stay split, and the loss has to take them so.
    """

    axis: str | None = None
    sequence_dim: int | None = None
    styles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, list[str]] = field(default_factory=dict)
    is_vocabulary_split: bool = False


def tensor_styles(plan: Plan, reading: Reading) -> TensorStyles:
    """The styles of every module of the plan."""
    axis = _axis(plan, reading)
    if axis is None:
        return TensorStyles(notes=_lost(plan, reading, {}, None))
    return _Styles(plan, reading, axis).made()


def stays_split(plan: Plan, reading: Reading, used: Used, axis: int) -> bool:
    """Whether a weight is stored as its GEMM or lookup takes it: split, and not gathered over the axis."""
    if used.weight is None or used.kind == "norm":
        return False
    stored, as_used = reading.stored(plan, used.weight)[axis], used.as_used[axis]
    return stored is not None and stored == as_used


def _axis(plan: Plan, reading: Reading) -> str | None:
    """The axis over which most elements of weights stay split, where these are more than the ones gathered over it.

    Layers decide, where there are any: embedding and head are one of each.
    """
    weights = [used for used in reading.modules.values() if used.weight is not None and used.kind != "norm"]
    in_layers = [used for used in weights if used.weight is not None and layer_of(used.weight)]
    best: tuple[int, str] | None = None
    for position, name in enumerate(reading.axes):
        split = Counter({True: 0, False: 0})
        for used in in_layers or weights:
            assert used.weight is not None, "tied weights are left out"
            if reading.stored(plan, used.weight)[position] is not None:
                is_kept = used.kind != "conv1d" and stays_split(plan, reading, used, position)
                split[is_kept] += size_of(plan, used.weight)
        if split[True] > split[False] and (best is None or split[True] > best[0]):
            best = (split[True], name)
    return best[1] if best else None


class _Styles:
    """The styles over one axis, while they are made."""

    def __init__(self, plan: Plan, reading: Reading, axis: str) -> None:
        self.plan, self.reading, self.axis = plan, reading, axis
        self.at = reading.axes.index(axis)
        self.notes: dict[str, list[str]] = {}
        self.is_tied = any(used.weight is None for used in reading.modules.values() if used.kind == "linear")
        self.kinds = {module: kind for module, used in reading.modules.items() if (kind := self._kind(used))}
        self.blocks = dict(self._blocks())
        self.inner = {norm for norm in self._of("norm") if any(self._within(norm, b) for b in self.blocks.items())}
        self.sequence_dim = self._sequence_dim()

    def made(self) -> TensorStyles:
        styles = {module: made for module in self.reading.modules if (made := tuple(self._styles(module)))}
        dims: dict[str, int] = {}
        for module, kind in self.kinds.items():
            is_lookup = self.reading.modules[module].kind == "embedding"
            dims[f"{module}.weight"] = int((kind == "column") == is_lookup)
            if kind == "column" and f"{module}.bias" in self.plan.parameters:
                dims[f"{module}.bias"] = 0
        self._note_activations()
        notes = {**self.notes, **_lost(self.plan, self.reading, self.kinds, self.axis)}
        is_vocabulary_split = any(self._keeps_vocabulary(module) for module in self.kinds)
        return TensorStyles(self.axis, self.sequence_dim, styles, dims, notes, is_vocabulary_split)

    def _of(self, *kinds: str) -> list[str]:
        """Modules of these kinds, as they run."""
        found = [module for module, used in self.reading.modules.items() if used.kind in kinds]
        return sorted(found, key=lambda module: self.reading.modules[module].at)

    def _kind(self, used: Used) -> str:
        """ "column" or "row" for a weight that stays split over the axis, "" otherwise."""
        if used.kind == "conv1d" or not stays_split(self.plan, self.reading, used, self.at):
            return ""
        split = used.as_used[self.at]
        assert split is not None, "it stays split"
        if used.kind == "embedding":
            return "" if self.is_tied else ("row", "column")[split.dim]
        return ("column", "row")[split.dim]

    # ---- blocks ----

    def _blocks(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Rows, each with the columns whose results it takes as they are: all linears since the last block are."""
        columns: list[str] = []
        is_whole, layer = False, None
        for module in self._of("linear", "conv1d"):
            if layer_of(module) != layer:
                columns, is_whole, layer = [], False, layer_of(module)
            kind = self.kinds.get(module)
            if kind == "row":
                if columns and not is_whole and self._passes_split(columns[0], module):
                    yield module, tuple(columns)
                columns, is_whole = [], False
            elif self._closes(module):
                columns, is_whole = [], False
            elif kind == "column":
                columns.append(module)
            else:
                is_whole = True

    def _passes_split(self, first: str, row: str) -> bool:
        """Whether all between is split as the columns' results: heads in attention, norms of heads."""
        begin, end = self.reading.modules[first].first, self.reading.modules[row].at
        for module, node in self.reading.forward[begin:end]:
            used = self.reading.modules.get(module)
            if "attention" in node.op.split(".")[1] and not all(self._is_over_heads(text) for text in node.inputs[:3]):
                return False
            if used is not None and (used.kind == "embedding" or (used.kind == "norm" and not used.makes[self.at])):
                return False
            if any(name.rpartition(".")[0] == module for name in self.reading.others):
                return False
        return True

    def _is_over_heads(self, layout: str) -> bool:
        return layout.split(", ")[self.at] == "S(1)"

    def _within(self, norm: str, block: tuple[str, tuple[str, ...]]) -> bool:
        row, columns = block
        modules = self.reading.modules
        return modules[columns[0]].first < modules[norm].first < modules[row].at

    # ---- activations between blocks ----

    def _between(self) -> list[str]:
        return [norm for norm in self._of("norm") if norm not in self.inner]

    def _split_of(self, norm: str) -> int | None:
        """The dim of a norm's result that the axis splits, other than features and parts of a dim."""
        used = self.reading.modules[norm]
        split = used.makes[self.at]
        return split.dim if split and not split.factor and split.dim < used.num_dims - 1 else None

    def _sequence_dim(self) -> int | None:
        found = Counter(self._split_of(norm) for norm in self._between())
        for dim, count in found.items():
            if dim is None or 2 * count <= sum(found.values()):
                continue
            reason = self._why_whole()
            if not reason:
                return dim
            self._note(f"activations between blocks split over {self.axis}", f"whole here, as {reason}")
        return None

    def _why_whole(self) -> str:
        """What keeps activations between blocks from being DTensors; "" where nothing does."""
        if self.reading.others:
            return f"{self.reading.others[0]} is of no linear, norm or embedding, which have a style"
        dims = {self.reading.modules[norm].num_dims for norm in self._between()}
        tables = [module for module in self._of("embedding") if not layer_of(module)]
        if any(self.reading.modules[table].num_dims not in dims for table in tables):
            return "an embedding has fewer dims than what it is added to"
        order = self._of("linear", "conv1d", "norm", "embedding")
        for before, module in pairwise(order):
            if before in tables and self.reading.modules[module].kind != "norm" and module not in self.kinds:
                return f"{module} takes an embedding without a norm between"
        return ""

    def _closes(self, module: str) -> bool:
        """Whether a result joins the activations between blocks: what reads it adds it to another, or is their norm."""
        weight = self.reading.modules[module].weight
        if weight is None or not layer_of(module):
            return False
        width = self.plan.parameters[weight].shape[0 if self.reading.modules[module].kind == "linear" else 1]
        for other, node in self.reading.forward[self.reading.modules[module].last + 1 :]:
            used = self.reading.modules.get(other)
            if used is not None:  # a norm of heads is narrower
                gain = self.plan.parameters.get(used.weight or "")
                return used.kind == "norm" and gain is not None and gain.shape == (width,)
            if len(node.inputs) > 1 and "dropout" not in node.op:
                return node.op.startswith("aten.add.")
        return False

    def _next(self, module: str) -> str | None:
        order = self._of("linear", "conv1d", "norm", "embedding")
        place = order.index(module) + 1
        return order[place] if place < len(order) else None

    def _is_linear(self, module: str | None) -> bool:
        return module is not None and self.reading.modules[module].kind in ("linear", "conv1d")

    def _is_fed_by_norm(self, module: str) -> bool:
        """Whether a linear comes after a norm between blocks, other linears that read the same apart."""
        order = self._of("linear", "conv1d", "norm", "embedding")
        for before in reversed(order[: order.index(module)]):
            if before in self.inner or self._is_linear(before):
                if self._closes(before):
                    return False
                continue
            return self.reading.modules[before].kind == "norm"
        return False

    # ---- styles ----

    def _styles(self, module: str) -> Iterator[str]:
        used, kind, dim = self.reading.modules[module], self.kinds.get(module), self.sequence_dim
        if used.kind == "norm":
            yield from self._norm(module, used)
        elif used.kind == "embedding" and not layer_of(module):
            out = f"Shard({dim})" if dim is not None else "Replicate()"
            local = "" if dim is None else ", use_local_output=False"
            if kind == "row":
                yield f"RowwiseParallel(input_layouts=Replicate(), output_layouts={out}{local})"
            elif kind == "column":
                yield f"ColwiseParallel(output_layouts={out}{local})"
            elif dim is not None:
                yield f"PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts={out}{local})"
        elif kind:
            yield self._linear(module, kind)
        elif used.kind in ("linear", "conv1d") and dim is not None:
            if self._is_fed_by_norm(module):
                yield LOCAL_INPUT
            if self._closes(module):
                yield (
                    f"PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard({dim}), "
                    "use_local_output=False)"
                )

    def _norm(self, module: str, used: Used) -> Iterator[str]:
        if module in self.inner:
            split = used.makes[self.at]
            assert split is not None, "a block passes its split"
            yield f"SequenceParallel(sequence_dim={split.dim}, use_local_output=True)"
        elif self.sequence_dim is not None:
            dim = self.sequence_dim
            yield "SequenceParallel()" if dim == 1 else f"SequenceParallel(sequence_dim={dim})"
            if self._is_linear(self._next(module)):
                yield (
                    f"PrepareModuleOutput(output_layouts=Shard({dim}), desired_output_layouts=Replicate(), "
                    "use_local_output=False)"
                )

    def _linear(self, module: str, kind: str) -> str:
        joins = self.sequence_dim is not None and self._closes(module)
        out = f"output_layouts=Shard({self.sequence_dim}), use_local_output=False" if joins else ""
        if kind == "row":
            cut = "" if module in self.blocks else "input_layouts=Replicate()"
            return f"RowwiseParallel({', '.join(filter(None, (cut, out)))})"
        if any(module in columns for columns in self.blocks.values()):
            return "ColwiseParallel()"
        if self._keeps_vocabulary(module):
            return "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)"
        return f"ColwiseParallel({out or 'output_layouts=Replicate()'})"

    def _keeps_vocabulary(self, module: str) -> bool:
        """Whether a head's logits go into the loss split by vocabulary."""
        if self.kinds.get(module) != "column" or layer_of(module) or self.reading.modules[module].kind != "linear":
            return False
        after = self.reading.forward[self.reading.modules[module].last + 1 :]
        if not after or not after[0][1].output or not after[0][1].local_shapes:
            return False
        node = after[0][1]
        return node.output[0].split(", ")[self.at] == f"S({len(node.local_shapes[0]) - 1})"

    # ---- notes ----

    def _note(self, sentence: str, name: str) -> None:
        self.notes.setdefault(sentence, []).append(name)

    def _note_activations(self) -> None:
        """Where activations are split over the axis otherwise than here."""
        axis, dim = self.axis, self.sequence_dim
        inside = {column for columns in self.blocks.values() for column in columns} | set(self.blocks)
        for module in self._between():
            found = self._split_of(module)
            if found != dim:
                here = "whole" if dim is None else f"split on dim {dim}"
                there = "whole" if found is None else f"split on dim {found}"
                self._note(f"activations {there} over {axis} in the plan, {here} here", module)
        for module, kind in self.kinds.items():
            used = self.reading.modules[module]
            if used.kind == "linear" and module not in inside and not self._keeps_vocabulary(module):
                what = (
                    "its result is gathered right after it" if kind == "column" else "its input is cut right before it"
                )
                self._note(f"split over {axis} outside a block that is split throughout: {what}", module)
        for module in self._of("linear"):
            if module not in self.kinds and self.reading.modules[module].reads[self.at]:
                self._note(f"runs on a part of its tokens over {axis} in the plan, on all of them here", module)
        if self.is_tied and any(u.kind == "embedding" for u in self.reading.modules.values()):
            tied = [m for m, u in self.reading.modules.items() if u.weight is None]
            self._note(f"shares its weight with an embedding: neither is split over {axis} here", ", ".join(tied))


def _lost(plan: Plan, reading: Reading, kinds: Mapping[str, str], axis: str | None) -> dict[str, list[str]]:
    """Weights that stay split in their GEMM over an axis in the plan and are gathered over it here."""
    notes: dict[str, list[str]] = {}
    for module, used in reading.modules.items():
        for position, name in enumerate(reading.axes):
            if not stays_split(plan, reading, used, position) or (name == axis and module in kinds):
                continue
            if used.kind == "conv1d":
                reason = "Conv1D has no parallel style"
            elif axis is None:
                reason = f"more weights are gathered over {name} than stay split"
            else:
                reason = "it shares its weight" if name == axis else "one axis at most is tensor parallel here"
            sentence = f"used as it lies, split over {name}, in the plan; gathered over {name} or whole here ({reason})"
            notes.setdefault(sentence, []).append(module)
    return notes
