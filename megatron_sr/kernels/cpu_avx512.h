// AVX-512: Philox and the rounding of 64 numbers to BF16, for the files that are compiled with it (setup.py).
#pragma once
#include "cpu_core.h"

#ifdef __AVX512BW__
#include <immintrin.h>

namespace {

struct Vec {
  typedef __m512i Type;
  static constexpr int size = 8;  // blocks

  MSR_INLINE Type set(uint64_t x) { return _mm512_set1_epi64(int64_t(x)); }
  MSR_INLINE Type lanes() { return _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0); }
  MSR_INLINE Type add(Type a, Type b) { return _mm512_add_epi64(a, b); }
  MSR_INLINE Type multiply(Type a, Type b) { return _mm512_mul_epu32(a, b); }
  MSR_INLINE Type upper(Type a) { return _mm512_srli_epi64(a, 32); }
  MSR_INLINE Type exclusive(Type a, Type b) { return _mm512_xor_si512(a, b); }
  MSR_INLINE Type exclusive(Type a, Type b, Type c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }

  // (upper half of p) ^ c ^ k in the low half, the low half of p in the upper.
  MSR_INLINE Type finish(Type p, Type c, Type k) {
    return _mm512_mask_ternarylogic_epi32(_mm512_ror_epi64(p, 32), 0x5555, c, k, 0x96);
  }

  MSR_INLINE void store(uint32_t* out, Type w01, Type w23) {
    _mm512_storeu_si512(out, _mm512_unpacklo_epi64(w01, w23));
    _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi64(w01, w23));
  }
};

}  // namespace

#include "cpu_philox.h"

namespace {

constexpr int kTile = 64;    // elements that one Philox vector serves
typedef __m512i V;

// Indices for vpermt2w. spread[q] takes from (w01, w23) the draws of elements 16 q .. 16 q + 15, blocks 2 q and 2 q + 1,
// each into the lower half of a 32-bit lane; upper takes the upper halves of 32 sums.
struct Indices {
  alignas(64) uint16_t spread[4][32] = {}, upper[32] = {};

  constexpr Indices() {
    for (int q = 0; q < 4; q++) {
      for (int e = 0; e < 16; e++) {
        const int block = 2 * q + e / 8, lane = block < 4 ? 2 * block : 2 * block - 7;  // Vec::lanes
        spread[q][2 * e] = uint16_t(e % 8 / 4 * 32 + lane * 4 + e % 4);
      }
    }
    for (int e = 0; e < 32; e++) upper[e] = uint16_t(2 * e + 1);
  }
};
constexpr Indices kIndices;

// Corrects sum = x + draw (or x + half, nearest). Its upper half is the result unless x is NaN or rounds past the largest
// finite number.
template <bool stochastic>
MSR_INLINE V repair(V x, V sum) {
  const V sign = _mm512_set1_epi32(int(0x80000000u)), infinity = _mm512_set1_epi32(0x7F800000);
  const V magnitude = _mm512_andnot_si512(sign, x);
  if (stochastic) {
    const __mmask16 finite = _mm512_cmplt_epu32_mask(magnitude, infinity);
    const __mmask16 over = _mm512_mask_cmpge_epu32_mask(finite, _mm512_andnot_si512(sign, sum), infinity);
    sum = _mm512_mask_or_epi32(sum, over, _mm512_and_si512(sign, x), _mm512_set1_epi32(0x7F7F0000));
  }
  return _mm512_mask_or_epi32(sum, _mm512_cmpgt_epu32_mask(magnitude, infinity), x, _mm512_set1_epi32(0x00400000));
}

struct Tile {
  V low, high;  // 32 BF16 numbers each
};

// Rounds 64 FP32 numbers with the words of their Philox blocks.
template <bool stochastic>
MSR_INLINE Tile rounded(V w01, V w23, const V (&x)[4]) {
  V sum[4], wrapped = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int q = 0; q < 4; q++) {
    V add;
    if (stochastic) {
      add = _mm512_maskz_permutex2var_epi16(0x55555555, w01, _mm512_load_si512(kIndices.spread[q]), w23);
    } else {
      const V odd = _mm512_and_si512(_mm512_srli_epi32(x[q], 16), _mm512_set1_epi32(1));
      add = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    }
    sum[q] = _mm512_add_epi32(x[q], add);
    // wrapped | (x ^ sum): a NaN may have overflowed into the sign.
    wrapped = _mm512_ternarylogic_epi32(wrapped, x[q], sum[q], 0xF6);
  }
  const V upper = _mm512_load_si512(kIndices.upper);
  V y0 = _mm512_permutex2var_epi16(sum[0], upper, sum[1]), y1 = _mm512_permutex2var_epi16(sum[2], upper, sum[3]);
  // Doubling drops the sign: 0xFF00 and above are infinities and NaN.
  const V largest = _mm512_max_epu16(_mm512_add_epi16(y0, y0), _mm512_add_epi16(y1, y1));
  const __mmask32 not_finite = _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(short(0xFF00)));
  if (__builtin_expect(_mm512_movepi32_mask(wrapped) | not_finite, 0)) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) sum[q] = repair<stochastic>(x[q], sum[q]);
    y0 = _mm512_permutex2var_epi16(sum[0], upper, sum[1]);
    y1 = _mm512_permutex2var_epi16(sum[2], upper, sum[3]);
  }
  return {y0, y1};
}

}  // namespace
#endif
