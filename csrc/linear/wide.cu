// Linear maps in wide forms: the kernels of kWideForms.
#include "wide.h"

#include <utility>

#include "launch_wide.cuh"
#include "wide_form.h"

namespace minserve {
namespace cuda {

namespace {

struct Call {
  const LinearArgs& args;
  const void *weight, *input;
  Dtype dtype;
  int device;
  cudaStream_t stream;

  template <class T, int kGates, std::size_t kForm>
  void launch() const {
    constexpr WideForm f = kWideForms[kForm];
    if constexpr (f.suits(kGates)) {
      launch_wide<
          WideShape<T, kGates, f.sets, f.groups, f.blocks, f.tokens, f.share, f.parts, f.resident>>(
          args, weight, input, dtype, device, stream);
    }
  }
  template <class T, int kGates, std::size_t... kForms>
  void launch_one(std::size_t form, std::index_sequence<kForms...>) const {
    ((form == kForms ? launch<T, kGates, kForms>() : void()), ...);
  }
  template <class T>
  void launch_by_gates(int form, int gates) const {
    const auto at = static_cast<std::size_t>(form);
    const auto all = std::make_index_sequence<kWideCount>();
    if (gates == 2) return launch_one<T, 2>(at, all);
    if (gates == 3) return launch_one<T, 3>(at, all);
    launch_one<T, 1>(at, all);
  }
};

}  // namespace

void linear_wide(int form, const LinearArgs& args, const void* weight, const void* input, int gates,
                 Dtype dtype, int device, void* stream) {
  const Call call{args, weight, input, dtype, device, static_cast<cudaStream_t>(stream)};
  if (dtype == Dtype::bf16) return call.launch_by_gates<bf16>(form, gates);
  call.launch_by_gates<f16>(form, gates);
}

}  // namespace cuda
}  // namespace minserve
