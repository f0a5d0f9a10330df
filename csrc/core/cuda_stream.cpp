// torch's current stream, and what a build without CUDA kernels says.
#include "cuda_stream.h"

#include <stdexcept>

#ifdef MINSERVE_CUDA
// Weak: the library also loads into a torch built without CUDA, which has no such function.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#endif

namespace minserve {

#ifdef MINSERVE_CUDA
void* current_stream(const Tensor& like) {
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream ||
      aoti_torch_get_current_cuda_stream(like.get_device_index(), &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("minserve: this torch gives no CUDA stream");
  }
  return stream;
}
#else
void no_cuda() {
  throw std::runtime_error(
      "minserve: this build has no CUDA kernels; rebuild with `MINSERVE_CUDA=ON pip install -e .` "
      "(nvcc is needed) or move the tensors to the CPU");
}
#endif

}  // namespace minserve
