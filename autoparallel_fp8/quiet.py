"""Silence for the length of a block: what torch, torchao and transformers log and warn while they import and trace.

Their lines speak of their own insides (missing kernels, side effects of a forward, enum constants) and not of the
user's model; what the user must know is an error or a note of the graph. Levels and filters are restored after.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no log records below CRITICAL inside the block."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
