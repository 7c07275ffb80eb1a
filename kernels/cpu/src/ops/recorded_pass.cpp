// A list of calls made once and run again: what a forward pass over the same buffers is.
#include <cstdint>

namespace {

struct Call {
  int (*run)(const void* arguments);
  const void* arguments;
};

}  // namespace

// Runs the calls in order, up to the first that fails: its index and code, as 4 * index + code, or -1 if none does.
extern "C" int64_t run_tape(const Call* calls, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (const int failed = calls[i].run(calls[i].arguments)) return 4 * i + failed;
  }
  return -1;
}
