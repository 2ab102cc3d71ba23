// The C interface of the rounding kernels, and the choice of the instruction set.
#include "cpu_launch.h"

namespace {

RoundPiece at_level(int level) { return level == 2 ? msr_avx512 : level == 1 ? msr_avx2 : msr_plain; }

}  // namespace

// Version of this interface; cpu.py refuses another.
MSR_EXPORT int msr_abi() { return 4; }

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

// Rounds `count` pieces.
MSR_EXPORT void msr_round(const Piece* pieces, int64_t count, const Format* format, int stochastic, int level,
                          int threads) {
  const RoundPiece round_piece = at_level(level);
  // Several threads run into the memory's bandwidth: not reading the destination first is then worth 10 %. One thread
  // does not, and loses as much where pieces end.
  const bool streaming = threads > 1 && total_length(pieces, count) >= kStreaming;
  const Launch launch{*format, stochastic != 0, streaming};
  share_elements(pieces, count, threads,
                 [&](int64_t i, int64_t from, int64_t to) { round_piece(launch, pieces[i], from, to); });
}
