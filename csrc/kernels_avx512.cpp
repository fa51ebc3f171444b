#include <immintrin.h>

#include "kernels.h"
#include "xxh3.h"

namespace grpo::avx512 {

constexpr size_t kPrefetchBytes = 4096;

struct Lane {
    __m512i acc;
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
    void copy_stripe(uint8_t* to, const uint8_t* from, const uint8_t* secret) {
        const __m512i word = _mm512_loadu_si512(from);
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

void fence() { _mm_sfence(); }

extern const Kernels kernels = {"avx512", copy_blocks, fold_stripes, fold_blocks, copy, convert, fence};

}  // namespace grpo::avx512
