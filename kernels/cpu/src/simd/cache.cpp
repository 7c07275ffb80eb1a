// Removes cache lines from all caches, for measurements of reads from memory.
#include "simd/simd.h"

namespace {

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct FlushLines {
  const char* first;
  int64_t bytes;
};

#if defined(__AVX512F__)
// All such CPUs have this instruction, whatever the compiler's target is. It does not wait for the flush before it.
__attribute__((target("clflushopt"))) void flush_line(const char* line) { _mm_clflushopt(const_cast<char*>(line)); }
#elif defined(__x86_64__)
void flush_line(const char* line) { _mm_clflush(line); }
#endif

}  // namespace

// Does nothing if the CPU is not known to have an instruction for it.
extern "C" int flush_lines(const FlushLines* op) {
#if defined(__x86_64__)
  constexpr int64_t kLine = 64;
  for (int64_t i = 0; i < op->bytes; i += kLine) flush_line(op->first + i);
  _mm_mfence();
#endif
  return 0;
}

extern "C" int64_t flush_lines_size() { return sizeof(FlushLines); }
