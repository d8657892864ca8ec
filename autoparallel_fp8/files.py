"""Files that are written whole or not at all, and paths that are looked at before the work."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UsageError


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    target = Path(path)
    try:
        with _without_signals():
            handle, temporary = tempfile.mkstemp(dir=target.parent or Path(), prefix=f".{target.name}.")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                os.chmod(temporary, 0o644)
                os.replace(temporary, target)
            except OSError:
                os.unlink(temporary)
                raise
    except OSError as error:
        raise UsageError(
            f"cannot write {target}: {error.strerror}", do="name a file in a folder that can be written"
        ) from error


@contextmanager
def _without_signals() -> Iterator[None]:
    """Interrupts and terminations wait until the block is done, so that it leaves nothing half done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Fail now rather than after the work: the folder exists, takes files, and the path is no folder.

    Raises:
        UsageError: as `write_text` would.
    """
    target = Path(path)
    folder = target.parent
    reason = None
    if target.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"there is no folder {folder}"
    elif not os.access(folder, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        reason = "it may not be written"
    if reason:
        raise UsageError(f"cannot write {target}: {reason}", do="name a file in a folder that can be written")


def check_path(path: Any) -> None:
    """It is one, as Python has paths.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"the path is a {type(path).__name__}", at="path", do='name a file, such as "plan.json"')
