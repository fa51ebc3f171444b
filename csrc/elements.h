// Per-element conversions, written once for the CPU and for CUDA: integer arithmetic only (a thread that flushes
// denormals gets the same bits), branch-free (compilers vectorise the loops around them).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define GRPO_HD __host__ __device__ __forceinline__
#else
#define GRPO_HD inline __attribute__((always_inline))
#endif

namespace grpo {

// The codes that Python passes. rawN is N bytes that no one interprets (integers, bool, float64, ...).
enum class Dtype : uint8_t { f32 = 0, f16 = 1, bf16 = 2, e4m3 = 3, e5m2 = 4, raw1 = 5, raw2 = 6, raw4 = 7, raw8 = 8, raw16 = 9 };
constexpr int kDtypes = 10;

GRPO_HD size_t item_bytes(Dtype dtype) {
    switch (dtype) {
        case Dtype::f32: case Dtype::raw4: return 4;
        case Dtype::f16: case Dtype::bf16: case Dtype::raw2: return 2;
        case Dtype::e4m3: case Dtype::e5m2: case Dtype::raw1: return 1;
        case Dtype::raw8: return 8;
        case Dtype::raw16: return 16;
    }
    return 0;
}

GRPO_HD bool is_float(Dtype dtype) { return dtype <= Dtype::e5m2; }
GRPO_HD bool convertible(Dtype from, Dtype to) { return from == to || (is_float(from) && is_float(to)); }

// A binary float of at most 16 bits: E exponent bits, M mantissa bits. kHasInf says whether the top exponent is
// reserved (IEEE: inf and NaN) or only its last code is NaN (OCP 8-bit "fn" formats).
template <int E, int M, bool kHasInf, typename Bits>
struct SmallFloat {
    using bits_type = Bits;
    static constexpr uint32_t kBias = (1u << (E - 1)) - 1;
    static constexpr uint32_t kSign = 1u << (E + M);
    static constexpr uint32_t kTop = ((1u << E) - 1) << M;                               // exponent all ones
    static constexpr uint32_t kNan = kHasInf ? (kTop | (1u << (M - 1))) : (kSign - 1);  // canonical, without sign
    static constexpr uint32_t kOverflow = kHasInf ? kTop : kNan - 1;

    // Round to nearest, ties to even; too large becomes inf, or the largest value where there is no inf: as torch
    // 2.13 casts on the CPU (older releases gave NaN for the latter).
    static GRPO_HD Bits encode(uint32_t x) {
        const uint32_t sign = (x >> 31) << (E + M);
        const uint32_t magnitude = x & 0x7fffffffu;
        const int32_t exponent = static_cast<int32_t>(magnitude >> 23) - 127 + static_cast<int32_t>(kBias);
        const int32_t clamped = exponent < 1 ? 1 : exponent;  // subnormal results share the exponent of the smallest normal
        const int32_t excess = clamped - exponent;
        const uint32_t shift = static_cast<uint32_t>(23 - M + (excess > 7 + M ? 7 + M : excess));
        // An fp32 subnormal is far below half the smallest value of every such format: its missing implicit bit is harmless.
        const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
        const uint32_t rounded = (significand + (1u << (shift - 1)) - 1 + ((significand >> shift) & 1u)) >> shift;
        uint32_t out = (static_cast<uint32_t>(clamped - 1) << M) + rounded;
        out = out >= kOverflow ? kOverflow : out;
        out = magnitude > 0x7f800000u ? kNan : out;
        out = magnitude == 0x7f800000u ? kOverflow : out;
        return static_cast<Bits>(sign | out);
    }

    static GRPO_HD uint32_t decode(Bits value) {
        const uint32_t bits = value;
        const uint32_t sign = (bits & kSign) << (31 - E - M);
        const uint32_t magnitude = bits & (kSign - 1);
        const uint32_t normal = (magnitude << (23 - M)) + ((127 - kBias) << 23);
        // A subnormal is an integer times 2^(1 - bias - M): exact and normal in fp32.
        const float scaled = static_cast<float>(static_cast<int32_t>(magnitude)) * subnormal_unit();
        uint32_t subnormal;
        memcpy(&subnormal, &scaled, 4);
        uint32_t out = magnitude < (1u << M) ? subnormal : normal;
        if (kHasInf) {
            out = magnitude >= kTop ? (0x7f800000u | ((magnitude & ((1u << M) - 1)) << (23 - M))) : out;
        } else {
            out = magnitude == kNan ? 0x7fc00000u : out;
        }
        return sign | out;
    }

  private:
    static GRPO_HD float subnormal_unit() {
        const uint32_t bits = (127u + 1u - kBias - M) << 23;
        float unit;
        memcpy(&unit, &bits, 4);
        return unit;
    }
};

using Half = SmallFloat<5, 10, true, uint16_t>;
using E5M2 = SmallFloat<5, 2, true, uint8_t>;
using E4M3 = SmallFloat<4, 3, false, uint8_t>;

struct BFloat16 {
    using bits_type = uint16_t;
    static GRPO_HD uint16_t encode(uint32_t x) {
        const uint32_t rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
        return static_cast<uint16_t>((x & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
    static GRPO_HD uint32_t decode(uint16_t value) { return static_cast<uint32_t>(value) << 16; }
};

// Any float dtype to any other goes through fp32, as in torch.
struct Float32 {
    using bits_type = uint32_t;
    static GRPO_HD uint32_t encode(uint32_t x) { return x; }
    static GRPO_HD uint32_t decode(uint32_t x) { return x; }
};

}  // namespace grpo
