// What every instruction set shares: the work of a launch, Philox4x32-10 and the rounding of one value.
// The specification is reference.py; noise.py draws the layout of the random bits.
//
// Everything here has internal linkage: the same text is compiled once for each instruction set.
#pragma once
#include <cstdint>
#include <cstring>

#define MSR_INLINE static inline __attribute__((always_inline))

// One affine piece of a tensor; the rows of table.py. Eight 64-bit words.
struct Piece {
  unsigned char* dst;
  const float* src;
  int64_t length;         // elements
  uint64_t global_start;  // index of the first one in its whole tensor
  uint64_t stride, run;   // element i lies at global_start + (i / run) * stride + i % run
  uint64_t key;           // Philox key, k1 << 32 | k0
  uint64_t step;
};

// The constants of a format in its storage; formats.py and cpu.py fill them in.
struct Format {
  int32_t mantissa_bits, min_field, max_code, infinity_code, nan_code, random_bits, storage_shift, storage_bytes;
};

// Rounds `n` consecutive elements of the logical tensor, the first of which has global index `g`.
typedef void (*RoundRun)(const Format&, bool stochastic, unsigned char* dst, const float* src, int64_t n, uint64_t g, uint64_t key,
                         uint64_t step);

// One for each level; nullptr where the compiler's target lacks it.
extern RoundRun msr_run_plain, msr_run_avx2, msr_run_avx512;

namespace {

constexpr int kBlocks = 16;            // Philox blocks that are computed together
constexpr int kWords = 4 * kBlocks;    // their 32-bit words: 64 draws of 32 bits or 128 of 16

// Words of the blocks block .. block + 15, in memory order: block by block, w0 w1 w2 w3 each.
// As 16-bit halves (little endian) they are in the order of their lanes.
MSR_INLINE void philox_words(uint64_t block, uint64_t key, uint64_t step, uint32_t* words) {
  uint32_t c0[kBlocks], c1[kBlocks], c2[kBlocks], c3[kBlocks];
  for (int i = 0; i < kBlocks; i++) {
    c0[i] = uint32_t(block + i);
    c1[i] = uint32_t((block + i) >> 32);
    c2[i] = uint32_t(step);
    c3[i] = uint32_t(step >> 32);
  }
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < kBlocks; i++) {
      uint64_t p0 = uint64_t(0xD2511F53u) * c0[i], p1 = uint64_t(0xCD9E8D57u) * c2[i];
      c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0;
      c1[i] = uint32_t(p1);
      c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
      c3[i] = uint32_t(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < kBlocks; i++) {
    words[4 * i] = c0[i];
    words[4 * i + 1] = c1[i];
    words[4 * i + 2] = c2[i];
    words[4 * i + 3] = c3[i];
  }
}

MSR_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// The storage pattern of one rounded value. `random` is the draw as a 32-bit fraction (16 random bits: shifted up by 16).
template <bool stochastic>
MSR_INLINE uint32_t round_one(const Format& f, uint32_t bits, uint32_t random) {
  const int m = f.mantissa_bits;
  const uint32_t magnitude = bits & 0x7FFFFFFF, mantissa = magnitude & 0x7FFFFF, own_field = magnitude >> 23;
  const uint32_t significand = mantissa | uint32_t(own_field > 0) << 23;
  const int exponent = own_field > 1 ? int(own_field) : 1;
  const int field = exponent > f.min_field ? exponent : f.min_field;
  const int discarded = field - exponent + 23 - m;  // at least 13
  const int deep = discarded > 32 ? discarded - 32 : 0;
  const uint32_t below = significand >> (discarded < 24 ? discarded : 24);
  // The shift by 32 - discarded drops the bits that `below` keeps.
  const uint32_t fraction = deep ? significand >> (deep < 24 ? deep : 24) : significand << ((32 - discarded) & 31);
  uint32_t up, overflow;
  if (stochastic) {
    up = uint32_t(fraction + random) < fraction;
    overflow = f.max_code;
  } else {
    up = fraction > 0x80000000u || (fraction == 0x80000000u && (below & 1));
    overflow = f.infinity_code;
  }
  uint32_t code = (uint32_t(field - f.min_field) << m) + below + up;
  code = code < overflow ? code : overflow;
  code = magnitude == 0x7F800000 ? uint32_t(f.infinity_code) : code;
  code = magnitude > 0x7F800000 ? uint32_t(f.nan_code) | mantissa >> (23 - m) : code;
  return code << f.storage_shift | (bits >> 31) << (8 * f.storage_bytes - 1);
}

template <bool stochastic, typename Storage>
MSR_INLINE void round_values(const Format& f, Storage* dst, const float* src, int64_t n, const uint32_t* random) {
  for (int64_t i = 0; i < n; i++) dst[i] = Storage(round_one<stochastic>(f, bits_of(src[i]), stochastic ? random[i] : 0));
}

// Any format, any length: tile by tile, through a small buffer of draws.
template <typename Storage>
void round_run_generic(const Format& f, bool stochastic, Storage* dst, const float* src, int64_t n, uint64_t g, uint64_t key, uint64_t step) {
  if (!stochastic) return round_values<false>(f, dst, src, n, nullptr);
  uint32_t words[kWords], draws[2 * kWords];
  const int lane_bits = f.random_bits == 16 ? 3 : 2, tile = kBlocks << lane_bits;
  for (int64_t at = 0; at < n;) {
    philox_words((g + at) >> lane_bits, key, step, words);
    const int skip = int((g + at) & ((1 << lane_bits) - 1));
    const int64_t count = n - at < tile - skip ? n - at : tile - skip;
    if (f.random_bits == 16) {
      for (int i = 0; i < kWords; i++) {
        draws[2 * i] = words[i] << 16;
        draws[2 * i + 1] = words[i] & 0xFFFF0000u;
      }
    } else {
      memcpy(draws, words, sizeof words);
    }
    round_values<true>(f, dst + at, src + at, count, draws + skip);
    at += count;
  }
}

void round_run_any(const Format& f, bool stochastic, unsigned char* dst, const float* src, int64_t n, uint64_t g, uint64_t key, uint64_t step) {
  if (f.storage_bytes == 1) return round_run_generic(f, stochastic, (uint8_t*)dst, src, n, g, key, step);
  if (f.storage_bytes == 2) return round_run_generic(f, stochastic, (uint16_t*)dst, src, n, g, key, step);
  round_run_generic(f, stochastic, (uint32_t*)dst, src, n, g, key, step);
}

}  // namespace
