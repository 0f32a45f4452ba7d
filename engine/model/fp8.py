"""Linear layers in 8-bit floating point: weights half the size of bfloat16's, and products in hardware on Hopper.

Values are float8_e4m3fn, with a float32 scale for each row: for a weight, each output channel's, found when it is
loaded; for activations, each token's, found when they come.
"""

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""448: what the largest magnitude of each row becomes."""

LEAST_CAPABILITY = (8, 9)
"""The first CUDA devices with products of such matrices: Ada, then Hopper and what came after."""

_LEAST_AMAX = 1e-12


def require_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError where a model in `dtype` on `device` cannot have such layers."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, found = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        raise ValueError(f"fp8: expected a CUDA device of capability {least} or above, found {found}")
    if dtype != torch.bfloat16:
        raise ValueError(f"fp8: expected dtype bfloat16 on CUDA, found {str(dtype).removeprefix('torch.')!r}")


def has_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a model in `dtype` on `device` gains by such layers: a CPU computes them in software."""
    try:
        require_fp8(device, dtype)
    except ValueError:
        return False
    return device.type == "cuda"


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values (rows, n) of any floating dtype as float8_e4m3fn, contiguous, and the rows' scales (rows,) float32.

    A row of zeros stays one; an infinity becomes NaN, and NaN stays.
    """
    wide = values.float()
    scale = wide.abs().amax(-1).clamp(min=_LEAST_AMAX) / LARGEST
    small = (wide / scale[:, None]).clamp(-LARGEST, LARGEST)
    return small.to(FP8, memory_format=torch.contiguous_format), scale


class Fp8Linear(nn.Module):
    """x W^T + b with both operands of the product in float8; parameters have a plain linear layer's names and shapes.

    weight: (out, in) float8_e4m3fn, without gradient. scale: (out,) float32. bias: (out,) in the model's dtype.
    On a CUDA device widths must be multiples of 16 and x bfloat16. On a CPU torch gives the same product in software,
    from the same rounded operands: slow, but it shows what fp8 does to results.
    """

    scale: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=FP8), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs))
        self.register_buffer("scale", torch.empty(outputs))

    def set_weight(self, weight: Tensor, part: int = 0, parts: int = 1) -> None:
        """Take a weight (out / parts, in) of any floating dtype, finite, quantised on its device.

        part: which of `parts` equal parts of the output channels it is for.
        """
        values, scale = quantize_rows(weight)
        if self.weight.is_meta:
            self.weight = nn.Parameter(
                self.weight.new_empty(self.weight.shape, device=weight.device), requires_grad=False
            )
            self.scale = torch.empty_like(self.scale, device=weight.device)
        self.weight.data.chunk(parts)[part].copy_(values)
        self.scale.chunk(parts)[part].copy_(scale)

    def forward(self, x: Tensor) -> Tensor:
        """(..., L, in) to (..., L, out), in the dtype of x."""
        rows, row_scale = quantize_rows(x.flatten(0, -2))
        product = torch._scaled_mm(
            rows, self.weight.t(), scale_a=row_scale[:, None], scale_b=self.scale[None], bias=self.bias,
            out_dtype=x.dtype, use_fast_accum=True,
        )  # fmt: skip
        return product.unflatten(0, x.shape[:-1])


def use_fp8(module: nn.Module) -> None:
    """Put an Fp8Linear, weights not set, in the place of each linear layer inside `module`; all must have a bias."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, Fp8Linear(child.in_features, child.out_features))
