// A stage of a ring whose length is known when the kernel runs, and how often the ring has been
// gone round.
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
