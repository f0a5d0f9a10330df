// The CPU's kernels exist once per instruction set, each in a namespace of that name (core/vec.h).
// Their declarations, and the choice at run time.
#pragma once

// Declares entry points in the namespace of every instruction set.
#define MS_DECLARE_PER_ISA(...) \
  namespace generic {           \
  __VA_ARGS__                   \
  }                             \
  namespace avx2 {              \
  __VA_ARGS__                   \
  }                             \
  namespace avx512 {            \
  __VA_ARGS__                   \
  }

namespace minserve {

// The instruction set chosen on this machine. avx512_bf16 (with VBMI) and amx have kernels of their
// own for the language model only; all else runs those of avx512.
enum class Isa { generic, avx2, avx512, avx512_bf16, amx };
Isa isa();
// Its name.
const char* cpu_isa();

// That of three entry points which is for this machine. For host code alone: a kernel's file would
// leave a copy built for its own instruction set.
template <class Entry>
Entry by_isa(Entry generic_entry, Entry avx2_entry, Entry avx512_entry) {
  switch (isa()) {
    case Isa::amx:
    case Isa::avx512_bf16:
    case Isa::avx512:
      return avx512_entry;
    case Isa::avx2:
      return avx2_entry;
    default:
      return generic_entry;
  }
}

#if defined(MINSERVE_X86)
#define MS_BY_ISA(name) by_isa(&generic::name, &avx2::name, &avx512::name)
#else
#define MS_BY_ISA(name) by_isa(&generic::name, &generic::name, &generic::name)
#endif

}  // namespace minserve
