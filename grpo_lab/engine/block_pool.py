"""KV blocks: exact counts, reference counting, and a prefix cache by chained hashes."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

BLOCK_TOKENS = 16
PrefixPolicy = Literal["versioned", "flush", "shared"]


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
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # free, nothing to reuse; the last goes first
        self._idle: OrderedDict[int, None] = OrderedDict()  # free, content to reuse; the first goes first
        self._content: dict[int, tuple[bytes, tuple[int, int]]] = {}  # hash, and the weights that computed it
        self._by_hash: dict[bytes, int] = {}
        self._reserved = 0

    def __len__(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._idle) - self._reserved

    @property
    def num_used(self) -> int:
        return len(self) - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks whose content a new request could reuse."""
        return len(self._by_hash)

    def version_of(self, index: int) -> tuple[int, int]:
        """Weights that computed a cached block."""
        return self._content[index][1]

    def reserve(self, count: int) -> None:
        """Blocks that sequences use from now on without asking which: counted, and taken by name later."""
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} are free"
        self._reserved += count
        self._make_blank(self._reserved)

    def give_back(self, count: int) -> None:
        """Reserved blocks that nobody needs any more."""
        assert count <= self._reserved, f"{count} blocks given back, {self._reserved} are reserved"
        self._reserved -= count

    def allocate(self, count: int, *, reserved: bool = False) -> list[int]:
        """Takes ``count`` free blocks, or reserved ones; the caller has checked ``num_free``."""
        if reserved:
            assert count <= self._reserved, f"{count} blocks claimed, {self._reserved} are reserved"
            self._reserved -= count
        else:
            assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} are free"
            self._make_blank(self._reserved + count)
        taken = self._blank[len(self._blank) - count :]
        del self._blank[len(self._blank) - count :]
        for index in taken:
            self._references[index] = 1
        return taken

    def _make_blank(self, count: int) -> None:
        """Forgets the least recently freed content until ``count`` blocks hold none."""
        for _ in range(count - len(self._blank)):
            index, _ = self._idle.popitem(last=False)
            del self._by_hash[self._content.pop(index)[0]]
            self._blank.append(index)

    def free(self, table: Sequence[int]) -> None:
        """Gives up one reference to each block; the last blocks of a sequence are reused first."""
        references = self._references
        for index in reversed(table):
            left = references[index] = references[index] - 1
            assert left >= 0, f"block {index} is freed twice"
            if left == 0:
                if index in self._content:
                    self._idle[index] = None
                else:
                    self._blank.append(index)

    def key(self, parent: bytes, tokens: Sequence[int], version: tuple[int, int]) -> bytes:
        """Chained hash of one full block: of its parent's hash, its tokens, and (policy) the weights."""
        state = hashlib.blake2b(parent, digest_size=16)
        state.update(array("q", tokens).tobytes())
        if self.policy == "versioned":
            state.update(array("q", version).tobytes())
        return state.digest()

    def match(
        self, token_ids: Sequence[int], version: tuple[int, int], salt: bytes = b""
    ) -> tuple[list[int], bytes]:
        """Cached blocks of the longest known prefix, and the hash of the last of them.

        ``salt`` takes the place of the first block's parent. At least one token stays to be computed, as its
        logits are needed. References are not taken.
        """
        found: list[int] = []
        parent = salt
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
        return self.num_free - sum(index in self._idle for index in table)

    def reference(self, table: Sequence[int]) -> None:
        """A sequence shares these cached blocks."""
        for index in table:
            self._idle.pop(index, None)
            self._references[index] += 1

    def remember(self, index: int, key: bytes, version: tuple[int, int]) -> None:
        """Block ``index`` is full and computed: later requests may reuse it."""
        if not self.caching or index in self._content or key in self._by_hash:
            return
        self._content[index] = (key, version)
        self._by_hash[key] = index

    def flush(self) -> int:
        """Empties the prefix cache and returns how many blocks it held; sequences keep their blocks."""
        cleared = len(self._by_hash)
        self._by_hash.clear()
        self._content.clear()
        self._blank += self._idle
        self._idle.clear()
        return cleared
