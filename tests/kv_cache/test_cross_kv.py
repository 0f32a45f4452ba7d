"""Cross-attention K/V: prompts are held once for all who use them, an image once for both branches."""

import pytest

from kv_cache.cross_kv import TextKV
from tests.kv import GEOMETRY, layer_kv, make_cache, run_call


def test_equal_prompts_are_held_once_and_freed_with_the_last_user() -> None:
    cache = make_cache(3)
    computed = []

    def compute():
        computed.append(1)
        return layer_kv(5)

    cache.keep_text(b"negative", compute)
    for name in "abc":
        session = cache.session(name)
        with cache.call(session):
            cache.publish_text(session, 0, b"same", compute)
            cache.publish_text(session, 1, b"negative", compute)
    assert len(computed) == 2, "the negative prompt once, the shared prompt once"
    assert cache.session("a").text(0) is cache.session("c").text(0)
    one = GEOMETRY.text_tokens * GEOMETRY.token_bytes
    assert cache.report().cross_bytes == 2 * one
    cache.forget("a")
    cache.forget("b")
    assert cache.report().prompts == 2
    cache.forget("c")
    assert (cache.report().prompts, cache.report().cross_bytes) == (1, one)


def test_the_image_kv_is_held_once_for_both_branches() -> None:
    cache = make_cache(1)
    session = cache.session("robot")
    computed = []
    with cache.call(session):
        cache.publish_image(session, lambda: computed.append(1) or layer_kv(4))  # type: ignore[func-returns-value]
    assert len(computed) == 1
    assert cache.report().cross_bytes == GEOMETRY.image_bytes


def test_a_restart_keeps_the_text_kv_and_drops_the_image_kv() -> None:
    cache = make_cache(1)
    session = cache.session("robot")
    run_call(cache, session)
    text = session.text(0)
    cache.restart(session)
    assert session.text(0) is text
    with pytest.raises(LookupError, match="no image"):
        _ = session.image


def test_publishing_is_all_or_nothing() -> None:
    cache = make_cache(1)
    session = cache.session("robot")
    run_call(cache, session, b"old")
    text, before = session.text(0), cache.report().cross_bytes

    def broken():
        raise MemoryError("half way")

    with cache.call(session), pytest.raises(MemoryError):
        cache.publish_text(session, 0, b"new", broken)
    assert session.text(0) is text
    assert (cache.report().prompts, cache.report().cross_bytes) == (1, before)
    with cache.call(session), pytest.raises(MemoryError):
        cache.publish_image(session, broken)
    with pytest.raises(LookupError):
        _ = session.image


def test_cross_attention_stays_within_its_budget() -> None:
    cache = make_cache(2)
    for robot in range(10):
        run_call(cache, cache.session(robot), b"%d" % robot)
        assert cache.report().cross_bytes <= cache.budget.cross_bytes


def test_a_released_prompt_is_gone_and_cannot_be_released_again() -> None:
    store = TextKV()
    store.acquire(b"p", lambda: layer_kv(5))
    store.release(b"p")
    with pytest.raises(KeyError):
        store.release(b"p")
