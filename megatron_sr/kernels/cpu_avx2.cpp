// AVX2; setup.py gives this file its own flags. Philox by hand, the rounding is vectorised by the compiler.
#include "cpu_core.h"

#ifdef __AVX2__
#include <immintrin.h>

namespace {

struct Vec {
  typedef __m256i Type;
  static constexpr int size = 4;  // blocks

  MSR_INLINE Type set(uint64_t x) { return _mm256_set1_epi64x(int64_t(x)); }
  MSR_INLINE Type lanes() { return _mm256_set_epi64x(3, 1, 2, 0); }
  MSR_INLINE Type add(Type a, Type b) { return _mm256_add_epi64(a, b); }
  MSR_INLINE Type multiply(Type a, Type b) { return _mm256_mul_epu32(a, b); }
  MSR_INLINE Type upper(Type a) { return _mm256_srli_epi64(a, 32); }
  MSR_INLINE Type exclusive(Type a, Type b) { return _mm256_xor_si256(a, b); }
  MSR_INLINE Type exclusive(Type a, Type b, Type c) { return _mm256_xor_si256(a, _mm256_xor_si256(b, c)); }

  // (upper half of p) ^ c ^ k in the low half, the low half of p in the upper.
  MSR_INLINE Type finish(Type p, Type c, Type k) {
    const Type low = _mm256_blend_epi32(_mm256_setzero_si256(), _mm256_xor_si256(c, k), 0x55);
    return _mm256_xor_si256(_mm256_shuffle_epi32(p, 0xB1), low);
  }

  MSR_INLINE void store(uint32_t* out, Type w01, Type w23) {
    _mm256_storeu_si256(reinterpret_cast<Type*>(out), _mm256_unpacklo_epi64(w01, w23));
    _mm256_storeu_si256(reinterpret_cast<Type*>(out + 8), _mm256_unpackhi_epi64(w01, w23));
  }
};

}  // namespace

#include "cpu_philox.h"

const RoundPiece msr_avx2 = round_piece<VectorPhilox>;
#else
const RoundPiece msr_avx2 = nullptr;
#endif
