"""File descriptors: as many as the settings need, and what is said when the system has none left."""

import asyncio
import errno
import logging
import resource
from typing import Any

from policy_server.logs import RareEvent

log = logging.getLogger(__name__)

# The checkpoint's files, the device's, libraries', standard streams.
_OF_THE_ENGINE = 256
# asyncio accepts up to 100 connections at a time, and those that are cut off for them close two rounds later.
_IN_PASSING = 400

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TooFewDescriptors(OSError):
    """The system does not allow the process as many open files as it needs."""


def raise_limit(connections: int) -> None:
    """Raise the limit on open files to what so many connections and an engine need. Raises TooFewDescriptors."""
    needed = connections + _OF_THE_ENGINE + _IN_PASSING
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError):
        text = f"{connections} connections need {needed} open files, and the system allows {hard} (ulimit -Hn)"
        raise TooFewDescriptors(text) from None


class AcceptErrors:
    """The event loop's exception handler: refused by the system to accept a connection, it says so once a minute.

    asyncio tries again after a second, a hundred times in a row, and would log a traceback of each.
    """

    def __init__(self) -> None:
        self._warning = RareEvent(log, logging.WARNING, "cannot accept connections for want of system resources")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle what the event loop caught; see asyncio.loop.set_exception_handler."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES and "socket" in context:
            self._warning.happened(reason=error.strerror)
        else:
            loop.default_exception_handler(context)
