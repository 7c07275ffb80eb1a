// Products with quantised blocks by AMX: a block is one instruction for each plane of x, for sixteen rows and columns.
//
// Most of the time is spent on scaling the sums, with three or four instructions for each row of a block. So work that
// rows share is done once for each panel in advance: weights are unpacked to signed bytes, which need no offset
// correction, and scales are widened.
#include "gguf/block_tile.h"
#include "int8/quantise.h"
#include "gemm/tile.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

constexpr int kAhead = 2;  // number of blocks that are multiplied ahead of the one whose sums are scaled
constexpr int kRooms = 4;

// The exact sums of a block, which AMX stores to memory for the vector registers that scale them.
template <int kPlanes>
struct alignas(64) Room {
  int32_t sums[kPlanes][kAmxRows * kWidth];
};

template <int I, int kPlanes, int kPlane = 0>
INLINE void multiply_planes(const ByteBlock<kPlanes>* a, Room<kPlanes>& room) {
  constexpr int kSum = (I * kPlanes + kPlane) % kAmxSums, kRow = kAmxA + kSum % 2, kColumn = kAmxB + I % 2;
  amx_load<kRow>(a->words[kPlane], sizeof(*a));
  amx_zero<kSum>();
  amx_dot_signed<kSum, kRow, kColumn>();
  amx_store<kSum>(room.sums[kPlane], kWidth * sizeof(int32_t));
  if constexpr (kPlane + 1 < kPlanes) multiply_planes<I, kPlanes, kPlane + 1>(a, room);
}

template <int I, int kPlanes>
INLINE void multiply_block(const ByteBlock<kPlanes>* a, const uint32_t* b, Room<kPlanes>& room) {
  amx_load<kAmxB + I % 2>(b, kWidth * sizeof(uint32_t));
  multiply_planes<I>(a, room);
}

template <int kPlanes>
INLINE Ints joined(const Room<kPlanes>& room, int row) {
  const Ints high = load_ints(room.sums[0] + row * kWidth);
  if constexpr (kPlanes == 1) return high;
  else return map_ints([&](int i) { return high.part[i] << kPlaneBits; }) + load_ints(room.sums[1] + row * kWidth);
}

template <Format F, int kPlanes, int MR>
void run_tile(const ByteProduct<kPlanes>& p, const SignedBlock<F>* panel) {
  constexpr bool kMinimum = kIsNibbles<F>;
  const ByteBlock<kPlanes>*a = p.a, *a_begun = a;
  const ptrdiff_t blocks = p.blocks, a_rows = p.a_rows;
  const int64_t first_line = p.first_line, end_line = p.end_line;
  const uint32_t* line = p.b + blocks * kPanelWords<F>;
  const uint16_t* scales = p.b_scale + blocks * kPanelScales<F>;
  Room<kPlanes> rooms[kRooms];
  ptrdiff_t begun = 0;
  const auto begin = [&] {
    for (int64_t i = first_line; i < end_line; i++) __builtin_prefetch(line + i * kWidth, 0, 2);
    if (first_line < end_line) __builtin_prefetch(scales, 0, 2);
    line += kPanelWords<F>;
    scales += kPanelScales<F>;
    const uint32_t* b = panel[begun].words;
    switch (begun % kRooms) {
      case 0: multiply_block<0>(a_begun, b, rooms[0]); break;
      case 1: multiply_block<1>(a_begun, b, rooms[1]); break;
      case 2: multiply_block<2>(a_begun, b, rooms[2]); break;
      case 3: multiply_block<3>(a_begun, b, rooms[3]); break;
    }
    begun++;
    a_begun += a_rows;
  };
  Floats sums[MR][1];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) sums[m][0] = broadcast(0.0f);
  for (ptrdiff_t block = -kAhead; block < blocks; block++) {
    if (begun < blocks) begin();
    if (block < 0) continue;
    const Room<kPlanes>& room = rooms[block % kRooms];
    const Floats scale = load(panel[block].scales), minimum = load(panel[block].scales + (kMinimum ? kWidth : 0));
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
      Floats& sum = sums[m][0];
      sum = fma(to_floats(joined(room, m)), scale * broadcast(a[m].scale), sum);
      if (kMinimum) sum = fma(minimum, broadcast(a[m].offset), sum);
    }
    a += a_rows;
  }
  p.c.store(sums);
}

}  // namespace

template <Format F>
void unpack_panel(const uint32_t* b, const uint16_t* b_scale, ptrdiff_t blocks, SignedBlock<F>* to) {
  constexpr int kWords = kPanelWords<F> / kWidth;
  for (const SignedBlock<F>* end = to + blocks; to < end; to++) {
#pragma GCC unroll 8
    for (int i = 0; i < kWords; i++) {
      const Words word = load_words(b + i * kWidth);
      if constexpr (kIsNibbles<F>) {
        store_words(to->words + i * kWidth, {word.part[0] & 0x0F0F0F0F});
        store_words(to->words + (kWords + i) * kWidth, {word.part[0] >> 4 & 0x0F0F0F0F});
      } else {
        store_words(to->words + i * kWidth, {word.part[0] ^ 0x80808080});
      }
    }
    const Floats scale = load_half(b_scale);
    store(to->scales, scale);
    if constexpr (kIsNibbles<F>) store(to->scales + kWidth, minimum_of<F>(scale, b_scale));
    b += kPanelWords<F>;
    b_scale += kPanelScales<F>;
  }
}

template <Format F, int kPlanes>
void multiply_byte_amx(const ByteProduct<kPlanes>& product, const SignedBlock<F>* panel, int rows) {
  with_constant<kAmxRows>(rows, [&](auto mr) { run_tile<F, kPlanes, mr.value>(product, panel); });
}

template void unpack_panel(const uint32_t*, const uint16_t*, ptrdiff_t, SignedBlock<Format::kNibbles>*);
template void unpack_panel(const uint32_t*, const uint16_t*, ptrdiff_t, SignedBlock<Format::kSymmetric>*);
template void unpack_panel(const uint32_t*, const uint16_t*, ptrdiff_t, SignedBlock<Format::kBytes>*);
template void multiply_byte_amx(const ByteProduct<1>&, const SignedBlock<Format::kNibbles>*, int);
template void multiply_byte_amx(const ByteProduct<2>&, const SignedBlock<Format::kNibbles>*, int);
template void multiply_byte_amx(const ByteProduct<1>&, const SignedBlock<Format::kSymmetric>*, int);
template void multiply_byte_amx(const ByteProduct<2>&, const SignedBlock<Format::kSymmetric>*, int);
template void multiply_byte_amx(const ByteProduct<1>&, const SignedBlock<Format::kBytes>*, int);
template void multiply_byte_amx(const ByteProduct<2>&, const SignedBlock<Format::kBytes>*, int);

}  // namespace rootgraft

#endif
