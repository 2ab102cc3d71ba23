// AVX-512 (F, BW, DQ, VL); setup.py gives this file its own flags. BF16 by hand, the other formats through cpu_core.h.
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
constexpr int kUnroll = 4;   // independent Philox vectors, to hide the latency of the multiplications
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

enum Store { kMasked, kWhole, kStreaming };

// Rounds 64 elements, or those in `mask`.
template <bool stochastic, Store store>
MSR_INLINE void round_tile(V w01, V w23, const float* src, uint16_t* dst, uint64_t mask) {
  V x[4], sum[4], wrapped = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int q = 0; q < 4; q++) {
    const __mmask16 present = store == kMasked ? __mmask16(mask >> (16 * q)) : __mmask16(0xFFFF);
    x[q] = _mm512_maskz_loadu_epi32(present, src + 16 * q);
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
  if (store == kMasked) {
    _mm512_mask_storeu_epi16(dst, __mmask32(mask), y0);
    _mm512_mask_storeu_epi16(dst + 32, __mmask32(mask >> 32), y1);
  } else if (store == kWhole) {
    _mm512_storeu_si512(dst, y0);
    _mm512_storeu_si512(dst + 32, y1);
  } else {
    _mm512_stream_si512(reinterpret_cast<V*>(dst), y0);
    _mm512_stream_si512(reinterpret_cast<V*>(dst + 32), y1);
  }
}

// The bits from .. to - 1 of a mask; to may lie past 64.
MSR_INLINE uint64_t bits_between(int64_t from, int64_t to) {
  return (to >= 64 ? ~0ull : (1ull << to) - 1) & ~0ull << from;
}

// Rounds as many whole groups of tiles as fit, from element i on, the first of block b. Returns where it stopped.
template <bool stochastic, Store store>
MSR_INLINE int64_t round_tiles(const Keys& keys, uint32_t b, uint16_t* dst, const float* src, int64_t i, int64_t n) {
  for (; i + kUnroll * kTile <= n; i += kUnroll * kTile, b += kUnroll * Vec::size) {
    Draws<kUnroll> d;
    if (stochastic) d = draw<kUnroll>(keys, b);
#pragma GCC unroll 8
    for (int j = 0; j < kUnroll; j++) {
      round_tile<stochastic, store>(d.w01[j], d.w23[j], src + i + kTile * j, dst + i + kTile * j, 0);
    }
  }
  return i;
}

// Rounds elements with global indices g .. g + n - 1, whose block counters share their high word.
template <bool stochastic>
void round_bf16_run(const Keys& keys, bool streaming, uint16_t* dst, const float* src, int64_t n, uint64_t g) {
  const uint32_t block = uint32_t(g >> 3);
  // The first tile may begin before the first element: masked loads and stores touch nothing there.
  const int64_t skip = int64_t(g & 7);
  Draws<1> d;
  int64_t i = -skip;
  if (skip) {
    if (stochastic) d = draw<1>(keys, block);
    round_tile<stochastic, kMasked>(d.w01[0], d.w23[0], src + i, dst + i, bits_between(skip, skip + n));
    i += kTile;
  }
  if (streaming && reinterpret_cast<uintptr_t>(dst + i) % 64 == 0) {
    i = round_tiles<stochastic, kStreaming>(keys, block + uint32_t(i + skip) / 8, dst, src, i, n);
    _mm_sfence();
  } else {
    i = round_tiles<stochastic, kWhole>(keys, block + uint32_t(i + skip) / 8, dst, src, i, n);
  }
  for (; i < n; i += kTile) {
    if (stochastic) d = draw<1>(keys, block + uint32_t((i + skip) / 8));
    round_tile<stochastic, kMasked>(d.w01[0], d.w23[0], src + i, dst + i, bits_between(0, n - i));
  }
}

void round_piece_avx512(const Launch& launch, const Piece& p, int64_t from, int64_t to) {
  if (!is_bf16(launch.format)) return round_piece<VectorPhilox>(launch, p, from, to);
  uint16_t* const dst = reinterpret_cast<uint16_t*>(p.dst);
  VectorPhilox philox(p.key, p.step);
  if (!launch.stochastic) {
    return round_bf16_run<false>(philox.keys, launch.streaming, dst + from, p.src + from, to - from, 0);
  }
  for_each_run(p, from, to, [&](int64_t i, int64_t n, uint64_t g) {
    while (n > 0) {
      // As far as the low word of the block counter, g >> 3, does not wrap.
      const uint64_t high = g >> 35, left = ((high + 1) << 35) - g;
      const int64_t count = uint64_t(n) < left ? n : int64_t(left);
      round_bf16_run<true>(philox.at(uint32_t(high)), launch.streaming, dst + i, p.src + i, count, g);
      i += count;
      g += uint64_t(count);
      n -= count;
    }
  });
}

}  // namespace

const RoundPiece msr_avx512 = round_piece_avx512;
#else
const RoundPiece msr_avx512 = nullptr;
#endif
