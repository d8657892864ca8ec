"""The ascent of a bound in a process of its own, beside the search for choices: the second core's work.

The process ends by itself at its deadline, or as soon as the one that began it is gone. Where a process cannot be
forked, or there is one core only, nothing is begun and the bound stays as it is.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from ..cores import num_cores
from ..problem import Array
from .priced_dual import Ascent

TELL_SECONDS = 5.0  # between two states that are sent


@dataclass(frozen=True)
class State:
    """An ascent as it was sent: its best bound and prices, and the moved costs at the prices of that moment."""

    bound: float
    best_prices: Array
    prices: Array
    theta: Array
    moved: Array
    paid: Array


class Beside:
    """An ascent that goes on in a process of its own."""

    def __init__(self, ascent: Ascent, deadline: float) -> None:
        self._receiver: Connection | None = None
        self._process: multiprocessing.process.BaseProcess | None = None
        if "fork" not in multiprocessing.get_all_start_methods() or num_cores() < 2:
            return
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        ends = (sender, self._receiver)
        self._process = context.Process(target=_raise, args=(ascent, deadline, *ends, os.getpid()), daemon=True)
        self._process.start()
        sender.close()

    def news(self) -> State | None:
        """The last state that was sent since the last call."""
        state = None
        try:
            while self._receiver is not None and self._receiver.poll():
                state = self._receiver.recv()
        except (EOFError, OSError):
            self._receiver = None
        return state

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def take(ascent: Ascent, state: State) -> None:
    """Make this process's ascent what the state says."""
    ascent.bound, ascent.best_prices, ascent.prices = state.bound, state.best_prices, state.prices
    ascent.dual.restore(state.theta, state.moved, state.paid)


def _raise(ascent: Ascent, deadline: float, sender: Connection, receiver: Connection, parent: int) -> None:
    receiver.close()  # its copy of the parent's end: with it open, sending to nobody would wait forever
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told too, and ends this process
    told = time.monotonic()
    while time.monotonic() < deadline and os.getppid() == parent:
        ascent.step()
        if time.monotonic() - told >= TELL_SECONDS:
            theta, moved, paid = ascent.dual.state()
            best = np.array(ascent.best_prices)
            try:
                sender.send(State(ascent.bound, best, ascent.prices, theta, moved, paid))
            except OSError:
                break
            told = time.monotonic()
    os._exit(0)
