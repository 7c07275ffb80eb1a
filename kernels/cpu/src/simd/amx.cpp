// Permission to use AMX, which a process must request from the operating system.
#include "simd/amx.h"

#if ROOTGRAFT_AMX

#include <sys/syscall.h>
#include <unistd.h>

namespace rootgraft {

bool has_amx() {
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
  return granted;
}

}  // namespace rootgraft

#endif
