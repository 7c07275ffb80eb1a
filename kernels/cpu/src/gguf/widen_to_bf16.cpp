// Converts blocks of all formats to numbers of bf16.
#include "gguf/widen_block.h"

namespace rootgraft {

template Widener widener_of<Bf16>(Format);

}  // namespace rootgraft
