// What every instruction set shares: the work of a launch, the rounding of one value, and the loop over any format.
// The specification is reference.py; noise.py draws the layout of the random bits.
//
// Everything but the entry points has internal linkage: the same text is compiled once for each instruction set.
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

// What all pieces of a launch have in common.
struct Launch {
  Format format;
  bool stochastic;  // else to nearest
  bool streaming;   // the destination is too large for the caches: it may be written past them
};

// Rounds the elements from .. to - 1 of a piece. One for each instruction set; nullptr where the compiler lacks it.
typedef void (*RoundPiece)(const Launch&, const Piece&, int64_t from, int64_t to);
extern const RoundPiece msr_plain, msr_avx2, msr_avx512;

namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u, kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
constexpr int kBlocks = 16;          // Philox blocks that are computed together
constexpr int kWords = 4 * kBlocks;  // their 32-bit words: 64 draws of 32 bits or 128 of 16

// Philox4x32-10, one block.
MSR_INLINE void philox_block(uint64_t block, uint64_t key, uint64_t step, uint32_t* words) {
  uint32_t c0 = uint32_t(block), c1 = uint32_t(block >> 32), c2 = uint32_t(step), c3 = uint32_t(step >> 32);
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; round++, k0 += kWeyl0, k1 += kWeyl1) {
    const uint64_t p0 = uint64_t(kMultiplier0) * c0, p1 = uint64_t(kMultiplier1) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

MSR_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// The storage pattern of one rounded value. `random` is the draw as a 32-bit fraction: 16 random bits are shifted up.
template <bool stochastic>
MSR_INLINE uint32_t round_any(const Format& f, uint32_t bits, uint32_t random) {
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
    up = (fraction > 0x80000000u) | ((fraction == 0x80000000u) & below);
    overflow = f.infinity_code;
  }
  uint32_t code = (uint32_t(field - f.min_field) << m) + below + up;
  code = code < overflow ? code : overflow;
  code = magnitude == 0x7F800000 ? uint32_t(f.infinity_code) : code;
  code = magnitude > 0x7F800000 ? uint32_t(f.nan_code) | mantissa >> (23 - m) : code;
  return code << f.storage_shift | (bits >> 31) << (8 * f.storage_bytes - 1);
}

// The same for BF16, where the code is the upper half of the bits and the fraction the lower.
template <bool stochastic>
MSR_INLINE uint32_t round_bf16(uint32_t bits, uint32_t random) {
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t sum = magnitude + (stochastic ? random >> 16 : 0x7FFF + (bits >> 16 & 1));
  uint32_t code = sum >> 16;
  if (stochastic) code = code == 0x7F80 && magnitude != 0x7F800000 ? 0x7F7F : code;
  code = magnitude > 0x7F800000 ? magnitude >> 16 | 0x40 : code;
  return code | (bits >> 31) << 15;
}

MSR_INLINE bool is_bf16(const Format& f) { return f.mantissa_bits == 7 && f.storage_bytes == 2; }

template <bool stochastic, bool bf16, typename Storage>
void round_values(const Format& format, Storage* dst, const float* src, int64_t n, const uint32_t* random) {
  const Format f = format;  // a copy, which no store to dst can change
#pragma GCC ivdep           // dst may be src: each value is read before it is written
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = bits_of(src[i]), draw = stochastic ? random[i] : 0;
    dst[i] = Storage(bf16 ? round_bf16<stochastic>(bits, draw) : round_any<stochastic>(f, bits, draw));
  }
}

// Calls use(i, n, g) for each run of consecutive elements: local i .. i + n - 1 have global indices g .. g + n - 1.
template <typename Use>
MSR_INLINE void for_each_run(const Piece& p, int64_t from, int64_t to, const Use& use) {
  if (p.run == p.stride || p.run >= uint64_t(p.length)) return use(from, to - from, p.global_start + from);
  const int64_t run = int64_t(p.run);
  for (int64_t i = from; i < to;) {
    const int64_t left = run - i % run, n = to - i < left ? to - i : left;
    use(i, n, p.global_start + uint64_t(i / run) * p.stride + uint64_t(i % run));
    i += n;
  }
}

// Any format, any length: tile by tile, through a small buffer of draws. `philox.words(block, words)` gives the words of
// the blocks block .. block + 15 in memory order; as 16-bit halves (little endian) they are in the order of their lanes.
template <bool bf16, typename Storage, typename Philox>
void round_stochastic(const Format& f, Philox& philox, Storage* dst, const float* src, int64_t n, uint64_t g) {
  uint32_t words[kWords], draws[2 * kWords];
  const int lane_bits = f.random_bits == 16 ? 3 : 2;
  const int tile = kBlocks << lane_bits;
  for (int64_t at = 0; at < n;) {
    philox.words((g + uint64_t(at)) >> lane_bits, words);
    if (lane_bits == 3) {
      for (int i = 0; i < kWords; i++) {
        draws[2 * i] = words[i] << 16;
        draws[2 * i + 1] = words[i] & 0xFFFF0000u;
      }
    }
    const int skip = int((g + uint64_t(at)) & ((1u << lane_bits) - 1));
    const int64_t count = n - at < tile - skip ? n - at : tile - skip;
    round_values<true, bf16>(f, dst + at, src + at, count, (lane_bits == 3 ? draws : words) + skip);
    at += count;
  }
}

template <bool bf16, typename Storage, typename Philox>
void round_stored(const Launch& launch, const Piece& p, int64_t from, int64_t to) {
  Storage* const dst = reinterpret_cast<Storage*>(p.dst);
  if (!launch.stochastic) return round_values<false, bf16>(launch.format, dst + from, p.src + from, to - from, nullptr);
  Philox philox(p.key, p.step);
  for_each_run(p, from, to, [&](int64_t i, int64_t n, uint64_t g) {
    round_stochastic<bf16>(launch.format, philox, dst + i, p.src + i, n, g);
  });
}

// The RoundPiece of an instruction set that offers no more than its own Philox.
template <typename Philox>
void round_piece(const Launch& launch, const Piece& p, int64_t from, int64_t to) {
  if (is_bf16(launch.format)) return round_stored<true, uint16_t, Philox>(launch, p, from, to);
  switch (launch.format.storage_bytes) {
    case 1: return round_stored<false, uint8_t, Philox>(launch, p, from, to);
    case 2: return round_stored<false, uint16_t, Philox>(launch, p, from, to);
    default: return round_stored<false, uint32_t, Philox>(launch, p, from, to);
  }
}

}  // namespace
