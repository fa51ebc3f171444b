#include <immintrin.h>

#include "kernels.h"
#include "xxh3.h"

namespace grpo::avx512 {

struct Lane {
    using Stripe = __m512i;
    __m512i acc;
    static Stripe stripe(const uint8_t* from) { return _mm512_loadu_si512(from); }
    void load(const uint64_t* from) { acc = _mm512_loadu_si512(from); }
    void store(uint64_t* to) const { _mm512_storeu_si512(to, acc); }
    void add(__m512i word, const uint8_t* secret) {
        const __m512i mixed = _mm512_xor_si512(word, _mm512_loadu_si512(secret));
        const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
        const __m512i neighbour = _mm512_shuffle_epi32(word, static_cast<_MM_PERM_ENUM>(_MM_SHUFFLE(1, 0, 3, 2)));
        acc = _mm512_add_epi64(acc, _mm512_add_epi64(product, neighbour));
    }
    void fold(const uint8_t* from, const uint8_t* secret) { add(_mm512_loadu_si512(from), secret); }
    template <bool kHash, bool kStream>
    void put(uint8_t* to, Stripe word, const uint8_t* secret) {
        if (kStream) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), word);
        else _mm512_storeu_si512(to, word);
        if (kHash) add(word, secret);
    }
    void scramble() {
        acc = _mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47));
        acc = _mm512_xor_si512(acc, _mm512_loadu_si512(xxh3::kSecret + xxh3::kScrambleSecret));
        acc = _mm512_mullo_epi64(acc, _mm512_set1_epi64(static_cast<int64_t>(xxh3::kPrime32_1)));
    }
};

#include "kernels_impl.h"

// BFloat16::encode of sixteen, each in the upper half of its lane.
inline __m512i rounded(__m512i x) {
    const __m512i one = _mm512_set1_epi32(1);
    const __mmask16 odd = _mm512_test_epi32_mask(x, _mm512_set1_epi32(0x10000)), nan = _mm512_fpclass_ps_mask(_mm512_castsi512_ps(x), 0x81);
    const __m512i up = _mm512_add_epi32(x, _mm512_set1_epi32(0x7fff));
    return _mm512_mask_mov_epi32(_mm512_mask_add_epi32(up, odd, up, one), nan, _mm512_set1_epi32(0x7fc00000));
}

struct Narrowed {  // stripes of bfloat16 from fp32
    const uint8_t* from;
    __m512i upper_halves;
    explicit Narrowed(const void* fp32) : from(static_cast<const uint8_t*>(fp32)) {
        alignas(64) uint16_t words[32];
        for (uint16_t i = 0; i < 32; ++i) words[i] = static_cast<uint16_t>(2 * i + 1);
        upper_halves = _mm512_load_si512(words);
    }
    __m512i next() {
        prefetch_once(from + kCastAhead);
        prefetch_once(from + kCastAhead + 64);
        const __m512i low = rounded(_mm512_loadu_si512(from)), high = rounded(_mm512_loadu_si512(from + 64));
        from += 128;
        return _mm512_permutex2var_epi16(low, upper_halves, high);
    }
};

struct Widened {  // stripes of fp32 from bfloat16
    const uint8_t* from;
    __m512i next() {
        prefetch_once(from + kCastAhead / 2);
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        from += 32;
        return _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    }
};

// The usual casts need no stop in the L1 cache.
void cast_blocks(uint64_t* acc, Dtype to_dtype, void* to, Dtype from_dtype, const void* from, size_t blocks, bool stream) {
    if (from_dtype == Dtype::f32 && to_dtype == Dtype::bf16) fill_blocks(acc, to, blocks, stream, Narrowed(from));
    else if (from_dtype == Dtype::bf16 && to_dtype == Dtype::f32) fill_blocks(acc, to, blocks, stream, Widened{static_cast<const uint8_t*>(from)});
    else cast_blocks_staged(acc, to_dtype, to, from_dtype, from, blocks, stream);
}

void fence() { _mm_sfence(); }

extern const Kernels kernels = {"avx512", copy_blocks, cast_blocks, fold_stripes, fold_blocks, copy, move_blocks, convert, fence};

}  // namespace grpo::avx512
