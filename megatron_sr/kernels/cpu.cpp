// The C interface of the CPU kernels: choice of the instruction set, and threads over balanced shares of the elements.
#include "cpu_core.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#define MSR_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t kMinShare = 1 << 15;  // elements worth a thread of their own

void round_piece(RoundRun run, const Format& f, bool stochastic, const Piece& p, int64_t from, int64_t to) {
  // Runs that follow one another without a gap are one run.
  const int64_t whole = p.run == p.stride || p.run >= uint64_t(p.length) ? p.length : int64_t(p.run);
  for (int64_t i = from; i < to;) {
    const int64_t n = std::min(to - i, whole - i % whole);
    const uint64_t g = whole == p.length ? p.global_start + i : p.global_start + (i / whole) * p.stride + i % whole;
    run(f, stochastic, p.dst + i * f.storage_bytes, p.src + i, n, g, p.key, p.step);
    i += n;
  }
}

RoundRun at_level(int level) { return level == 2 ? msr_run_avx512 : level == 1 ? msr_run_avx2 : msr_run_plain; }

}  // namespace

// Version of this interface; cpu.py refuses another.
MSR_EXPORT int msr_abi() { return 1; }

// The best level that both the compiler and this machine have: 0 plain, 1 AVX2, 2 AVX-512.
MSR_EXPORT int msr_best_level() {
#if defined(__x86_64__)
  if (msr_run_avx512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return 2;
  if (msr_run_avx2 && __builtin_cpu_supports("avx2")) return 1;
#endif
  return 0;
}

// Rounds `count` pieces. Each thread takes an equal share of all elements, cut without regard to the pieces.
MSR_EXPORT void msr_round(const Piece* pieces, int64_t count, const Format* format, int stochastic, int level, int threads) {
  const RoundRun run = at_level(level);
  std::vector<int64_t> end(count);
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) end[i] = total += pieces[i].length;
  threads = int(std::max<int64_t>(1, std::min<int64_t>(threads, total / kMinShare)));
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
    const int64_t from = total / team * thread + std::min(total % team, thread), to = total / team * (thread + 1) + std::min(total % team, thread + 1);
    int64_t i = std::upper_bound(end.begin(), end.end(), from) - end.begin();
    for (int64_t at = from; at < to; i++) {
      const int64_t first = end[i] - pieces[i].length, stop = std::min(to, end[i]);
      round_piece(run, *format, stochastic, pieces[i], at - first, stop - first);
      at = stop;
    }
  }
}
