// The tensor maps of matrices in bfloat16.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "encode_tma_descriptor.cuh"
#include "../arch/wgmma.cuh"

namespace minserve {
namespace cuda {

// A matrix [rows, columns] in bfloat16, read in tiles of tile_rows by kStep.
inline CUtensorMap tensor_map_of(const void* data, std::int64_t rows, std::int64_t columns,
                                 int tile_rows) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {kStep, static_cast<cuuint32_t>(tile_rows)}, steps[2] = {1, 1};
  const CUresult result = encode_tensor_map()(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw std::runtime_error("minserve: a matrix has no tensor map");
  return map;
}

}  // namespace cuda
}  // namespace minserve
