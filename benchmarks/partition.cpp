// Prints "rows panels" of each part of a product, as kernels/cpu/src/simd/partition.h cuts it.
// Arguments: threads rows columns unit few many, and lines of 64 bytes in a panel.
#include <cstdio>
#include <cstdlib>

#include "simd/partition.h"

int main(int, char** arguments) {
  int64_t at[7];
  for (int i = 0; i < 7; i++) at[i] = std::atoll(arguments[1 + i]);
  const rootgraft::Cuts cuts((int)at[0], at[1], at[2], at[3], at[4], at[5], {at[6]});
  for (int64_t i = 0; i < cuts.count(); i++) {
    const rootgraft::ProductPart part = cuts.part(i);
    std::printf("%d %d\n", part.row_count(), part.panel_count());
  }
}
