// Two passes over the bits of 16-bit weights that the rollout bridge makes at every update, where torch's own operators take
// several times as long: are all finite, and a strided copy.
#include <cstdint>
#include <cstring>

#define MSR_EXPORT extern "C" __attribute__((visibility("default")))

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

// Lists a matrix that lies transposed: dst[r * columns + c] = src[r + c * step].
template <typename Unit>
void list_transposed(Unit* dst, const Unit* src, int64_t rows, int64_t columns, int64_t step) {
  int64_t r = 0;
#ifdef __SSE2__
  if constexpr (sizeof(Unit) == 4) {  // in squares of 4 x 4
    for (; r + 4 <= rows && columns % 4 == 0; r += 4) {
      for (int64_t c = 0; c < columns; c += 4) {
        __m128i in[4], out[4];
        for (int k = 0; k < 4; k++) in[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + r + (c + k) * step));
        const __m128i low01 = _mm_unpacklo_epi32(in[0], in[1]), low23 = _mm_unpacklo_epi32(in[2], in[3]);
        const __m128i high01 = _mm_unpackhi_epi32(in[0], in[1]), high23 = _mm_unpackhi_epi32(in[2], in[3]);
        out[0] = _mm_unpacklo_epi64(low01, low23);
        out[1] = _mm_unpackhi_epi64(low01, low23);
        out[2] = _mm_unpacklo_epi64(high01, high23);
        out[3] = _mm_unpackhi_epi64(high01, high23);
        for (int k = 0; k < 4; k++) _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + (r + k) * columns + c), out[k]);
      }
    }
  }
#endif
  for (; r < rows; r++) {
    for (int64_t c = 0; c < columns; c++) dst[r * columns + c] = src[r + c * step];
  }
}

// Lists a strided tensor in its own order. Inner dimensions last.
template <typename Unit>
Unit* list(Unit* dst, const Unit* src, int dims, const int64_t* sizes, const int64_t* strides) {
  if (dims == 0) {
    *dst = *src;
    return dst + 1;
  }
  const int64_t n = sizes[0], step = strides[0];
  if (dims == 2 && step == 1 && strides[1] >= n) {
    list_transposed(dst, src, n, sizes[1], strides[1]);
    return dst + n * sizes[1];
  }
  if (dims > 1) {
    for (int64_t i = 0; i < n; i++) dst = list(dst, src + i * step, dims - 1, sizes + 1, strides + 1);
    return dst;
  }
  if (step == 1) {
    memcpy(dst, src, size_t(n) * sizeof(Unit));
  } else {
    for (int64_t i = 0; i < n; i++) dst[i] = src[i * step];
  }
  return dst + n;
}

}  // namespace

// Whether none of `count` 16-bit floating-point numbers has all bits of `exponent` set, as infinities and NaN have.
MSR_EXPORT int msr_all_finite(const uint16_t* x, int64_t count, uint16_t exponent) {
  constexpr int64_t kBlock = 4096;
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = count - at < kBlock ? count - at : kBlock;
    uint16_t found = 0;
    for (int64_t i = 0; i < n; i++) found |= uint16_t((x[at + i] & exponent) == exponent);
    if (found) return 0;
  }
  return 1;
}

// Copies a strided tensor of `width`-byte units (2, 4 or 8) into consecutive memory; sizes and strides in units.
MSR_EXPORT void msr_list_strided(void* dst, const void* src, int width, int dims, const int64_t* sizes,
                                 const int64_t* strides) {
  if (width == 2) {
    list(static_cast<uint16_t*>(dst), static_cast<const uint16_t*>(src), dims, sizes, strides);
  } else if (width == 4) {
    list(static_cast<uint32_t*>(dst), static_cast<const uint32_t*>(src), dims, sizes, strides);
  } else {
    list(static_cast<uint64_t*>(dst), static_cast<const uint64_t*>(src), dims, sizes, strides);
  }
}
