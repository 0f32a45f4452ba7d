"""Recording episodes: what is in the files, that no robot waits for them, and what is wrong with disk or memory."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from engine.checkpoint.synthetic import BUILTIN_CONFIGS
from engine.model.config import parse_config
from engine.model.vae import build_vae, decode_video
from engine.model.video_encoder import VideoEncoder
from engine.policy import Chunk
from engine.session import Window
from engine.settings import EngineSettings
from engine.startup import load_policy
from engine.video.recorder import Recorder
from engine.video.video_file import VideoFile
from engine.worker import EngineWorker
from policy_server.server import PolicyServer
from policy_server.settings import ServerSettings, SettingsError, parse_settings
from protocol.robot import Observation
from tests.serving import SECONDS, Robot, observation, until

SIZE = (64, 128)  # of tiny's picture


def frames_of(video: Path) -> np.ndarray:
    with av.open(str(video)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def only_video(directory: Path) -> Path:
    (video,) = directory.glob("*.mp4")
    assert {file.name for file in directory.iterdir()} == {video.name, f"{video.stem}.npz"}
    return video


# What is decoded and how it is written.


@pytest.mark.parametrize("name", ["tiny", "wan22-tiny"])
def test_a_video_in_pieces_is_the_video_even_if_the_vae_does_other_work_meanwhile(name: str) -> None:
    torch.manual_seed(0)
    config = parse_config(BUILTIN_CONFIGS[name])
    vae = build_vae(config.vae).eval()
    latents = torch.randn(1, config.vae.z_dim, 4, 2, 4)
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    with torch.inference_mode():
        whole = vae.decode(latents * std + mean).sample
    pieces = []
    for piece in decode_video(vae, latents):
        pieces.append(piece)
        with torch.inference_mode():
            VideoEncoder(vae).encode(torch.zeros(1, 3, 5, *whole.shape[3:]))
            vae.decode(latents)
    assert [piece.shape[2] for piece in pieces] == [1, 4, 4, 4]
    assert torch.equal(torch.cat(pieces, dim=2), whole)


def test_a_video_file_holds_its_frames(tmp_path: Path) -> None:
    ramp = np.linspace(0, 200, 128, dtype=np.uint8)[None, None, :, None]
    frames = np.broadcast_to(ramp, (6, *SIZE, 3)) + np.arange(6, dtype=np.uint8)[:, None, None, None] * 10
    with VideoFile(tmp_path / "name.of.it") as file:
        file.add_frames(frames[:1])
        file.add_frames(frames[1:])
        file.write_arrays(numbers=np.arange(3))
    written = frames_of(tmp_path / "name.of.it.mp4")
    assert written.shape == frames.shape
    assert np.abs(written.astype(int) - frames).max() <= 8
    assert np.load(tmp_path / "name.of.it.npz")["numbers"].tolist() == [0, 1, 2]


def test_a_video_file_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    def write_half() -> None:
        with VideoFile(tmp_path / "it") as file:
            file.add_frames(np.zeros((120, *SIZE, 3), np.uint8))  # more than the encoder looks ahead
            file.write_arrays(numbers=np.arange(3))
            assert len(list(tmp_path.iterdir())) == 2
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write_half()
    assert list(tmp_path.iterdir()) == []


# The real policy behind a real socket.


def recording_server(directory: Path) -> PolicyServer:
    torch.set_num_threads(1)
    settings = parse_settings(["--port", "0", "--device", "cpu", "--steps", "1", "--save-video", str(directory)], {})
    return PolicyServer(settings, lambda report: load_policy(settings.engine, report))


async def test_an_episode_becomes_a_video_with_its_actions(tmp_path: Path) -> None:
    """Five calls: one window of four, and a restart."""
    directory = tmp_path / "made" / "for it"
    async with recording_server(directory) as server:
        await server.ready()
        async with await Robot.connect(server) as robot:
            sent = [observation(frames, session_id="../kitchen 7/é") for frames in (1, 4, 4, 4, 4)]
            replies = [(await robot.ask(each))["actions"] for each in sent]
            assert list(directory.iterdir()) == []
            await robot.ask({"endpoint": "reset"})
            await until(lambda: any(directory.glob("*.mp4")))
    video = only_video(directory)
    assert video.name.startswith("_kitchen_7_-20")
    assert frames_of(video).shape == (33 + 9, *SIZE, 3)
    arrays = np.load(video.with_suffix(".npz"))
    np.testing.assert_array_equal(arrays["actions"], np.stack(replies))
    assert arrays["first_frame"].tolist() == [1, 9, 17, 25, 33 + 1]


async def test_a_server_that_stops_writes_what_its_robots_were_doing(tmp_path: Path) -> None:
    async with recording_server(tmp_path) as server:
        await server.ready()
        async with await Robot.connect(server) as robot:
            await robot.ask(observation())
    video = only_video(tmp_path)
    assert video.name.startswith("connection_1-")
    assert frames_of(video).shape == (9, *SIZE, 3)


async def test_a_directory_that_cannot_be_made_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = ServerSettings(port=0, engine=EngineSettings(save_video=str(tmp_path / "file" / "videos")))
    with pytest.raises(SettingsError, match=r"save-video: cannot make .*videos: Not a directory"):
        await PolicyServer(settings, lambda report: None).start()  # type: ignore[arg-type, return-value]


# The engine's thread, with a policy that does what it is told.


@dataclass
class ScriptedPolicy:
    """Latents without a model: a restart at a session's first call. `before` runs ahead of every call and piece."""

    before: Callable[[str], None] = lambda event: None
    events: list[str] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)
    threads: set[int] = field(default_factory=set)
    slowest_call: float = 0.0

    def infer(self, session_id: str, observation: Observation) -> Chunk:
        self._note(f"infer {session_id}")
        restarted = session_id not in self.sessions
        self.sessions.add(session_id)
        window = Window.NEW if restarted else Window.CONTINUED
        return Chunk(np.zeros((24, 8), np.float32), {}, torch.zeros(16, 2 + restarted, 2, 4), window, 1)

    def end_session(self, session_id: str) -> None:
        self.events.append(f"end {session_id}")
        self.sessions.discard(session_id)

    def decode(self, latents: list[torch.Tensor]) -> Iterator[np.ndarray]:
        for index in range(sum(each.shape[1] for each in latents)):
            self._note(f"piece {index}")
            yield np.zeros((4 if index else 1, 16, 32, 3), np.uint8)

    def info(self) -> dict[str, object]:
        return {}

    def _note(self, event: str) -> None:
        self.events.append(event)
        self.threads.add(threading.get_ident())
        self.before(event)


class Gate:
    """Holds the engine at one event until it is opened."""

    def __init__(self, event: str) -> None:
        self.event = event
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, event: str) -> None:
        if event == self.event:
            self.entered.set()
            assert self.opened.wait(SECONDS)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[EngineWorker, Recorder, ScriptedPolicy]]]:
    workers: list[EngineWorker] = []

    def start_loop(
        before: Callable[[str], None] = lambda event: None, **options: object
    ) -> tuple[EngineWorker, Recorder, ScriptedPolicy]:
        policy = ScriptedPolicy(before)
        recorder = Recorder(tmp_path, **options)  # type: ignore[arg-type]
        worker = EngineWorker(lambda report: policy, max_queue=8, recorder=recorder)  # type: ignore[arg-type, return-value]
        workers.append(worker)
        worker.start()
        worker.loaded.result(SECONDS)
        return worker, recorder, policy

    yield start_loop
    for worker in workers:
        worker.stop(drain=False)
        assert worker.join(SECONDS)


def call(worker: EngineWorker, session_id: str, times: int = 1) -> None:
    for _ in range(times):
        worker.infer(session_id, Observation({}, {}, "")).result(SECONDS)


def test_calls_wait_for_one_piece_at_most(start) -> None:
    """While the engine is in a piece, three calls and an end come. All of them go before the next piece."""
    gate = Gate("piece 1")
    worker, recorder, policy = start(gate)
    call(worker, "a", 2)
    worker.end_session("a").result(SECONDS)
    assert gate.entered.wait(SECONDS)
    waiting = [worker.infer(name, Observation({}, {}, "")) for name in "bcd"]
    ended = worker.end_session("e")
    gate.opened.set()
    for each in (*waiting, ended):
        each.result(SECONDS)
    worker.stop(drain=True)
    recorder.finished.result(SECONDS)
    assert policy.events[: 5 + 4 + 1] == [
        "infer a", "infer a", "end a", "piece 0", "piece 1",
        "end e", "infer b", "infer c", "infer d", "piece 2",
    ]  # fmt: skip
    assert threading.get_ident() not in policy.threads
    assert len(policy.threads) == 1


def test_nothing_is_decoded_while_an_episode_runs(start) -> None:
    worker, _, policy = start()
    call(worker, "a", 3)
    assert policy.events == ["infer a"] * 3


def test_two_episodes_of_one_name_are_two_files(start, tmp_path: Path) -> None:
    worker, recorder, _ = start(title=lambda session_id: "same")
    for name in "ab":
        call(worker, name)
    worker.stop(drain=True)
    recorder.finished.result(SECONDS)
    videos = sorted(tmp_path.glob("*.mp4"))
    assert len(videos) == len(list(tmp_path.glob("*.npz"))) == 2
    assert all(frames_of(video).shape == (9, 16, 32, 3) for video in videos)


def test_memory_is_bounded_and_given_back(start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = torch.zeros(16, 2, 2, 4).nbytes
    worker, recorder, _ = start(most_bytes=4 * size)
    call(worker, "a", 2)  # three latent frames, then two: two and a half sizes
    call(worker, "b", 3)  # the first fits
    (line,) = [message for message in caplog.messages if "fill their memory" in message]
    assert line == "recordings fill their memory: that of b ends after 1 calls"
    for name in "ab":
        worker.end_session(name)
    assert wait_for(lambda: recorder.held_bytes == 0)
    call(worker, "d", 2)
    worker.stop(drain=True)
    recorder.finished.result(SECONDS)
    lengths = {video.name[0]: len(frames_of(video)) for video in tmp_path.glob("*.mp4")}
    assert lengths == {"a": 17, "b": 9, "d": 17}


def wait_for(condition: Callable[[], bool]) -> bool:
    waited = threading.Event()
    return any(condition() or waited.wait(0.01) for _ in range(100 * SECONDS))


def test_a_disk_that_takes_nothing_costs_the_recording_alone(
    start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker, recorder, _ = start()
    call(worker, "a")
    tmp_path.rename(tmp_path.with_name("gone"))
    worker.end_session("a").result(SECONDS)
    assert wait_for(lambda: any("the recording of a is lost: FileNotFoundError" in each for each in caplog.messages))
    tmp_path.mkdir()
    call(worker, "b")
    worker.stop(drain=True)
    recorder.finished.result(SECONDS)
    assert only_video(tmp_path).name.startswith("b-")


def test_a_device_without_memory_for_a_piece_costs_the_recording_alone(
    start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: str) -> None:
        if event == "piece 1":
            raise torch.OutOfMemoryError("CUDA out of memory")

    worker, recorder, _ = start(fail)
    call(worker, "a")
    worker.end_session("a").result(SECONDS)
    assert wait_for(lambda: any("the recording of a is lost: OutOfMemoryError" in each for each in caplog.messages))
    call(worker, "b")
    assert worker.not_ready is None
    worker.stop(drain=True)
    recorder.finished.result(SECONDS)
    assert list(tmp_path.iterdir()) == []


def test_a_stop_that_does_not_drain_leaves_no_half_file(
    start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate("piece 1")
    worker, recorder, _ = start(gate)
    call(worker, "a")
    worker.end_session("a")
    assert gate.entered.wait(SECONDS)
    worker.stop(drain=False)
    gate.opened.set()
    assert worker.join(SECONDS)
    recorder.finished.result(SECONDS)
    assert any("the recording of a is lost: EngineStopped" in each for each in caplog.messages)
    assert list(tmp_path.iterdir()) == []


def test_a_session_without_a_call_has_no_recording(start, tmp_path: Path) -> None:
    worker, recorder, _ = start()
    worker.end_session("a").result(SECONDS)
    worker.stop(drain=True)
    recorder.finished.result(SECONDS)
    assert list(tmp_path.iterdir()) == []
