// The inner loops, compiled once per instruction set and chosen at run time.
#pragma once

#include <vector>

#include "elements.h"

namespace grpo {

struct Kernels {
    const char* name;
    // Copies whole 1024-byte blocks and folds them into the XXH3 accumulators `acc` (null: copy only), scrambling
    // after each block. `stream` uses non-temporal stores; `to` is then 64-byte aligned.
    void (*copy_blocks)(uint64_t* acc, void* to, const void* from, size_t blocks, bool stream);
    // The same of float elements that are converted on the way. Blocks are of 1024 bytes at `to`.
    void (*cast_blocks)(uint64_t* acc, Dtype to_dtype, void* to, Dtype from_dtype, const void* from, size_t blocks, bool stream);
    // Folds whole stripes of 64 bytes, without a scramble; stripe i uses the secret from `secret_offset` + 8 i.
    void (*fold_stripes)(uint64_t* acc, const void* from, size_t stripes, size_t secret_offset);
    // Folds whole blocks, scrambling after each; reads only.
    void (*fold_blocks)(uint64_t* acc, const void* from, size_t blocks);
    // Copies bytes of any alignment; `stream` avoids reading the destination into the cache.
    void (*copy)(void* to, const void* from, size_t bytes, bool stream);
    // Only moves memory, `reads` bytes for each `writes` (1:1, 2:1 or 1:2), in blocks of 1024 bytes at `to`, past the
    // caches: as fast as a cast that narrows or widens could be at most. What it writes is a part of what it reads.
    void (*move_blocks)(void* to, const void* from, size_t blocks, int reads, int writes);
    // Converts `count` contiguous elements between float dtypes.
    void (*convert)(Dtype to_dtype, void* to, Dtype from_dtype, const void* from, size_t count);
    // Non-temporal stores become visible to other threads only after this.
    void (*fence)();
};

// The instruction sets that this CPU has, best first. Never empty: the last one is plain C++.
std::vector<const Kernels*> available_kernels();

// By name, or the best for "auto". Null for an unknown or unavailable name.
const Kernels* find_kernels(const char* name);

}  // namespace grpo
