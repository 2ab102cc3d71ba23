// Philox4x32-10 on vectors of 64-bit lanes, for AVX2 and AVX-512. The includer defines `Vec`: the vector and its
// instructions.
//
// Each 64-bit lane holds one block, in its low half: the multiplication 32 x 32 -> 64 bits then needs no shuffles, and
// until the last round the upper halves may hold anything. Words 0 1 and words 2 3 of a block come out as one lane each.
#pragma once
#include "cpu_core.h"

namespace {

// The key schedule, and everything of the first three rounds that does not depend on the low word of the block counter.
struct Keys {
  uint64_t k0[10], k1[10];  // 32-bit words, held as the vectors want to load them
  uint64_t round1, round2, round3, round3_low;

  Keys(uint64_t key, uint64_t step, uint32_t block_high) {
    for (uint32_t r = 0; r < 10; r++) {
      k0[r] = uint32_t(uint32_t(key) + r * kWeyl0);
      k1[r] = uint32_t(uint32_t(key >> 32) + r * kWeyl1);
    }
    const uint64_t p1 = uint64_t(kMultiplier1) * uint32_t(step);
    const uint64_t p0 = uint64_t(kMultiplier0) * (uint32_t(p1 >> 32) ^ block_high ^ uint32_t(k0[0]));
    round1 = uint32_t(step >> 32) ^ k1[0];
    round2 = uint32_t(p1) ^ k0[1];
    round3 = uint32_t(p0 >> 32) ^ k1[1];
    round3_low = uint32_t(p0) ^ k1[2];
  }
};

template <int N>
struct Draws {
  typename Vec::Type w01[N], w23[N];
};

// The words of N vectors of blocks from `block` on, in `Vec::lanes` order. The low word of the counter must not wrap.
template <int N>
MSR_INLINE Draws<N> draw(const Keys& k, uint32_t block) {
  typedef typename Vec::Type V;
  const V m0 = Vec::set(kMultiplier0), m1 = Vec::set(kMultiplier1);
  V c0[N], c1[N], c2[N], c3[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {  // round 1: words 0 and 1 are constants
    c3[i] = Vec::multiply(Vec::add(Vec::lanes(), Vec::set(block + uint32_t(Vec::size * i))), m0);
    c2[i] = Vec::exclusive(Vec::upper(c3[i]), Vec::set(k.round1));
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {  // round 2: word 3 is a constant
    c1[i] = Vec::multiply(c2[i], m1);
    c0[i] = Vec::exclusive(Vec::upper(c1[i]), Vec::set(k.round2));
    c2[i] = Vec::exclusive(c3[i], Vec::set(k.round3));
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {  // round 3
    const V p0 = Vec::multiply(c0[i], m0), p1 = Vec::multiply(c2[i], m1);
    c0[i] = Vec::exclusive(Vec::upper(p1), c1[i], Vec::set(k.k0[2]));
    c1[i] = p1;
    c2[i] = Vec::exclusive(Vec::upper(p0), Vec::set(k.round3_low));
    c3[i] = p0;
  }
#pragma GCC unroll 8
  for (int r = 3; r < 9; r++) {
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      const V p0 = Vec::multiply(c0[i], m0), p1 = Vec::multiply(c2[i], m1);
      c0[i] = Vec::exclusive(Vec::upper(p1), c1[i], Vec::set(k.k0[r]));
      c1[i] = p1;
      c2[i] = Vec::exclusive(Vec::upper(p0), c3[i], Vec::set(k.k1[r]));
      c3[i] = p0;
    }
  }
  Draws<N> out;
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    const V p0 = Vec::multiply(c0[i], m0), p1 = Vec::multiply(c2[i], m1);
    out.w01[i] = Vec::finish(p1, c1[i], Vec::set(k.k0[9]));
    out.w23[i] = Vec::finish(p0, c3[i], Vec::set(k.k1[9]));
  }
  return out;
}

// Sixteen blocks at a time, in memory order; what `round_stochastic` wants.
struct VectorPhilox {
  uint64_t key, step;
  uint32_t block_high = 0;
  Keys keys;

  VectorPhilox(uint64_t key, uint64_t step) : key(key), step(step), keys(key, step, 0) {}

  const Keys& at(uint32_t high) {
    if (high != block_high) keys = Keys(key, step, block_high = high);
    return keys;
  }

  void words(uint64_t block, uint32_t* out) {
    if (uint32_t(block) > UINT32_MAX - kBlocks) {  // the low word wraps, once in 2**32 blocks
      for (int i = 0; i < kBlocks; i++) philox_block(block + i, key, step, out + 4 * i);
      return;
    }
    constexpr int n = kBlocks / Vec::size;
    const Draws<n> d = draw<n>(at(uint32_t(block >> 32)), uint32_t(block));
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) Vec::store(out + 4 * Vec::size * i, d.w01[i], d.w23[i]);
  }
};

}  // namespace
