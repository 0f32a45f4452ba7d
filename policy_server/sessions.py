"""Which connection owns which episode, and what becomes of an episode when its robot goes away."""

import asyncio
import logging
from concurrent.futures import Future
from dataclasses import dataclass

from engine.embodiment import Observation
from engine.loop import EngineLoop, EngineStopped, TimedChunk
from policy_server.logs import log_event

log = logging.getLogger(__name__)


class SessionInUse(ValueError):
    """Another live connection owns this session id."""


def episode_name(key: str) -> str:
    """What people call the session that the engine knows as `key`: its id where it has one."""
    return key.removeprefix("id ")


@dataclass(eq=False)
class _Session:
    key: str  # the engine's name for it: no explicit id can equal that of an episode without one
    session_id: str | None
    connection: str | None = None
    expiry: asyncio.TimerHandle | None = None
    in_engine: bool = False


class Sessions:
    """Every session of a server. Not thread-safe: it lives on the event loop.

    A connection has one session at a time: the one with the id it sent last, or one without an id that lives as
    long as the connection. A session with an id survives its connection for `ttl` seconds.
    """

    def __init__(self, engine: EngineLoop, ttl: float) -> None:
        self._engine = engine
        self._ttl = ttl
        self._by_key: dict[str, _Session] = {}
        self._by_connection: dict[str, _Session] = {}

    def infer(self, connection: str, session_id: str | None, observation: Observation) -> Future[TimedChunk]:
        """Queue a call for the connection's session, which becomes `session_id` unless that is None.

        Raises SessionInUse, and then nothing has changed; EngineBusy or EngineStopped, and then the change of
        session stands.
        """
        session = self._claim(connection, session_id)
        future = self._engine.infer(session.key, observation)
        session.in_engine = True
        return future

    def reset(self, connection: str, session_id: str | None = None) -> Future[None] | None:
        """End the connection's session, if it has one; the future tells when the engine has done so.

        session_id: an episode that its robot names, which may have begun on an earlier connection: if it waits for its
        robot, it ends too. That of another live connection is left alone. The same id, sent again, is a fresh episode.
        """
        ended = None
        if (current := self._by_connection.get(connection)) is not None:
            ended = self._end(current, "reset")
        named = self._by_key.get(_key_of(session_id)) if session_id is not None else None
        if named is not None and named.connection is None:
            ended = self._end(named, "reset") or ended  # the engine ends them in this order
        return ended

    def leave(self, connection: str) -> None:
        """The connection is gone: its session waits `ttl` seconds for it to come back, or ends if it has no id."""
        session = self._by_connection.pop(connection, None)
        if session is None:
            return
        session.connection = None
        if session.session_id is None or not session.in_engine or self._ttl == 0:
            self._end(session, "disconnected")
        else:
            loop = asyncio.get_running_loop()
            session.expiry = loop.call_later(self._ttl, self._end, session, "expired")

    def close(self) -> None:
        """Forget everything, without a word to the engine, which is going away too."""
        for session in self._by_key.values():
            if session.expiry is not None:
                session.expiry.cancel()
        self._by_key.clear()
        self._by_connection.clear()

    @property
    def connected(self) -> int:
        """Sessions of live connections."""
        return len(self._by_connection)

    @property
    def waiting(self) -> int:
        """Sessions that wait for their robot to come back."""
        return len(self._by_key) - len(self._by_connection)

    def _claim(self, connection: str, session_id: str | None) -> _Session:
        current = self._by_connection.get(connection)
        if current is not None and session_id in (None, current.session_id):
            return current
        key = _key_of(session_id) if session_id is not None else f"connection {connection}"
        session = self._by_key.get(key)
        if session is not None and session.connection is not None:
            raise SessionInUse(
                f"session_id: {session_id!r:.200} is in use by another connection; expected an id of its own"
            )
        if current is not None:
            self._end(current, "switched")
        if session is None:
            session = self._by_key[key] = _Session(key, session_id)
            event = "session start"
        else:
            event = "session resumed"
        if session.expiry is not None:
            session.expiry.cancel()
            session.expiry = None
        session.connection = connection
        self._by_connection[connection] = session
        log_event(log, logging.INFO, event, connection=connection, session=session_id)
        return session

    def _end(self, session: _Session, reason: str) -> Future[None] | None:
        del self._by_key[session.key]
        if session.expiry is not None:
            session.expiry.cancel()
        if session.connection is not None:
            del self._by_connection[session.connection]
        log_event(log, logging.INFO, "session end", session=session.session_id or session.key, reason=reason)
        if not session.in_engine:
            return None
        try:
            return self._engine.end_session(session.key)
        except EngineStopped:
            return None  # it forgets everything anyway


def _key_of(session_id: str) -> str:
    return f"id {session_id}"
