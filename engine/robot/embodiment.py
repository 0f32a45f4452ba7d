"""What one kind of robot sends and gets, as data. No torch here."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import cast

from engine.files.one_line import one_line
from protocol.robot import HANDSHAKE, ObservationSpec, StateVector, View

EMBODIMENT_HINT = "--embodiment FILE describes the robot that a checkpoint is for"


class EmbodimentError(ValueError):
    """An embodiment that is not valid or does not fit the checkpoint: one line that names file, entry, expectation."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A view's place in the picture; every pixel is `width` pixels wide and `height` high."""

    view: str
    width: int = 1
    height: int = 1


@dataclass(frozen=True, kw_only=True)
class ActionVector:
    """Numbers that a robot gets. relative_to: the state vector that the model's numbers are added to, if any."""

    name: str
    size: int
    relative_to: str | None = None


@dataclass(frozen=True, kw_only=True)
class Embodiment:
    """One kind of robot.

    name: how checkpoints name it in their statistics. layout: rows of the picture that the model sees, top to bottom.
    crop: share of each view's height and width that is kept, around its middle.
    template: what the text encoder is told, with the lower-cased prompt at each "{p}".
    state, action: in the order in which the model has them.
    own_handshake: values that differ from the usual ones in what the server tells robots first.
    """

    name: str
    views: tuple[View, ...]
    layout: tuple[tuple[Cell, ...], ...]
    crop: float
    template: str
    default_prompt: str
    state: tuple[StateVector, ...]
    action: tuple[ActionVector, ...]
    own_handshake: Mapping[str, object]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the picture, counted in views of single size."""
        return sum(row[0].height for row in self.layout), sum(cell.width for cell in self.layout[0])

    @property
    def action_size(self) -> int:
        """Numbers of one action."""
        return sum(vector.size for vector in self.action)

    @property
    def handshake(self) -> dict[str, object]:
        """What the server tells such robots first; always the same six keys."""
        return HANDSHAKE | dict(self.own_handshake)

    @property
    def observation_spec(self) -> ObservationSpec:
        """What a request of such a robot must hold."""
        height, width = cast(list[int], self.handshake["image_resolution"])
        return ObservationSpec(self.views, self.state, (height, width))

    def prompt_text(self, prompt: str) -> str:
        """The robot's prompt in the embodiment's template."""
        task = prompt.strip() or self.default_prompt
        return self.template.replace("{p}", task.lower())

    def with_relative_actions(self, names: Collection[str]) -> "Embodiment":
        """The same robot where the actions `names`, and no others, are relative.

        Each is relative to the state vector that the embodiment names for it, else to the one of its own name.
        Raises EmbodimentError where there is no such action, or no such state vector of its size.
        """
        if unknown := set(names) - {vector.name for vector in self.action}:
            known = ", ".join(vector.name for vector in self.action)
            raise EmbodimentError(
                f"the checkpoint calls the actions {', '.join(sorted(unknown))} relative; embodiment {self.name} has "
                f"{known}: {EMBODIMENT_HINT}"
            )
        sizes = {vector.name: vector.size for vector in self.state}
        action = []
        for vector in self.action:
            reference = vector.relative_to or vector.name if vector.name in names else None
            if reference is not None and sizes.get(reference) != vector.size:
                raise EmbodimentError(
                    f"the checkpoint calls the action {vector.name} relative, so embodiment {self.name} needs a state "
                    f"vector {reference} of size {vector.size}"
                )
            action.append(replace(vector, relative_to=reference))
        return replace(self, action=tuple(action))
