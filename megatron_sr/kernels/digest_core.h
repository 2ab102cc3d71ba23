// The sums of rollout/digest.py, whose docstring is the specification: S_k = sum w[j] * A_k[j mod C] * B_k[j div C].
#pragma once
#include <cstdint>

constexpr int kRow = 4096;  // C: words that share one B

// A_k, whole and split: A = high * 2^32 + low, low signed.
struct DigestTables {
  alignas(64) uint64_t whole[2][kRow];
  alignas(64) int32_t low[2][kRow], high[2][kRow];
};

// Adds the dot products of `rows` (1 or 2) full rows with A to out[row][k]. nullptr where the compiler lacks the instruction set.
typedef void (*DigestRows)(const DigestTables&, const int32_t* words, int rows, uint64_t out[2][2]);
extern const DigestRows msr_digest_avx2;
