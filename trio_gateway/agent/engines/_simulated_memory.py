"""The simulated engine's KV memory: blocks of tokens, and the prompts that are still in them. Pure.

As in vLLM: full blocks of a prompt are named by a chain of hashes, so that equal
prefixes meet; a block that nobody uses keeps its contents until somebody needs
the room, the longest unused first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final


def chain(tokens: Sequence[int], block_tokens: int, salt: int) -> list[int]:
    """Name the full blocks of a prompt; the last token's block is left out, since it is computed anyway.

    Args:
        salt: prompts with another salt never share a block.
    """
    names = []
    name = salt
    for at in range(block_tokens, len(tokens), block_tokens):
        name = hash((name, *tokens[at - block_tokens : at]))
        names.append(name)
    return names


@final
class BlockTable:
    """The blocks of one sequence. `KVMemory` makes it and takes it back.

    Attributes:
        cached: blocks, from the first on, that were found computed.
        blocks: their numbers, in the order of the tokens.
    """

    def __init__(self, cached: int, blocks: list[int]) -> None:
        self.cached = cached
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)


@final
class KVMemory:
    """A fixed number of blocks.

    Each is free, held by one sequence or more, or kept for its contents alone;
    ``free + held + kept == total`` at every moment.

    Attributes:
        total: blocks.
        block_tokens: tokens in each.
        queries, hits: blocks of prompts that were looked up, and found.
        evictions: contents that were thrown away for room.
    """

    def __init__(self, total: int, block_tokens: int) -> None:
        self.total: Final = total
        self.block_tokens: Final = block_tokens
        self.queries = 0
        self.hits = 0
        self.evictions = 0
        self._free = list(range(total - 1, -1, -1))
        self._users: dict[int, int] = {}
        self._kept: dict[int, None] = {}  # unused blocks with contents, longest unused first
        self._by_name: dict[int, int] = {}
        self._names: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Blocks without contents."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Blocks that sequences use."""
        return len(self._users)

    @property
    def kept(self) -> int:
        """Blocks that nobody uses and whose contents are known."""
        return len(self._kept)

    @property
    def available(self) -> int:
        """Blocks that can be given out."""
        return len(self._free) + len(self._kept)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences use, 0 to 1."""
        return len(self._users) / self.total

    def blocks_for(self, tokens: int) -> int:
        """Say how many blocks hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def take(self, names: Sequence[int], tokens: int) -> BlockTable | None:
        """Take the blocks for ``tokens`` tokens whose full blocks begin with ``names``.

        Answers None, and takes nothing, if there are too few.
        """
        found = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        wanted = self.blocks_for(tokens) - len(found)
        unused = sum(block in self._kept for block in found)
        if wanted > self.available - unused:
            return None
        self.queries += len(names)
        self.hits += len(found)
        for block in found:
            self._kept.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        table = BlockTable(len(found), found)
        for _ in range(wanted):
            self._give(table)
        return table

    def grow(self, table: BlockTable) -> bool:
        """Add a block to a sequence's; False if there is none."""
        if not self.available:
            return False
        self._give(table)
        return True

    def remember(self, table: BlockTable, names: Sequence[int]) -> None:
        """Note that a sequence's first blocks are computed, and under which names others find them."""
        for block, name in zip(table.blocks, names, strict=False):
            if block not in self._names and name not in self._by_name:
                self._names[block] = name
                self._by_name[name] = block

    def give_back(self, table: BlockTable) -> None:
        """Take all blocks of a sequence back; a second time has no effect."""
        # The end of a prompt is shared by fewer than its beginning: it goes first.
        for block in reversed(table.blocks):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                if block in self._names:
                    self._kept[block] = None
                else:
                    self._free.append(block)
        table.blocks.clear()

    def forget(self) -> None:
        """Throw all contents away that nobody uses, as an engine that starts again."""
        while self._kept:
            self._free.append(self._evict())

    def _give(self, table: BlockTable) -> None:
        block = self._free.pop() if self._free else self._evict()
        self._users[block] = 1
        table.blocks.append(block)

    def _evict(self) -> int:
        block = next(iter(self._kept))
        del self._kept[block]
        del self._by_name[self._names.pop(block)]
        self.evictions += 1
        return block
