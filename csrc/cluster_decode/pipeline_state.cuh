// The current stage of a ring whose length is known at run time, and how many times the ring has
// been passed.
#pragma once

namespace minserve {
namespace cuda {
namespace cluster {

struct PipelineState {
  int slot = 0, round = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++slot == stages) slot = 0, ++round;
  }
};

}  // namespace cluster
}  // namespace cuda
}  // namespace minserve
