"""The replay command, its episodes and what it writes."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import matplotlib.image
import numpy as np
import pytest

from clients import replay
from clients.action_plot import plot_actions
from clients.episode import CAMERAS, EpisodeError, is_scheduled, schedule
from clients.recorded_episode import read_episode
from clients.synthetic_episode import synthetic_episode
from protocol.codec import Dialect, encode
from protocol.messages import infer_reply, parse_request
from tests.clients.wire_server import WireServer
from tests.droid import DROID

PROMPT = "Move the $pan forward and use the brush"


def write_video(
    path: Path, frames: int, height: int = 48, width: int = 64, milliseconds: Sequence[int] = (), brightness: int = 4
) -> None:
    """A video whose frame i is grey, of brightness 4 i; 15 frames a second unless `milliseconds` says when each is."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=15)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = width, height, "yuv420p", 4_000_000
        if milliseconds:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(frames):
            image = np.full((height, width, 3), brightness * number, np.uint8)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if milliseconds:
                frame.pts, frame.time_base = milliseconds[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_video_of_two_sizes(path: Path) -> None:
    """A video whose images grow after frame 24."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg2video", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        wider = av.CodecContext.create("mpeg2video", "w")
        wider.width, wider.height, wider.pix_fmt, wider.time_base = 96, 80, "yuv420p", Fraction(1, 25)  # type: ignore[attr-defined]
        number = 0
        for encoder, height, width in ((stream, 48, 64), (wider, 80, 96)):
            images = [np.zeros((height, width, 3), np.uint8)] * 25
            for image in [*images, None]:
                frame = None if image is None else av.VideoFrame.from_ndarray(image, format="rgb24")
                for packet in encoder.encode(frame):  # type: ignore[attr-defined]
                    packet.stream, packet.time_base = stream, Fraction(1, 25)
                    packet.pts = packet.dts = number
                    number += 1
                    container.mux(packet)


def write_episode(directory: Path, frames: int = 50) -> Path:
    directory.mkdir(exist_ok=True)
    for camera in CAMERAS:
        write_video(directory / f"{camera}.mp4", frames)
    return directory


def test_the_schedule_of_the_release() -> None:
    calls = schedule(419)
    assert calls[:3] == [(0,), (0, 7, 15, 23), (24, 31, 39, 47)]
    assert calls[-1] == (384, 391, 399, 407)
    assert len(calls) == 18
    assert [len(schedule(length)) for length in (1, 23, 24, 47, 48)] == [1, 1, 2, 2, 3]
    assert all(is_scheduled(frame) for call in calls for frame in call)


def test_a_recording_is_cut_into_calls(tmp_path: Path) -> None:
    episode = read_episode(write_episode(tmp_path / "demo"))
    assert episode.name == "demo"
    for numbers, call in zip([(0,), (0, 7, 15, 23), (24, 31, 39, 47)], episode.calls, strict=True):
        assert list(call) == list(CAMERAS)
        for frames in call.values():
            assert frames.shape == (len(numbers), 48, 64, 3)
            assert frames.dtype == np.uint8
            brightness = frames.mean(axis=(1, 2, 3))
            assert np.abs(brightness - 4 * np.array(numbers)).max() < 3


@pytest.mark.parametrize(
    ("milliseconds", "seen"),
    [
        ([round(1000 * i / 15) for i in range(50)], [0, 0, 7, 15, 23, 24, 31, 39, 47]),
        ([round(1000 * i / 30) for i in range(100)], [0, 0, 14, 30, 46, 48, 62, 78, 94]),
        ([200 * i for i in range(18)], [0, 0, 2, 5, 8, 8, 10, 13, 16]),
        ([*range(0, 2000, 20), *range(2000, 3400, 100)], [0, 0, 23, 50, 77, 80, 101, 106, 111]),
    ],
    ids=["15 a second", "30 a second", "5 a second", "50 a second, then 10"],
)
def test_a_recording_at_another_rate_is_resampled_by_time(
    tmp_path: Path, milliseconds: list[int], seen: list[int]
) -> None:
    for camera in CAMERAS:
        write_video(tmp_path / f"{camera}.mp4", len(milliseconds), milliseconds=milliseconds, brightness=2)
    episode = read_episode(tmp_path)
    for camera in CAMERAS:
        frames = np.concatenate([call[camera] for call in episode.calls])
        assert np.rint(frames.mean(axis=(1, 2, 3)) / 2).tolist() == pytest.approx(seen, abs=1)


@pytest.mark.parametrize("text", ["ffconcat version 1.0\nfile other.mp4\n", "#EXTM3U\n#EXTINF:5,\nother.mp4\n"])
def test_a_list_of_other_files_is_not_followed(tmp_path: Path, text: str) -> None:
    directory = write_episode(tmp_path)
    (directory / "wrist_image_left.mp4").rename(directory / "other.mp4")
    (directory / "wrist_image_left.mp4").write_text(text)
    with pytest.raises(EpisodeError, match=r"wrist_image_left\.mp4 cannot be read after frame 0: Invalid data"):
        read_episode(directory)


def break_file(path: Path) -> None:
    path.write_bytes(b"not a video")


def cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (Path.unlink, r"wrist_image_left\.mp4 is missing"),
        (break_file, r"wrist_image_left\.mp4 cannot be read after frame 0"),
        (cut_file, r"wrist_image_left\.mp4 cannot be read after frame 0"),
        (write_video_of_two_sizes, r"wrist_image_left\.mp4 has frames of more than one size: 64x48, 96x80"),
        (
            lambda path: write_video(path, 3, milliseconds=[0, 67, 20_000]),
            r"wrist_image_left\.mp4: frame 2 comes 19\.9 s after the one before, expected .* at most 10",
        ),
        (lambda path: write_video(path, 49), r"differ in their number of frames: .*wrist_image_left\.mp4 49"),
    ],
)
def test_a_bad_recording_is_named(tmp_path: Path, harm: Any, problem: str) -> None:
    directory = write_episode(tmp_path)
    harm(directory / "wrist_image_left.mp4")
    with pytest.raises(EpisodeError, match=problem):
        read_episode(directory)


def test_a_file_without_video_is_named(tmp_path: Path) -> None:
    directory = write_episode(tmp_path)
    with av.open(str(directory / "wrist_image_left.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=48_000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 2048), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 48_000
        container.mux(stream.encode(silence))
        container.mux(stream.encode())
    with pytest.raises(EpisodeError, match=r"wrist_image_left\.mp4 has no video"):
        read_episode(directory)


def test_a_recording_with_odd_text_in_it_is_read(tmp_path: Path) -> None:
    directory = write_episode(tmp_path)
    path = directory / "wrist_image_left.mp4"
    content = path.read_bytes()
    assert content.count(b"VideoHandler") == 1
    path.write_bytes(content.replace(b"VideoHandler", b"Vid\xebohandler"))
    assert len(read_episode(directory).calls) == 3


def test_whatever_else_a_recording_makes_the_reader_raise_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write_episode(tmp_path, frames=1)

    def odd(path: str, **options: object) -> None:
        raise ValueError("an odd\nrecording")

    monkeypatch.setattr("clients.recorded_episode.av.open", odd)
    assert replay.main(["--episode", str(tmp_path), "--prompt", PROMPT]) == 1
    recording = tmp_path / "exterior_image_1_left.mp4"
    assert capsys.readouterr().err == f"replay: {recording} cannot be read after frame 0: an odd recording\n"


def test_a_prompt_that_cannot_be_sent_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As a shell hands over bytes that are not UTF-8."""
    episode = write_episode(tmp_path / "demo", frames=1)
    with WireServer(brightness_answer) as server:
        assert replay.main(["--episode", str(episode), "--prompt", "grasp \udcff", "--url", server.url]) == 1
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert last_line.startswith("replay: prompt: cannot be sent")


def test_the_synthetic_episode_moves_and_is_always_the_same() -> None:
    episode = synthetic_episode()
    assert [frames.shape for frames in episode.calls[0].values()] == [(1, 180, 320, 3)] * 3
    assert len(episode.calls) == 6
    for camera in CAMERAS:
        first, last = episode.calls[1][camera], episode.calls[3][camera]
        assert first.shape == (4, 180, 320, 3)
        assert np.abs(first.astype(int) - last).mean() > 1
    again = synthetic_episode()
    for call, other in zip(episode.calls, again.calls, strict=True):
        assert all(np.array_equal(call[camera], other[camera]) for camera in CAMERAS)


def brightness_answer(message: dict[str, Any], dialect: Dialect) -> bytes:
    """Actions that depend on the images alone, so that the same episode gives the same actions."""
    request = parse_request(message, dialect, DROID)
    level = request.observation.views["wrist"].mean() / 255
    return infer_reply(request, np.linspace(0, level, 192, dtype=np.float32).reshape(24, 8), {})


def test_a_replay_writes_actions_and_a_picture_twice_the_same(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    episode = write_episode(tmp_path / "demo")
    with WireServer(brightness_answer, api_key="key") as server:
        for out in ("first", "second"):
            options = ["--episode", str(episode), "--prompt", PROMPT, "--url", server.url, "--api-key", "key"]
            assert replay.main([*options, "--out", str(tmp_path / out)]) == 0
    archives = [np.load(tmp_path / out / "actions.npz") for out in ("first", "second")]
    assert archives[0]["actions"].shape == (3, 24, 8)
    assert archives[0]["latencies"].shape == (3,)
    assert str(archives[0]["prompt"]) == PROMPT
    assert np.array_equal(archives[0]["actions"], archives[1]["actions"])
    assert matplotlib.image.imread(tmp_path / "first" / "actions.png").shape[:2] == (924, 1320)
    output = capsys.readouterr().out
    for word in ("min", "median", "p95", "max", "calls/s", "actions/s", "actions.npz", "actions.png"):
        assert word in output
    sessions = [message["session_id"] for message in server.messages]
    assert len(set(sessions[:3])) == len(set(sessions[3:])) == 1
    assert sessions[0] != sessions[3]
    for message in server.messages:
        assert message["prompt"] == PROMPT
        assert not message["observation/joint_position"].any()
        assert message["observation/gripper_position"].tolist() == [0]
        assert "observation/exterior_image_2_left" in message


def test_a_replay_of_the_synthetic_episode_can_be_cut_short(tmp_path: Path) -> None:
    with WireServer(brightness_answer) as server:
        options = ["--episode", "synthetic", "--prompt", PROMPT, "--url", server.url, "--calls", "2"]
        assert replay.main([*options, "--out", str(tmp_path)]) == 0
    assert len(server.messages) == 2


def not_finite(message: dict[str, Any], dialect: Dialect) -> bytes:
    return encode({"actions": np.full((24, 8), np.nan, np.float32)}, dialect)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            lambda message, dialect: "prompt: expected\nsomething else",
            "the server answered: prompt: expected something",
        ),
        (not_finite, "not finite"),
        (lambda message, dialect: encode({"actions": np.zeros((24, 7), np.float32)}, dialect), "(24, 8)"),
        (lambda message, dialect: encode({"other": 1}, dialect), "(24, 8)"),
    ],
)
def test_what_the_server_gets_wrong_is_one_line(
    answer: Any, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    episode = write_episode(tmp_path / "demo", frames=1)
    with WireServer(answer) as server:
        options = ["--episode", str(episode), "--prompt", PROMPT, "--url", server.url, "--out", str(tmp_path / "out")]
        assert replay.main(options) == 1
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert last_line.startswith("replay: ")
    assert problem in last_line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--episode", "{here}/demo", "--url", "ws://127.0.0.1:1"], "connection refused"),
        (["--episode", "{here}/demo", "--url", "ws://:bad"], "cannot connect to ws://:bad"),
        (["--episode", "{here}/nowhere"], "nowhere is not a directory"),
        (["--episode", "{here}"], "exterior_image_1_left.mp4 is missing"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_line(
    options: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_episode(tmp_path / "demo", frames=1)
    filled = [option.format(here=tmp_path) for option in options]
    assert replay.main([*filled, "--prompt", PROMPT, "--wait", "0.1"]) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert problem in error[0]


def test_without_the_extra_the_command_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(replay.importlib.util, "find_spec", lambda name: None if name == "av" else object())
    assert replay.main(["--episode", "synthetic", "--prompt", PROMPT]) == 1
    assert capsys.readouterr().err == "replay: the replay needs av: install this project with its `replay` extra\n"


@pytest.mark.parametrize("calls", ["0", "-1", "many"])
def test_calls_must_be_a_positive_number(calls: str) -> None:
    with pytest.raises(SystemExit):
        replay.main(["--episode", "synthetic", "--prompt", PROMPT, "--calls", calls])


def test_the_plot_takes_one_call_and_a_flat_line(tmp_path: Path) -> None:
    plot_actions(np.zeros((1, 24, 8), np.float32), "flat", tmp_path / "plot.png")
    image = matplotlib.image.imread(tmp_path / "plot.png")
    assert 0.01 < (image[..., :3].min(axis=-1) < 0.9).mean() < 0.2  # drawn on, and not all over
