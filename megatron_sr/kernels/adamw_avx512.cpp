// AVX-512 (F, BW, DQ, VL); setup.py gives this file its own flags.
//
// AdamW is bound by the divider (a square root and two quotients take some 50 cycles for 16 elements on Intel) and by memory;
// Philox needs neither. In tiles of 64 elements the processor sees both in its window and does them at once, so that stochastic
// rounding costs no time; in the larger tiles of adamw.cpp it does one after the other.
#include "adamw_core.h"
#include "cpu_avx512.h"

#include <algorithm>
#include <type_traits>

#ifdef __AVX512BW__

namespace {

constexpr int64_t kAhead = 512;  // elements to ask the memory for in advance: its own guesses stop at every page
typedef __m512 F;

MSR_INLINE F load_grad(const float* x) { return _mm512_loadu_ps(x); }
MSR_INLINE F load_grad(const uint16_t* x) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// update_values of 16 elements: the same operations in the same order.
template <bool from_grad, typename Grad>
MSR_INLINE F update_vector(const Update& u, float* main, const Grad* grads, float* exp_avg, float* exp_avg_sq) {
  const F grad = load_grad(grads), m = _mm512_loadu_ps(exp_avg), v = _mm512_loadu_ps(exp_avg_sq);
  const F average = _mm512_fmadd_ps(_mm512_set1_ps(u.average), _mm512_sub_ps(grad, m), from_grad ? grad : m);
  const F scaled = _mm512_mul_ps(_mm512_set1_ps(u.square), grad);
  const F square = _mm512_fmadd_ps(scaled, grad, _mm512_mul_ps(v, _mm512_set1_ps(u.beta2)));
  _mm512_storeu_ps(exp_avg, average);
  _mm512_storeu_ps(exp_avg_sq, square);
  const F root = _mm512_div_ps(_mm512_sqrt_ps(square), _mm512_set1_ps(u.root));
  const F change = _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(u.minus_step), average),
                                 _mm512_add_ps(root, _mm512_set1_ps(u.eps)));
  const F value = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(main), _mm512_set1_ps(u.decay)), change);
  _mm512_storeu_ps(main, value);
  return value;
}

// n elements, a multiple of 64, the first of them the first of block b.
template <bool stochastic, bool from_grad, typename Grad>
void update_and_round_tiles(const Update& update, const Keys& keys, uint32_t b, uint16_t* param, float* main,
                            const Grad* grad, float* exp_avg, float* exp_avg_sq, int64_t n) {
  const Update u = update;
  for (int64_t i = 0; i < n; i += kTile, b += Vec::size) {
#pragma GCC unroll 4
    for (int64_t e = i + kAhead; e < i + kAhead + kTile; e += 16) {  // past the end does no harm
      __builtin_prefetch(main + e, 1);
      __builtin_prefetch(exp_avg + e, 1);
      __builtin_prefetch(exp_avg_sq + e, 1);
      if (sizeof(Grad) == 4 || !(e & 16)) __builtin_prefetch(grad + e);
      if (!(e & 16)) __builtin_prefetch(param + e, 1);
    }
    Draws<1> d = {};
    if (stochastic) d = draw<1>(keys, b);
    V x[4];
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
      const int64_t at = i + 16 * q;
      x[q] = _mm512_castps_si512(
          update_vector<from_grad>(u, main + at, grad + at, exp_avg + at, exp_avg_sq + at));
    }
    const Tile y = rounded<stochastic>(d.w01[0], d.w23[0], x);
    _mm512_storeu_si512(param + i, y.low);
    _mm512_storeu_si512(param + i + 32, y.high);
  }
}

int64_t update_and_round(const Update& u, bool bf16_grad, bool stochastic, const Piece& p, const uintptr_t* state,
                         int64_t from, int64_t to) {
  const uint64_t g = p.global_start + uint64_t(from);
  const bool one_run = p.run == p.stride || p.run >= uint64_t(p.length);
  if (stochastic && (!one_run || g & 7)) return from;
  const uint64_t left = (((g >> 35) + 1) << 35) - g;  // until the low word of the block counter wraps
  const int64_t n = int64_t(std::min(uint64_t(to - from), stochastic ? left : ~uint64_t(0))) & -int64_t(kTile);
  uint16_t* const param = reinterpret_cast<uint16_t*>(p.dst) + from;
  float *const main = const_cast<float*>(p.src) + from, *const exp_avg = reinterpret_cast<float*>(state[1]) + from,
               *const exp_avg_sq = reinterpret_cast<float*>(state[2]) + from;
  const Keys keys(p.key, p.step, uint32_t(g >> 35));
  const auto run = [&](auto draws, auto from_grad, const auto* grad) {
    update_and_round_tiles<decltype(draws)::value, decltype(from_grad)::value>(
        u, keys, uint32_t(g >> 3), param, main, grad + from, exp_avg, exp_avg_sq, n);
  };
  const auto with_grad = [&](auto draws, auto from_grad) {
    if (bf16_grad) return run(draws, from_grad, reinterpret_cast<const uint16_t*>(state[0]));
    run(draws, from_grad, reinterpret_cast<const float*>(state[0]));
  };
  const auto with_draws = [&](auto draws) {
    if (u.average_from_grad) return with_grad(draws, std::true_type());
    with_grad(draws, std::false_type());
  };
  stochastic ? with_draws(std::true_type()) : with_draws(std::false_type());
  return from + n;
}

const AdamWLevel kLevel = level(update_and_round);

}  // namespace

const AdamWLevel* const msr_adamw_avx512 = &kLevel;
#else
const AdamWLevel* const msr_adamw_avx512 = nullptr;
#endif
