"""What a failed trace says, in one sentence and one place of the user's model.

Tracers raise with pages of advice about themselves. Here the user's own exception or the tracer's first line is picked
out, and the place: fqn of the module, file and line of the innermost frame that is not torch's.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from autoparallel_fp8.errors import AutoParallelError, CaptureError

# What tracing a user's forward may end with; all of dynamo's own errors are RuntimeErrors.
_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    NotImplementedError,
    AssertionError,
    AttributeError,
    LookupError,
    ArithmeticError,
    SyntaxError,  # of the code that tracers write
)
_TORCH = str(Path(torch.__file__).parent)
_DO = "make forward a function of tensors: no branch, shape or number that depends on a tensor's values, no printing"
_DO_RAISED = "forward itself raises this: run the model on real inputs of these shapes and dtypes"


@contextmanager
def traced_model(model: nn.Module, module_of: Callable[[fx.Node], str]) -> Iterator[None]:
    """Turns what a failed trace raises into a CaptureError that says why, and where in the model."""
    try:
        yield
    except (AutoParallelError, *_ERRORS) as error:
        ours = _error_of_ours(error)
        if ours is error and ours.at:
            raise
        if ours is not None:
            place = place_of(error, model, module_of).partition(", ")[0]
            raise type(ours)(ours.message, at=ours.at or place, do=ours.do) from error
        reason, is_raised = reason_of(error)
        raise CaptureError(
            f"the model cannot be traced: {reason}",
            at=place_of(error, model, module_of),
            do=_DO_RAISED if is_raised else _DO,
        ) from error


def _error_of_ours(error: BaseException) -> AutoParallelError | None:
    """What an op or layer of this library raised while it was traced, inside the tracer's own error."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, AutoParallelError):
        inner = inner.__cause__ or inner.__context__
    return inner


def reason_of(error: BaseException) -> tuple[str, bool]:
    """The reason in one line, and whether it is an exception that forward itself raises."""
    text = str(error)
    raised = re.search(r"Developer debug context: raised exception (\w+)\((.*)\)", text)
    if raised:
        return f"{raised[1]}: {_unquoted(raised[2])}", True
    inner = re.search(r"got (\w*(?:Error|Exception))\((.*)\)\s*(?:\n|$)", text)
    if inner:
        return f"{inner[1]}: {_unquoted(inner[2])}", True
    if type(error).__name__ == "DataDependentOutputException":
        return "it reads a number out of a tensor, as `.item()` does", False
    if type(error).__name__ == "DynamicOutputShapeException":
        return f"the shape of {text.split()[0]}'s result depends on data", False
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    explanation = next((line for line in lines if line.startswith("Explanation: ")), "")
    first = lines[0] if lines else type(error).__name__
    return _short(f"{first}. {explanation.removeprefix('Explanation: ')}" if explanation else first), False


def place_of(error: BaseException, model: nn.Module, module_of: Callable[[fx.Node], str]) -> str:
    """ "fqn, file:line" as far as known."""
    module = ""
    frames: list[Any] = []
    step = error.__traceback__
    while step is not None:
        names = step.tb_frame.f_locals
        node = names.get("n", names.get("node"))
        if isinstance(node, fx.Node):
            module = module_of(node) or module
            frames = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "") or frames
        step = step.tb_next
    frames = [(frame.filename, frame.lineno) for frame in getattr(error, "real_stack", None) or []] or frames
    own = [(file, int(line)) for file, line in frames if not str(file).startswith(_TORCH)]
    if not own:
        return module or type(model).__name__
    file, line = own[-1]
    module = module or next((_owner(model, *frame) for frame in reversed(own) if _owner(model, *frame)), "")
    return ", ".join(part for part in (module, f"{file}:{line}") if part)


def _owner(model: nn.Module, file: str, line: int) -> str:
    """The fqn of the first module whose forward holds a source line, with the number of others that share it."""
    names = [name or type(module).__name__ for name, module in model.named_modules() if _holds(module, file, line)]
    return names[0] + (f" (or one of {len(names) - 1} more)" if len(names) > 1 else "") if names else ""


def _holds(module: nn.Module, file: str, line: int) -> bool:
    code: Any = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or code.co_filename != file:
        return False
    lines = [at for _, _, at in code.co_lines() if at is not None]
    return code.co_firstlineno <= line <= max(lines, default=0)


def _unquoted(text: str) -> str:
    """The text without the quotes around the whole of it; quotes that are a part of it stay."""
    text = text.strip()
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return _short(text)
    return _short(value if isinstance(value, str) else text)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:297]}..."
