"""What every part of reading a checkpoint raises."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one line that names the file, the entry and what was expected."""
