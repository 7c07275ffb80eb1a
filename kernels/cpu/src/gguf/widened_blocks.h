// y = x W^T + b with W in blocks of four or eight bits, whose numbers are rounded to the type of x on their way to the
// products: the bits of a plain weight, of which a quarter or half is read from memory.
#pragma once

#include "int8/quantised_linear.h"

namespace rootgraft {

// A call whose planes are 0. Throws std::bad_alloc.
void multiply_widened_blocks(const QuantisedLinear& op);

}  // namespace rootgraft
