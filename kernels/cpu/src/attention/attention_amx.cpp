// Attention of many queries by AMX.
#include "attention/attention_amx.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

constexpr int kBandQueries = 2 * kAmxRows;
static_assert(kTileQueries >= 2 * kBandQueries);  // room for the scores of two bands

// Two tiles of queries, or one. All tiles have the same number of rows; the last rows may be unused.
struct Band {
  int first, end;  // range of queries
  AmxRows rows;
};

struct Bands {
  static constexpr int kMost = kTileQueries / kBandQueries;

  Band all[kMost];
  int count = 0;

  explicit Bands(int queries) {
    const int each = amx_rows(queries);
    for (int first = 0; first < queries; first += 2 * each) {
      all[count++] = {first, std::min(first + 2 * each, queries), {each, first + each < queries ? each : 0}};
    }
  }
};

// The product of a band's tiles with some panels, two by two. It is computed one step along K at a time between other
// work.
class BandProduct {
 public:
  BandProduct() : panels_(0) {}
  // `adds`: whether to add to the sums in the target.
  BandProduct(const Product& p, const AmxRows& rows, int panels, bool adds)
      : p_(p), rows_(rows), panels_(panels), adds_(adds) {}

  int steps() const { return (panels_ + 1) / 2 * (int)(p_.steps / kAmxWords); }

  // Computes one step. Returns false if all steps are done.
  INLINE bool step() {
    if (panel_ >= panels_) return false;
    with_constant<2>(panels_ - panel_ < 2 ? 1 : 2, [&](auto panels) {
      if (rows_.second) step_of<2, panels.value>();
      else step_of<1, panels.value>();
    });
    return true;
  }

 private:
  struct Nothing {
    template <int>
    INLINE void before() {}
  };

  template <int R, int P>
  INLINE void step_of() {
    const ptrdiff_t line = p_.c.stride * sizeof(float);
    const auto target = [&](auto i) {
      auto* row = static_cast<float*>(p_.c.first) + i.value / P * rows_.second * p_.c.stride;
      return row + (panel_ + i.value % P) * kWidth;
    };
    if (k_ == 0 && adds_) for_constants<R * P>([&](auto i) { amx_load<i.value>(target(i), line); });
    else if (k_ == 0) for_constants<R * P>([](auto i) { amx_zero<i.value>(); });
    const auto panel = [&](int i) { return p_.b + (panel_ + i) * p_.b_stride; };
    Nothing nothing;
    const ptrdiff_t a_bytes = p_.a_stride * sizeof(uint32_t);
    const uint32_t* second = p_.a + rows_.second * p_.a_stride;
    amx_products<AmxWords::kBf16, R, P, AmxReuse::kFirstCache>(p_.a, second, a_bytes, panel, k_, nothing);
    if ((k_ += kAmxWords) < p_.steps) return;
    for_constants<R * P>([&](auto i) { amx_store<i.value>(target(i), line); });
    k_ = 0, panel_ += 2;
  }

  Product p_ = {};
  AmxRows rows_ = {};
  int panels_, panel_ = 0;
  bool adds_ = false;
  ptrdiff_t k_ = 0;
};

// All queries of a block whose keys are laid out, one band at a time. While the vector units weigh the scores of one
// band, AMX multiplies the values of the band before and computes the scores of the next. The scores of the first band
// are computed while the values are laid out.
class BlockOfBands {
 public:
  BlockOfBands(const Bf16Block& block, const Bands& bands)
      : block_(block), bands_(bands), value_dim_((int)block.op.value_dim) {
    for (int i = 0; i < bands.count; i++) panels_[i] = seen_panels(bands.all[i]);
  }

  INLINE void attend() const {
    BandProduct scores = scores_of(0);
    take_values(block_, kWidth, [&] { scores.step(); });
    while (scores.step()) continue;
    for (int i = 0; i < bands_.count; i++) {
      BandProduct values = i ? values_of(i - 1) : BandProduct();
      scores = i + 1 < bands_.count ? scores_of(i + 1) : BandProduct();
      weigh(i, values, scores);
    }
    BandProduct values = values_of(bands_.count - 1);
    while (values.step()) continue;
  }

 private:
  // Number of panels with keys that any query of a band sees, at least one. The weights of all others would be zeros.
  int seen_panels(const Band& band) const {
    if (block_.plain) return block_.rows.panels;
    int64_t end = 0;
    for (int m = band.first; m < band.end; m++) end = std::max(end, block_.scratch.end[m]);
    return (int)std::clamp<int64_t>((end - block_.first_key + kWidth - 1) / kWidth, 1, block_.rows.panels);
  }

  float* room(int i) const { return block_.scratch.scores + i % 2 * kBandQueries * kBlock; }

  BandProduct scores_of(int i) const {
    const int words = (int)block_.op.head_dim / Bf16::kPerWord;
    const Band& band = bands_.all[i];
    const uint32_t* queries = block_.queries + band.first * words;
    return {{queries, words, block_.scratch.keys, words * kWidth, words, {room(i), kBlock}, nullptr}, band.rows,
            panels_[i], false};
  }

  BandProduct values_of(int i) const {
    const int steps = (panels_[i] + kStepPanels - 1) / kStepPanels * kAmxWords;
    const auto* weights = reinterpret_cast<const uint32_t*>(room(i));
    const Band& band = bands_.all[i];
    float* sums = block_.result.values + band.first * value_dim_;
    return {{weights, kBlock, block_.scratch.values, kBlockWords * kWidth, steps, {sums, value_dim_}, nullptr}, band.rows,
            value_dim_ / kWidth, !block_.begins};
  }

  // Turns the scores of a band into weights, between steps of both products: first those of `values`, then of `scores`.
  INLINE void weigh(int i, BandProduct& values, BandProduct& scores) const {
    const Band& band = bands_.all[i];
    const int groups = (band.end - band.first + kTakenRows - 1) / kTakenRows;
    const int pace = (values.steps() + scores.steps() + groups - 1) / groups;
    float* first = room(i);
    with_constant<kBlock / kWidth>(panels_[i], [&](auto panels) {
      const auto weigh = [&](auto rows, int m) {
        for (int step = 0; step < pace; step++) {
          if (!values.step()) scores.step();
        }
        float* at = first + (m - band.first) * kBlock;
        Floats taken[rows.value][panels.value];
#pragma GCC unroll 4
        for (int r = 0; r < rows.value; r++) {
#pragma GCC unroll 4
          for (int v = 0; v < panels.value; v++) taken[r][v] = load(at + r * kBlock + v * kWidth);
        }
        weigh_rows(block_, m, taken, at);
      };
      int m = band.first;
      for (; m + kTakenRows <= band.end; m += kTakenRows) weigh(Constant<kTakenRows>{}, m);
      for (; m < band.end; m++) weigh(Constant<1>{}, m);
    });
    while (values.step() || scores.step()) continue;
  }

  const Bf16Block& block_;
  const Bands& bands_;
  int panels_[Bands::kMost];
  int value_dim_;
};

}  // namespace

void attend_by_amx(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result,
                   bool resumes, Scratch& scratch) {
  const QueryTile& tile = *stretch.tile;
  const int64_t words = op.head_dim / Bf16::kPerWord;
  if (!stretch.continues) gather_queries<Bf16>(op, tile, scratch);
  if (are_few(op, tile)) return attend_few_by_amx(op, stretch, next, result, resumes, scratch);
  const AmxScope scope(amx_shapes(amx_rows(tile.count), kAmxWords));
  const Bands bands(tile.count);
  walk_blocks(op, stretch, next, result, resumes, scratch.end, [&](const BlockWork& work) {
    for (int head = 0; head < tile.heads; head++) {
      const int first = head * tile.count;
      const Bf16Block block{work, head, result.from(first, op.value_dim), scratch.queries + first * words, scratch};
      lay_out_keys(block);
      BlockOfBands(block, bands).attend();
    }
  });
}

}  // namespace rootgraft

#endif
