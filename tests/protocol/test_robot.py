"""Requests of robots of other kinds than DROID's: which camera a key is, what may be missing."""

import numpy as np
import pytest

from protocol.codec import Dialect
from protocol.messages import InferRequest, RequestError, parse_request
from protocol.robot import ObservationSpec, StateVector, View

PAIR = ObservationSpec(
    views=(
        View(name="front", keys=("cam_0", "cam_1")),
        View(name="side", keys=("cam_1", "cam_2")),
        View(name="top", keys=("top",), required=False),
    ),
    state=(StateVector(name="base", key="base", size=3, meaning="wheel speeds"),),
    resolution=(180, 320),
)


def parse(*cameras: str, spec: ObservationSpec = PAIR, **more: object) -> InferRequest:
    images = {key: np.full((8, 8, 3), index, np.uint8) for index, key in enumerate(cameras)}
    request = parse_request({**images, "base": [1, 2, 3], "prompt": "go", **more}, Dialect.OPENPI, spec)
    assert isinstance(request, InferRequest)
    return request


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (("cam_0", "cam_1"), {"front": "cam_0", "side": "cam_1"}),
        (("cam_1", "cam_2", "top"), {"front": "cam_1", "side": "cam_2", "top": "top"}),
        (("cam_0", "cam_1", "cam_2"), {"front": "cam_0", "side": "cam_1"}),
    ],
)
def test_a_request_uses_one_numbering(sent: tuple[str, ...], expected: dict[str, str]) -> None:
    views = parse(*sent).observation.views
    assert {name: sent[frames[0, 0, 0, 0]] for name, frames in views.items()} == expected


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (("cam_1",), "cam_2: expected an RGB image"),
        (("cam_0",), "cam_1: expected an RGB image"),
        (("cam_2",), "cam_0: expected an RGB image"),
        ((), "cam_0: expected an RGB image"),
        (("cam_0", "cam_2"), "cam_2: expected cam_1 beside cam_0, found cameras 0 and 2, which no numbering has"),
    ],
)
def test_no_camera_stands_in_for_another(sent: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse(*sent)
    assert str(raised.value).startswith(message)


def test_of_a_group_one_is_enough() -> None:
    spec = ObservationSpec(
        views=tuple(View(name=name, keys=(name,), required=False, one_of="eye") for name in ("left", "right")),
        state=PAIR.state,
        resolution=PAIR.resolution,
    )
    assert set(parse("right", spec=spec).observation.views) == {"right"}
    with pytest.raises(RequestError, match=r"left: expected at least one eye \(this, or right\), found nothing"):
        parse(spec=spec)


def test_state_comes_by_name_and_is_asked_for_in_words() -> None:
    assert parse("cam_0", "cam_1").observation.state["base"].tolist() == [1, 2, 3]
    with pytest.raises(RequestError, match="base: expected numbers of shape"):
        parse("cam_0", "cam_1", base=[1, 2])
    images = {key: np.zeros((8, 8, 3), np.uint8) for key in ("cam_0", "cam_1")}
    with pytest.raises(RequestError, match="base: expected 3 wheel speeds, found nothing"):
        parse_request({**images, "prompt": "go"}, Dialect.OPENPI, PAIR)
