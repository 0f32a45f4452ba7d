"""A forked process has copies of its parent's connections, and must leave them alone."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forgetful(Protocol):
    """What has a connection that a child process must not use."""

    def after_fork(self) -> None:
        """Called in the child: forget the connection, without a word to the server."""


_forgetful: weakref.WeakSet[Forgetful] = weakref.WeakSet()


def forget_in_children(client: Forgetful) -> None:
    """Have `client.after_fork` called in every process that is forked from this one, before it does anything else."""
    _forgetful.add(client)


def _after_fork() -> None:
    for client in list(_forgetful):
        client.after_fork()


if hasattr(os, "register_at_fork"):  # elsewhere no process forks
    os.register_at_fork(after_in_child=_after_fork)
