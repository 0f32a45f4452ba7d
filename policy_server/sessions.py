"""Which connection holds which episodes, and what becomes of an episode when its robot goes away."""

import asyncio
import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from engine.fair_queue import Peer
from engine.worker import EngineStopped, EngineWorker
from policy_server.logs import LogBudget, log_event
from protocol.robot import Observation

if TYPE_CHECKING:  # which needs torch
    from engine.policy import Chunk

log = logging.getLogger(__name__)

_WAITING_TO_CONNECTED = 4


class SessionInUse(ValueError):
    """Another live connection holds the session of this id."""


class Gone(Exception):
    """The connection that asks has been found dead and given up its sessions."""


def episode_name(key: str) -> str:
    """What people call the session that the engine knows as `key`: its id where it has one."""
    return key.removeprefix("id ")


@dataclass(eq=False)
class Session:
    """One episode.

    key: the engine's name for it: no explicit id can equal that of an episode without one. began: when, counted as
    connections are. connection: who holds it; None while it waits for its robot.
    after_reset: whether it began because its robot had reset the episode of that name.
    """

    key: str
    session_id: str | None
    began: int
    after_reset: bool
    connection: "_Connection | None" = None
    expiry: asyncio.TimerHandle | None = None
    in_engine: bool = False


class Link(Protocol):
    """What is asked of a connection."""

    async def is_alive(self) -> bool:
        """Whether somebody is at its other end; takes seconds at most."""
        ...

    def cut(self) -> None:
        """End it at once."""
        ...


@dataclass(eq=False)
class _Connection:
    """One connection. opened: when, counted as sessions are. sessions: what it holds, least recently used first.

    last: what it used last, until that ended. reset: names that it reset and has not used again. resumed: sessions that
    it took over from an earlier one, and of which no call has been answered since.
    """

    name: str
    opened: int
    link: Link
    sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    last: Session | None = None
    reset: OrderedDict[str, None] = field(default_factory=OrderedDict)
    resumed: set[str] = field(default_factory=set)


class Sessions:
    """Every session of a server. Not thread-safe: it lives on the event loop.

    A connection holds as many sessions as it names ids, up to `most`, and one without an id. No clock ends them while
    it lives. A session with an id survives its connection for `ttl` seconds; where four times `most` do, the one that
    has waited the longest ends. lines: has room for the log lines of sessions that begin and end.
    """

    def __init__(self, engine: EngineWorker, ttl: float, most: int, lines: LogBudget) -> None:
        self._engine = engine
        self._ttl = ttl
        self._most = most
        self._lines = lines
        self._order = itertools.count()
        self._connections: dict[str, _Connection] = {}
        self._by_key: dict[str, Session] = {}
        self._waiting: dict[str, Session] = {}  # for their robots to come back, in the order in which those left

    def open(self, connection: str, link: Link) -> None:
        """A connection was made."""
        self._connections[connection] = _Connection(connection, next(self._order), link)

    async def claim(self, connection: str, session_id: str | None) -> Session:
        """The session that the connection names, or its own one without a name; made where there is none.

        A session whose robot is away goes on, on a connection that was opened after it began: one that was open before
        cannot be its robot come back. If another connection holds it that shows no sign of life, it is taken from it.
        Raises SessionInUse where that one is alive, and then nothing has changed.
        """
        key = _key_of(session_id) if session_id is not None else f"connection {connection}"
        if await self._is_held_by_another(key, connection):
            raise SessionInUse(
                f"session_id: {session_id!r:.200} is in use by another connection; expected an id of its own"
            )
        claimant = self._connections[connection]
        session = self._by_key.get(key)
        if session is not None and session.connection is None and session.began > claimant.opened:
            self._end(session, "another robot's")
            session = None
        if session is None or session.connection is None:
            session = self._take(claimant, session or self._begin(claimant, key, session_id))
        claimant.sessions.move_to_end(key)
        claimant.last = session
        return session

    def infer(self, session: Session, observation: Observation, peer: Peer) -> "Future[Chunk]":
        """Queue a call for a claimed session. Raises EngineBusy or EngineStopped."""
        future = self._engine.infer(session.key, observation, peer)
        session.in_engine = True
        return future

    def resumed(self, connection: str, session: Session) -> bool:
        """Whether this is the first answer to the session since its robot came back on this connection."""
        asking = self._connections.get(connection)
        if asking is None or session.key not in asking.resumed:
            return False
        asking.resumed.remove(session.key)
        return True

    async def reset(self, connection: str, session_ids: Sequence[str] | None) -> None:
        """End the sessions of these ids, or without any the one that the connection used last.

        Those of other live connections stay, and ids that nobody knows are fine. The same id, sent again, is a fresh
        episode, also if it comes before the engine has seen the end of this one.
        """
        if session_ids is None:
            last = self._connections[connection].last
            keys = [last.key] if last is not None else []
        else:
            keys = [_key_of(each) for each in session_ids]
        for key in keys:
            if await self._is_held_by_another(key, connection) or (session := self._by_key.get(key)) is None:
                continue
            self._end(session, "reset")
            reset = self._connections[connection].reset
            reset[key] = None
            if len(reset) > self._most:
                reset.popitem(last=False)

    def leave(self, connection: str) -> None:
        """The connection is gone: its sessions wait `ttl` seconds for it to come back, or end if they have no id."""
        gone = self._connections.pop(connection, None)
        if gone is None:
            return  # it was found dead before
        for session in list(gone.sessions.values()):
            if session.session_id is None or not session.in_engine or self._ttl == 0:
                self._end(session, "disconnected")
            else:
                self._release(session)
                loop = asyncio.get_running_loop()
                session.expiry = loop.call_later(self._ttl, self._end, session, "expired")
                self._waiting[session.key] = session
        while len(self._waiting) > _WAITING_TO_CONNECTED * self._most:
            self._end(next(iter(self._waiting.values())), "too many wait for their robots")

    def close(self) -> None:
        """Forget everything, without a word to the engine, which is going away too."""
        for session in self._by_key.values():
            if session.expiry is not None:
                session.expiry.cancel()
        self._by_key.clear()
        self._waiting.clear()
        for connection in self._connections.values():
            connection.sessions.clear()
            connection.last = None

    @property
    def connected(self) -> int:
        """Sessions of live connections."""
        return len(self._by_key) - self.waiting

    @property
    def waiting(self) -> int:
        """Sessions that wait for their robot to come back."""
        return len(self._waiting)

    async def _is_held_by_another(self, key: str, connection: str) -> bool:
        """Whether another connection holds a session, and is alive. One that is dead loses all that it holds.

        Raises Gone where the connection that asks was itself found dead meanwhile.
        """
        while (session := self._by_key.get(key)) is not None and session.connection is not None:
            holder = session.connection
            if holder.name == connection:
                break
            if await holder.link.is_alive():
                if session.connection is holder:
                    return True
            elif self._connections.get(holder.name) is holder:
                log_event(log, logging.WARNING, "silent connection gives up its sessions", connection=holder.name)
                self.leave(holder.name)
                holder.link.cut()
        if connection not in self._connections:
            raise Gone
        return False

    def _begin(self, connection: _Connection, key: str, session_id: str | None) -> Session:
        after_reset = key in connection.reset
        connection.reset.pop(key, None)
        session = self._by_key[key] = Session(key, session_id, next(self._order), after_reset)
        return session

    def _take(self, connection: _Connection, session: Session) -> Session:
        """Give the connection a session that nobody holds."""
        if len(connection.sessions) >= self._most:
            self._end(next(iter(connection.sessions.values())), "least recently used")
        if session.expiry is not None:
            session.expiry.cancel()
            session.expiry = None
        self._waiting.pop(session.key, None)
        if session.in_engine:
            connection.resumed.add(session.key)
        session.connection = connection
        connection.sessions[session.key] = session
        event = "session resumed" if session.in_engine else "session start"
        self._lines.log(log, event, connection=connection.name, session=session.session_id)
        return session

    def _release(self, session: Session) -> None:
        connection = session.connection
        if connection is None:
            return
        del connection.sessions[session.key]
        connection.resumed.discard(session.key)
        if connection.last is session:
            connection.last = None
        session.connection = None

    def _end(self, session: Session, reason: str) -> None:
        del self._by_key[session.key]
        self._waiting.pop(session.key, None)
        if session.expiry is not None:
            session.expiry.cancel()
        self._release(session)
        self._lines.log(log, "session end", session=session.session_id or session.key, reason=reason)
        if session.in_engine:
            with contextlib.suppress(EngineStopped):  # it forgets everything anyway
                self._engine.end_session(session.key)


def _key_of(session_id: str) -> str:
    return f"id {session_id}"
