// AMX: multiplies up to 16 rows of A with 16 columns of B over 16 words of K in one instruction.
//
// A is given as rows of words, and B as panels (gemm/tile.h): 16 columns side by side, K downwards. The registers must
// be given shapes first, and be released at the end: otherwise the system would save their 8 KiB at each thread switch.
#pragma once

#include "simd/simd.h"

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#define ROOTGRAFT_AMX 1
#endif

namespace rootgraft {

constexpr int kAmxRows = 16, kAmxWords = 16;

#if ROOTGRAFT_AMX

// Whether this process may use AMX. The operating system is asked once; it may not know AMX.
bool has_amx();

// The shapes of the registers, in the layout that the instruction reads.
struct alignas(64) AmxShapes {
  uint8_t palette = 1, first_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // bytes of a row of each register
  uint8_t rows[16] = {};

  void set(int number, int row_count, int words) {
    rows[number] = (uint8_t)row_count;
    bytes[number] = (uint16_t)(words * 4);
  }
};

// Registers 0 .. 3 hold sums, the next two rows of A, of a given number of words, and the last two panels of B.
constexpr int kAmxSums = 4, kAmxA = 4, kAmxB = 6;

inline AmxShapes amx_shapes(int rows, int words) {
  AmxShapes shapes;
  for (int i = 0; i < kAmxSums; i++) shapes.set(i, rows, kWidth);
  for (int i = 0; i < 2; i++) {
    shapes.set(kAmxA + i, rows, words);
    shapes.set(kAmxB + i, words, kWidth);
  }
  return shapes;
}

// While an object of this class exists, this thread's registers have these shapes.
class AmxScope {
 public:
  explicit AmxScope(const AmxShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
  ~AmxScope() { asm volatile("tilerelease"); }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;
};

// The compiler is told that memory is read and written, as it cannot see which. Strides are in bytes.
template <int T>
INLINE void amx_load(const void* from, ptrdiff_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
// The same for memory that should not evict other lines from the first cache.
template <int T>
INLINE void amx_load_passing(const void* from, ptrdiff_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
INLINE void amx_store(void* to, ptrdiff_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int T>
INLINE void amx_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

// C += A B for: pairs of bf16; signed bytes; signed bytes of A and unsigned ones of B; unsigned of A and signed of B.
template <int C, int A, int B>
INLINE void amx_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
INLINE void amx_dot_signed() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
INLINE void amx_dot_signed_unsigned() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
INLINE void amx_dot_unsigned_signed() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// The AMX unit sleeps after about 350 ns without work, and takes about as long to wake up (Sapphire Rapids). A product
// into a register whose sums are not used keeps it awake and costs a sixth of that time.
INLINE void amx_stay_awake() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kAmxSums - 1), "i"(kAmxA), "i"(kAmxB));
}

#else

constexpr bool has_amx() { return false; }

#endif

}  // namespace rootgraft
