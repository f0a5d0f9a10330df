// A place in a ring of stages, and how often it has been gone round.
#pragma once

namespace minserve {
namespace cuda {

struct Place {
  int slot = 0, turn = 0;
  __device__ __forceinline__ void go_on(int stages) {
    if (++slot == stages) slot = 0, ++turn;
  }
};

}  // namespace cuda
}  // namespace minserve
