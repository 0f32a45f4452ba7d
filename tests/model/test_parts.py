"""Parts of the engine alone: text, embodiment, schedule, frame buffer, rotation."""

import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer

from engine.checkpoint.synthetic import BUILTIN_CONFIGS, BUILTIN_STATISTICS
from engine.model.config import parse_config
from engine.model.rope import Rope, rotate
from engine.model.solver import FlowSolver, flow_sigmas, flow_timesteps, unipc
from engine.model.text import clean, tokenize
from engine.robot.embodiment_file import read_embodiment
from engine.robot.normalization import StatisticsError, read_range
from engine.robot.transforms import Transforms
from engine.session import Session
from kv_cache.cache import SessionKV

DROID = read_embodiment("oxe_droid")


@pytest.fixture
def transforms() -> Transforms:
    return Transforms(DROID, parse_config(BUILTIN_CONFIGS["tiny"]), BUILTIN_STATISTICS)


@pytest.mark.parametrize(
    ("dirty", "expected"),
    [
        ("  pick \t up\n\n the   block ", "pick up the block"),
        ("salt &amp;amp; pepper", "salt & pepper"),
        ("cafÃ©", "café"),
    ],
)
def test_prompts_are_cleaned(dirty: str, expected: str) -> None:
    assert clean(dirty) == expected


def test_tokens_are_padded_or_cut_with_the_end_kept() -> None:
    short, mask = tokenize(ByT5Tokenizer(), "ab", 8)
    assert short.tolist() == [100, 101, 1, 0, 0, 0, 0, 0]
    assert mask.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    long, mask = tokenize(ByT5Tokenizer(), "abcdefghijkl", 8)
    assert long.tolist() == [100, 101, 102, 103, 104, 105, 106, 1]
    assert mask.all()


def test_the_template_has_the_prompt_twice_and_a_default() -> None:
    text = DROID.prompt_text("  Open the Drawer ")
    assert text.startswith("A multi-view video shows that a robot open the drawer The video is split")
    assert text.endswith("(dropped view). The robot open the drawer")
    assert DROID.prompt_text(" \n").count("perform the default behavior.") == 2


def test_views_are_stitched_wrist_on_top_and_missing_ones_black(transforms: Transforms) -> None:
    views = {
        name: np.full((2, 180, 320, 3), value, np.uint8) for name, value in (("wrist", 10), ("exterior_right", 30))
    }
    picture = transforms.stitch(views)
    assert picture.shape == (2, 64, 128, 3)
    assert picture.dtype == torch.uint8
    assert (picture[:, :32].int() - 10).abs().max() <= 1
    assert (picture[:, 32:, :64] == 0).all()
    assert (picture[:, 32:, 64:].int() - 30).abs().max() <= 1


@pytest.mark.parametrize("size", [(224, 224), (480, 640), (9, 11)])
def test_views_of_any_size_are_taken(transforms: Transforms, size: tuple[int, int]) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (1, *size, 3), dtype=np.uint8)
    views = dict.fromkeys(("wrist", "exterior_left", "exterior_right"), frames)
    assert transforms.stitch(views).shape == (1, 64, 128, 3)


def test_the_state_is_clamped_and_padded(transforms: Transforms) -> None:
    state = transforms.normalize_state(
        {"joint_position": np.array([9.0, -9, 0, 0, 0, 0, 0]), "gripper_position": np.array([0.5])}
    )
    assert state.shape == (64,)
    assert state[:2].tolist() == [1.0, -1.0]
    assert state[7] == 0.0
    assert (state[8:] == 0).all()


def test_joint_actions_are_relative_and_the_gripper_is_absolute(transforms: Transforms) -> None:
    latents = torch.zeros(24, 32)
    latents[:, 7] = 1.0
    joints = np.linspace(-1, 1, 7)
    actions = transforms.actions(latents, {"joint_position": joints})
    action = read_range(BUILTIN_STATISTICS, "oxe_droid", "action", DROID.action)
    middle = (action.q01 + action.q99) / 2
    assert (actions.dtype, actions.shape) == (np.float32, (24, 8))
    np.testing.assert_allclose(actions[5, :7], joints + middle[:7].numpy(), atol=1e-6)
    np.testing.assert_allclose(actions[:, 7], 1.0)


def test_statistics_that_are_missing_are_named() -> None:
    with pytest.raises(StatisticsError, match=r"no embodiment 'oxe_droid'; it has \['other'\]"):
        read_range({"other": {}}, "oxe_droid", "state", DROID.state)
    metadata = {"oxe_droid": {"statistics": {"action": {"joint_position": {"q01": [1.0]}}}}}
    with pytest.raises(StatisticsError, match=r"list of 7 numbers at oxe_droid.statistics.action.joint_position.q01"):
        read_range(metadata, "oxe_droid", "action", DROID.action)


def test_the_schedule_falls_from_noise_to_the_final_level() -> None:
    sigmas = flow_sigmas(16, 5.0)
    assert sigmas[0] == pytest.approx(5 * 0.999 / (1 + 4 * 0.999))
    assert sigmas[-1] == 0
    assert (np.diff(sigmas) < 0).all()
    decoupled = flow_sigmas(16, 5.0, 0.8)
    assert decoupled[0] == pytest.approx(sigmas[0])
    assert decoupled[-1] == pytest.approx(0.8)
    assert flow_timesteps(sigmas)[0] == 999
    assert flow_timesteps(decoupled)[-1] >= 800


def test_the_solver_follows_a_constant_velocity_exactly() -> None:
    """Flow matching: x_sigma = data + sigma * (noise - data), so velocity is noise - data."""
    data, noise = torch.randn(2, 3), torch.randn(2, 3)
    sigmas = flow_sigmas(16, 5.0)
    start = (data + sigmas[0] * (noise - data)).float()
    path = FlowSolver(sigmas, torch.device("cpu")).start(start)
    for _ in range(16):
        x = path.step(noise - data)
    torch.testing.assert_close(x, data, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("steps", "final_noise"), [(1, 0.0), (2, 0.0), (16, 0.0), (16, 0.8), (50, 0.0)])
def test_the_solver_is_the_library_s_own(steps: int, final_noise: float) -> None:
    """Step by step, in float64, with velocities that have nothing to do with each other."""
    sigmas = flow_sigmas(steps, 5.0, final_noise)
    scheduler = unipc(sigmas)
    expected = torch.randn(1, 3, 2, 4, 5, dtype=torch.float64)
    path = FlowSolver(sigmas, torch.device("cpu")).start(expected.float())
    for timestep in scheduler.timesteps:
        velocity = torch.randn(expected.shape, dtype=torch.float64)
        expected = scheduler.step(velocity, timestep, expected, return_dict=False)[0]
        torch.testing.assert_close(path.step(velocity.float()), expected.float(), atol=1e-5, rtol=0)


def test_rotations_are_made_once() -> None:
    rope = Rope(12, 2, 3, 2, 24, 1)
    assert rope.rotation(3, 2, True, torch.device("cpu")) is rope.rotation(3, 2, True, torch.device("cpu"))


def test_the_session_keeps_the_last_four_frames() -> None:
    session = Session(SessionKV("robot", 2))
    frames = list(torch.arange(9))
    assert session.push_frames(frames[:3]) == [2], "the first call looks at the newest frame alone"
    assert session.push_frames(frames[3:4]) == [0, 1, 2, 3]
    assert session.push_frames(frames[4:5]) == [1, 2, 3, 4]
    assert session.push_frames(frames[5:9]) == [5, 6, 7, 8]
    other = Session(SessionKV("other", 2))
    other.push_frames(frames[:1])
    assert other.push_frames(frames[1:2]) == [0, 0, 0, 1], "the oldest is repeated in front"


def test_rotation_depends_on_relative_position_alone() -> None:
    rope = Rope(head_dim=32, rows=2, columns=3, block_frames=2, block_actions=24, block_states=1)
    q, k = torch.randn(2, 1, 6, 1, 32)
    cpu = torch.device("cpu")
    products = []
    for start in (0, 5):
        turned_q = rotate(q, rope.rotation(start, 1, False, cpu))
        turned_k = rotate(k, rope.rotation(start + 2, 1, False, cpu))
        products.append(torch.einsum("blhd,bmhd->lm", turned_q, turned_k))
    torch.testing.assert_close(*products, atol=1e-4, rtol=1e-4)
    assert rope.rotation(1, 2, True, cpu).cos.shape == (2 * 6 + 25, 1, 16)
