// Blocks of 8-bit KV by AMX, for tiles of many queries. The sums are those of the vector code, so their bits are the
// same.
//
// A panel is loaded for two bands at a time, because loading it takes as long as multiplying it. Memory is kept for two
// bands only, so that all of it stays in the first cache. Multiplying ahead while the vector units compute weights
// would need more memory, and lose more than it gains.
#include "attention/attention_int8_softmax.h"
#include "gemm/tile_amx.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

constexpr int kTakenRows = 4;               // rows whose scores are processed together
constexpr int kSumDims = kPanels * kWidth;  // dimensions whose sums fit in the memory of a band's scores

struct alignas(64) AmxScratch {
  Band bands[2];
  uint32_t values[kBlock / kWordBytes * kMaxHeadDim];  // B of the output: [16 dimensions][word of weights][dimension]
};
thread_local AmxScratch amx_scratch;

void lay_out_values(const BlockWork& block, const Int8Head& head, uint32_t* to) {
  const int64_t dims = block.op.head_dim;
  for (int64_t dim = 0; dim < dims; dim += kWidth) {
    for (int w = 0; w < kPanelWords; w++) {
      for (int panel = 0; panel < kPanels; panel++, to += kWidth) {
        store_words(to, load_words(head.values[panel] + w * dims + dim));
      }
    }
  }
}

// The bands of a tile, which has one KV head.
struct Bands {
  int queries, count, each;

  explicit Bands(int queries) : queries(queries) {
    count = (queries + kBandQueries - 1) / kBandQueries;
    each = (queries + count - 1) / count;
  }
  int first(int band) const { return band * each; }
  int rows(int band) const { return std::min(each, queries - band * each); }
};

struct AmxBlock {
  const BlockWork& block;
  const Int8Scratch& scratch;
  Int8Head head;
  Bands bands;
  AmxScratch& amx;

  AmxBlock(const BlockWork& block, const Int8Scratch& scratch)
      : block(block), scratch(scratch), bands(block.tile.count), amx(amx_scratch) {
    head.find(block, 0);
    lay_out_values(block, head, amx.values);
  }

  // Scores of R bands as integers, in the place of the later floats. Rows after the last query have undefined contents.
  template <int R>
  INLINE void multiply_keys(int band) const {
    const ptrdiff_t words = block.op.head_dim / kWordBytes;
    const uint32_t* queries[R];
    for (int r = 0; r < R; r++) queries[r] = scratch.queries + bands.first(band + r) * words;
#pragma GCC unroll 2
    for (int first = 0; first < kPanels; first += 2) {
      sum_by_amx<AmxWords::kBytes, R, 2>(queries, words, [&](int p) { return head.keys[first + p]; }, words, [] {});
      for_constants<2 * R>([&](auto i) {
        constexpr int kPanel = i.value % 2, kBand = i.value / 2;
        amx_store<i.value>(amx.bands[kBand].scores + (first + kPanel) * kWidth, kBlock * sizeof(float));
      });
    }
  }

  // Number of prefetches for each kTakenRows rows of a band, in each of two passes over the tile.
  int pace(int rows) const {
    return kWidth * block.rows.panels / (bands.count * ((rows + kTakenRows - 1) / kTakenRows));
  }

  template <bool kPlain>
  INLINE void store_band(Band& to, int band) const {
    const int query = bands.first(band), rows = bands.rows(band), steps = pace(rows);
    for (int row = 0; row < rows; row += kTakenRows) {
      block.ahead.step(steps);
      Floats scores[kTakenRows][kPanels];
#pragma GCC unroll 4
      for (int i = 0; i < kTakenRows; i++) {
        const Ints start = broadcast_int(scratch.start[query + row + i]);
#pragma GCC unroll 4
        for (int v = 0; v < kPanels; v++) {
          const auto* dots = reinterpret_cast<const int32_t*>(to.scores + (row + i) * kBlock + v * kWidth);
          scores[i][v] = to_floats(load_ints(dots) + start) * load(head.key_scales[v]);
        }
      }
      store_scores<kTakenRows, kPlain>(block, scratch, head, query + row, scores, to, row);
    }
  }

  template <bool kPlain>
  INLINE void weigh_band(Band& to, int band) const {
    const int query = bands.first(band), rows = bands.rows(band), steps = pace(rows);
    for (int row = 0; row < rows; row += kTakenRows) {
      block.ahead.step(steps);
      weigh_scores<kPlain>(block, scratch, head, query + row, to, row, std::min(kTakenRows, rows - row));
    }
  }

  // R bands take each step together: the numbers of a query need a long chain of instructions, and two chains overlap.
  template <int R, bool kPlain>
  __attribute__((noinline)) void weigh(int band) const {
    for (int r = 0; r < R; r++) store_band<kPlain>(amx.bands[r], band + r);
    for (int r = 0; r < R; r++) {
      const int rows = bands.rows(band + r);
      choose_scales<kPlain>(block, scratch, amx.bands[r], value_steps<kPlain>(amx.bands[r], &head, 1, rows),
                            bands.first(band + r), rows);
    }
    amx_stay_awake();
    for (int r = 0; r < R; r++) weigh_band<kPlain>(amx.bands[r], band + r);
  }

  // Sums of weights and values of kSumDims dimensions as integers, in the memory of the scores.
  template <int R>
  INLINE void multiply_values(int64_t dim) const {
    constexpr ptrdiff_t kWords = kBlock / kWordBytes;
    const uint32_t* weights[R];
    for (int r = 0; r < R; r++) weights[r] = reinterpret_cast<const uint32_t*>(amx.bands[r].weights);
#pragma GCC unroll 2
    for (int first = 0; first < kPanels; first += 2) {
      const uint32_t* values = amx.values + (dim + first * kWidth) * kWords;
      const auto panel = [=](int p) { return values + p * kWords * kWidth; };
      sum_by_amx<AmxWords::kUnsignedBytes, R, 2>(weights, kWords, panel, kWords, [] {});
      for_constants<2 * R>([&](auto i) {
        constexpr int kPanel = i.value % 2, kBand = i.value / 2;
        amx_store<i.value>(amx.bands[kBand].scores + (first + kPanel) * kWidth, kSumDims * sizeof(float));
      });
    }
  }

  // Adds these sums of kSumDims dimensions to the result of a band.
  void add_sums(const Band& from, int band, int64_t dim) const {
    const int64_t dims = block.op.head_dim;
    const auto* sums = reinterpret_cast<const int32_t*>(from.scores);
    float* to = block.result.values + bands.first(band) * dims + dim;
    const auto add = [&](auto older) {
      for (int i = 0; i < bands.rows(band); i++, sums += kSumDims, to += dims) {
        const Floats scale = broadcast(from.weight_scale[i]);
#pragma GCC unroll 4
        for (int d = 0; d < kSumDims; d += kWidth) {
          store(to + d, fma(to_floats(load_ints(sums + d)), scale, older(to + d, i)));
        }
      }
    };
    if (block.begins) add([](const float*, int) { return broadcast(0.0f); });
    else if (!from.shrinks) add([](const float* sum, int) { return load(sum); });
    else add([&](const float* sum, int i) { return load(sum) * broadcast(from.shrink[i]); });
  }

  template <int R, bool kPlain>
  void attend(int band) const {
    multiply_keys<R>(band);
    weigh<R, kPlain>(band);
    for (int64_t dim = 0; dim < block.op.head_dim; dim += kSumDims) {
      multiply_values<R>(dim);
      for (int r = 0; r < R; r++) add_sums(amx.bands[r], band + r, dim);
    }
  }
};

template <bool kPlain>
void attend_bands(const AmxBlock& work) {
  const int count = work.bands.count;
  for (int band = 0; band < count; band += 2) {
    if (band + 1 < count) work.attend<2, kPlain>(band);
    else work.attend<1, kPlain>(band);
  }
}

}  // namespace

bool takes_amx(const Attention& op, const QueryTile& tile) {
  return tile.count > kTileRows && op.head_dim / kWordBytes % kAmxWords == 0 && has_amx();
}

void attend_int8_by_amx(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result,
                        bool resumes, Int8Scratch& scratch) {
  // Setting the shapes of the registers takes as long as ten products, so it is done once for all blocks.
  const AmxScope scope(amx_shapes(Bands(stretch.tile->count).each, kAmxWords));
  walk_blocks(op, stretch, next, result, resumes, scratch.end, [&](const BlockWork& block) {
    const AmxBlock work(block, scratch);
    block.plain ? attend_bands<true>(work) : attend_bands<false>(work);
  });
}

}  // namespace rootgraft

#endif
