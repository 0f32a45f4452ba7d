"""Sessions in one pool: each gets what it would have got alone, under pressure too, and after a failure."""

import random
from pathlib import Path

import pytest
import torch

from benchmarks.golden import TOLERANCE, Engine, Golden, Mode, Report, build_engine, run_call
from engine.rollout import Prediction
from engine.session import Session
from tests.kv import bytes_for

FILES = Path(__file__).parents[1] / "golden_files"
NAMES = ("session", "prompt_change", "session_switch")


@pytest.fixture(scope="module")
def goldens() -> dict[str, Golden]:
    files = {name: Golden(FILES / f"{name}.safetensors") for name in NAMES}
    first = files["session"]
    for golden in files.values():  # one engine serves them all
        assert (golden.config, golden.runtime, golden.statistics) == (first.config, first.runtime, first.statistics)
    return files


@pytest.fixture(scope="module")
def engine(goldens: dict[str, Golden]) -> Engine:
    return build_engine(goldens["session"])


@pytest.fixture(scope="module")
def alone(engine: Engine, goldens: dict[str, Golden]) -> dict[tuple[str, int], Prediction]:
    """What every call gives when its session has the engine to itself."""
    results = {}
    for name, golden in goldens.items():
        robot = Robot(engine, golden, name)
        results |= {(name, index): robot.call() for index in range(len(golden.calls))}
        robot.leave()
    return results


class Robot:
    """Sends a golden file's calls, one after the other, and holds them against the file."""

    def __init__(self, engine: Engine, golden: Golden, name: str) -> None:
        self.engine, self.golden, self.name = engine, golden, name
        self.report = Report()
        self.next = 0
        self.session = Session(engine.cache.session(name))

    def call(self) -> Prediction:
        if self.golden.calls[self.next]["new_session"]:
            self.leave()
            self.session = Session(self.engine.cache.session(self.name))
        self.next += 1
        return run_call(self.engine, self.golden, self.session, self.next - 1, self.report)

    def leave(self) -> None:
        self.engine.cache.forget(self.name)


def same(a: Prediction, b: Prediction) -> bool:
    """Bit for bit."""
    return torch.equal(a.video_latents, b.video_latents) and torch.equal(a.action_latents, b.action_latents)


def with_room_for(sessions: int, engine: Engine) -> Engine:
    """The same model over a pool for so many sessions."""
    return engine.with_cache(bytes_for(sessions, engine.cache.geometry, engine.cache.policy))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_interleaved_sessions_get_bit_for_bit_what_they_get_alone(seed: int, engine, goldens, alone) -> None:
    shared = with_room_for(3, engine)
    robots = {name: Robot(shared, golden, name) for name, golden in goldens.items()}
    order = [name for name, golden in goldens.items() for _ in golden.calls]
    random.Random(seed).shuffle(order)
    for name in order:
        index = robots[name].next
        assert same(robots[name].call(), alone[name, index]), (name, index, order)
    assert all(robot.report.clean(TOLERANCE) for robot in robots.values())
    assert shared.cache.report().evictions == 0


def test_sessions_in_pieces_get_the_same_bits(engine, goldens, alone) -> None:
    """Windows that are not one run are gathered, and nothing else changes."""
    shared = with_room_for(2, engine)
    # Others hold a block here and there: five sessions with a frame each leave no free segment.
    for other in range(5):
        kv = shared.cache.session(other)
        with shared.cache.call(kv), shared.cache.lease(kv, 1, commit=True):
            pass
    robot = Robot(shared, goldens["session"], "session")
    for index in range(4):
        assert same(robot.call(), alone["session", index])
    report = shared.cache.report()
    assert report.gathered > 0
    assert report.evictions == 0


def test_an_evicted_session_restarts_as_if_its_window_had_ended(engine, goldens) -> None:
    shared = with_room_for(1, engine)
    a, b = Robot(shared, goldens["session"], "a"), Robot(shared, goldens["prompt_change"], "b")
    a.call(), b.call()
    assert a.session.kv.resident_frames == 0, "the pool holds one session, and b came last"
    evicted = a.call()

    alone = Robot(engine, goldens["session"], "reference")
    alone.call()
    alone.session.failed = True  # the next call begins a window
    assert same(evicted, alone.call())
    alone.leave()


def test_an_eviction_at_a_restart_gives_the_golden_numbers(engine, goldens) -> None:
    """The fifth call restarts in the golden file; eviction just before it changes nothing."""
    shared = with_room_for(1, engine)
    a, b = Robot(shared, goldens["session"], "a"), Robot(shared, goldens["prompt_change"], "b")
    a.next = 3
    a.call(), b.call()
    assert a.session.kv.resident_frames == 0
    a.report = Report()
    a.call()
    assert a.report.clean(TOLERANCE), a.report


class Injected(Exception):
    """The failure that a test puts into a forward."""


class FailAt:
    """Raises at the n-th forward of one layer, when the K/V of the layers before it have been written.

    branches: how many went through that forward.
    """

    def __init__(self, engine: Engine, layer: int, forward: int) -> None:
        self._left = forward
        self.branches = 0
        self._handle = engine.model.dit.blocks[layer].self_attn.qkv.register_forward_hook(self._hook)

    def _hook(self, module: object, inputs: object, values: torch.Tensor) -> None:
        self._left -= 1
        if self._left < 0:
            self._handle.remove()
            self.branches = len(values)
            raise Injected


FORWARDS = {
    "batched": ["prefill", "denoise", "step2"],
    "separate": ["prefill+", "prefill-", "denoise+", "denoise-", "step2+", "step2-"],
}
"""A call's forwards in order, by how the guidance branches go through the model."""
EVERY_FORWARD = [
    pytest.param(guidance, number, id=f"{guidance}-{name}")
    for guidance, names in FORWARDS.items()
    for number, name in enumerate(names)
]


@pytest.fixture(scope="module")
def quick() -> dict[str, Engine]:
    """By guidance. Two steps a call, a short image conditioning: what counts here is where a failure is put."""
    golden = Golden(FILES / "session.safetensors")
    golden.config["action_head_cfg"]["config"]["num_frames"] = 9
    golden.runtime["num_inference_steps"] = 2
    return {guidance: build_engine(golden, Mode(guidance=guidance)) for guidance in FORWARDS}


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize(("guidance", "forward"), EVERY_FORWARD)
@pytest.mark.parametrize("calls_before", [0, 1], ids=["restart", "continue"])
def test_a_forward_that_raises_leaves_the_pool_as_before_and_the_session_restarts(
    quick: dict[str, Engine], goldens, reference, layer: int, guidance: str, forward: int, calls_before: int
) -> None:
    engine = quick[guidance]
    bystander, robot = (Robot(engine, goldens["session"], name) for name in ("bystander", "robot"))
    bystander_windows = bystander.session.kv.blocks
    for _ in range(calls_before):
        robot.call()
    before = engine.cache.report()
    failure = FailAt(engine, layer, forward)
    with pytest.raises(Injected):
        robot.call()
    assert failure.branches == (2 if guidance == "batched" else 1)
    after = engine.cache.report()
    assert (after.blocks_free, after.blocks_by_session) == (before.blocks_free, before.blocks_by_session)
    assert bystander.session.kv.blocks == bystander_windows

    robot.next -= 1  # the robot sends the observation again
    prediction = robot.call()
    assert robot.session.kv.resident_frames == 1, "a fresh window"
    assert same(prediction, reference[guidance][calls_before])
    robot.leave(), bystander.leave()


@pytest.mark.parametrize(("guidance", "forward"), [("batched", 1), ("separate", 3)])
def test_a_call_that_raises_takes_no_frames_into_the_buffer(
    quick: dict[str, Engine], goldens, guidance: str, forward: int
) -> None:
    """A call that is tried again, as after an out-of-memory, must not feed its frames in twice."""
    engine = quick[guidance]
    robot = Robot(engine, goldens["session"], "robot")
    robot.call()
    frames = list(robot.session.frames)
    FailAt(engine, 1, forward)
    with pytest.raises(Injected):
        robot.call()
    assert [id(frame) for frame in robot.session.frames] == [id(frame) for frame in frames]
    assert robot.session.called
    robot.leave()
    robot = Robot(engine, goldens["session"], "robot")
    FailAt(engine, 1, forward)
    with pytest.raises(Injected):
        robot.call()
    assert not robot.session.frames
    assert not robot.session.called
    robot.leave()


@pytest.fixture(scope="module")
def reference(quick: dict[str, Engine], goldens) -> dict[str, list[Prediction]]:
    """By guidance: call 0, and call 1 of a session that begins a window with it."""
    predictions = {}
    for guidance, engine in quick.items():
        robot = Robot(engine, goldens["session"], "reference")
        predictions[guidance] = [robot.call()]
        robot.session.failed = True
        predictions[guidance].append(robot.call())
        robot.leave()
    return predictions
