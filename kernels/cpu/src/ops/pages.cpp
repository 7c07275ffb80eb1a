// Copies the first cells of pages, in all layers of a KV cache.
#include <cstdint>
#include <cstring>

#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 16;  // number of bytes below which one thread is faster

// Arguments of the call, packed by Python: fields of 8 bytes in this order. Every page and count is within the cache.
struct CopyPages {
  char *k, *v;  // [layers][pages][heads][page_size] cells; v may be null
  const int64_t *source, *target, *count;  // [copies]; count: number of cells
  int64_t copies, layers, pages, heads, page_size;
  int64_t cell;  // bytes of a cell
  int64_t threads;
};

// Makes all copies in one layer's K or V, in order: a page may be the target of one copy and the source of a later one.
void copy_layer(const CopyPages& op, char* cache) {
  const int64_t head_bytes = op.page_size * op.cell, page_bytes = op.heads * head_bytes;
  for (int64_t i = 0; i < op.copies; i++) {
    const char* from = cache + op.source[i] * page_bytes;
    char* to = cache + op.target[i] * page_bytes;
    if (from == to) continue;
    for (int64_t head = 0; head < op.heads; head++) {
      std::memcpy(to + head * head_bytes, from + head * head_bytes, op.count[i] * op.cell);
    }
  }
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int copy_pages(const CopyPages* op) {
  const int64_t layer_bytes = op->pages * op->heads * op->page_size * op->cell;
  const int64_t caches = op->v ? 2 : 1;
  const int64_t bytes = caches * op->layers * op->copies * op->heads * op->page_size * op->cell;
  parallel_items(threads_for(bytes, kSmall, op->threads), caches * op->layers, [&](int64_t i) {
    copy_layer(*op, (i % caches ? op->v : op->k) + i / caches * layer_bytes);
  });
  return 0;
}

extern "C" int64_t copy_pages_size() { return sizeof(CopyPages); }
