// sums += A B^T for 64 rows of A and kTokens rows of B, 16 inputs each, both described in shared
// memory.
//
// Thread t of the warpgroup holds row r = 16 (t / 32) + t % 32 / 4 and row r + 8. Of both it has
// the tokens k = 8 j + 2 (t % 4) and k + 1: of row r in sums 4 j and 4 j + 1, of row r + 8 in sums
// 4 j + 2 and 4 j + 3.
#pragma once

#include <cstdint>

namespace minserve {
namespace cuda {

constexpr int kBlockRows = 64;  // rows of a warpgroup's product
constexpr int kGroupThreads = 128;
constexpr int kStep = 64;  // inputs a stage: rows of 128 bytes

template <int kTokens>
struct Wgmma;

#define MS_WGMMA(TOKENS, PLACES, A, B, KEEP, ...)                                       \
  template <>                                                                           \
  struct Wgmma<TOKENS> {                                                                \
    static __device__ __forceinline__ void add(float (&s)[TOKENS / 2], std::uint64_t a, \
                                               std::uint64_t b, int keep) {             \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" KEEP                              \
                   ", 0;\n"                                                             \
                   "wgmma.mma_async.sync.aligned.m64n" #TOKENS                          \
                   "k16.f32.bf16.bf16"                                                  \
                   " {" PLACES "}, %" A ", %" B ", p, 1, 1, 0, 0; }"                    \
                   : __VA_ARGS__                                                        \
                   : "l"(a), "l"(b), "r"(keep));                                        \
    }                                                                                   \
  };
#define MS_SUMS4(i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define MS_SUMS8(i) MS_SUMS4(i), MS_SUMS4(i + 4)
#define MS_SUMS16(i) MS_SUMS4(i), MS_SUMS4(i + 4), MS_SUMS4(i + 8), MS_SUMS4(i + 12)
#define MS_SUMS64(i) MS_SUMS16(i), MS_SUMS16(i + 16), MS_SUMS16(i + 32), MS_SUMS16(i + 48)

// clang-format off
#define MS_PLACES4 "%0, %1, %2, %3"
#define MS_PLACES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MS_PLACES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MS_PLACES12 MS_PLACES8 ", %8, %9, %10, %11"
#define MS_PLACES20 MS_PLACES16 ", %16, %17, %18, %19"
#define MS_PLACES28 MS_PLACES20 ", %20, %21, %22, %23, %24, %25, %26, %27"
#define MS_PLACES32 MS_PLACES16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MS_PLACES36 MS_PLACES32 ", %32, %33, %34, %35"
#define MS_PLACES40 MS_PLACES36 ", %36, %37, %38, %39"
#define MS_PLACES48 MS_PLACES32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MS_PLACES64 MS_PLACES32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MS_PLACES128 MS_PLACES64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
MS_WGMMA(8, MS_PLACES4, "4", "5", "6", MS_SUMS4(0))
MS_WGMMA(16, MS_PLACES8, "8", "9", "10", MS_SUMS4(0), MS_SUMS4(4))
MS_WGMMA(24, MS_PLACES12, "12", "13", "14", MS_SUMS4(0), MS_SUMS8(4))
MS_WGMMA(32, MS_PLACES16, "16", "17", "18", MS_SUMS16(0))
MS_WGMMA(40, MS_PLACES20, "20", "21", "22", MS_SUMS4(0), MS_SUMS16(4))
MS_WGMMA(56, MS_PLACES28, "28", "29", "30", MS_SUMS4(0), MS_SUMS8(4), MS_SUMS16(12))
MS_WGMMA(64, MS_PLACES32, "32", "33", "34", MS_SUMS16(0), MS_SUMS16(16))
MS_WGMMA(72, MS_PLACES36, "36", "37", "38", MS_SUMS4(0), MS_SUMS16(4), MS_SUMS16(20))
MS_WGMMA(80, MS_PLACES40, "40", "41", "42", MS_SUMS8(0), MS_SUMS16(8), MS_SUMS16(24))
MS_WGMMA(96, MS_PLACES48, "48", "49", "50", MS_SUMS16(0), MS_SUMS16(16), MS_SUMS16(32))
MS_WGMMA(128, MS_PLACES64, "64", "65", "66", MS_SUMS64(0))
MS_WGMMA(256, MS_PLACES128, "128", "129", "130", MS_SUMS64(0), MS_SUMS64(64))
// clang-format on

#undef MS_WGMMA
#undef MS_SUMS4
#undef MS_SUMS8
#undef MS_SUMS16
#undef MS_SUMS64
#undef MS_PLACES4
#undef MS_PLACES8
#undef MS_PLACES12
#undef MS_PLACES16
#undef MS_PLACES20
#undef MS_PLACES28
#undef MS_PLACES32
#undef MS_PLACES36
#undef MS_PLACES40
#undef MS_PLACES48
#undef MS_PLACES64
#undef MS_PLACES128

}  // namespace cuda
}  // namespace minserve
