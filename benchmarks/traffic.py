"""Bytes that the DiT's block and the video encoder move and what they launch, in the CUDA code that Inductor makes.

    python -m benchmarks.traffic

Of the DROID 14B geometry: one block in a denoise forward of both guidance branches, in bfloat16 and with fp8; and the
encoding of the 9 frames of a call that continues, in bfloat16, compiled and kernel by kernel.

No GPU is needed, nor used where there is one: tensors are fake, the code is made for an H200 and never run. It takes a
CUDA build of torch, with Triton. Bytes are what each kernel has to read and write where nothing stays in a cache from
one to the next; attention counts as reading the whole pool, which here holds the two branches' full windows.

Prints Markdown tables. Exits 1 where the code makes a tensor as large as a layer's pool, which is to copy it.
"""

import argparse
import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_model import droid_14b
from engine.execution import DirectExecution, compile_variants
from engine.model.config import ModelConfig, parse_config
from engine.model.dit import CrossContext, DiT, ForwardContext, TimeEmbedding
from engine.model.fp8 import FP8, use_fp8
from engine.model.rope import Rotation
from engine.model.vae import build_vae, prepare_convolutions
from engine.model.video_encoder import VideoEncoder
from engine.startup import kv_geometry
from kv_cache.paged_kv import PagedKV
from kv_cache.window import WindowPolicy

CUDA = torch.device("cuda", 0)
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32, max_threads_per_block=1024,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10, shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=60 * 2**20, total_memory=140 * 2**30, is_integrated=False, gcnArchName="",
)  # fmt: skip

_KINDS = (
    ("fused kernels", r"\btriton_\w+\.run\("),
    ("matrix products", r"\bextern_kernels\.\w*(?:mm|linear)\w*\(|\btorch\.ops\.aten\._scaled_mm\.\w+\("),
    ("convolutions", r"\bextern_kernels\.convolution\("),
    ("attention", r"\btorch\.ops\.(?:aten\._scaled_dot_product_\w+|kv_cache\.attend)\.default\("),
)
_CALL = re.compile(r"\b(?:triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+)\(")
_MADE = re.compile(r"\bempty_strided_cuda\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)")


@dataclass(frozen=True)
class Traffic:
    """moved: bytes. launches: by kind. largest: bytes of the largest tensor that the code makes."""

    moved: int = 0
    launches: Counter[str] = field(default_factory=Counter)
    largest: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        launched = self.launches + other.launches
        return Traffic(self.moved + other.moved, launched, max(self.largest, other.largest))

    def __str__(self) -> str:
        launched = ", ".join(f"{number} {kind}" for kind, number in self.launches.items())
        return f"{self.moved / 1e9:.2f} | {launched} | {self.largest / 1e6:.0f}"


def launches(code: str) -> Counter[str]:
    """What a call of code that Inductor made launches, by kind; `other` is what no kind covers."""
    body = "\n".join(line for line in code.splitlines() if not line.lstrip().startswith(("#", "assert_", "def ")))
    found = Counter({kind: len(re.findall(pattern, body)) for kind, pattern in _KINDS})
    found["other"] = len(_CALL.findall(body)) - found.total()
    return +found


def largest_tensor(code: str) -> int:
    """Bytes of the largest tensor that code which Inductor made allocates; 0 where it allocates none."""
    return max(
        (
            prod(int(size) for size in shape.split(",") if size.strip()) * getattr(torch, dtype).itemsize
            for shape, dtype in _MADE.findall(code)
        ),
        default=0,
    )


class _Made(BaseException):
    """Ends a compilation once its code is there: to load it, Triton would need a GPU."""


def count(work: Callable[[], Any]) -> Traffic:
    """Of the first graph that `work` compiles, in a FakeTensorMode on a make-believe H200."""
    from torch._inductor.graph import GraphLowering

    made: list[Traffic] = []
    generate = GraphLowering.codegen

    def generated(self: GraphLowering) -> None:
        code = generate(self)[0]
        text = code if isinstance(code, str) else code.value
        made.append(Traffic(self.count_bytes()[0], launches(text), largest_tensor(text)))
        raise _Made

    torch._dynamo.reset()
    config = {"compile_threads": 1, "fx_graph_cache": False}
    with (
        mock.patch.object(GraphLowering, "codegen", generated),
        torch._inductor.config.patch(config),
        contextlib.suppress(_Made),
    ):
        work()
    return made[0]


@contextlib.contextmanager
def h200() -> Iterator[None]:
    """While it lasts, compilers believe that there is one, and tensors are fake."""
    import torch._dynamo.device_interface as interfaces
    import torch._subclasses.fake_tensor as fake
    import triton
    from triton.backends.compiler import GPUTarget

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * H200.major + H200.minor, H200.warp_size),
        get_current_device=lambda: CUDA.index,
        get_active_torch_device=lambda: CUDA,
    )
    answers = {
        "get_device_properties": H200,
        "get_compute_capability": 10 * H200.major + H200.minor,
        "current_device": CUDA.index,
        "is_available": True,
        "is_bf16_supported": True,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "synchronize": None,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(
                mock.patch.object(interfaces.CudaInterface, name, staticmethod(lambda *_, answer=answer, **__: answer))
            )
        cuda = {"get_device_capability": (H200.major, H200.minor), "get_device_properties": H200, "current_device": 0}
        for name, answer in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        worker = interfaces.CudaInterface.Worker
        stack.enter_context(mock.patch.object(worker, "get_device_properties", staticmethod(lambda *_, **__: H200)))
        stack.enter_context(mock.patch.object(fake, "init_gpu_context"))
        # Which kernel it runs is asked of the driver: here, in half precision, the flash one for heads up to 256.
        stack.enter_context(mock.patch("engine.model.dit.scaled_dot_product_attention", _flash))
        stack.enter_context(mock.patch("torch.nn.functional.scaled_dot_product_attention", _efficient))
        triton.runtime.driver.set_active(driver)
        stack.enter_context(fake.FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.no_grad())
        yield


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    return attended


def _efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attended: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, False)[0]
    return attended


def _in_bfloat16(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.dtype != FP8:
            parameter.data = parameter.data.to(torch.bfloat16)


def block_traffic(config: ModelConfig, fp8: bool) -> tuple[Traffic, int]:
    """Of one block in a denoise forward of both branches over full windows; and the bytes of a layer's pool."""
    dit, dtype = config.dit, torch.bfloat16
    geometry = kv_geometry(config, dtype)
    tokens = geometry.frames_per_forward * geometry.frame_tokens + geometry.register_tokens
    resident = WindowPolicy(dit.window_frames).capacity - geometry.frames_per_forward
    heads = (geometry.heads, geometry.head_dim)
    with h200():
        with CUDA:
            model = DiT(replace(dit, num_layers=1), config.image, config.max_action_dim, config.max_state_dim)
            if fp8:
                use_fp8(model.blocks)
        _in_bfloat16(model)

        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, device=CUDA, dtype=dtype)

        def cross(count: int) -> tuple[tuple[Tensor, Tensor], ...]:
            return ((empty(1, count, *heads), empty(1, count, *heads)),)

        windows = [list(range(branch * resident, (branch + 1) * resident)) for branch in range(geometry.branches)]
        pool = PagedKV(geometry, geometry.branches * resident, CUDA, "triton")
        context = ForwardContext(
            Rotation(*(torch.empty(tokens, 1, geometry.head_dim // 2, device=CUDA) for _ in range(2))),
            pool.plan(windows, [[] for _ in windows], resident),
            CrossContext(tuple(cross(geometry.text_tokens) for _ in windows), cross(geometry.image_tokens)).joined(),
        )
        time = TimeEmbedding(empty(2, dit.dim), empty(2, 6, dit.dim))
        forward = DirectExecution(model, pool, guidance="batched", compiled=True).forward(context)
        return count(lambda: forward(empty(1, tokens, dit.dim), time)), pool.layers[0].k.nbytes


class _Eager(TorchDispatchMode):
    """Counts what operations read and write that do more than to look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function is not torch.ops.aten.empty.memory_format:
            tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
            moved = sum(each.numel() * each.itemsize for each in tensors)
            self.traffic += Traffic(moved, Counter({"operations": 1}))
        return result


def encoder_traffic(config: ModelConfig) -> tuple[Traffic, Traffic]:
    """Of a continued call's frames, compiled and kernel by kernel."""
    compiled = Traffic()
    known: dict[tuple[nn.Module, torch.Size, bool], Traffic] = {}

    def counted(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        made = compile_variants(step)

        def run(module: nn.Module, x: Tensor, seen: dict[nn.Module, Tensor]) -> Tensor:
            nonlocal compiled
            key = (module, x.shape, bool(seen))
            if key not in known:
                known[key] = count(lambda: made(module, x, seen))
            compiled += known[key]
            return step(module, x, seen)

        return run

    with h200():
        with CUDA:
            vae = build_vae(config.vae)
        _in_bfloat16(vae)
        prepare_convolutions(vae, channels_last=True)
        encoder = VideoEncoder(vae)
        frames = 1 + 4 * config.dit.num_frame_per_block
        video = torch.empty(1, 3, frames, config.video_height, config.video_width, device=CUDA, dtype=torch.bfloat16)
        with mock.patch("engine.model.video_encoder.compile_variants", counted):
            encoder.encode(video, compiled=True)
        with _Eager() as eager:
            encoder.encode(video)
    return compiled, eager.traffic


def main() -> int:
    """The command line; returns the exit code."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    config = parse_config(droid_14b())
    print(f"torch {torch.__version__}, code for {H200.name}")
    print("\n| one block, one denoise forward | GB | launches | largest tensor made, MB |\n|---|---|---|---|")
    copies = False
    for fp8 in (False, True):
        traffic, pool = block_traffic(config, fp8)
        print(f"| {'fp8' if fp8 else 'bfloat16'} | {traffic} |", flush=True)
        copies |= traffic.largest >= pool
    print("\n| encoding of 9 frames | GB | launches | largest tensor made, MB |\n|---|---|---|---|")
    for name, traffic in zip(("compiled", "kernel by kernel"), encoder_traffic(config), strict=True):
        print(f"| {name} | {traffic} |", flush=True)
    return 1 if copies else 0


if __name__ == "__main__":
    sys.exit(main())
