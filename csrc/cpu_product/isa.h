// Kernels with products of packed matrices exist for two instruction sets more than all others
// (core/cpu_isa.h): for bfloat16 products, and for tiles. Their declarations, and the choice at run
// time.
#pragma once

#include "../core/cpu_isa.h"

// Declares entry points in the namespace of every instruction set.
#define MS_DECLARE_PER_PRODUCT_ISA(...) \
  MS_DECLARE_PER_ISA(__VA_ARGS__)       \
  namespace avx512_bf16 {               \
  __VA_ARGS__                           \
  }                                     \
  namespace amx {                       \
  __VA_ARGS__                           \
  }

namespace minserve {

// That of five entry points which is for this machine. For host code alone.
template <class Entry>
Entry by_product_isa(Entry generic_entry, Entry avx2_entry, Entry avx512_entry,
                     Entry avx512_bf16_entry, Entry amx_entry) {
  switch (isa()) {
    case Isa::amx:
      return amx_entry;
    case Isa::avx512_bf16:
      return avx512_bf16_entry;
    default:
      return by_isa(generic_entry, avx2_entry, avx512_entry);
  }
}

// A compiler that knows no tiles has no such kernels; isa() is never amx then.
#if defined(MINSERVE_X86) && defined(MINSERVE_AMX)
#define MS_BY_PRODUCT_ISA(name) \
  by_product_isa(&generic::name, &avx2::name, &avx512::name, &avx512_bf16::name, &amx::name)
#elif defined(MINSERVE_X86)
#define MS_BY_PRODUCT_ISA(name) \
  by_product_isa(&generic::name, &avx2::name, &avx512::name, &avx512_bf16::name, &avx512_bf16::name)
#else
#define MS_BY_PRODUCT_ISA(name) (&generic::name)
#endif

}  // namespace minserve
