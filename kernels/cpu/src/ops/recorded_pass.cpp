// Replays a recorded forward pass: a list of native calls over the same buffers.
#include <cstdint>

namespace {

struct Call {
  int (*run)(const void* arguments);
  const void* arguments;
};

}  // namespace

// Runs the calls in order up to the first failure. Returns 4 * index + code of the failed call, or -1.
extern "C" int64_t run_tape(const Call* calls, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (const int failed = calls[i].run(calls[i].arguments)) return 4 * i + failed;
  }
  return -1;
}
