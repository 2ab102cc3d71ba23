// Two rows at a time, so that each constant is loaded once for both. setup.py gives this file its own flags.
#include "digest_core.h"

#ifdef __AVX2__
#include <immintrin.h>

namespace {

inline __m256i odd(__m256i x) { return _mm256_shuffle_epi32(x, 0xF5); }

// w * A mod 2^64 = w * low + ((w * high mod 2^32) << 32): the second part needs 32-bit sums only.
struct Sum {
  __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();

  inline __attribute__((always_inline)) void add(__m256i words, __m256i odd_words, __m256i l, __m256i odd_l, __m256i h) {
    low = _mm256_add_epi64(low, _mm256_mul_epi32(words, l));
    low = _mm256_add_epi64(low, _mm256_mul_epi32(odd_words, odd_l));
    high = _mm256_add_epi32(high, _mm256_mullo_epi32(words, h));
  }

  uint64_t total() const {
    alignas(32) uint64_t lows[4];
    alignas(32) uint32_t highs[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lows), low);
    _mm256_store_si256(reinterpret_cast<__m256i*>(highs), high);
    uint32_t upper = 0;
    for (uint32_t x : highs) upper += x;
    return lows[0] + lows[1] + lows[2] + lows[3] + (uint64_t(upper) << 32);
  }
};

inline __m256i load(const int32_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }

constexpr int kAhead = 2 * kRow;  // words: the same place of the next two rows, wanted in the L2 cache

template <int rows>
void dots(const DigestTables& t, const int32_t* words, uint64_t out[2][2]) {
  Sum sums[rows][2];
  for (int c = 0; c < kRow; c += 8) {
    const __m256i l0 = load(t.low[0] + c), l1 = load(t.low[1] + c), h0 = load(t.high[0] + c), h1 = load(t.high[1] + c);
    const __m256i odd_l0 = odd(l0), odd_l1 = odd(l1);
    for (int r = 0; r < rows; r++) {
      const __m256i w = load(words + r * kRow + c), odd_w = odd(w);
      if (!(c & 8)) __builtin_prefetch(words + r * kRow + c + kAhead, 0, 2);  // past the end does no harm
      sums[r][0].add(w, odd_w, l0, odd_l0, h0);
      sums[r][1].add(w, odd_w, l1, odd_l1, h1);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int k = 0; k < 2; k++) out[r][k] += sums[r][k].total();
}

void digest_rows(const DigestTables& t, const int32_t* words, int rows, uint64_t out[2][2]) {
  rows == 2 ? dots<2>(t, words, out) : dots<1>(t, words, out);
}

}  // namespace

const DigestRows msr_digest_avx2 = digest_rows;
#else
const DigestRows msr_digest_avx2 = nullptr;
#endif
