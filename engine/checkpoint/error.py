"""What every part of reading a checkpoint raises."""

from engine.files.one_line import one_line


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one line that names the file, the entry and what was expected."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))
