"""Triton's kernel: run through the interpreter in a process of its own, and compiled for the cards it must run on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_the_kernel_compiles_for_every_architecture_and_loads_while_it_multiplies(capability: int) -> None:
    """For a card that is not there, at DROID's sizes. Keys that are not copied asynchronously would be waited for."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from kv_cache.triton_attention import kernel

    function = kernel.fn
    tensors = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache", "out"), "*bf16")
    lengths = dict.fromkeys(("length", "table_size", "q_stride", "k_stride", "v_stride", "stride"), "i32")
    constants = {"PAGE": 880, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_M": 128, "BLOCK_N": 64}
    signature = tensors | {"table": "*i32", "visible": "*i32", "factor": "fp32"} | lengths
    aligned = (*tensors, *(name for name in lengths if "stride" in name))
    source = ASTSource(
        fn=function,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert "cp.async.cg" in compiled.asm["ptx"]
    assert ("wgmma.mma_async" in compiled.asm["ptx"]) == (capability == 90)
