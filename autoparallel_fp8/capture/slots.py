"""What the inputs and results of AOTAutograd's joint graph are, read from the descriptors it leaves on them.

Descriptors (of torch._functorch._aot_autograd.descriptors, torch 2.11 to 2.14) are told by class name: "ParamAOTInput"
with a fqn, "PlainAOTInput" with a position, "GradAOTOutput" of an input, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autoparallel_fp8.capture.from_fx import Slot
from autoparallel_fp8.errors import CaptureError


@dataclass(frozen=True)
class SlotReader:
    """Reads descriptors into slots.

    Attributes:
        kept: fqn of a parameter or buffer -> the fqn that has its node.
        prefix: what the traced module puts before the model's fqns.
        input_names: of each leaf of the arguments.
        result_names: of each leaf of what forward returns.
    """

    kept: Mapping[str, str]
    prefix: str
    input_names: Sequence[str]
    result_names: Sequence[str]

    def of_input(self, node: fx.Node) -> Slot | None:
        """What a placeholder is; None for arguments that are no tensors."""
        if not isinstance(node.meta.get("val"), Tensor):
            return None
        return self._slot(node.meta["desc"])

    def of_output(self, value: Any, described: Any) -> Slot | None:
        """What a result is; None for values that are no tensors."""
        kind = type(described).__name__
        if not isinstance(value, fx.Node):
            return None
        if kind == "PlainAOTOutput":
            return Slot("output", self.result_names[described.idx])
        if kind == "GradAOTOutput":
            return Slot("gradient", self._slot(described.grad_of).target)
        if kind == "InputMutationAOTOutput":
            slot = self._slot(described.mutated_input)
            if slot.kind == "buffer":
                return slot
            raise _in_place(slot)
        raise CaptureError(f"forward returns something that is not planned ({kind})", at="forward's results")

    def _slot(self, described: Any) -> Slot:
        kind = type(described).__name__
        if kind in ("ParamAOTInput", "BufferAOTInput"):
            name = described.target.removeprefix(self.prefix)
            return Slot("parameter" if kind == "ParamAOTInput" else "buffer", self.kept.get(name, name))
        if kind == "PlainAOTInput":
            return Slot("input", self.input_names[described.idx])
        if kind == "TangentAOTInput" and type(described.output).__name__ == "PlainAOTOutput":
            return Slot("tangent", self.result_names[described.output.idx])
        if kind == "TangentAOTInput" and hasattr(described.output, "mutated_input"):
            raise _in_place(self._slot(described.output.mutated_input))
        raise CaptureError(f"forward takes something that is not planned ({kind})", at="forward's arguments")


def _in_place(slot: Slot) -> CaptureError:
    cures = {
        "parameter": "compute with a clone of it; updates belong into the optimizer step, outside of forward",
        "buffer": "write detached values into it: what is written here needs a gradient",
    }
    do = cures.get(slot.kind, "change a clone of it")
    return CaptureError(f"forward changes its {slot.kind} in place", at=slot.target, do=do)
