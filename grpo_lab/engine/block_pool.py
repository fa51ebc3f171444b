"""KV blocks: exact counts, reference counting, and a prefix cache by chained hashes."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BLOCK_TOKENS = 16
PrefixPolicy = Literal["versioned", "flush", "shared"]


@dataclass(slots=True)
class Block:
    """``hash`` is set once the block is full and may be reused; ``version`` computed its content."""

    index: int
    references: int = 0
    hash: bytes | None = None
    version: tuple[int, int] = (0, 0)


class BlockPool:
    """Hands out blocks of 16 tokens. Every block is either free or referenced by a sequence.

    Free blocks keep their content until they are handed out again (least recently freed first), so a
    later request with the same prefix finds them. ``policy`` says how the prefix cache treats weights:

    - ``versioned``: the weight version is part of the key; blocks of older weights never match;
    - ``flush``: keys carry no version, and the engine empties the cache at every weight switch;
    - ``shared``: neither. A new request may reuse work of older weights (a stale cache, rule S17).

    >>> pool = BlockPool(num_blocks=4)
    >>> table = pool.allocate(2)
    >>> pool.num_free, pool.num_used
    (2, 2)
    >>> pool.free(table)
    >>> pool.num_free
    4
    """

    def __init__(self, num_blocks: int, policy: PrefixPolicy = "versioned", caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: a pool needs at least 1 block")
        self.policy = policy
        self.caching = caching
        self._blocks = [Block(index) for index in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict((index, None) for index in range(num_blocks))
        self._by_hash: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._blocks) - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks whose content a new request could reuse."""
        return len(self._by_hash)

    def version_of(self, index: int) -> tuple[int, int]:
        return self._blocks[index].version

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` free blocks; the caller has checked ``num_free``."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} are free"
        taken = []
        for _ in range(count):
            index, _ = self._free.popitem(last=False)
            block = self._blocks[index]
            self._forget(block)
            block.references = 1
            taken.append(index)
        return taken

    def free(self, table: Sequence[int]) -> None:
        """Gives up one reference to each block; the last blocks of a sequence are reused first."""
        for index in reversed(table):
            block = self._blocks[index]
            assert block.references > 0, f"block {index} is freed twice"
            block.references -= 1
            if block.references == 0:
                self._free[index] = None
                if block.hash is None:  # nothing to reuse: hand it out before cached ones
                    self._free.move_to_end(index, last=False)

    def key(self, parent: bytes, tokens: Sequence[int], version: tuple[int, int]) -> bytes:
        """Chained hash of one full block: of its parent's hash, its tokens, and (policy) the weights."""
        state = hashlib.blake2b(parent, digest_size=16)
        state.update(array("q", tokens).tobytes())
        if self.policy == "versioned":
            state.update(array("q", version).tobytes())
        return state.digest()

    def match(self, token_ids: Sequence[int], version: tuple[int, int]) -> tuple[list[int], bytes]:
        """Cached blocks of the longest known prefix, and the hash of the last of them.

        At least one token stays to be computed, as its logits are needed. References are not taken.
        """
        found: list[int] = []
        parent = b""
        if not self.caching:
            return found, parent
        for start in range(0, (len(token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            key = self.key(parent, token_ids[start : start + BLOCK_TOKENS], version)
            index = self._by_hash.get(key)
            if index is None:
                break
            found.append(index)
            parent = key
        return found, parent

    def num_free_without(self, table: Sequence[int]) -> int:
        """Free blocks that would be left after ``reference(table)``."""
        return len(self._free) - sum(index in self._free for index in table)

    def reference(self, table: Sequence[int]) -> None:
        for index in table:
            block = self._blocks[index]
            if block.references == 0:
                del self._free[index]
            block.references += 1

    def remember(self, index: int, key: bytes, version: tuple[int, int]) -> None:
        """Block ``index`` is full and computed: later requests may reuse it."""
        block = self._blocks[index]
        if not self.caching or block.hash is not None or key in self._by_hash:
            return
        block.hash, block.version = key, version
        self._by_hash[key] = index

    def flush(self) -> int:
        """Empties the prefix cache and returns how many blocks it held; sequences keep their blocks."""
        cleared = len(self._by_hash)
        for index in self._by_hash.values():
            self._blocks[index].hash = None
        self._by_hash.clear()
        return cleared

    def _forget(self, block: Block) -> None:
        if block.hash is not None:
            self._by_hash.pop(block.hash, None)
            block.hash = None
