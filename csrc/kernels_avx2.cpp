#include <immintrin.h>

#include "kernels.h"
#include "xxh3.h"

namespace grpo::avx2 {

struct Lane {
    __m256i low, high;
    void load(const uint64_t* from) {
        low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 4));
    }
    void store(uint64_t* to) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 4), high);
    }
    static __m256i add(__m256i acc, __m256i word, const uint8_t* secret) {
        const __m256i mixed = _mm256_xor_si256(word, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret)));
        const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
        const __m256i neighbour = _mm256_shuffle_epi32(word, _MM_SHUFFLE(1, 0, 3, 2));
        return _mm256_add_epi64(acc, _mm256_add_epi64(product, neighbour));
    }
    void fold(const uint8_t* from, const uint8_t* secret) {
        low = add(low, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), secret);
        high = add(high, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32)), secret + 32);
    }
    struct Stripe {
        __m256i a, b;
    };
    static Stripe stripe(const uint8_t* from) {
        return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32))};
    }
    template <bool kHash, bool kStream>
    void put(uint8_t* to, Stripe word, const uint8_t* secret) {
        if (kStream) {
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to), word.a);
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), word.b);
        } else {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), word.a);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), word.b);
        }
        if (kHash) {
            low = add(low, word.a, secret);
            high = add(high, word.b, secret + 32);
        }
    }
    static __m256i scramble_half(__m256i acc, const uint8_t* secret) {
        const __m256i prime = _mm256_set1_epi32(static_cast<int>(xxh3::kPrime32_1));
        acc = _mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47));
        acc = _mm256_xor_si256(acc, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret)));
        const __m256i low = _mm256_mul_epu32(acc, prime);
        const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(acc, 32), prime);
        return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
    }
    void scramble() {
        low = scramble_half(low, xxh3::kSecret + xxh3::kScrambleSecret);
        high = scramble_half(high, xxh3::kSecret + xxh3::kScrambleSecret + 32);
    }
};

#include "kernels_impl.h"

void fence() { _mm_sfence(); }

extern const Kernels kernels = {"avx2", copy_blocks, cast_blocks_staged, fold_stripes, fold_blocks, copy, move_blocks, convert, fence};

}  // namespace grpo::avx2
