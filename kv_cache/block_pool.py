"""Which blocks are free. One block holds the K/V of one latent frame; nothing here knows a tensor.

The pool prefers runs of neighbouring blocks, because attention reads a run through a plain view. It is laid out in
segments of `segment` blocks, the most a window ever holds: a new window starts in a segment that is wholly free, where
it can grow without meeting another. Once no such segment is left, blocks come from the tightest gap that fits, and a
window in pieces is attended through a gather instead: slower, never wrong.
"""


class OutOfBlocks(RuntimeError):
    """Fewer blocks are free than were asked for; nothing was allocated."""


class BlockPool:
    """The free list over blocks 0 to num_blocks - 1. Raises ValueError where num_blocks or segment is not positive."""

    def __init__(self, num_blocks: int, segment: int = 1) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool holds at least one block, got {num_blocks}")
        if segment < 1:
            raise ValueError(f"a segment holds at least one block, got {segment}")
        self.num_blocks = num_blocks
        self._segment = segment
        self._free = [True] * num_blocks
        self._free_count = num_blocks

    @property
    def free_count(self) -> int:
        """Blocks that can be allocated now."""
        return self._free_count

    @property
    def used_count(self) -> int:
        """Blocks handed out."""
        return self.num_blocks - self._free_count

    def is_free(self, block: int) -> bool:
        """Whether `block` could be handed out; False for numbers outside the pool."""
        return 0 <= block < self.num_blocks and self._free[block]

    def allocate(self, count: int, prefer: int | None = None) -> list[int]:
        """Take `count` blocks, as few runs of neighbours as can be.

        prefer: the block that would extend the caller's window; the blocks from there on are taken as far as they
            are free. Without it a new window starts: in a free segment where there is one.
        Raises OutOfBlocks, with nothing taken, where fewer than `count` are free.
        """
        if count > self._free_count:
            raise OutOfBlocks(f"{count} blocks asked for, {self._free_count} of {self.num_blocks} free")
        start = self._free_segment() if prefer is None else prefer
        blocks = [] if start is None else self._take_run(start, count)
        while len(blocks) < count:
            missing = count - len(blocks)
            blocks += self._take_run(self._tightest_gap(missing), missing)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Give blocks back.

        Raises ValueError, with nothing freed, where one is not handed out (a double free, a number outside the
        pool) or is named twice.
        """
        for block in blocks:
            if not 0 <= block < self.num_blocks or self._free[block]:
                raise ValueError(f"block {block} is not handed out and cannot be freed")
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"a block is named twice in {blocks}")
        for block in blocks:
            self._free[block] = True
        self._free_count += len(blocks)

    def _take_run(self, start: int, count: int) -> list[int]:
        run: list[int] = []
        while len(run) < count and self.is_free(start + len(run)):
            run.append(start + len(run))
            self._free[run[-1]] = False
        self._free_count -= len(run)
        return run

    def _free_segment(self) -> int | None:
        for start in range(0, self.num_blocks - self._segment + 1, self._segment):
            if all(self._free[start : start + self._segment]):
                return start
        return None

    def _tightest_gap(self, count: int) -> int:
        """Start of the shortest free run that holds `count` blocks, else of the longest one."""
        gaps = self._gaps()
        fitting = [gap for gap in gaps if gap[1] >= count]
        return min(fitting, key=lambda gap: gap[1])[0] if fitting else max(gaps, key=lambda gap: gap[1])[0]

    def _gaps(self) -> list[tuple[int, int]]:
        """Every maximal free run as (start, length)."""
        gaps: list[tuple[int, int]] = []
        for block in range(self.num_blocks):
            if not self._free[block]:
                continue
            if gaps and sum(gaps[-1]) == block:
                gaps[-1] = (gaps[-1][0], gaps[-1][1] + 1)
            else:
                gaps.append((block, 1))
        return gaps
