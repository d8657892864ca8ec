"""The progress of a command: a line on a terminal that each stage overwrites; nothing in a pipe."""

from __future__ import annotations

import time
from typing import Any


class ProgressLine:
    """Called with a line of text when a stage begins or ends; keeps the stages' times."""

    def __init__(self, stream: Any, quiet: bool, times: bool = False) -> None:
        self.stream, self.with_times = stream, times
        self.shown = not quiet and stream.isatty()
        self.started = time.perf_counter()
        self.times: list[str] = []

    def __call__(self, text: str) -> None:
        if text.endswith(" s"):
            self.times.append(text)
        if self.shown:
            print(f"\r\x1b[2K{time.perf_counter() - self.started:6.1f} s  {text}", end="", file=self.stream, flush=True)

    def note(self, text: str) -> None:
        """A line that stays, in a pipe too."""
        clear = "\r\x1b[2K" if self.shown else ""
        print(f"{clear}note: {text}", file=self.stream, flush=True)

    def finish(self) -> None:
        total = f"{time.perf_counter() - self.started:6.1f} s  {', '.join(self.times)}"
        if self.shown:
            print(f"\r\x1b[2K{total}", file=self.stream, flush=True)
        elif self.with_times:
            print(total, file=self.stream, flush=True)
