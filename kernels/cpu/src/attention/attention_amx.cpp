// Attention of many queries by AMX.
#include "attention/attention_amx.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

thread_local AmxRoom amx_room;

// A times B, rows of C c_stride apart, for all queries of a tile.
void multiply_rows(int count, int panels, const Product& product) {
  for_amx_tiles(count, panels, [&](int m, const AmxRows& rows, int p, int some) {
    Product part = product;
    part.a += m * product.a_stride;
    part.b += p * product.b_stride;
    part.c.first = static_cast<float*>(product.c.first) + m * product.c.stride + p * kWidth;
    multiply_amx<AmxWords::kBf16>(part, rows, some);
  });
}

void score_many(const Bf16Block& block) {
  const int words = (int)block.op.head_dim / Bf16::kPerWord;
  lay_out_keys(block);
  multiply_rows(block.tile.count, block.rows.panels,
                {block.queries, words, block.scratch.keys, words * kWidth, words, {block.scratch.scores, kBlock}, nullptr});
}

// Scores become weights.
void weigh_all(const Bf16Block& block) {
  with_constant<kBlock / kWidth>(block.rows.panels, [&](auto panels) {
    const auto weigh = [&](auto rows, int m) {
      Floats scores[rows.value][panels.value];
#pragma GCC unroll 4
      for (int r = 0; r < rows.value; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < panels.value; v++) scores[r][v] = load(block.scratch.scores + (m + r) * kBlock + v * kWidth);
      }
      weigh_rows(block, m, scores);
    };
    int m = 0;
    for (; m + kTakenRows <= block.tile.count; m += kTakenRows) weigh(Constant<kTakenRows>{}, m);
    for (; m < block.tile.count; m++) weigh(Constant<1>{}, m);
  });
  clear_end(block);
}

void add_values(const Bf16Block& block, bool unpacked, float* sums) {
  const int count = block.tile.count, value_dim = (int)block.op.value_dim;
  const int steps = (block.rows.panels + kStepPanels - 1) / kStepPanels * kAmxWords;
  const auto* weights = reinterpret_cast<const uint32_t*>(block.scratch.scores);
  for (int dim = 0; dim < value_dim; dim += kSumDims) {
    const int panels = std::min(kSumDims, value_dim - dim) / kWidth;
    const uint32_t* values = block.scratch.values + dim / kWidth * kBlockWords * kWidth;
    multiply_rows(count, panels, {weights, kBlock, values, kBlockWords * kWidth, steps, {sums, kSumDims}, nullptr});
    add_sums(block, sums, dim, panels, unpacked);
  }
}

}  // namespace

void attend_by_amx(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result,
                   bool resumes, Scratch& scratch) {
  const QueryTile& tile = *stretch.tile;
  const int64_t words = op.head_dim / Bf16::kPerWord;
  AmxRoom& room = amx_room;
  gather_queries<Bf16>(op, tile, scratch);
  if (are_few(op, tile)) return attend_few_by_amx(op, stretch, next, result, resumes, scratch, room);
  const AmxScope scope(amx_shapes(amx_rows(tile.count), kAmxWords));
  walk_blocks(op, stretch, next, result, resumes, scratch.end, [&](const BlockWork& work) {
    for (int head = 0; head < tile.heads; head++) {
      const int first = head * tile.count;
      const Bf16Block block{work, head, result.from(first, op.value_dim), scratch.queries + first * words, scratch};
      score_many(block);
      const bool unpacked = take_values(block, kWidth);
      weigh_all(block);
      add_values(block, unpacked, room.sums);
    }
  });
}

}  // namespace rootgraft

#endif
