"""Every way to run the forwards gives the release's numbers: one batch or two forwards, compiled, captured."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.golden import (
    FILES,
    TOLERANCE,
    Engine,
    Golden,
    Mode,
    Report,
    build_engine,
    check,
    check_rollout,
    run_call,
)
from engine.execution import DirectExecution
from engine.graphs import CapturedFunction, CudaCapture, GraphExecution
from engine.model.dit import ForwardContext, TimeEmbedding
from engine.rollout import Prediction
from engine.session import Session

SESSION = next(path for path in FILES if path.stem == "session")
MASKED = next(path for path in FILES if path.stem == "step_mask_8")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")


class Capture:
    """In place of CUDA graphs: repeats the very work, on the tensors that it was captured with. Counts captures."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captured += 1
        return work


def on_graphs(golden: Golden, capture: Capture, guidance: str = "batched") -> Engine:
    engine = build_engine(golden)
    direct = DirectExecution(engine.model.dit, engine.cache.paged, guidance, compiled=False)
    engine.rollout._execution = GraphExecution(direct, capture)
    return engine


def test_branches_one_after_the_other_give_the_release_s_numbers() -> None:
    report = check(SESSION, Mode(guidance="separate"))
    assert report.clean(TOLERANCE), report


@pytest.mark.slow
@needs_compiler
def test_compiled_blocks_give_the_release_s_numbers() -> None:
    report = check(MASKED, Mode(execution="compile"))
    assert report.clean(TOLERANCE), report


@pytest.mark.slow
@needs_compiler
def test_compiled_blocks_write_into_the_pool_and_copy_none_of_it() -> None:
    """The operator writes in place; where a compiler cannot see that it may, it copies a layer's pool each time."""
    golden = Golden(MASKED)
    engine = build_engine(golden, Mode(execution="compile"))
    forward = engine.rollout._execution.forward
    largest: list[int] = []

    def watched(context: ForwardContext) -> Callable[[Tensor, TimeEmbedding], Tensor]:
        run = forward(context)

        def profiled(tokens: Tensor, time: TimeEmbedding) -> Tensor:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
                hidden = run(tokens, time)
            largest.append(max(event.self_cpu_memory_usage for event in prof.events()))
            return hidden

        return profiled

    engine.rollout._execution.forward = watched  # type: ignore[method-assign]
    assert check_rollout(golden, engine).clean(TOLERANCE)
    hidden = 4 * 2 * 89 * 128  # bytes of both branches' hidden state
    assert hidden <= max(largest[1:]) < engine.cache.paged.layers[0].k.nbytes / 4, "the first one compiled"


@pytest.mark.slow
@pytest.mark.parametrize("guidance", ["batched", "separate"])
def test_one_capture_serves_every_fill_and_call(guidance: str) -> None:
    """A window that grows, restarts, and grows again: prefill of one frame and of two, and denoising."""
    capture = Capture()
    golden = Golden(SESSION)
    report = check_rollout(golden, on_graphs(golden, capture, guidance))
    assert report.clean(TOLERANCE), report
    assert capture.captured == 3


def test_captures_serve_sessions_with_other_prompts_images_and_blocks() -> None:
    goldens = [Golden(path) for path in FILES if path.stem in ("session", "prompt_change")]
    capture = Capture()
    engine = on_graphs(goldens[0], capture)
    reports = [Report(), Report()]
    sessions = [Session(engine.cache.session(name)) for name in ("a", "b")]
    for index in range(3):
        for golden, session, report in zip(goldens, sessions, reports, strict=True):
            run_call(engine, golden, session, index, report)
    assert all(report.clean(TOLERANCE) for report in reports), reports
    assert capture.captured == 3


def test_a_capture_that_gives_other_numbers_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The call that finds it is made again without it."""
    monkeypatch.setattr("torch.compile", lambda function, **options: function)  # that it works is another test's
    golden = Golden(MASKED)
    engine = build_engine(golden)

    def broken(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: work() + 1

    engine.rollout._execution = GraphExecution(
        DirectExecution(engine.model.dit, engine.cache.paged, "batched", False), broken
    )
    assert check_rollout(golden, engine).clean(TOLERANCE)
    assert engine.rollout.execution == "compile"
    assert "differs from what was captured" in str(engine.rollout.execution_reason)
    assert "differs from what was captured" in caplog.text


def test_the_last_layer_of_a_prefill_computes_keys_and_values_alone() -> None:
    engine = build_engine(Golden(MASKED))
    ran: list[str] = []
    for index, block in enumerate(engine.model.dit.blocks):
        for name, module in block.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda *_, label=f"{index}.{name}": ran.append(label))
    prefill = engine.rollout._execution.prefill
    of_prefill: list[list[str]] = []

    def watched(tokens: Tensor, time: TimeEmbedding, context: object) -> None:
        ran.clear()
        prefill(tokens, time, context)  # type: ignore[arg-type]
        of_prefill.append(list(ran))

    engine.rollout._execution.prefill = watched  # type: ignore[method-assign]
    check_rollout(Golden(MASKED), engine)
    layers = range(len(engine.model.dit.blocks))
    for names in of_prefill:
        assert [name for name in names if name.startswith(f"{layers[-1]}.")] == ["2.self_attn.qkv"]
        assert all(f"{index}.ffn.2" in names for index in layers[:-1])
    assert of_prefill


class Waits(TorchDispatchMode):
    """Notes operations by which the host waits for a device, or sends it something, once `watching`."""

    NAMES = ("item", "_local_scalar_dense", "nonzero", "is_nonzero", "linalg_solve", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.watching = False
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().removeprefix("aten::").partition(".")[0]
        if self.watching and name in self.NAMES:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("stem", "expected"), [("step_mask_8", set()), ("step_cache_dynamic", {"item"})])
def test_the_denoise_loop_waits_for_nothing_but_the_velocity_cache_s_decision(stem: str, expected: set[str]) -> None:
    golden = Golden(next(path for path in FILES if path.stem == stem))
    engine = build_engine(golden)
    forward = engine.rollout._execution.forward
    session = Session(engine.cache.session(0))
    with Waits() as waits:

        def watched(context: ForwardContext) -> Callable[[Tensor, TimeEmbedding], Tensor]:
            waits.watching = True  # to the end of the call: the loop, and what is left to do after it
            return forward(context)

        engine.rollout._execution.forward = watched  # type: ignore[method-assign]
        call = engine.rollout.call

        def ended(*args: Any) -> Prediction:
            prediction = call(*args)
            waits.watching = False
            return prediction

        engine.rollout.call = ended  # type: ignore[method-assign]
        run_call(engine, golden, session, 0, Report())
    assert set(waits.seen) == expected


def test_a_captured_function_knows_each_shape_and_gives_results_of_their_own() -> None:
    engine = build_engine(Golden(MASKED))
    capture = Capture()
    encode = CapturedFunction(engine.model.video_encoder.encode, capture)
    with torch.inference_mode():
        for frames in (1, 5, 1):
            videos = torch.rand(2, 1, 3, frames, 64, 128) * 2 - 1
            got = [encode(video) for video in videos]
            for video, latents in zip(videos, got, strict=True):
                assert torch.equal(latents, engine.model.video_encoder.encode(video))
    assert capture.captured == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("execution", ["eager", "compile", "graph"])
@pytest.mark.parametrize("guidance", ["batched", "separate"])
def test_on_a_gpu_every_execution_gives_the_release_s_numbers(execution: str, guidance: str) -> None:
    mode = Mode(device="cuda", execution=execution, guidance=guidance)
    report = check(SESSION, mode)
    assert report.clean(TOLERANCE), report


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_capture_reads_what_its_tensors_hold_by_then() -> None:
    x = torch.ones(4, device="cuda")
    replay = CudaCapture(x.device)(lambda: x * 2)
    x.fill_(3)
    assert replay().tolist() == [6.0] * 4
