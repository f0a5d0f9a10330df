// The best of the tokens that one thread looks at, ids ascending.
#pragma once

#include "../common/best.cuh"
#include "../common/row.cuh"

namespace minserve {
namespace cuda {

class BestSoFar {
 public:
  // Tokens past the end of a row come after its last one, so none of them is taken.
  __device__ __forceinline__ void add(const float4& x, unsigned id) {
    const float most = max_or_nan(max_or_nan(x.x, x.y), max_or_nan(x.z, x.w));
    if (!(most > best_) && id_ != kNone) return;
    id_ = id + (x.x == most ? 0 : x.y == most ? 1 : x.z == most ? 2 : x.w == most ? 3 : 0);
    best_ = most;
  }
  // 0, which is below all others, where there was no token. 0 is added since -0 is no less than 0.
  __device__ std::uint64_t key() const {
    return id_ == kNone ? 0 : BestKey::of(best_ + 0.0f, id_).key;
  }

 private:
  static constexpr unsigned kNone = 0xffffffffu;
  float best_ = kImpossible;
  unsigned id_ = kNone;
};

}  // namespace cuda
}  // namespace minserve
