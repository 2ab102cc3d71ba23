// The C interface of the digest, and its plain form: one 64-bit product per word and sum.
#include "digest_core.h"

#include <omp.h>

#include <algorithm>

#define MSR_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t kRowsPerThread = 16;  // 256 KiB: fewer are not worth a thread

// splitmix64 of x, made odd.
uint64_t mix(uint64_t x) {
  uint64_t z = x + 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return (z ^ (z >> 31)) | 1;
}

DigestTables make_tables() {
  DigestTables t;
  for (int k = 0; k < 2; k++)
    for (int c = 0; c < kRow; c++) {
      const uint64_t a = mix(2 * ((uint64_t(1) << 61) + c) + k);
      t.whole[k][c] = a;
      t.low[k][c] = int32_t(a);
      t.high[k][c] = int32_t((a + 0x80000000u) >> 32);
    }
  return t;
}

const DigestTables& tables() {
  static const DigestTables t = make_tables();
  return t;
}

void plain_dots(const DigestTables& t, const int32_t* words, int64_t column, int64_t count, uint64_t out[2]) {
  uint64_t s0 = 0, s1 = 0;
  for (int64_t i = 0; i < count; i++) {
    const uint64_t w = uint64_t(int64_t(words[i]));
    s0 += w * t.whole[0][column + i];
    s1 += w * t.whole[1][column + i];
  }
  out[0] += s0;
  out[1] += s1;
}

void add_row(const uint64_t dots[2], int64_t row, uint64_t sums[2]) {
  for (int k = 0; k < 2; k++) sums[k] += dots[k] * mix(2 * uint64_t(row) + k);
}

// Rows from .. to - 1 of a piece whose row `from` starts at `words`.
void whole_rows(const DigestTables& t, const int32_t* words, int64_t from, int64_t to, DigestRows rows_of, uint64_t sums[2]) {
  for (int64_t row = from; row < to;) {
    const int rows = int(std::min<int64_t>(2, to - row));
    uint64_t dots[2][2] = {};
    if (rows_of)
      rows_of(t, words, rows, dots);
    else
      for (int r = 0; r < rows; r++) plain_dots(t, words + r * kRow, 0, kRow, dots[r]);
    for (int r = 0; r < rows; r++) add_row(dots[r], row + r, sums);
    words += rows * kRow;
    row += rows;
  }
}

}  // namespace

// Adds to sums[0], sums[1] the contribution of `count` consecutive 32-bit words, the first of them word `first` of its tensor.
MSR_EXPORT void msr_digest(const int32_t* words, int64_t count, int64_t first, uint64_t* sums, int level, int threads) {
  const DigestTables& t = tables();
  const DigestRows rows_of = level >= 1 ? msr_digest_avx2 : nullptr;
  const auto part = [&](int64_t size) {  // words of one row, from its middle on or up to it
    uint64_t dots[2] = {};
    plain_dots(t, words, first % kRow, size, dots);
    add_row(dots, first / kRow, sums);
    words += size;
    first += size;
    count -= size;
  };
  if (first % kRow) part(std::min<int64_t>(count, kRow - first % kRow));
  const int64_t rows = count / kRow, row = first / kRow;
  threads = int(std::max<int64_t>(1, std::min<int64_t>(threads, rows / kRowsPerThread)));
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
    const int64_t from = rows * thread / team, to = rows * (thread + 1) / team;
    uint64_t mine[2] = {};
    whole_rows(t, words + from * kRow, row + from, row + to, rows_of, mine);
#pragma omp critical(msr_digest)
    {
      sums[0] += mine[0];
      sums[1] += mine[1];
    }
  }
  words += rows * kRow;
  first += rows * kRow;
  count -= rows * kRow;
  if (count) part(count);
}
