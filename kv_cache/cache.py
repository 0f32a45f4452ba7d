"""The K/V of many sessions on one device: windows, cross-attention K/V, eviction, transactions.

One thread uses it, one call at a time. A session that is not in a call is idle, and an idle session's K/V can be taken
at any moment: it has then lost a window, not an episode, and its next call starts a new one.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kv_cache.attention import AttentionPlan
from kv_cache.block_pool import BlockPool, OutOfBlocks
from kv_cache.cross_kv import LayerKV, TextKV, layer_kv_bytes
from kv_cache.paged_kv import KVGeometry, PagedKV
from kv_cache.sizing import KVBudget
from kv_cache.window import WindowPolicy


@dataclass
class _Branch:
    """One guidance branch of a session: resident blocks, oldest frame first, and its prompt."""

    blocks: list[int] = field(default_factory=list)
    kept: int = 0  # leading blocks that were resident before the running call
    prompt: bytes | None = None
    text: LayerKV | None = None


class SessionKV:
    """What one session holds in a KVCache. Made by `KVCache.session`; changed through the cache alone."""

    def __init__(self, key: Hashable, branches: int) -> None:
        self.key = key
        self._branches = [_Branch() for _ in range(branches)]
        self._image: LayerKV | None = None
        self._conditioning: Tensor | None = None

    @property
    def resident_frames(self) -> int:
        """Latent frames in the window; 0 for a session that is new, was restarted or was evicted."""
        return len(self._branches[0].blocks)

    @property
    def blocks(self) -> int:
        """Blocks held, all branches together."""
        return sum(len(branch.blocks) for branch in self._branches)

    @property
    def image(self) -> LayerKV:
        """The image K/V, for both branches. Raises LookupError where none was published."""
        if self._image is None:
            raise LookupError(f"session {self.key!r} has no image K/V")
        return self._image

    @property
    def conditioning(self) -> Tensor:
        """What else the window was started with. Raises LookupError where none was published."""
        if self._conditioning is None:
            raise LookupError(f"session {self.key!r} has no conditioning: its window was never started, or is evicted")
        return self._conditioning

    def text(self, branch: int) -> LayerKV:
        """The text K/V of a branch. Raises LookupError where none was published."""
        text = self._branches[branch].text
        if text is None:
            raise LookupError(f"branch {branch} of session {self.key!r} has no text K/V")
        return text


@dataclass(frozen=True)
class KVReport:
    """What a cache holds now and has counted since its start: evictions, and windows that plans found in one run of
    blocks (`plain_view`) or had to gather.

    cross_bytes: of cross-attention K/V and conditioning; of it text_bytes are those of prompts, which sessions
    share. session_bytes: the most that one session can hold. bytes_by_session: what each holds now, its text K/V
    as if it were its own.
    """

    blocks_total: int
    blocks_free: int
    blocks_used: int
    blocks_by_session: dict[Hashable, int]
    block_bytes: int
    pool_bytes: int
    cross_bytes: int
    text_bytes: int
    session_bytes: int
    bytes_by_session: dict[Hashable, int]
    prompts: int
    evictions: int
    plain_view: int
    gathered: int


class KVCache:
    """All K/V on `device`, within `budget`; `backend` is one of `attention.available_backends`."""

    def __init__(
        self, geometry: KVGeometry, policy: WindowPolicy, budget: KVBudget, device: torch.device, backend: str = "sdpa"
    ) -> None:
        self.geometry = geometry
        self.policy = policy
        self.budget = budget
        self.paged = PagedKV(geometry, budget.blocks, device, backend)
        self._pool = BlockPool(budget.blocks, segment=geometry.window_blocks(policy))
        self._text = TextKV()
        self._sessions: OrderedDict[Hashable, SessionKV] = OrderedDict()  # least recently used first
        self._active: SessionKV | None = None
        self._evictions = 0
        self._plain_view = self._gathered = 0

    def session(self, key: Hashable) -> SessionKV:
        """The session of that key, made where there is none."""
        if key not in self._sessions:
            self._sessions[key] = SessionKV(key, self.geometry.branches)
        return self._sessions[key]

    def forget(self, key: Hashable) -> None:
        """Give back all that a session holds. An unknown key is fine."""
        session = self._sessions.pop(key, None)
        if session is not None:
            self._drop(session)

    def evict_idle(self) -> int:
        """Take the K/V of every session that is not in a call; returns how many lost some."""
        return sum(self._evict(session) for session in list(self._sessions.values()) if session is not self._active)

    @contextmanager
    def call(self, session: SessionKV) -> Iterator[None]:
        """One call of the policy for `session`: the only one whose K/V are used, and safe from eviction.

        All or nothing: where the body raises, the blocks that it added are free again.
        """
        if self._active is not None:
            raise RuntimeError(f"session {self._active.key!r} is in a call")
        self._active = session
        self._sessions.move_to_end(session.key)
        for branch in session._branches:
            branch.kept = len(branch.blocks)
        try:
            yield
        except BaseException:
            for branch in session._branches:
                self._pool.free(branch.blocks[branch.kept :])
                del branch.blocks[branch.kept :]
            raise
        finally:
            self._active = None

    def restart(self, session: SessionKV) -> None:
        """Empty the window and drop what it was started with. The text K/V stay: they depend on the prompt alone."""
        for branch in session._branches:
            self._pool.free(branch.blocks)
            branch.blocks, branch.kept = [], 0
        session._image = session._conditioning = None

    @contextmanager
    def lease(self, session: SessionKV, frames: int, commit: bool = False) -> Iterator[AttentionPlan]:
        """The plan of forwards over `frames` current frames in every branch, for as many as the body runs.

        commit: the frames' K/V are stored, become resident when the body ends well, and push out of the window what
            leaves it. Where the body raises, their blocks are free again.
        Raises OutOfBlocks where not even evicting every idle session makes room.
        """
        branches = session._branches
        leaving = self.policy.leaving(session.resident_frames, frames)
        windows = [[block for at, block in enumerate(branch.blocks) if at not in leaving] for branch in branches]
        stored: list[list[int]] = [[] for _ in branches]
        if commit:
            self._make_room(frames * len(branches))
            for branch, blocks in zip(branches, stored, strict=True):
                blocks += self._pool.allocate(frames, branch.blocks[-1] + 1 if branch.blocks else None)
        try:
            plan = self.paged.plan(windows, stored, self.policy.capacity)
            self._plain_view += plan.views
            self._gathered += len(branches) - plan.views
            yield plan
        except BaseException:
            for blocks in stored:
                self._pool.free(blocks)
            raise
        if not commit:
            return
        for branch, window, blocks in zip(branches, windows, stored, strict=True):
            self._pool.free([branch.blocks[at] for at in leaving])
            branch.kept -= sum(at < branch.kept for at in leaving)
            branch.blocks = window + blocks

    def publish_text(self, session: SessionKV, branch: int, prompt: bytes, compute: Callable[[], LayerKV]) -> None:
        """Give a branch the text K/V of `prompt` (its token ids), computed where no session has it yet.

        All or nothing: where `compute` raises, the branch keeps the prompt it had.
        """
        held = session._branches[branch]
        if held.prompt == prompt:
            return
        if prompt not in self._text:
            self._make_cross_room(self.geometry.text_bytes)
        text = self._text.acquire(prompt, compute)
        if held.prompt is not None:
            self._text.release(held.prompt)
        held.prompt, held.text = prompt, text

    def publish_image(self, session: SessionKV, compute: Callable[[], LayerKV]) -> None:
        """Give the session its image K/V. All or nothing: where `compute` raises, there is none."""
        session._image = None
        self._make_cross_room(self.geometry.start_bytes)
        session._image = compute()

    def publish_conditioning(self, session: SessionKV, conditioning: Tensor) -> None:
        """Give the session what else its window is started with, of the geometry's `conditioning_bytes`.

        It leaves with the window: an idle session keeps nothing on the device that cannot be taken from it.
        """
        session._conditioning = conditioning

    def keep_text(self, prompt: bytes, compute: Callable[[], LayerKV]) -> None:
        """Hold the text K/V of a prompt for good (the negative prompt of every session)."""
        self._text.acquire(prompt, compute)

    def reset_counters(self) -> None:
        """Count evictions and plans from here on."""
        self._evictions = 0
        self._plain_view = self._gathered = 0

    def report(self) -> KVReport:
        """What the cache holds and has counted. Safe to call from another thread: it only reads."""
        sessions = list(self._sessions.items())
        return KVReport(
            blocks_total=self._pool.num_blocks,
            blocks_free=self._pool.free_count,
            blocks_used=self._pool.used_count,
            blocks_by_session={key: session.blocks for key, session in sessions},
            block_bytes=self.geometry.block_bytes,
            pool_bytes=self._pool.num_blocks * self.geometry.block_bytes,
            cross_bytes=self._cross_bytes(),
            text_bytes=self._text.nbytes,
            session_bytes=self.geometry.session_bytes(self.policy),
            bytes_by_session={key: self._bytes_of(session) for key, session in sessions},
            prompts=len(self._text),
            evictions=self._evictions,
            plain_view=self._plain_view,
            gathered=self._gathered,
        )

    def _make_room(self, count: int) -> None:
        while self._pool.free_count < count:
            if not self._evict_oldest(lambda session: session.blocks > 0):
                raise OutOfBlocks(f"{count} blocks needed, {self._pool.free_count} free and no idle session to evict")

    def _make_cross_room(self, size: int) -> None:
        # Where nothing is left to evict, the session in the call still gets what it needs.
        while self._cross_bytes() + size > self.budget.cross_bytes and self._evict_oldest(_holds_cross_kv):
            pass

    def _cross_bytes(self) -> int:
        return self._text.nbytes + sum(_start_bytes_of(session) for session in list(self._sessions.values()))

    def _bytes_of(self, session: SessionKV) -> int:
        own_text = session._branches[0].text  # the other branch's prompt is everybody's
        text = layer_kv_bytes(own_text) if own_text is not None else 0
        return session.blocks * self.geometry.block_bytes + text + _start_bytes_of(session)

    def _evict_oldest(self, worth: Callable[[SessionKV], bool]) -> bool:
        """Evict the least recently used idle session that is worth it; False where there is none."""
        for session in self._sessions.values():
            if session is not self._active and worth(session):
                return self._evict(session)
        return False

    def _evict(self, session: SessionKV) -> bool:
        if not (session.blocks or _holds_cross_kv(session)):
            return False
        self._drop(session)
        self._evictions += 1
        return True

    def _drop(self, session: SessionKV) -> None:
        self.restart(session)
        for branch in session._branches:
            if branch.prompt is not None:
                self._text.release(branch.prompt)
            branch.prompt = branch.text = None


def _start_bytes_of(session: SessionKV) -> int:
    image, conditioning = session._image, session._conditioning
    return (layer_kv_bytes(image) if image is not None else 0) + (
        conditioning.nbytes if conditioning is not None else 0
    )


def _holds_cross_kv(session: SessionKV) -> bool:
    return _start_bytes_of(session) > 0 or any(branch.prompt is not None for branch in session._branches)
