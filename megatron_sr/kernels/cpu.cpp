// The C interface of the CPU kernels: choice of the instruction set, and threads over balanced shares of the elements.
#include "cpu_core.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#define MSR_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t kMinShare = 1 << 15;   // elements worth a thread of their own
constexpr int64_t kStreaming = 1 << 25;  // elements in one launch from which on the caches hold neither src nor dst

RoundPiece at_level(int level) { return level == 2 ? msr_avx512 : level == 1 ? msr_avx2 : msr_plain; }

}  // namespace

// Version of this interface; cpu.py refuses another.
MSR_EXPORT int msr_abi() { return 1; }

// The best level that both the compiler and this machine have: 0 plain, 1 AVX2, 2 AVX-512.
MSR_EXPORT int msr_best_level() {
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (msr_avx512 && avx512) return 2;
  if (msr_avx2 && __builtin_cpu_supports("avx2")) return 1;
#endif
  return 0;
}

// Rounds `count` pieces. Each thread takes an equal share of all elements, cut without regard to the pieces.
MSR_EXPORT void msr_round(const Piece* pieces, int64_t count, const Format* format, int stochastic, int level,
                          int threads) {
  std::vector<int64_t> end(count);
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) end[i] = total += pieces[i].length;
  const RoundPiece round_piece = at_level(level);
  const Launch launch{*format, stochastic != 0, total >= kStreaming};
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
      round_piece(launch, pieces[i], at - first, stop - first);
      at = stop;
    }
  }
}
