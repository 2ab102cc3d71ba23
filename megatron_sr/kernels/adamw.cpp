// The C interface of the fused optimizer step: AdamW, or nothing, then rounding, tile by tile, while a tile is in the
// cache. Rounding is that of the rounding kernels, so the bits are theirs.
#include "adamw_core.h"
#include "cpu_launch.h"

namespace {

constexpr int64_t kTile = 256;  // elements; small, so that the tensors' streams pause but briefly while it is rounded

struct Levels {
  RoundPiece round;
  const AdamWLevel* adamw;
};

Levels at_level(int level) {
  if (level == 2) return {msr_avx512, msr_adamw_avx512};
#if defined(__x86_64__)
  if (level == 1 && msr_adamw_avx2 && __builtin_cpu_supports("fma")) return {msr_avx2, msr_adamw_avx2};
#endif
  return {level ? msr_avx2 : msr_plain, msr_adamw_plain};
}

}  // namespace

// What adamw_cpu.py passes for all pieces of a launch.
struct AdamWLaunch {
  Format format;
  Update update;
  int32_t bf16_grad;
  int32_t remainders;       // piece.src is the int16 remainder, and the main param is (param, remainder)
  int32_t stochastic;       // else to nearest
  int32_t last_stochastic;  // how the params were rounded before; only with remainders
  uint64_t last_step;
};

// pieces: dst = param, src = FP32 main param or int16 remainder. state: for each piece the addresses of its gradient,
// exp_avg and exp_avg_sq; nullptr to round again without a step.
MSR_EXPORT void msr_adamw(const Piece* pieces, const uintptr_t (*state)[3], int64_t count, const AdamWLaunch* launch,
                          int level, int threads) {
  const Levels levels = at_level(level);
  const AdamWLevel& adamw = *levels.adamw;
  const int64_t grad_bytes = launch->bf16_grad ? 2 : 4;
  const Launch last{launch->format, true, false};
  const Launch now{launch->format, launch->stochastic != 0, false};
  share_elements(pieces, count, threads, [&](int64_t i, int64_t from, int64_t to) {
    alignas(64) float buffer[kTile];
    alignas(64) uint16_t probed[kTile];
    const Piece& piece = pieces[i];
    const bool together = adamw.update_and_round && state && !launch->remainders && is_bf16(launch->format);
    for (int64_t n; from < to; from += n) {
      if (together) {
        from = adamw.update_and_round(launch->update, launch->bf16_grad, now.stochastic, piece, state[i], from, to);
        if (from == to) break;
      }
      // After the first tile, tiles begin with a whole Philox block; where they go together soon, it ends with its block.
      const int64_t skip = int64_t((piece.global_start + uint64_t(from)) & 7);
      n = std::min(to - from, together && skip ? 8 - skip : kTile - skip);
      float* main = const_cast<float*>(piece.src) + from;
      uint16_t* const param = reinterpret_cast<uint16_t*>(piece.dst) + from;
      int16_t* const remainder = reinterpret_cast<int16_t*>(const_cast<float*>(piece.src)) + from;
      if (launch->remainders) {
        main = buffer;
        if (launch->last_stochastic) {
          adamw.probe(main, remainder, n);
          Piece probe = piece;  // its elements from .. from + n - 1 are the buffers'
          probe.src = main - from;
          probe.dst = reinterpret_cast<unsigned char*>(probed - from);
          probe.step = launch->last_step;
          levels.round(last, probe, from, from + n);
        }
        adamw.join(main, param, remainder, launch->last_stochastic ? probed : nullptr, n);
      }
      if (state) {
        const unsigned char* const grad = reinterpret_cast<const unsigned char*>(state[i][0]) + from * grad_bytes;
        adamw.update(launch->update, launch->bf16_grad, main, grad, reinterpret_cast<float*>(state[i][1]) + from,
                     reinterpret_cast<float*>(state[i][2]) + from, n);
      }
      if (!launch->remainders) {
        levels.round(now, piece, from, from + n);
      } else if (launch->stochastic) {
        adamw.split(main, remainder, n);
        Piece split = piece;
        split.src = main - from;
        levels.round(now, split, from, from + n);
      } else {
        adamw.split_nearest(main, param, remainder, n);
      }
    }
  });
}
