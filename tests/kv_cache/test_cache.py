"""Many sessions in one pool: sizing, eviction, transactions, sharing, accounting. No model is needed."""

import random
import threading
from dataclasses import replace

import pytest
import torch

from kv_cache.block_pool import OutOfBlocks
from kv_cache.cache import KVCache
from kv_cache.paged_kv import KVGeometry
from kv_cache.sizing import (
    CPU_DEFAULT_BYTES,
    NotEnoughMemory,
    kv_bytes_available,
    one_session_bytes,
    plan_budget,
)
from kv_cache.window import Overflow, WindowPolicy
from tests.kv import CPU, GEOMETRY, POLICY, bytes_for, layer_kv, make_cache, run_call


def check_accounts(cache: KVCache) -> None:
    report = cache.report()
    assert report.blocks_used == sum(report.blocks_by_session.values())
    assert report.blocks_used + report.blocks_free == report.blocks_total


def test_sizing_counts_what_a_window_holds_between_calls() -> None:
    """The current frames of a forward that leaves nothing behind take no blocks: seven of nine frames are resident."""
    one = bytes_for(1)
    assert one == one_session_bytes(GEOMETRY, POLICY)
    budget = plan_budget(GEOMETRY, POLICY, one)
    assert budget.blocks == 2 * 7
    assert budget.sessions == 1
    assert plan_budget(GEOMETRY, POLICY, bytes_for(2)).sessions == 2
    assert plan_budget(GEOMETRY, POLICY, bytes_for(2) - 1).sessions == 1
    with pytest.raises(NotEnoughMemory, match=r"one session needs .* MiB, of it 14 blocks of"):
        plan_budget(GEOMETRY, POLICY, one - 1)


@pytest.mark.parametrize("more", [0, 1, 2, 5])
def test_blocks_take_what_whole_sessions_leave(more: int) -> None:
    available = bytes_for(2) + more * GEOMETRY.block_bytes
    budget = plan_budget(GEOMETRY, POLICY, available)
    assert (budget.sessions, budget.blocks) == (2, 2 * 14 + more)
    assert plan_budget(GEOMETRY, POLICY, available + GEOMETRY.block_bytes - 1).blocks == budget.blocks


def test_a_window_that_slides_needs_room_for_the_frames_that_come() -> None:
    sliding = WindowPolicy(9, Overflow.SLIDE)
    assert plan_budget(GEOMETRY, sliding, one_session_bytes(GEOMETRY, sliding)).blocks == 2 * (9 + 2)


def test_memory_comes_from_the_setting_or_the_default() -> None:
    assert kv_bytes_available(CPU, 0.5, None) == CPU_DEFAULT_BYTES
    assert kv_bytes_available(CPU, 0.5, 12345) == 12345
    with pytest.raises(NotEnoughMemory, match=r"asked for, and cpu has [\d.,]+ MiB in all"):
        kv_bytes_available(CPU, 0.5, 2**60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_is_a_fraction_of_what_is_free_on_cuda() -> None:
    device = torch.device("cuda")
    free, _ = torch.cuda.mem_get_info(device)
    assert kv_bytes_available(device, 0.5, None, reserved=2**20) == pytest.approx((free - 2**20) / 2, rel=0.05)


def test_one_session_fills_its_window_through_plain_views_only() -> None:
    cache = make_cache(1)
    session = cache.session("robot")
    resident = []
    for _ in range(9):
        run_call(cache, session)
        resident.append(session.resident_frames)
    assert resident == [1, 3, 5, 7, 1, 3, 5, 7, 1]
    assert cache.report().gathered == 0
    assert cache.report().plain_view == 9 * 4
    assert cache.report().evictions == 0


def test_sessions_that_fit_are_never_evicted_nor_gathered() -> None:
    cache = make_cache(4)
    for call in range(20):
        for robot in range(4):
            assert run_call(cache, cache.session(robot), b"%d" % robot) == (call % 4 == 0)
    assert cache.report().evictions == 0
    assert cache.report().gathered == 0


def test_under_pressure_the_least_recently_used_session_loses_its_window() -> None:
    cache = make_cache(2)
    a, b, c = (cache.session(name) for name in "abc")
    for session in (a, b, a, b, b):
        run_call(cache, session, str(session.key).encode())
    run_call(cache, c, b"c")
    assert (a.resident_frames, b.resident_frames, c.resident_frames) == (0, 5, 1)
    assert cache.report().evictions == 1
    assert run_call(cache, a, b"a"), "the evicted session restarts instead of failing"
    check_accounts(cache)


@pytest.mark.slow
def test_ten_thousand_calls_of_two_hundred_churning_sessions_leave_every_block_accounted_for() -> None:
    cache, rng = make_cache(3), random.Random(1140)
    cache.keep_text(b"negative", lambda: layer_kv(5))
    for _ in range(10_000):
        key = rng.randrange(200)
        action = rng.random()
        if action < 0.1:
            cache.forget(key)
        elif action < 0.15:
            with pytest.raises(ZeroDivisionError), cache.call(cache.session(key)):  # noqa: PT012
                with cache.lease(cache.session(key), 2, commit=True):
                    pass
                with cache.lease(cache.session(key), 2):
                    raise ZeroDivisionError
        else:
            run_call(cache, cache.session(key), b"prompt %d" % rng.randrange(5))
        check_accounts(cache)
    assert cache.report().evictions > 100, "the pool was never under pressure: the test shows nothing"
    for key in range(200):
        cache.forget(key)
    report = cache.report()
    assert (report.blocks_used, report.prompts) == (0, 1)
    assert report.cross_bytes == GEOMETRY.text_tokens * GEOMETRY.token_bytes


def test_a_call_that_raises_leaves_the_pool_as_before() -> None:
    cache = make_cache(1)
    session = cache.session("robot")
    run_call(cache, session)
    before = cache.report()
    for at in ("first lease", "second lease", "after commit"):
        with pytest.raises(RuntimeError, match=at), cache.call(session):  # noqa: PT012
            with cache.lease(session, 2, commit=True):
                if at == "first lease":
                    raise RuntimeError(at)
            with cache.lease(session, 2):
                if at == "second lease":
                    raise RuntimeError(at)
            raise RuntimeError(at)
        after = cache.report()
        assert (after.blocks_free, after.blocks_by_session) == (before.blocks_free, before.blocks_by_session)
        assert session.resident_frames == 1


def test_a_lease_whose_plan_cannot_be_made_gives_its_blocks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(1)
    session = cache.session("robot")

    def out_of_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no memory for the plan's tensors")

    monkeypatch.setattr(cache.paged, "plan", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError), cache.call(session), cache.lease(session, 2, commit=True):
        pass
    assert cache.report().blocks_used == 0


DROID = KVGeometry(
    layers=40, heads=40, head_dim=128, frame_tokens=880, frames_per_forward=2, register_tokens=25, text_tokens=512,
    image_tokens=257, dtype=torch.bfloat16,
)  # fmt: skip
GIB_80_GB_CARD = 0.8 * 33.2  # what the 14B in bfloat16 leaves of 79.1 GiB, and the default share of it


@pytest.mark.parametrize(("robots", "evicted"), [(2, False), (3, True)])
def test_two_robots_on_an_80_gb_card_keep_their_windows(robots: int, evicted: bool) -> None:
    """The blocks that the 14B gets there, with tensors small enough for any machine."""
    budget = plan_budget(DROID, POLICY, int(GIB_80_GB_CARD * 2**30))
    assert budget.sessions == 2
    assert 2 * 14 < budget.blocks < 3 * 14, "what two sessions leave is in the pool too"
    cache = KVCache(GEOMETRY, POLICY, budget, CPU)
    restarts = [run_call(cache, cache.session(call % robots), b"%d" % (call % robots)) for call in range(80)]
    assert (cache.report().evictions > 0) == evicted
    if not evicted:
        assert sum(restarts) == 80 // 4, "the window's own, every fourth call"


def test_what_many_idle_sessions_hold_is_bounded_and_leaves_with_their_windows() -> None:
    """A vectorised simulator: each of 128 sessions started its window once, and none is in a call."""
    geometry = replace(GEOMETRY, conditioning_bytes=400)
    cache = make_cache(3, geometry)
    most = geometry.text_bytes + 3 * geometry.session_bytes(POLICY)
    for number in range(128):
        session = cache.session(number)
        run_call(cache, session, b"%d" % number)
        cache.publish_conditioning(session, torch.zeros(100))
        report = cache.report()
        assert report.bytes_by_session[number] == 2 * geometry.block_bytes + geometry.text_bytes + geometry.start_bytes
        assert report.blocks_used * geometry.block_bytes + report.cross_bytes <= most
    holding = [number for number in range(128) if cache.report().bytes_by_session[number]]
    assert holding == [125, 126, 127], "those that called last"
    with pytest.raises(LookupError, match="session 5 has no conditioning"):
        _ = cache.session(5).conditioning
    assert cache.evict_idle() == 3
    assert (cache.report().cross_bytes, set(cache.report().bytes_by_session.values())) == (0, {0})


def test_a_report_can_be_made_while_prompts_come_and_go() -> None:
    cache = make_cache(2)
    done = threading.Event()
    failures: list[Exception] = []

    def scrape() -> None:
        while not done.is_set():
            try:
                cache.report()
            except Exception as error:
                failures.append(error)

    reader = threading.Thread(target=scrape)
    reader.start()
    for robot in range(3000):
        session = cache.session(robot % 7)
        with cache.call(session):
            cache.publish_text(session, 0, b"%d" % robot, lambda: layer_kv(5))
        if robot % 3 == 0:
            cache.forget((robot + 1) % 7)
    done.set()
    reader.join()
    assert not failures


def test_a_sliding_window_that_raises_after_evicting_frames_keeps_only_its_own() -> None:
    policy = WindowPolicy(4, Overflow.SLIDE, sink_frames=1)
    cache = make_cache(1, policy=policy)
    session = cache.session("robot")
    for _ in range(5):
        with cache.call(session), cache.lease(session, 2, commit=True):
            pass
        assert session.resident_frames <= 4
    with pytest.raises(RuntimeError), cache.call(session):  # noqa: PT012
        with cache.lease(session, 2, commit=True):
            pass
        raise RuntimeError
    assert session.resident_frames == 2, "the sink and one frame from before the call"
    check_accounts(cache)


def test_a_sliding_lease_does_not_see_the_frames_that_the_current_ones_push_out() -> None:
    cache = make_cache(1, policy=WindowPolicy(4, Overflow.SLIDE))
    session = cache.session("robot")
    for _ in range(2):
        with cache.call(session), cache.lease(session, 2, commit=True):
            pass
    with cache.call(session), cache.lease(session, 2) as plan:
        assert plan.visible.tolist() == [2 * GEOMETRY.frame_tokens] * 2, (
            "of four that the window holds, two are current"
        )
    assert session.resident_frames == 4, "nothing leaves without a commit"


def test_a_session_larger_than_the_pool_is_an_error_that_loses_nothing() -> None:
    cache = make_cache(1, policy=WindowPolicy(40))
    cache_small = KVCache(GEOMETRY, WindowPolicy(40), replace(cache.budget, blocks=5), CPU)
    session = cache_small.session("robot")
    with (
        pytest.raises(OutOfBlocks, match="6 blocks needed, 5 free"),
        cache_small.call(session),
        cache_small.lease(session, 3, commit=True),
    ):
        pass
    assert cache_small.report().blocks_free == 5


def test_two_calls_at_once_are_refused() -> None:
    cache = make_cache(2)
    with (
        cache.call(cache.session("a")),
        pytest.raises(RuntimeError, match="'a' is in a call"),
        cache.call(cache.session("b")),
    ):
        pass


def test_evicting_all_idle_sessions_frees_the_pool() -> None:
    cache = make_cache(2)
    run_call(cache, cache.session("a"))
    run_call(cache, cache.session("b"))
    assert cache.evict_idle() == 2
    assert cache.report().blocks_used == 0
    assert cache.evict_idle() == 0
