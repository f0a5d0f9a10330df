// Arguments of the kernels between two library products; shared by host and device code.
#pragma once

#include <cstdint>

#include "../cells/kind.h"
#include "../core/types.h"

namespace minserve {

// y [rows, gates * channels] is the product of a matrix with the residual stream x [rows, width]
// itself, whose RMS norm's division is left for here. The norm's weight is in the matrix.
struct NormedArgs {
  std::int64_t rows = 0, width = 0, channels = 0;
  float eps = 0.0f;

  bf16* x = nullptr;
  const bf16* ahead = nullptr;  // [width], what the next product's bias adds to x; or null

  bf16* y = nullptr;
  const bf16* bias = nullptr;  // [gates * channels], or null

  // Steps alone.
  bf16* out = nullptr;     // [rows, channels]
  float* state = nullptr;  // [num_slots, channels] with rows state_stride apart
  std::int64_t state_stride = 0, num_slots = 0;
  const std::int32_t* slots = nullptr;  // [rows]
  bool linear_candidate = false, normalize_gates = true;

  // Of a norm alone, y = x / norm * weight.
  const bf16* weight = nullptr;  // [width]
};

// The cells whose step a kernel computes.
using NormedCells = CellList<CellKind::mingru, CellKind::minlstm>;

namespace cuda {

// y = x / norm * weight.
void rms_norm(const NormedArgs& args, int device, void* stream);

// y = GELU(y / norm + bias), in place.
void normed_gelu(const NormedArgs& args, int device, void* stream);

// A cell's step from y / norm + bias.
void normed_step(const NormedArgs& args, CellKind cell, int device, void* stream);

}  // namespace cuda
}  // namespace minserve
