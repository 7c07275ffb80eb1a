// Converts blocks of all formats to numbers of fp32.
#include "gguf/widen_block.h"

namespace rootgraft {

template Widener widener_of<Fp32>(Format);

}  // namespace rootgraft
