"""What a client remembers of its sessions: who uses which, and which have an episode on the server."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from protocol.errors import shortened
from protocol.messages import without_numbers

logger = logging.getLogger("clients")

_MOST_EPISODES = 1024  # a connection may keep far fewer
_MOST_WARNINGS = 100
_LONGEST_WARNING = 500


class Sessions:
    """The sessions of one client. A name of None is the session of calls without a `session_id`.

    caller: whoever makes a call, a thread or an asyncio task.
    """

    def __init__(self) -> None:
        self._last_of: weakref.WeakKeyDictionary[object, str | None] = weakref.WeakKeyDictionary()
        self._last: str | None = None
        self._is_from_before: OrderedDict[str | None, bool] = OrderedDict()  # by name: begun before the last reconnect
        self._warned: set[str] = set()

    def use(self, caller: object, name: str | None) -> None:
        """A caller is about to make a call in a session."""
        self._last_of[caller] = self._last = name

    def last_of(self, caller: object) -> str | None:
        """The session that a caller used last; the one that anybody did where it used none."""
        return self._last_of.get(caller, self._last)

    def can_be_told_apart(self, name: str | None) -> bool:
        """Whether a reset can mean this session: one without a name is to the server what the connection used last."""
        return name is not None or self._last is None

    def reconnected(self) -> None:
        """There is a new connection, and the server may not know the episodes of the old one."""
        for name in self._is_from_before:
            self._is_from_before[name] = True

    def ended(self, name: str | None) -> None:
        """The server was told to end a session's episode."""
        self._is_from_before.pop(name, None)

    def answered(self, name: str | None, reply: Mapping[str, Any]) -> None:
        """Log what a reply says beside its actions: warnings, once each, and an episode that was lost."""
        warnings = reply.get("warnings")
        for warning in warnings if isinstance(warnings, list) else ():
            self._warn(str(warning))
        is_from_before = self._is_from_before.pop(name, False)
        self._is_from_before[name] = False
        if len(self._is_from_before) > _MOST_EPISODES:
            self._is_from_before.popitem(last=False)
        episode = reply.get("episode")
        call = episode.get("call") if isinstance(episode, dict) else None
        if is_from_before and isinstance(call, int):
            session = "the session without a name" if name is None else f"session {shortened(name)!r}"
            if call == 1:
                logger.warning("the episode of %s was lost with the connection: the server began a new one", session)
            else:
                logger.info("after the reconnect the episode of %s goes on with call %d", session, call)

    def _warn(self, warning: str) -> None:
        warning = shortened(warning, _LONGEST_WARNING)
        kind = without_numbers(warning)
        if kind in self._warned or len(self._warned) >= _MOST_WARNINGS:
            return
        self._warned.add(kind)
        last = "; further warnings are not logged" if len(self._warned) == _MOST_WARNINGS else ""
        logger.warning("the policy server warns: %s%s", warning, last)
