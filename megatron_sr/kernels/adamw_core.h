// One AdamW step and the 16-bit remainders of main params, for every instruction set: the compiler vectorises it.
// The specification is adamw_reference.py; every operation rounds once, and the two fused multiply-adds are explicit.
#pragma once
#include "cpu_core.h"

// Constants of one step; `Update` of adamw.py.
struct Update {
  float decay, average, beta2, square, root, eps, minus_step;
  int32_t average_from_grad;
};

// What an instruction set offers, for n consecutive elements.
struct AdamWLevel {
  // One AdamW step; grad is FP32, or BF16 if `bf16_grad`.
  void (*update)(const Update&, bool bf16_grad, float* main, const void* grad, float* exp_avg, float* exp_avg_sq,
                 int64_t n);
  // One AdamW step and the rounding of its result to BF16, together: elements from .. to - 1 of a piece, in whole tiles.
  // Returns where it stopped: `from` where it can do none. `state` as in msr_adamw. nullptr: only one after the other.
  int64_t (*update_and_round)(const Update&, bool bf16_grad, bool stochastic, const Piece&, const uintptr_t* state,
                              int64_t from, int64_t to);
  // FP32 values in [1, 2] which round up exactly where main params with these remainders do.
  void (*probe)(float* probe, const int16_t* remainder, int64_t n);
  // Main params from BF16 params and remainders. `probed`: the rounded probe; nullptr: params are in nearest form.
  void (*join)(float* main, const uint16_t* param, const int16_t* remainder, const uint16_t* probed, int64_t n);
  // Remainders of main params, which it saturates at the largest BF16 number first.
  void (*split)(float* main, int16_t* remainder, int64_t n);
  // Params in nearest form and remainders of main params, without loss.
  void (*split_nearest)(const float* main, uint16_t* param, int16_t* remainder, int64_t n);
};

// One for each instruction set; nullptr where the compiler lacks it.
extern const AdamWLevel *const msr_adamw_plain, *const msr_adamw_avx2, *const msr_adamw_avx512;

namespace {

MSR_INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

MSR_INLINE float grad_of(float x) { return x; }
MSR_INLINE float grad_of(uint16_t bf16) { return float_of(uint32_t(bf16) << 16); }

template <bool from_grad, typename Grad>
void update_values(const Update& update, float* __restrict main, const Grad* __restrict grads,
                   float* __restrict exp_avg, float* __restrict exp_avg_sq, int64_t n) {
  const Update u = update;
  for (int64_t i = 0; i < n; i++) {
    const float grad = grad_of(grads[i]);
    const float average = __builtin_fmaf(u.average, grad - exp_avg[i], from_grad ? grad : exp_avg[i]);
    const float square = __builtin_fmaf(u.square * grad, grad, exp_avg_sq[i] * u.beta2);
    exp_avg[i] = average;
    exp_avg_sq[i] = square;
    main[i] = main[i] * u.decay + u.minus_step * average / (__builtin_sqrtf(square) / u.root + u.eps);
  }
}

void update_any(const Update& u, bool bf16_grad, float* main, const void* grad, float* exp_avg, float* exp_avg_sq,
                int64_t n) {
  const float* const fp32 = static_cast<const float*>(grad);
  const uint16_t* const bf16 = static_cast<const uint16_t*>(grad);
  if (u.average_from_grad) {
    if (bf16_grad) return update_values<true>(u, main, bf16, exp_avg, exp_avg_sq, n);
    return update_values<true>(u, main, fp32, exp_avg, exp_avg_sq, n);
  }
  if (bf16_grad) return update_values<false>(u, main, bf16, exp_avg, exp_avg_sq, n);
  update_values<false>(u, main, fp32, exp_avg, exp_avg_sq, n);
}

void probe_values(float* __restrict probe, const int16_t* __restrict remainder, int64_t n) {
  for (int64_t i = 0; i < n; i++) probe[i] = float_of(0x3F800000u | uint16_t(remainder[i]));
}

void join_values(float* __restrict main, const uint16_t* __restrict param, const int16_t* __restrict remainder,
                 const uint16_t* __restrict probed, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t low = uint16_t(remainder[i]), high = param[i];
    const bool finite = (high & 0x7F80) != 0x7F80;
    const uint32_t up = probed ? (finite ? probed[i] - 0x3F80u : 0) : low >> 15;
    main[i] = float_of((high - up) << 16 | low);
  }
}

void split_values(float* __restrict main, int16_t* __restrict remainder, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = bits_of(main[i]), magnitude = bits & 0x7FFFFFFF;
    const bool over = magnitude > 0x7F7F0000 && magnitude < 0x7F800000;
    const uint32_t kept = over ? (bits & 0x80000000u) | 0x7F7F0000u : bits;
    main[i] = float_of(kept);
    remainder[i] = int16_t(uint16_t(kept));
  }
}

void split_nearest_values(const float* __restrict main, uint16_t* __restrict param, int16_t* __restrict remainder,
                          int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = bits_of(main[i]);
    param[i] = uint16_t((bits >> 16) + (bits >> 15 & 1));
    remainder[i] = int16_t(uint16_t(bits));
  }
}

constexpr AdamWLevel level(decltype(AdamWLevel::update_and_round) update_and_round) {
  return {update_any, update_and_round, probe_values, join_values, split_values, split_nearest_values};
}

}  // namespace
