"""What a planner says while it works: a line of text when a stage begins or ends."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str], None]


class Stage:
    """Says that a stage begins, and how long it took when it ends."""

    def __init__(self, say: Progress, name: str) -> None:
        self.say, self.name = say, name

    def __enter__(self) -> None:
        self.started = time.perf_counter()
        self.say(f"{self.name}: ...")

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if kind is None:
            self.say(f"{self.name}: {time.perf_counter() - self.started:.1f} s")
