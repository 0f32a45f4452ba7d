"""The thread that owns the device: jobs in, futures out, one at a time.

The policy is loaded, run and dropped on this thread and nowhere else, so nothing interleaves with a forward. Those who
call take turns. Ends of sessions come first: they are short, and no call of the session waits any more when one is
queued. Work that can wait has a queue of its own, which has its turn, one piece at a time, when nothing else waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.device_faults import MemoryRetry, is_lost
from engine.fair_queue import FairQueue, Peer
from engine.watchdog import Watchdog
from protocol.robot import Observation

if TYPE_CHECKING:  # the loop itself must start, and say that it loads, before torch is imported
    from engine.policy import Chunk, Policy, PolicyStats
    from engine.video.recorder import Recorder

log = logging.getLogger(__name__)

LoadPolicy = Callable[[Callable[[str], None]], "Policy"]

_DIED = "the engine died"  # what robots are told; what it died of is in `finished`


class EngineBusy(RuntimeError):
    """As many calls wait as may wait; this one was not queued."""


class EngineStopped(RuntimeError):
    """The engine runs no more jobs: it was stopped, or it died."""


class EngineHung(RuntimeError):
    """The engine's thread has not come back from a job for so long that it will not."""


@dataclass(frozen=True)
class WorkerStats:
    """waiting: calls in the queue. running: whether a job is on the device. policy: None until it is loaded."""

    waiting: int
    running: bool
    policy: PolicyStats | None


@dataclass(eq=False)
class _Job:
    run: Callable[[Policy], Any]
    session_id: str | None = None
    future: Future[Any] = field(default_factory=Future)


class EngineWorker:
    """Runs a policy's jobs: those of different callers in turns, see FairQueue.

    load: makes the policy; called on the engine's thread with a function that takes what loading is doing, in words.
    max_queue: how many calls may wait behind the running one. recorder: is given each call's result and each session's
    end, and the time that no call wants.

    Two futures tell how the thread fares: `loaded` gives the policy's `info()`; `finished` gives None after an
    orderly stop, and the error when loading failed or the thread died of something that no later call can survive. A
    job that takes many times as long as the slowest call of the policy has hung: `finished` then gives EngineHung, and
    the thread, which nothing can interrupt, is still there.
    """

    def __init__(self, load: LoadPolicy, *, max_queue: int, recorder: Recorder | None = None) -> None:
        self.loaded: Future[dict[str, object]] = Future()
        self.finished: Future[None] = Future()
        for outcome in (self.loaded, self.finished):
            outcome.set_running_or_notify_cancel()  # a waiter that gives up must not cancel it for the others
        self._load = load
        self._max_queue = max_queue
        self._recorder = recorder
        self._calls: FairQueue[_Job] = FairQueue(room=max_queue)
        self._ends: deque[_Job] = deque()
        self._idle: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._stopped = False
        self._running: _Job | None = None
        self._watchdog = Watchdog(self._doubt, self._hung)
        self._doubted = False
        self._not_ready: str | None = "starting"
        self._memory = MemoryRetry()
        self._policy: Policy | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, which begins to load. Call it once."""
        self._thread.start()
        self._watchdog.start()
        if self._recorder is not None:
            self._recorder.finished.add_done_callback(self._recorded)
            self._recorder.start(self.submit_idle)

    @property
    def not_ready(self) -> str | None:
        """None when calls are served, else why not (or not for certain), in words."""
        return self._not_ready or self._memory.lacking

    def infer(self, session_id: str, observation: Observation, peer: Peer | None = None) -> Future[Chunk]:
        """Queue one call of the policy. A future that is cancelled while it waits is never run.

        peer: who calls, the same object at each call; None for one that calls once. The result's `seconds` have, beside
        the phases, "wait" in the queue and "infer", all of it on the engine's thread, a second try included.
        Raises EngineBusy when `max_queue` calls wait already and this one has to give way, EngineStopped after `stop`
        or the thread's death. The future raises what the policy raised, EngineBusy where the call gave way to a later
        one, or EngineStopped.
        """
        job = _Job(partial(self._call, time.monotonic(), session_id, observation), session_id)
        with self._wake:
            if self._stopping:
                raise EngineStopped(self._not_ready)
            refused = self._calls.add(peer or Peer(), job)
            self._wake.notify()
        busy = f"{self._max_queue} calls are waiting already"
        if refused is job:
            raise EngineBusy(busy)
        if refused is not None:
            _fail([refused], EngineBusy(busy))
        # After the lock is given back: the callback takes it, and runs at once if the job is done already.
        # It knows the future alone: a future that knew its job would keep the images until a garbage collection.
        job.future.add_done_callback(self._forget_if_cancelled)
        return job.future

    def end_session(self, session_id: str) -> Future[None]:
        """Queue the end of a session, ahead of all calls; one of its own that still waits raises EngineStopped.

        Never refused for a full queue. Raises EngineStopped as `infer` does.
        """

        def run(policy: Policy) -> None:
            policy.end_session(session_id)
            if self._recorder is not None:
                self._recorder.finish(session_id)

        job = _Job(run)
        with self._wake:
            if self._stopping:
                raise EngineStopped(self._not_ready)
            dropped = self._calls.discard(lambda call: call.session_id == session_id)
            self._ends.append(job)
            self._wake.notify()
        _fail(dropped, EngineStopped("its session has ended"))
        return job.future

    def submit_idle(self, run: Callable[[Policy], Any]) -> Future[Any]:
        """Queue a small piece of work for when nothing else waits, after `stop` with draining too.

        Raises EngineStopped after `stop` without it or the thread's death. The future raises what `run` raised, or
        EngineStopped.
        """
        job = _Job(run)
        with self._wake:
            if self._stopped:
                raise EngineStopped(self._not_ready)
            self._idle.append(job)
            self._wake.notify()
        return job.future

    def stats(self) -> WorkerStats:
        """What waits, what runs, what the policy holds. Cheap, from any thread."""
        policy = self._policy
        with self._wake:
            waiting = len(self._calls)
        return WorkerStats(waiting, self._running is not None, policy.stats() if policy is not None else None)

    def stop(self, *, drain: bool) -> None:
        """Take no more jobs. The running one finishes; waiting ones still run if `drain`, else get EngineStopped.

        With `drain`, what is being recorded is written to its end too.
        Returns at once; `finished` tells the end. May be called again, to give up draining.
        """
        with self._wake:
            self._stopping = True
            self._not_ready = "shutting down"
            dropped = [] if drain else self._drop_all()
            self._wake.notify()
        _fail(dropped, EngineStopped("the server is shutting down"))

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended, or does so within `timeout` seconds. Neither a load nor a call is cut short."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _drop_all(self) -> list[_Job]:
        """Empty all queues for good; with the lock held."""
        self._stopped = True
        dropped = [*self._ends, *self._calls.discard(lambda call: True), *self._idle]
        self._ends.clear()
        self._idle.clear()
        return dropped

    def _recorded(self, _: Future[None]) -> None:
        """The recorder has nothing left to write: the thread may end."""
        with self._wake:
            self._wake.notify()

    def _forget_if_cancelled(self, future: Future[Any]) -> None:
        """Drop a cancelled job now: its place and its images are not kept until its turn."""
        if future.cancelled():
            with self._wake:
                self._calls.discard(lambda call: call.future is future)

    def _report(self, status: str) -> None:
        log.info(status)
        with self._wake:
            if not self._stopping:
                self._not_ready = status

    # On the watchdog's thread.

    def _doubt(self, spent: float, slowest: float) -> None:
        reason = f"a call has been running for {spent:.0f} s, the slowest before it took {slowest:.1f} s"
        log.warning(reason)
        with self._wake:
            self._doubted = True
            if not self._stopping:
                self._not_ready = reason

    def _hung(self, spent: float, slowest: float) -> None:
        job = self._running
        error = EngineHung(f"a call did not end in {spent:.0f} s; the slowest before it took {slowest:.1f} s")
        if job is not None:
            _settle(job.future, EngineStopped(_DIED))
        self._finish(error, _DIED)

    def _finish(self, error: BaseException | None, reason: str) -> None:
        """The end, whoever comes to it first: the engine's thread, or the watchdog that has given it up."""
        with self._wake:
            if self._stopped and self.finished.done():
                return
            self._stopping = True
            self._not_ready = reason
            dropped = self._drop_all()
        _fail(dropped, EngineStopped(reason))
        if error is not None and self._recorder is not None:
            self._recorder.close()
        if not self.loaded.done():
            self.loaded.set_exception(error or EngineStopped(reason))
        _settle(self.finished, error)

    # From here on: the engine's thread.

    def _work(self) -> None:
        error: BaseException | None = None
        reason = "the server is shutting down"
        try:
            self._serve()
        except BaseException as caught:
            traceback.clear_frames(caught.__traceback__)
            error, reason = caught, _DIED
        self._policy = None
        self._finish(error, reason)

    def _serve(self) -> None:
        policy = self._policy = self._load(self._report)
        with self._wake:
            self._not_ready = "shutting down" if self._stopping else None
        self.loaded.set_result(policy.info())
        while (job := self._next(lambda: self._stopping)) is not None:
            self._run(policy, job)
            del job  # and its images, now rather than when the next one comes
        if (recorder := self._recorder) is not None:
            recorder.close()
            while (job := self._next(lambda: self._stopped or recorder.finished.done())) is not None:
                self._run(policy, job)

    def _next(self, ended: Callable[[], bool]) -> _Job | None:
        """The next job, an idle one where there is no other, or None when nothing is left and nothing will come."""
        with self._wake:
            while not (self._ends or self._calls or self._idle or ended()):
                self._wake.wait()
            if self._ends:
                return self._ends.popleft()
            if self._calls:
                return self._calls.pop()
            return self._idle.popleft() if self._idle else None

    def _run(self, policy: Policy, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        self._running = job
        self._watchdog.begin(policy.slowest_call)
        try:
            result = job.run(policy)
        except BaseException as error:
            # A traceback keeps every local of the failed call alive, tensors included.
            traceback.clear_frames(error.__traceback__)
            if not isinstance(error, Exception) or is_lost(error):
                _settle(job.future, EngineStopped(_DIED))
                raise
            _settle(job.future, error)
        else:
            _settle(job.future, result)
        finally:
            self._watchdog.end()
            self._running = None
            self._end_doubt()
            del job  # else an error's traceback, which has this frame, would keep its images

    def _end_doubt(self) -> None:
        """A job that was doubted has ended after all."""
        if self._doubted:
            with self._wake:
                self._doubted = False
                if not self._stopping:
                    self._not_ready = None

    def _call(self, queued_at: float, session_id: str, observation: Observation, policy: Policy) -> Chunk:
        started_at = time.monotonic()
        chunk = self._memory.call(partial(policy.infer, session_id, observation), lambda: policy.free_caches())
        if self._recorder is not None:
            self._recorder.add(session_id, chunk)
        of_all = {"wait": started_at - queued_at, "infer": time.monotonic() - started_at}
        return replace(chunk, seconds=of_all | chunk.seconds)


def _fail(jobs: list[_Job], error: Exception) -> None:
    for job in jobs:
        if job.future.set_running_or_notify_cancel():
            job.future.set_exception(error)


def _settle(future: Future[Any], outcome: object) -> None:
    """Give a future its result, or what it raises, unless the watchdog or the engine's thread was quicker."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
