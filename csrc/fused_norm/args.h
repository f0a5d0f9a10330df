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

  // Of a step with an output gate.
  const float* lower_bound = nullptr;  // [channels], or null

  // Of a norm alone, y = x / norm * weight, [width]; of a step with an output gate, that of its
  // norm, [channels], or null.
  const bf16* weight = nullptr;
};

// h / norm(h) * weight * silu(gate), all of one dtype.
struct GatedNormArgs {
  std::int64_t rows = 0, channels = 0, gate_stride = 0;
  std::int64_t groups = 1;  // of the channels, each normed by itself
  bool gate_first = false;  // the norm is that of h silu(gate)
  float eps = 0.0f;
  const void* h = nullptr;       // [rows, channels]
  const void* gate = nullptr;    // [rows, channels], rows gate_stride apart
  const void* weight = nullptr;  // [channels], or null
  void* out = nullptr;           // [rows, channels]
};

// x += y, then out = x / norm(x) * weight.
struct AddedNormArgs {
  std::int64_t rows = 0, width = 0;
  float eps = 0.0f;
  void* x = nullptr;             // [rows, width], fp32 or bf16
  const bf16* y = nullptr;       // [rows, width], or null
  const bf16* weight = nullptr;  // [width]
  bf16* out = nullptr;           // [rows, width]
};

// silu(gate) * up, of one dtype.
struct SwigluArgs {
  std::int64_t rows = 0, channels = 0;  // of the output
  const void* y = nullptr;              // [rows, gate | up]
  void* out = nullptr;                  // [rows, channels]
};

// The cells whose step a kernel computes.
using NormedCells = CellList<CellKind::mingru, CellKind::minlstm, CellKind::hgrn>;

namespace cuda {

// y = x / norm * weight.
void rms_norm(const NormedArgs& args, int device, void* stream);

// y = GELU(y / norm + bias), in place.
void normed_gelu(const NormedArgs& args, int device, void* stream);

// out = silu(gate) * up with gate | up = y / norm + bias.
void normed_swiglu(const NormedArgs& args, int device, void* stream);

void gated_rms_norm(const GatedNormArgs& args, Dtype dtype, int device, void* stream);
void swiglu(const SwigluArgs& args, Dtype dtype, int device, void* stream);
// x has this dtype, fp32 or bf16.
void added_rms_norm(const AddedNormArgs& args, Dtype dtype, int device, void* stream);

// A cell's step from y / norm + bias.
void normed_step(const NormedArgs& args, CellKind cell, int device, void* stream);

}  // namespace cuda
}  // namespace minserve
