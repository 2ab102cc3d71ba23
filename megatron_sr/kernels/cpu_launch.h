// What the C interfaces share: exports, and threads over balanced shares of the elements of a launch.
#pragma once
#include <omp.h>

#include <algorithm>
#include <vector>

#include "cpu_core.h"

#define MSR_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t kMinShare = 1 << 15;   // elements worth a thread of their own
constexpr int64_t kStreaming = 1 << 25;  // elements in one launch from which on the caches hold neither src nor dst

MSR_INLINE int64_t total_length(const Piece* pieces, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) total += pieces[i].length;
  return total;
}

// Calls use(piece, from, to) for the elements from .. to - 1 of pieces[piece], from up to `threads` threads. Each takes
// an equal share of all elements, cut without regard to the pieces.
template <typename Use>
void share_elements(const Piece* pieces, int64_t count, int threads, const Use& use) {
  std::vector<int64_t> end(count);
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) end[i] = total += pieces[i].length;
  threads = int(std::max<int64_t>(1, std::min<int64_t>(threads, total / kMinShare)));
#pragma omp parallel num_threads(threads)
  {
    // Shares are whole multiples of 64 elements, so that two threads rarely write to one cache line.
    const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
    const int64_t share = (total / team + 64) / 64 * 64;  // at least total / team, rounded up
    const int64_t from = std::min(total, share * thread), to = std::min(total, share * (thread + 1));
    int64_t i = std::upper_bound(end.begin(), end.end(), from) - end.begin();
    for (int64_t at = from; at < to; i++) {
      const int64_t first = end[i] - pieces[i].length, stop = std::min(to, end[i]);
      use(i, at - first, stop - first);
      at = stop;
    }
  }
}

}  // namespace
