// The bucket hash: a tree of XXH3-64 (Yann Collet, https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, seed 0,
// default secret). Leaves are the bucket's 64 KiB chunks; the root is the hash of the leaf hashes followed by the
// bucket's length. Inputs of at most 240 bytes are zero-padded to 256, so only XXH3's long-input form is needed (the
// length in the root keeps padded inputs apart). A tree because leaves can be hashed by any thread in any order.
#pragma once

#include "elements.h"

namespace grpo::xxh3 {

constexpr size_t kStripe = 64, kBlock = 1024, kLeaf = 64 * kBlock, kLanes = 8;
constexpr size_t kShort = 240, kPadded = 256;

constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu, kPrime64_3 = 0x165667B19E3779F9u,
                   kPrime64_4 = 0x85EBCA77C2B2AE63u, kPrime64_5 = 0x27D4EB2F165667C5u;

constexpr size_t kSecretBytes = 192;
constexpr size_t kScrambleSecret = kSecretBytes - kStripe, kLastSecret = kSecretBytes - kStripe - 7, kMergeSecret = 11;

#ifdef __CUDACC__
#define GRPO_SECRET __device__ __constant__ const
#else
#define GRPO_SECRET alignas(64) inline constexpr
#endif
#define GRPO_SECRET_BYTES \
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, \
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, \
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, \
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, \
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, \
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, \
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, \
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, \
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, \
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, \
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, \
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e
GRPO_SECRET uint8_t kSecret[kSecretBytes] = {GRPO_SECRET_BYTES};

GRPO_HD uint64_t read64(const void* from) {
    uint64_t value;
    memcpy(&value, from, 8);
    return value;
}

GRPO_HD uint64_t secret64(size_t offset) {
    uint64_t value = 0;  // byte by byte: a device may not load 8 bytes from an odd address
#ifdef __CUDA_ARCH__
    for (int i = 7; i >= 0; --i) value = (value << 8) | kSecret[offset + i];
#elif !defined(__CUDACC__)
    value = read64(kSecret + offset);
#else
    static const uint8_t host_secret[kSecretBytes] = {GRPO_SECRET_BYTES};
    value = read64(host_secret + offset);
#endif
    return value;
}

GRPO_HD void init(uint64_t acc[kLanes]) {
    acc[0] = kPrime32_3; acc[1] = kPrime64_1; acc[2] = kPrime64_2; acc[3] = kPrime64_3;
    acc[4] = kPrime64_4; acc[5] = kPrime32_2; acc[6] = kPrime64_5; acc[7] = kPrime32_1;
}

// What one 8-byte word adds to its own lane; the word itself is added to the neighbouring lane (index ^ 1).
GRPO_HD uint64_t word_product(uint64_t word, uint64_t key) {
    const uint64_t mixed = word ^ key;
    return (mixed & 0xffffffffu) * (mixed >> 32);
}

GRPO_HD uint64_t scramble_lane(uint64_t acc, size_t lane) {
    acc ^= acc >> 47;
    acc ^= secret64(kScrambleSecret + 8 * lane);
    return acc * kPrime32_1;
}

GRPO_HD uint64_t multiply_fold(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
    return (a * b) ^ __umul64hi(a, b);
#else
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
#endif
}

GRPO_HD uint64_t merge(const uint64_t acc[kLanes], uint64_t length) {
    uint64_t hash = length * kPrime64_1;
    for (size_t i = 0; i < 4; ++i)
        hash += multiply_fold(acc[2 * i] ^ secret64(kMergeSecret + 16 * i), acc[2 * i + 1] ^ secret64(kMergeSecret + 16 * i + 8));
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9u;
    return hash ^ (hash >> 32);
}

}  // namespace grpo::xxh3
