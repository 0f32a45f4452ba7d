"""Triton's kernel: run through the interpreter in a process of its own, and compiled for the cards it must run on."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_kernel_agrees_with_float64_under_the_interpreter() -> None:
    """In a process of its own: Triton decides at its import whether it interprets or compiles."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kv_cache/interpreted_triton.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


CARDS = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Compute capability, and the bytes of shared memory that a block of threads can have there at most."""
MOST_SPILLED = 128  # bytes a thread: some registers' worth, beside hundreds of products


def compiled(tile: Any, dtype: str, capability: int) -> Any:
    """The kernel at DROID's sizes, for a card that is not there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from kv_cache.triton_attention import kernel

    function = kernel.fn
    tensors = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache", "out"), f"*{dtype}")
    lengths = dict.fromkeys(("length", "table_size", "q_stride", "k_stride", "v_stride", "stride"), "i32")
    constants = {"PAGE": 880, "HEAD_DIM": 128, "BLOCK_D": 128, **tile.kwargs}
    signature = tensors | {"table": "*i32", "visible": "*i32", "factor": "fp32"} | lengths
    aligned = (*tensors, *(name for name in lengths if "stride" in name))
    source = ASTSource(
        fn=function,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled(ptx: str, capability: int, path: Path) -> int:
    """Bytes that each thread writes to memory for want of registers, as NVIDIA's assembler says."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    path.write_text(ptx)
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={sm_arch_from_capability(capability)}", str(path)]
    done = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=True)
    return int(re.findall(r"(\d+) bytes spill stores", done.stderr)[0])


@pytest.mark.slow
@pytest.mark.parametrize("capability", CARDS)
def test_tiles_tried_on_a_card_fit_it_and_load_while_they_multiply(capability: int, tmp_path: Path) -> None:
    """Keys that are not copied asynchronously would be waited for. Of each shape that of most stages, the largest."""
    pytest.importorskip("triton")
    from kv_cache.triton_attention import tiles_for

    tiles = tiles_for(torch.bfloat16, divmod(capability, 10))
    largest = {tuple(tile.kwargs.values()): tile for tile in sorted(tiles, key=lambda tile: tile.num_stages)}
    assert (128, 64) in largest
    for tile in largest.values():
        made = compiled(tile, "bf16", capability)
        assert made.metadata.shared <= CARDS[capability], tile
        assert spilled(made.asm["ptx"], capability, tmp_path / "kernel.ptx") <= MOST_SPILLED, tile
        assert "cp.async.cg" in made.asm["ptx"]
        assert ("wgmma.mma_async" in made.asm["ptx"]) == (capability == 90)
        assert ("tcgen05.mma" in made.asm["ptx"]) == (capability == 100)


@pytest.mark.slow
def test_float32_has_a_tile_of_its_own_that_fits_the_smallest_card() -> None:
    pytest.importorskip("triton")
    from kv_cache.triton_attention import tiles_for

    smallest = min(CARDS, key=CARDS.__getitem__)
    (tile,) = tiles_for(torch.float32, divmod(smallest, 10))
    assert compiled(tile, "fp32", smallest).metadata.shared <= CARDS[smallest]
