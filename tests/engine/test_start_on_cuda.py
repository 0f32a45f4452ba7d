"""The road from settings to answers on a CUDA device, walked on one that is not there (`tests/fake_cuda.py`).

What is run is the server's own `load_policy`: loading, self-check, profile run, sizing, captures, warm-up; then five
calls.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_model import RandomWeights, droid_14b
from engine.checkpoint.synthetic import BUILTIN_CONFIGS
from engine.device import choose_device
from engine.device_faults import DeviceUnavailable
from engine.policy import Policy
from engine.settings import EngineSettings
from engine.startup import PolicyLoadError, load_policy
from policy_server.process import load, run
from policy_server.settings import ServerSettings
from tests.checkpoints import observation, small
from tests.fake_cuda import FLASH_ATTN_4_FOR_HOPPER, GIB, FakeCuda, Replay, Wait, fake_cuda

CALLS = 5
QUICK = EngineSettings(checkpoint="small", kv_bytes=GIB, warm_up="off")
STEPS = 16
# Each is a copy without `non_blocking`, or a look at the clock. At a restart: image and text go to the device as well.
MOST_WAITS = {"restart": 25, "continued": 20}


@dataclass(frozen=True)
class Road:
    """How a start and the calls after it went. calls: the events of each. info: as `/info` has it."""

    cuda: FakeCuda
    info: dict[str, Any]
    started: list[Wait | Replay]
    calls: list[list[Wait | Replay]]


def droid() -> dict[str, Any]:
    """The 14B geometry: its widths, views, frames and window. Of 40 like layers there are two, and few words."""
    config = droid_14b()
    head = config["action_head_cfg"]["config"]
    head["diffusion_model_cfg"]["num_layers"] = 2
    head["text_encoder_cfg"] |= {"num_layers": 2, "vocab": 384}
    head["image_encoder_cfg"]["vision_layers"] = 3
    return config


@pytest.fixture(scope="module", autouse=True)
def checkpoints() -> Iterator[None]:
    """The two above; and FlashAttention 4, whose kernels take their time to compile, is used where it is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", None)
        patch.setitem(BUILTIN_CONFIGS, "small", small())
        patch.setitem(BUILTIN_CONFIGS, "droid", droid())
        yield


def walk(settings: EngineSettings, **card: Any) -> Road:
    with fake_cuda(**card) as cuda, pytest.MonkeyPatch.context() as patch:
        if settings.checkpoint == "droid":  # gigabytes are made where they are not real
            device = torch.device("cuda", torch.device(settings.device).index or 0)
            patch.setattr("engine.checkpoint.open.SyntheticWeights", lambda: RandomWeights(device))
        if settings.attention_backend == "flash-attn-4":
            patch.delitem(sys.modules, "flash_attn")
            pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4")
            for name, value in FLASH_ATTN_4_FOR_HOPPER.items():
                patch.setenv(name, value)
        policy = load_policy(settings, lambda status: None)
        started, calls = list(cuda.events), []
        for _ in range(CALLS):
            cuda.events.clear()
            assert policy.infer("robot", observation()).actions.shape == (24, 8)
            calls.append(list(cuda.events))
        return Road(cuda, policy.info(), started, calls)


WAYS = {
    "auto": (EngineSettings(checkpoint="small", device="auto", steps=2, step_cache="none"), 0),
    "cuda, text encoder on the host, video": (
        EngineSettings(
            checkpoint="small", device="cuda", step_cache="mask-5", text_encoder_device="cpu", save_video="videos"
        ),
        0,
    ),
    "14B": (EngineSettings(checkpoint="droid", device="cuda", step_cache="mask-5"), 0),
    "14B, FlashAttention 4": (
        EngineSettings(checkpoint="droid", device="cuda", step_cache="mask-5", attention_backend="flash-attn-4"),
        0,
    ),
    "14B on cuda:1, fp8, branches separate": (
        EngineSettings(checkpoint="droid", device="cuda:1", step_cache="mask-5", fp8=True, guidance="separate"),
        1,
    ),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) if "14B," in name or "fp8" in name else name for name in WAYS],
)
def way(request: pytest.FixtureRequest) -> tuple[Road, EngineSettings, int]:
    settings, index = WAYS[request.param]
    return walk(settings), settings, index


def test_start_and_calls_go_through_on_the_device_asked_for_alone(way: tuple[Road, EngineSettings, int]) -> None:
    """An operation over two devices would have raised."""
    road, settings, index = way
    assert road.cuda.used == {index}
    assert road.info["device"] == f"cuda:{index}"
    backend = "triton" if settings.attention_backend == "auto" else settings.attention_backend
    assert (road.info["execution"], road.info["attention_backend"]) == ("graph", backend)
    assert road.cuda.peak[index] < road.cuda.total


def test_every_forward_is_captured_and_nothing_in_it_waits_or_is_done_by_the_host(
    way: tuple[Road, EngineSettings, int],
) -> None:
    """Prefill of one frame and of two, denoising, and the VAE's two encodings; no call captures any more."""
    road, _, _ = way
    assert len(road.cuda.graphs) == 5
    for graph in road.cuda.graphs:
        assert graph.operations > 30
        assert graph.waits == []
        assert graph.on_host == []


def test_denoising_is_replayed_step_by_step_without_a_wait(way: tuple[Road, EngineSettings, int]) -> None:
    road, settings, _ = way
    for events in road.calls:
        loop = denoise_loop(events)
        assert len(loop) == (5 if settings.step_cache == "mask-5" else settings.steps)
        assert all(isinstance(event, Replay) for event in loop)


def test_the_waits_of_a_call_are_few(way: tuple[Road, EngineSettings, int]) -> None:
    road, _, _ = way
    for kind, events in zip(("restart", *["continued"] * 3, "restart"), road.calls, strict=True):
        waits = [event for event in events if isinstance(event, Wait)]
        assert len(waits) <= MOST_WAITS[kind], waits
        assert {wait.kind for wait in waits} == {"synchronize", "to device", "to host"}
        assert sum(wait.kind == "to host" for wait in waits) == 1, "the actions"


def test_the_velocity_cache_waits_for_its_decisions_alone() -> None:
    road = walk(EngineSettings(checkpoint="small", device="cuda", step_cache="velocity", kv_bytes=GIB))
    for events in road.calls:
        waits = [event for event in denoise_loop(events) if isinstance(event, Wait)]
        assert waits
        assert len(waits) <= STEPS - 2
        for wait in waits:
            assert (wait.kind, wait.where.partition(":")[0]) == ("item", "engine/model/step_cache.py")


def denoise_loop(events: list[Wait | Replay]) -> list[Wait | Replay]:
    """A call's events from the first replay of what is replayed most to the last one."""
    graphs = [event.graph for event in events if isinstance(event, Replay)]
    most = max(graphs, key=graphs.count)
    at = [index for index, event in enumerate(events) if isinstance(event, Replay) and event.graph is most]
    return events[at[0] : at[-1] + 1]


@pytest.mark.parametrize(
    ("capability", "has_fp8"),
    [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True), ((12, 0), True)],
)
def test_every_card_from_ampere_on_gets_graphs_and_from_ada_on_fp8(capability: tuple[int, int], has_fp8: bool) -> None:
    settings = replace(QUICK, fp8=True)
    with fake_cuda(capability=capability):
        if not has_fp8:
            with pytest.raises(PolicyLoadError, match=r"fp8: expected a CUDA device of capability 8\.9 or above"):
                load_policy(settings, lambda status: None)
            settings = replace(settings, fp8=False)
        info = load_policy(settings, lambda status: None).info()
        assert (info["execution"], info["attention_backend"]) == ("graph", "triton")
        assert (info["device"], info["dtype"]) == ("cuda:0", "bfloat16")


def test_a_device_that_torch_does_not_see_is_refused() -> None:
    with (
        fake_cuda(devices=1),
        pytest.raises(DeviceUnavailable, match="'cuda:1' asked for, but torch sees 1 CUDA device"),
    ):
        load_policy(EngineSettings(checkpoint="small", device="cuda:1"), lambda status: None)


EMPTY = '__version__ = "0.0.1"'  # flash_attn_interface on the package index is no more than this
BROKEN = 'raise ImportError("libc10.so: undefined symbol: _ZN3c104cuda9SetDeviceEi")'  # built for another torch


@pytest.mark.parametrize(
    ("content", "reason"),
    [(EMPTY, "has no attribute 'flash_attn_with_kvcache'"), (BROKEN, "ImportError: libc10.so: undefined symbol")],
)
def test_a_package_of_the_name_alone_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: str, reason: str
) -> None:
    (tmp_path / "flash_attn_interface").mkdir()
    (tmp_path / "flash_attn_interface" / "__init__.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    with fake_cuda(capability=(9, 0)):
        policy = load_policy(QUICK, lambda status: None)
    assert policy.info()["attention_backend"] == "triton"
    assert "flash_attn_interface is installed and of no use here: " in caplog.text
    assert reason in caplog.text
    sys.modules.pop("flash_attn_interface", None)


def test_a_backend_that_fails_its_check_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kv_cache.self_check._ROUNDING", -1.0)
    with fake_cuda():
        info = load_policy(QUICK, lambda status: None).info()
        assert (info["attention_backend"], info["execution"]) == ("sdpa", "compile")
        assert str(info["execution_reason"]).startswith("attention by triton cannot be used: BackendError: ")
        assert "attention by triton cannot be used" in caplog.text
        with pytest.raises(PolicyLoadError, match="'triton' differs from SDPA"):
            load_policy(replace(QUICK, attention_backend="triton"), lambda status: None)
        with pytest.raises(PolicyLoadError, match="'triton' differs from SDPA"):
            load_policy(replace(QUICK, execution="graph"), lambda status: None)


def test_a_capture_that_differs_leaves_the_start_compiled_and_its_reason_to_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.graphs._ROUNDING", -1.0)
    with fake_cuda() as cuda:
        info = load_policy(replace(QUICK, steps=1, warm_up="required"), lambda status: None).info()
    assert len(cuda.graphs) == 1, "after the first that differs, none is made"
    assert info["execution"] == "compile"
    assert "a replay differs from what was captured" in str(info["execution_reason"])
    assert "a replay differs from what was captured" in caplog.text


async def test_too_little_memory_is_no_bad_setting_and_leaves_with_1(caplog: pytest.LogCaptureFixture) -> None:
    """A unit is not started again after 2, and who holds the card may leave it. A setting that is too small is bad."""

    async def exit_code(settings: EngineSettings, **card: Any) -> int:
        def on_a_card(report: Callable[[str], None]) -> Policy:
            with fake_cuda(**card):
                return load(settings, report)

        return await run(ServerSettings(port=0), on_a_card)

    assert await exit_code(replace(QUICK, kv_bytes=None), total=2**20) == 1
    assert "cannot start now: the device has 0.0 GiB free; the weights need" in caplog.text
    assert await exit_code(replace(QUICK, kv_bytes=1000)) == 2


def test_a_gpu_that_torch_does_not_see_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a driver that is older than what torch was built for."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("engine.device.DEVICE_FILES", tmp_path)
    assert choose_device("auto").type == "cpu"
    assert caplog.text == ""
    for name in ("nvidia0", "nvidiactl", "null"):
        (tmp_path / name).touch()
    assert choose_device("auto").type == "cpu"
    assert f"running on the CPU: {tmp_path}/nvidia0 is there, but torch sees no GPU" in caplog.text
    with pytest.raises(DeviceUnavailable, match=r"torch sees 0 CUDA devices: .*nvidia0 is there"):
        choose_device("cuda")


def test_a_large_checkpoint_is_loaded_on_a_cpu_only_where_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(BUILTIN_CONFIGS, "droid-14b", droid_14b())
    with pytest.raises(DeviceUnavailable, match=r"no GPU was found, and 8\d\.\d GiB of weights .* --device cpu asks"):
        load_policy(EngineSettings(checkpoint="droid-14b"), lambda status: None)
    monkeypatch.setattr("engine.device.MOST_BYTES_ON_CPU", 0)
    with pytest.raises(DeviceUnavailable):
        load_policy(EngineSettings(checkpoint="small", warm_up="off"), lambda status: None)
    load_policy(EngineSettings(checkpoint="small", warm_up="off", device="cpu"), lambda status: None)
