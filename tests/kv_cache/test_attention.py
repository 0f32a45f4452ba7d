"""Attention over the pool: every backend against a float64 reference, and as one node of a compiled graph."""

import random

import pytest
import torch
from torch import Tensor

from engine.model.config import DitConfig
from engine.model.dit import Block, LayerContext
from engine.model.rope import Rope
from kv_cache.attention import DEVICE_SIDE, AttentionPlan, attend, available_backends, choose_backend
from kv_cache.cache import KVCache
from kv_cache.paged_kv import KVGeometry, PagedKV, PagedLayer
from kv_cache.sizing import plan_budget
from tests.kv import CPU, GEOMETRY, POLICY, check_against_float64, leases, make_cache

CUDA_BACKENDS = (*DEVICE_SIDE, "sdpa")
PACKAGES = {"flash_attn_interface", "flash_attn.cute", "triton"}


def test_view_and_gather_agree_with_float64() -> None:
    assert check_against_float64(make_cache(2), 1, CPU, torch.float32, 1e-5)[False] == 0
    # Eight sessions that grow in turns in a pool for two: some stand in pieces.
    kinds = check_against_float64(make_cache(2), 8, CPU, torch.float32, 1e-5)
    assert kinds[True] > 5
    assert kinds[False] > 5


def test_what_comes_from_one_tensor_is_attended_as_what_comes_alone() -> None:
    """q, k and v may be parts of one product."""
    cache = make_cache(1)
    session = cache.session(0)
    with cache.call(session):
        with cache.lease(session, 2, commit=True) as plan:
            q, k, v = torch.randn(2, 12, 3, GEOMETRY.heads, GEOMETRY.head_dim).unbind(2)
            first = cache.paged.layers[0].attend(q, k, v, plan)
        with cache.lease(session, 2) as plan:
            got = cache.paged.layers[0].attend(q, k, v, plan)
            assert torch.equal(got, cache.paged.layers[0].attend(q.contiguous(), k.contiguous(), v.contiguous(), plan))
            # Its window is what it is itself.
            torch.testing.assert_close(got, first)


def test_each_branch_of_a_batch_gets_what_it_gets_alone() -> None:
    cache = make_cache(2)
    members = [cache.session(index) for index in range(8)]
    for plan, length, _ in leases(cache, members, random.Random(3)):
        q, k, v = torch.randn(3, 2, length, GEOMETRY.heads, GEOMETRY.head_dim)
        layer = cache.paged.layers[0]
        together = layer.attend(q, k, v, plan)
        alone = [layer.attend(*part) for part in zip(q.split(1), k.split(1), v.split(1), plan.split(), strict=True)]
        assert torch.equal(together, torch.cat(alone))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize("frame_tokens", [880, 256, 50])
def test_cuda_backends_agree_with_float64(backend: str, sessions: int, frame_tokens: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    if backend not in available_backends(device, torch.bfloat16):
        pytest.skip(f"{backend} is not installed, or not for this card")
    geometry = KVGeometry(
        layers=2, heads=4, head_dim=128, frame_tokens=frame_tokens, frames_per_forward=2, register_tokens=25,
        text_tokens=8, image_tokens=8, dtype=torch.bfloat16,
    )  # fmt: skip
    budget = plan_budget(geometry, POLICY, 2**30)
    cache = KVCache(geometry, POLICY, budget, device, backend)
    check_against_float64(cache, sessions, device, torch.bfloat16, 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", DEVICE_SIDE)
def test_a_captured_graph_follows_table_and_length(backend: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    if backend not in available_backends(device, torch.bfloat16):
        pytest.skip(f"{backend} is not installed, or not for this card")
    geometry = KVGeometry(
        layers=1, heads=4, head_dim=128, frame_tokens=880, frames_per_forward=2, register_tokens=25,
        text_tokens=8, image_tokens=8, dtype=torch.bfloat16,
    )  # fmt: skip
    pool = PagedKV(geometry, 12, device, backend)
    layer = pool.layers[0]
    q, k, v = torch.randn(3, 2, 2 * 880 + 25, 4, 128, dtype=torch.bfloat16, device=device)
    plans = [pool.plan(windows, [[], []], 9) for windows in ([[3], [0]], [[7, 5, 6, 11], [1, 2, 3, 4]])]
    captured = pool.plan([[], []], [[], []], 9)
    layer.attend(q, k, v, captured)  # tile sizes are tried and libraries loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.attend(q, k, v, captured)
    for plan in (*plans, *plans):
        layer.k.normal_()
        layer.v.normal_()
        for name in ("table", "visible"):
            getattr(captured, name).copy_(getattr(plan, name))
        graph.replay()
        expected = attend(q, k, v, layer.k.clone(), layer.v.clone(), plan, "sdpa")
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_the_backend_is_chosen_once_and_by_name() -> None:
    assert choose_backend(CPU, torch.float32) == "sdpa"
    assert choose_backend(CPU, torch.float32, "sdpa") == "sdpa"
    with pytest.raises(ValueError, match=r"'flash-attn-3' cannot run here \(cpu, .* available: sdpa"):
        choose_backend(CPU, torch.float32, "flash-attn-3")


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [
        (torch.bfloat16, (9, 0), ["flash-attn-3", "flash-attn-4", "triton", "sdpa"]),
        (torch.bfloat16, (10, 0), ["flash-attn-4", "triton", "sdpa"]),
        (torch.bfloat16, (12, 0), ["triton", "sdpa"]),
        (torch.bfloat16, (8, 0), ["triton", "sdpa"]),
        (torch.bfloat16, (7, 5), ["sdpa"]),
        (torch.float32, (9, 0), ["sdpa", "triton"]),
        (torch.float64, (9, 0), ["sdpa"]),
    ],
)
def test_backends_are_offered_where_they_can_run(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int], expected
) -> None:
    """With every package installed; what the device can do is put in its place here."""
    the_machine_has(monkeypatch, capability, PACKAGES)
    device = torch.device("cuda")
    assert available_backends(device, dtype) == expected
    on_device = [name for name in expected if name != "sdpa"]
    assert available_backends(device, dtype, device_side=True) == on_device


def test_a_backend_whose_lengths_are_on_the_device_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"no attention backend .*\(cpu, .* lengths on the device\): .* package triton"
    ):
        choose_backend(CPU, torch.float32, device_side=True)
    the_machine_has(monkeypatch, (9, 0), {"triton"})
    device = torch.device("cuda")
    assert choose_backend(device, torch.bfloat16) == "triton"
    assert choose_backend(device, torch.bfloat16, device_side=True) == "triton"
    with pytest.raises(ValueError, match=r"'sdpa' cannot run here .* lengths on the device\); available: triton$"):
        choose_backend(device, torch.bfloat16, "sdpa", device_side=True)


def test_compiled_attention_is_one_graph_for_every_fill_and_block() -> None:
    compiles_so_far_are_forgotten()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    cache, rng = make_cache(2), random.Random(7)
    graphs: list[int] = []
    for _ in range(32):
        session = cache.session(rng.randrange(8))  # in a pool for two: other blocks, later in pieces
        with cache.call(session):
            if session.resident_frames >= 7:
                cache.restart(session)
            with cache.lease(session, 2) as plan:
                for layer in cache.paged.layers:
                    q, k, v = torch.randn(3, 2, 15, GEOMETRY.heads, GEOMETRY.head_dim)
                    got = compiled(q, k, v, layer.k, layer.v, plan, "sdpa")
                    assert torch.equal(got, attend(q, k, v, layer.k, layer.v, plan, "sdpa"))
            with cache.lease(session, rng.choice((1, 2)), commit=True):
                pass
        graphs.append(compiled_graphs())
    assert set(graphs) == {1}
    assert cache.report().gathered > 0
    assert cache.report().plain_view > 0


def test_a_compiled_block_is_one_graph_for_every_layer_and_fill() -> None:
    compiles_so_far_are_forgotten()
    config = DitConfig(dim=24, ffn_dim=32, num_heads=2, num_layers=3)
    geometry = KVGeometry(
        layers=3, heads=2, head_dim=12, frame_tokens=6, frames_per_forward=2, register_tokens=25,
        text_tokens=5, image_tokens=4, dtype=torch.float32,
    )  # fmt: skip
    cache = make_cache(1, geometry)
    blocks = [Block(config) for _ in range(3)]
    for parameter in (p for block in blocks for p in block.parameters()):
        torch.nn.init.normal_(parameter, std=0.1)

    def run(block: Block, x: Tensor, e0: Tensor, start: int, layer: PagedLayer, plan: AttentionPlan, step) -> Tensor:
        rotation = Rope(12, 2, 3, 2, 24, 1).rotation(start, 2, True, CPU)
        text, image = ((torch.ones(1, n, 2, 12), torch.ones(1, n, 2, 12)) for n in (5, 4))
        return step(block, x, e0, LayerContext(rotation, plan, layer, (text, text), image), 12)

    def eager(block: Block, *args: object) -> Tensor:
        return block(*args)

    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    session = cache.session(0)
    with torch.no_grad():
        for fill in range(4):
            with cache.call(session):
                with cache.lease(session, 2) as plan:
                    for block, layer in zip(blocks, cache.paged.layers, strict=True):
                        x, e0 = torch.randn(2, 37, 24), torch.randn(2, 6, 24)
                        start = 2 * fill + 1
                        args = (block, x, e0, start, layer, plan)
                        torch.testing.assert_close(run(*args, compiled), run(*args, eager), atol=1e-5, rtol=0)
                with cache.lease(session, 1 if fill == 0 else 2, commit=True):
                    pass
    assert compiled_graphs() == 1


def the_machine_has(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], packages: set[str]) -> None:
    """A CUDA device of this capability, and these of `PACKAGES`, with what is wanted of them."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("kv_cache.attention._offers", lambda package, function: package in packages)


def compiles_so_far_are_forgotten() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
