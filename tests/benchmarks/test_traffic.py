"""What `benchmarks.traffic` reads off Inductor's code for CUDA; to make such code takes gigabytes, so not here."""

from benchmarks.traffic import largest_tensor, launches

CODE = """
extern_kernels.mm  # a comment: mm(
triton_red_fused_add_0 = async_compile.triton('triton_red_fused_add_0', '''
def triton_red_fused_add_0(in_ptr0, xnumel):
    pass
''', device_str='cuda')

def call(self, args):
    buf0 = empty_strided_cuda((2, 1785, 5120), (9139200, 5120, 1), torch.bfloat16)
    triton_red_fused_add_0.run(arg0_1, buf0, 3570, 5120, stream=raw_stream0)
    buf1 = empty_strided_cuda((3570, 15360), (15360, 1), torch.bfloat16)
    extern_kernels.addmm(arg2_1, reinterpret_tensor(buf0, (3570, 5120), (5120, 1), 0), arg1_1, alpha=1, out=buf1)
    # Topologically Sorted Source Nodes: [x], Original ATen: [aten.addmm], extern_kernels.addmm(
    buf2 = empty_strided_cuda((3570, ), (1, ), torch.float32)
    extern_kernels._scaled_mm(buf5, arg3_1, buf6, arg4_1, arg5_1, out_dtype=torch.bfloat16, out=buf7)
    buf3 = torch.ops.kv_cache.attend.default(buf1, buf1, buf1, arg3_1, 'triton')
    assert_size_stride(buf3, (2, 1785, 40, 128), (1, 2, 3, 4), 'torch.ops.kv_cache.attend.default(')
    buf4 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf3, arg4_1, arg5_1)
    triton_poi_fused_cat_1.run(buf4, buf3, 18278400, stream=raw_stream0)
    buf5 = extern_kernels.convolution(buf4, arg6_1, stride=(1, 1, 1), padding=(0, 1, 1))
    torch.ops.aten.index_put_.default(arg7_1, [arg8_1], buf3)
    buf6 = empty_strided_cuda((), (), torch.float32)
"""


def test_launches_are_told_by_kind_and_none_is_missed() -> None:
    assert launches(CODE) == {
        "fused kernels": 2, "matrix products": 2, "convolutions": 1, "attention": 2, "other": 1,
    }  # fmt: skip


def test_the_largest_tensor_is_that_of_most_bytes() -> None:
    assert largest_tensor(CODE) == 3570 * 15360 * 2
    assert largest_tensor("") == 0
    assert largest_tensor("buf = empty_strided_cuda((), (), torch.float32)") == 4
