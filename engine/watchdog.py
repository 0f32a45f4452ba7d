"""Notices work that does not end: a kernel that hangs, or a wait for one, returns no error to be caught."""

import threading
import time
from collections.abc import Callable

TICK_SECONDS = 1.0
# In multiples of the slowest work so far, and at least so many seconds: a busy machine is no fault.
DOUBT_TIMES, DOUBT_SECONDS = 4, 30.0
HUNG_TIMES, HUNG_SECONDS = 10, 60.0

Notice = Callable[[float, float], None]
"""Is told how long the work has been going on, and how long the slowest before it took, in seconds."""


class Watchdog:
    """Watches one piece of work at a time, from a thread of its own.

    doubt: called once when work takes several times as long as the slowest before it, and never after its end. hung:
    called once, for good, when it takes many times as long.
    """

    def __init__(self, doubt: Notice, hung: Notice) -> None:
        self._doubt = doubt
        self._hung = hung
        self._changed = threading.Condition()
        self._number = 0
        self._slowest: float | None = None

    def start(self) -> None:
        """Start the thread. Call it once."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin(self, slowest: float) -> None:
        """Work begins. slowest: seconds that the slowest took so far; 0 where there was none: any time may be right."""
        with self._changed:
            self._number += 1
            self._slowest = slowest or None
            self._changed.notify()

    def end(self) -> None:
        """The work has ended."""
        with self._changed:
            self._slowest = None
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while self._slowest is None:
                    self._changed.wait()
                number, slowest = self._number, self._slowest
                spent, doubted = 0.0, False
                while number == self._number and self._slowest is not None:
                    began = time.monotonic()
                    self._changed.wait(TICK_SECONDS)
                    # Not more: while the whole process stands still, the work does so too.
                    spent += min(time.monotonic() - began, 2 * TICK_SECONDS)
                    if number != self._number or self._slowest is None:
                        break
                    if not doubted and spent >= max(DOUBT_SECONDS, DOUBT_TIMES * slowest):
                        doubted = True
                        self._doubt(spent, slowest)
                    if spent >= max(HUNG_SECONDS, HUNG_TIMES * slowest):
                        self._hung(spent, slowest)
                        return
