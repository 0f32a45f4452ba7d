"""The encoder gives what diffusers' own gives, and for grey frames, to the bit, what it gives without keeping any."""

from collections.abc import Callable

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from engine.checkpoint.footprint import footprint
from engine.checkpoint.synthetic import BUILTIN_CONFIGS
from engine.model import video_encoder
from engine.model.config import parse_config
from engine.model.vae import build_vae, prepare_convolutions
from engine.model.video_encoder import VideoEncoder

SIZES = ["tiny", "wan22-tiny"]


def random_vae(size: str, seed: int = 0) -> AutoencoderKLWan:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    vae = build_vae(parse_config(BUILTIN_CONFIGS[size]).vae).eval()
    for name, parameter in vae.named_parameters():
        if name.endswith("gamma"):
            parameter.data.uniform_(0.5, 1.5)
    return vae


def still(image: Tensor, grey: int) -> Tensor:
    return torch.cat([image, image.new_zeros(1, 3, grey, *image.shape[3:])], dim=2)


@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_a_still_picture_is_encoded_to_the_bit_as_the_whole_video_is(size: str) -> None:
    """At the first call, when features are kept, and at later ones; for two sizes in turn."""
    encoder = VideoEncoder(random_vae(size))
    for _ in range(2):
        for height, width in ((16, 32), (48, 32)):
            image = torch.rand(1, 3, 1, height, width) * 2 - 1
            expected = encoder.encode(still(image, 32))
            assert expected.std() > 0
            assert torch.equal(encoder.encode_still(image, 32), expected)
    image = torch.rand(1, 3, 1, 16, 32) * 2 - 1
    assert torch.equal(encoder.encode_still(image, 48), encoder.encode(still(image, 48))), "steady ever after"
    assert torch.equal(encoder.encode_still(image, 8), encoder.encode(still(image, 8)))


@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_features_are_kept_as_soon_as_they_see_nothing_of_the_image(size: str) -> None:
    """A piece sooner, the image still shows in them."""
    encoder = VideoEncoder(random_vae(size))
    encoder._steady_from = [piece - 1 for piece in encoder._steady_from]
    encoder.encode_still(torch.ones(1, 3, 1, 16, 32), 32)
    image = torch.rand(1, 3, 1, 16, 32) * 2 - 1
    assert not torch.equal(encoder.encode_still(image, 32), encoder.encode(still(image, 32)))


@torch.inference_mode()
def test_what_never_depends_on_the_image_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    products = 0
    convolve = video_encoder.convolve

    def counted(x: Tensor, weight: Tensor, *args: object) -> Tensor:
        nonlocal products
        out = convolve(x, weight, *args)  # type: ignore[arg-type]
        products += out.numel() * weight[0].numel()
        return out

    monkeypatch.setattr(video_encoder, "convolve", counted)
    encoder = VideoEncoder(random_vae("tiny"))
    spent = []
    for _ in range(3):
        products = 0
        encoder.encode_still(torch.rand(1, 3, 1, 16, 32) * 2 - 1, 32)
        spent.append(products)
    products = 0
    encoder.encode(torch.rand(1, 3, 33, 16, 32))
    assert spent[1] == spent[2] < spent[0] < products
    assert spent[1] < 0.6 * products


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("prepared", [None, True, False], ids=["plain", "channels last", "channels first"])
@torch.inference_mode()
def test_it_computes_what_the_library_computes(size: str, prepared: bool | None) -> None:
    vae = random_vae(size)
    video = torch.rand(1, 3, 13, 16, 32) * 2 - 1
    expected = vae.encode(video).latent_dist.mode()
    if prepared is not None:
        prepare_convolutions(vae, channels_last=prepared)
    torch.testing.assert_close(VideoEncoder(vae).encode(video), expected, atol=1e-5, rtol=0)
    still_latents = vae.encode(still(video[:, :, :1], 32)).latent_dist.mode()
    torch.testing.assert_close(VideoEncoder(vae).encode_still(video[:, :, :1], 32), still_latents, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_in_bfloat16_it_comes_no_less_near_to_float32_than_the_library() -> None:
    vae = random_vae("tiny")
    video = torch.rand(1, 3, 1, 16, 32) * 2 - 1
    exact = VideoEncoder(vae).encode(video)
    vae.bfloat16()
    library = vae.encode(video.bfloat16()).latent_dist.mode()
    ours = VideoEncoder(vae).encode(video.bfloat16())
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() < 1.1 * (library - exact).norm()


def test_what_is_kept_counts_as_memory_that_serving_needs() -> None:
    """In 14B's VAE: four frames of the first and of the third of down_blocks, and so on, as they leave each."""
    needed = footprint(parse_config(BUILTIN_CONFIGS["droid-2l"]))
    first, second = 4 * 96 * 352 * 640, 4 * 96 * 176 * 320
    third, fourth, fifth = 4 * 192 * 176 * 320, 2 * 192 * 88 * 160, 2 * 384 * 88 * 160
    assert needed.steady == 2 * (first + second + third + fourth + fifth)


@pytest.mark.slow
@torch.inference_mode()
def test_compiled_it_gives_the_same_from_two_graphs_for_each_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs, traced here: without the convolutions that no compiler follows, and no code made for a CPU."""
    monkeypatch.setattr("engine.model.vae._HAS_ONEDNN", False)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, options, **how: compiler(step, backend=backend, **how))
    encoder = VideoEncoder(random_vae("tiny"))
    for _ in range(2):
        image, video = (torch.rand(1, 3, frames, 16, 32) * 2 - 1 for frames in (1, 9))
        assert torch.equal(encoder.encode(video, compiled=True), encoder.encode(video))
        assert torch.equal(encoder.encode_still(image, 32, compiled=True), encoder.encode(still(image, 32)))
    modules = 1 + len(encoder._vae.encoder.down_blocks) + 1
    once_more = 1  # the first convolution, as a piece of a video lies otherwise in memory than grey frames
    assert len(graphs) == 2 * modules + once_more, "for a first frame, and for four frames"
