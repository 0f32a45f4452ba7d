"""A CUDA device that is not there: what would run on it gives shapes and devices, and everything else runs for real.

Tensors on the device are fake ones (`FakeTensorMode`): kernels compute no numbers, and an operation over two devices
raises as it would on a GPU. The driver is replaced where torch calls it, in `torch._C`, so that torch's own Python code
for devices, memory and graphs is run. What the host computes is computed; what it reads from the device is zeros.
"""

import ctypes
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import pytest
import torch
import torch._dynamo  # looks at what torch is built with, and must see the truth
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from tests.fake_results import KNOWN, Known, describe, key_of, tensors_in

aten = torch.ops.aten
GIB = 2**30
FLASH_ATTN_4_FOR_HOPPER = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
"""Environment in which FlashAttention 4 compiles its kernels without asking the driver which card there is."""
ROOMS = ("engine", "kv_cache", "policy_server", "benchmarks")
_ROOT = Path(__file__).resolve().parent.parent
_READS = (aten._local_scalar_dense.default, aten.item.default)
_GUARDS = 20  # device types that have a guard in libc10, and some more in later versions
_CUDA_GUARD, _META_GUARD = 1, 14


@dataclass(frozen=True)
class Wait:
    """The host waits for the device. kind: "synchronize", "item", "to host" or "to device"; where: file and line."""

    kind: str
    where: str


@dataclass(frozen=True)
class Replay:
    """A captured graph is launched."""

    graph: "Graph"


@dataclass(eq=False)
class Graph:
    """What was captured. operations: on the device. waits: what no graph can hold. on_host: work not repeated."""

    operations: int = 0
    waits: list[Wait] = field(default_factory=list)
    on_host: list[str] = field(default_factory=list)


@dataclass
class FakeCuda:
    """The devices, and what was done with them.

    capability: as of a card (9, 0). total: bytes of memory of each. events: waits and replays in order. graphs: as
    captured. used: devices that hold or held tensors. compiled: how many functions were given to `torch.compile`.
    """

    capability: tuple[int, int] = (9, 0)
    devices: int = 2
    total: int = 139 * GIB
    events: list[Wait | Replay] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    compiled: int = 0
    waits: int = 0
    current: int = 0
    allocated: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    peak: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    capture: Graph | None = None
    _storages: set[int] = field(default_factory=set)

    def wait(self, kind: str) -> None:
        wait = Wait(kind, _where())
        self.waits += 1
        (self.events if self.capture is None else self.capture.waits).append(wait)

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's memory for as long as it lives. Raises OutOfMemoryError where the device has none left."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        index, size = tensor.device.index, storage.nbytes()
        if self.allocated[index] + size > self.total:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / GIB:.2f} GiB.")
        self._storages.add(key)
        self.used.add(index)
        self.allocated[index] += size
        self.peak[index] = max(self.peak[index], self.allocated[index])
        finalize(storage, self._let_go, key, index, size).atexit = False

    def _let_go(self, key: int, index: int, size: int) -> None:
        self._storages.remove(key)
        self.allocated[index] -= size


class _Mode(FakeTensorMode):
    """Fakes what has to do with the device alone."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._cuda = cuda

    @property
    def avoid_device_init(self) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is aten.to:  # in inference mode; what it stands for comes back here
            with self:
                return func.decompose(*args, **kwargs)
        on_device = any(isinstance(tensor, FakeTensor) for tensor in tensors_in((*args, *kwargs.values())))
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if func in _READS and on_device:
            self._cuda.wait("item")
            dtype = args[0].dtype
            return True if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
        if func is aten._to_copy.default and device is not None and (on_device or device.type == "cuda"):
            if device.type == "cpu":
                self._cuda.wait("to host")  # into memory that is not pinned it is never asynchronous
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if not on_device:
                return self._to_device(args[0], kwargs.get("dtype"), device, kwargs.get("non_blocking", False))
        if func is aten.copy_.default and on_device:
            target, source, *not_blocking = args
            if not isinstance(target, FakeTensor):
                self._cuda.wait("to host")
                return target.zero_()
            if not isinstance(source, FakeTensor):
                self._to_device(source, None, target.device, not_blocking == [True])
                return target
        if not on_device and (device is None or device.type != "cuda"):
            if self._cuda.capture is not None:
                self._cuda.capture.on_host.append(f"{func} at {_where()}")
            return func(*args, **kwargs)
        if func is aten.randn.generator:  # nothing is drawn
            func, kwargs = aten.randn.default, {k: v for k, v in kwargs.items() if k != "generator"}
        return self._on_device(func, types, args, kwargs)

    def _to_device(self, source: Tensor, dtype: torch.dtype | None, device: torch.device, not_blocking: bool) -> Tensor:
        if not not_blocking:
            self._cuda.wait("to device")
        made = {"dtype": dtype or source.dtype, "device": device}
        copied: Tensor = self._on_device(aten.empty_strided.default, (), (source.shape, source.stride()), made)
        return copied

    def _on_device(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self._cuda.capture is not None:
            self._cuda.capture.operations += 1
        key = key_of((func, *args, *kwargs.items()))
        known = KNOWN.get(key)
        if known is None:
            waits = self._cuda.waits
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if key is not None and self._cuda.waits == waits:
                KNOWN[key] = describe(result, args)
        elif known.kind == "first argument":
            return args[0]
        elif known.kind == "unlike":
            result = super().__torch_dispatch__(func, types, args, kwargs)
        else:
            result = self._like(known, args)
        for tensor in tensors_in(result if isinstance(result, (tuple, list)) else (result,)):
            if tensor.device.type == "cuda":
                self._cuda.hold(tensor)
        return result

    def _like(self, known: "Known", args: Any) -> FakeTensor:
        """What torch's own cache does in five times the time."""
        with in_kernel_invocation_manager(self):
            if known.kind == "new":
                made = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
            else:
                made = torch.as_strided(args[0], known.shape, known.stride, known.offset)
        return FakeTensor(self, made, known.device)


def _where() -> str:
    """The innermost line of the project that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in ROOMS:
            return f"{path.relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


class _Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device

    def wait_stream(self, other: "_Stream") -> None:
        """Nothing runs, so nothing is early."""


class _Generator(torch.Generator):
    """A generator on the device; torch itself would ask the driver for one."""

    place: torch.device

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        made = super().__new__(cls)
        made.place = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place


def _graph_of(cuda: FakeCuda) -> type:
    class CUDAGraph:
        def capture_begin(self, *pool: Any, **options: Any) -> None:
            assert cuda.capture is None
            self._graph = cuda.capture = Graph()
            cuda.graphs.append(self._graph)

        def capture_end(self) -> None:
            cuda.capture = None

        def replay(self) -> None:
            assert cuda.capture is None
            cuda.events.append(Replay(self._graph))

    return CUDAGraph


def install(patch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    """Put the driver's functions in place, for as long as the patches last."""

    def exchange(index: int) -> int:
        before = cuda.current
        if index >= 0:
            cuda.current = index
        return before

    def stats(index: int) -> dict[str, object]:
        counted = {"all": {"current": cuda.allocated[index], "peak": cuda.peak[index]}}
        return {"allocated_bytes": counted, "reserved_bytes": counted}

    def reset_peak(index: int) -> None:
        cuda.peak[index] = cuda.allocated[index]

    major, minor = cuda.capability
    properties = SimpleNamespace(
        name="a card that is not there", major=major, minor=minor, total_memory=cuda.total, multi_processor_count=132
    )
    in_c: dict[str, Any] = {
        "_cuda_getDeviceCount": lambda: cuda.devices,
        "_cuda_getDevice": lambda: cuda.current,
        "_cuda_setDevice": exchange,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_synchronize": lambda: cuda.wait("synchronize"),
        "_cuda_emptyCache": lambda: None,
        "_host_emptyCache": lambda: None,
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": reset_peak,
    }
    for name, function in in_c.items():
        patch.setattr(torch._C, name, function, raising=False)

    @contextmanager
    def stream(used: _Stream) -> Iterator[None]:
        yield

    def compile_nothing(function: Any, **options: Any) -> Any:
        cuda.compiled += 1
        return function

    in_torch_cuda: dict[str, Any] = {
        "_initialized": True,
        "_cached_device_count": None,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "_get_device_properties": lambda index: properties,
        "_cudart": SimpleNamespace(cudaMemGetInfo=lambda index: (cuda.total - cuda.allocated[index], cuda.total)),
        "Stream": _Stream,
        "current_stream": _Stream,
        "stream": stream,
        "CUDAGraph": _graph_of(cuda),
        "graph_pool_handle": lambda: (0, 1),
    }
    for name, value in in_torch_cuda.items():
        patch.setattr(torch.cuda, name, value, raising=False)
    patch.setattr(torch, "Generator", _Generator)
    patch.setattr(torch, "compile", compile_nothing)  # its own fakes and these do not mix
    patch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None)
    _give_cuda_a_guard()


def _give_cuda_a_guard() -> None:
    """Have torch's C++ code switch to the device without asking the driver, as it does for fake CUDA tensors anyway
    where it is built with CUDA. A build without has no guard at all for it: it gets that of `meta`, which does nothing.
    """
    if torch.backends.cuda.is_built():
        torch._C._ensureCUDADeviceGuardSet()
        return
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.so"))))
    guards = (ctypes.c_void_p * _GUARDS).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA_GUARD] = guards[_META_GUARD]


@contextmanager
def fake_cuda(**card: Any) -> Iterator[FakeCuda]:
    """While the body runs, on this thread, torch sees CUDA devices; `card` as in FakeCuda."""
    cuda = FakeCuda(**card)
    with pytest.MonkeyPatch.context() as patch:
        install(patch, cuda)
        with _Mode(cuda):
            yield cuda
