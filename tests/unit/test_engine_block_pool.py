import pytest

from grpo_lab.engine.block_pool import BLOCK_TOKENS, BlockPool

V1, V2 = (1, 1), (1, 2)
TOKENS = list(range(3 * BLOCK_TOKENS + 5))


def cache(pool, tokens, version):
    """Fills and remembers the full blocks of ``tokens``, as a finished sequence would."""
    full = len(tokens) // BLOCK_TOKENS
    table, parent = pool.allocate(full), b""
    for index in range(full):
        parent = pool.key(parent, tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS], version)
        pool.remember(table[index], parent, version)
    pool.free(table)
    return table


def test_counts_are_exact():
    pool = BlockPool(8)
    first, second = pool.allocate(3), pool.allocate(2)
    assert (pool.num_free, pool.num_used) == (3, 5)
    assert not set(first) & set(second)
    pool.free(first)
    pool.free(second)
    assert (pool.num_free, pool.num_used) == (8, 0)


def test_a_block_cannot_be_freed_twice():
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.free(table)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(table)


def test_a_prefix_is_found_block_by_block():
    pool = BlockPool(8)
    table = cache(pool, TOKENS, V1)
    assert pool.match(TOKENS, V1)[0] == table
    other = [*TOKENS[: BLOCK_TOKENS * 2], 999, *TOKENS[BLOCK_TOKENS * 2 + 1 :]]
    assert pool.match(other, V1)[0] == table[:2]
    assert pool.match([999, *TOKENS[1:]], V1)[0] == []


def test_one_token_is_always_left_to_compute():
    pool = BlockPool(8)
    cache(pool, TOKENS, V1)
    assert len(pool.match(TOKENS[: 2 * BLOCK_TOKENS], V1)[0]) == 1
    assert len(pool.match(TOKENS[: 2 * BLOCK_TOKENS + 1], V1)[0]) == 2


@pytest.mark.parametrize(("policy", "found"), [("versioned", 0), ("flush", 3), ("shared", 3)])
def test_only_versioned_keys_tell_weights_apart(policy, found):
    pool = BlockPool(8, policy)
    cache(pool, TOKENS, V1)
    assert len(pool.match(TOKENS, V2)[0]) == found
    assert len(pool.match(TOKENS, V1)[0]) == 3


def test_flush_empties_the_cache_and_keeps_references():
    pool = BlockPool(8, "flush")
    table = cache(pool, TOKENS, V1)
    pool.reference(table[:1])
    assert pool.flush() == 3
    assert pool.match(TOKENS, V1) == ([], b"")
    assert pool.num_used == 1


def test_shared_blocks_are_freed_by_their_last_reader():
    pool = BlockPool(4)
    table = cache(pool, TOKENS, V1)
    pool.reference(table)
    pool.reference(table)
    pool.free(table)
    assert pool.num_free == 1
    pool.free(table)
    assert pool.num_free == 4


def test_blocks_without_content_are_handed_out_before_cached_ones():
    pool = BlockPool(4)
    table = cache(pool, TOKENS, V1)
    assert not set(pool.allocate(1)) & set(table)
    # Then the tail of the oldest sequence goes first, so that its prefix stays useful longest.
    assert pool.allocate(1) == [table[-1]]
    assert pool.match(TOKENS, V1)[0] == table[:2]


def test_content_handed_out_again_is_forgotten():
    pool = BlockPool(3)
    cache(pool, TOKENS, V1)
    pool.allocate(3)
    assert pool.num_cached == 0
    assert pool.match(TOKENS, V1)[0] == []


def test_free_blocks_left_after_taking_a_cached_prefix():
    pool = BlockPool(5)
    table = cache(pool, TOKENS, V1)
    assert pool.num_free_without(table) == 2
    pool.reference(table)
    assert pool.num_free_without(table) == 2


def test_a_pool_needs_a_block():
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)
