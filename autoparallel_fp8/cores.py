"""How many cores this process may use; without torch, which `workers` needs and the solver does not."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Cores that this process may use, where the system says which; else those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
