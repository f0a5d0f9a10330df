// Which instruction set the CPU's kernels use on this machine.
#include "cpu_isa.h"

#include <cstdlib>
#include <cstring>
#if defined(MINSERVE_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace minserve {

namespace {

#if defined(MINSERVE_X86)
// Tiles (AMX) may be used once the system has been asked for room to keep them in, which holds for
// all threads and for good. Old systems and some sandboxes refuse.
bool may_use_tiles() {
#if defined(MINSERVE_AMX) && defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  constexpr long kAskForRoom = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & (kBf16 | kTiles)) != (kBf16 | kTiles)) return false;
  return syscall(SYS_arch_prctl, kAskForRoom, kTileData) == 0;
#else
  return false;
#endif
}
#endif

Isa choose_isa() {
#if defined(MINSERVE_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  // For tests and for comparing: may only lower the choice.
  const char* wish = std::getenv("MINSERVE_CPU_ISA");
  const bool want_generic = wish && !std::strcmp(wish, "generic");
  const bool want_avx2 = wish && !std::strcmp(wish, "avx2");
  if (want_generic || !avx2) return Isa::generic;
  if (!avx512 || want_avx2) return Isa::avx2;
  const bool want_avx512 = wish && !std::strcmp(wish, "avx512");
  const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  if (!bf16 || want_avx512) return Isa::avx512;
  const bool want_bf16 = wish && !std::strcmp(wish, "avx512_bf16");
  return !want_bf16 && may_use_tiles() ? Isa::amx : Isa::avx512_bf16;
#else
  return Isa::generic;
#endif
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose_isa();
  return chosen;
}

const char* cpu_isa() {
  switch (isa()) {
    case Isa::amx:
      return "amx";
    case Isa::avx512_bf16:
      return "avx512_bf16";
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "generic";
  }
}

}  // namespace minserve
