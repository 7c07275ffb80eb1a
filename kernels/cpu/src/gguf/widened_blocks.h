// y = x W^T + b with W in blocks of four or eight bits. The numbers are rounded to the type of x before the products.
// So the bits are those of a plain weight, but only a quarter or half of its bytes is read from memory.
#pragma once

#include "int8/quantised_linear.h"

namespace rootgraft {

// Computes a call with planes 0. Throws std::bad_alloc.
void multiply_widened_blocks(const QuantisedLinear& op);

}  // namespace rootgraft
