// AVX-512 (F, BW, DQ, VL); setup.py gives this file its own flags. BF16 by hand, the other formats through cpu_core.h.
#include "cpu_avx512.h"

#ifdef __AVX512BW__

namespace {

constexpr int kUnroll = 4;  // independent Philox vectors, to hide the latency of the multiplications
constexpr int64_t kAhead = 1024;  // elements to ask the memory for in advance

enum Store { kMasked, kWhole, kStreaming };

// Rounds 64 elements, or those in `mask`.
template <bool stochastic, Store store>
MSR_INLINE void round_tile(V w01, V w23, const float* src, uint16_t* dst, uint64_t mask) {
  V x[4];
#pragma GCC unroll 4
  for (int q = 0; q < 4; q++) {
    const __mmask16 present = store == kMasked ? __mmask16(mask >> (16 * q)) : __mmask16(0xFFFF);
    x[q] = _mm512_maskz_loadu_epi32(present, src + 16 * q);
  }
  const Tile y = rounded<stochastic>(w01, w23, x);
  if (store == kMasked) {
    _mm512_mask_storeu_epi16(dst, __mmask32(mask), y.low);
    _mm512_mask_storeu_epi16(dst + 32, __mmask32(mask >> 32), y.high);
  } else if (store == kWhole) {
    _mm512_storeu_si512(dst, y.low);
    _mm512_storeu_si512(dst + 32, y.high);
  } else {
    _mm512_stream_si512(reinterpret_cast<V*>(dst), y.low);
    _mm512_stream_si512(reinterpret_cast<V*>(dst + 32), y.high);
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
      const int64_t at = i + kTile * j + kAhead;  // past the end does no harm
      for (int q = 0; q < 4; q++) __builtin_prefetch(src + at + 16 * q);
      for (int q = 0; store == kWhole && q < 2; q++) __builtin_prefetch(dst + at + 32 * q, 1);
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
