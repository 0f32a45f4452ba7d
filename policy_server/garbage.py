"""What the garbage collector looks at while robots are served."""

import gc

_FULL_EVERY = 1


def freeze_gc() -> None:
    """Have the collector leave alone what is loaded by now: some 400,000 objects, of libraries for the most part.

    Left to itself it looks at all of them in a full collection, which stops every thread for long, and so it waits
    until a hundred thousand more have come. Without them a full collection is short; it can come often, and what
    connections leave behind in cycles does not add up.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # counts anew what there is to look at
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_EVERY)


def unfreeze_gc() -> None:
    """Have the collector see everything again: at the interpreter's end libraries report as leaked what it does not."""
    gc.unfreeze()
