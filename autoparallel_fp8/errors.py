"""The errors of the library: one base, one child a stage.

    AutoParallelError
    |- UsageError      an argument of the public API or the command line is wrong
    |- CaptureError    the model could not be turned into a graph
    |- RuleError       an op has no usable rule, or a rule contradicts its op
    |- CostError       the device or mesh lacks a figure that a cost needs
    |- ProblemError    the planning problem is malformed
    |- InfeasibleError nothing satisfies all constraints together
    |- SolveError      the solver failed or found nothing in its time
    |- PlanError       a plan file or a placement in it is wrong
    `- ApplyError      executing a plan failed

Every error carries three parts: what was wrong, where (`at`), and what to do (`do`).
"""

from __future__ import annotations

from typing import Any


class AutoParallelError(Exception):
    """Base of every error that a user's input can cause; prints as a short paragraph.

    Args:
        message: what was wrong, one sentence without a full stop.
        at: where: a parameter, an op, a file, a mesh.
        do: what to do about it.
    """

    def __init__(self, message: str, *, at: str | None = None, do: str | None = None) -> None:
        super().__init__(message, at, do)
        self.message, self.at, self.do = message, at, do

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.message, self.at, self.do)

    def __str__(self) -> str:
        lines = [self.message]
        if self.at:
            lines.append(f"  at: {self.at}")
        if self.do:
            lines.append(f"  do: {self.do}")
        return "\n".join(lines)


def _again(kind: type[AutoParallelError], message: str, at: str | None, do: str | None) -> AutoParallelError:
    """The error as it was, on the other side of a pickle."""
    return kind(message, at=at, do=do)


class UsageError(AutoParallelError, ValueError):
    """An argument of the public API or of the command line is wrong."""


class CaptureError(AutoParallelError):
    """The model could not be turned into a graph."""


class RuleError(AutoParallelError):
    """An op has no usable rule, or a rule contradicts its op."""


class CostError(AutoParallelError):
    """The device or the mesh lacks a figure that a cost needs."""


class ProblemError(AutoParallelError):
    """The planning problem is malformed; a mistake of ours or of a problem file."""


class InfeasibleError(AutoParallelError):
    """Nothing satisfies all constraints together; the message names the constraints."""


class SolveError(AutoParallelError):
    """The solver failed, or found nothing in its time."""


class PlanError(AutoParallelError):
    """A plan file, or a placement in it, is wrong."""


class ApplyError(AutoParallelError):
    """Executing a plan failed."""
