// Which GPU this is.
#pragma once

namespace minserve {
namespace cuda {

// Whether it is a Hopper: what is compiled for sm_90a runs on nothing else.
bool is_hopper(int device);

}  // namespace cuda
}  // namespace minserve
