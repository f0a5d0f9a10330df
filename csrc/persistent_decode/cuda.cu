// The launch of a persistent decode step: as many blocks as multiprocessors, all at once or not at
// all.
#include "../core/launch.cuh"
#include "../core/encode_tma_descriptor.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace minserve {
namespace cuda {

namespace {

int attribute(cudaDeviceAttr which, int device, const char* what) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), what);
  return value;
}

template <template <class> class CellOf, bool kAny, WeightType kType, bool kSplit,
          bool kBatchInvariant, bool kPieces, int kColumnTiles>
void launch(PersistentDecodeArgs& args, int device, cudaStream_t on) {
  using Cell = CellOf<float>;
  using OfBlock = persistent::Shared<Cell, kSplit, kBatchInvariant, kColumnTiles>;
  // Of a Hopper's 227 KiB for a block.
  static_assert(227 * 1024 - static_cast<int>(sizeof(OfBlock)) -
                        input_room(Cell::kPreactivations, kColumnTiles * kColumns) >=
                    persistent::kFewestStages * persistent::kStageBytes,
                "room for weights, whatever the inputs take");
  static thread_local int prepared = -1, most_shared = 0;
  constexpr auto kKernel = &persistent_decode_kernel<CellOf, kAny, kType, kSplit, kBatchInvariant,
                                                     kPieces, kColumnTiles>;
  if (prepared != device) {
    most_shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device, "shared memory");
    check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared),
          "shared memory of a whole step");
    prepared = device;
  }
  const int besides = static_cast<int>(sizeof(OfBlock)) + kColumnTiles * args.input_bytes;
  args.stages = (most_shared - besides) / persistent::kStageBytes;
  if (args.stages > persistent::kMostStages) args.stages = persistent::kMostStages;
  if (args.stages < persistent::kFewestStages) {
    throw std::runtime_error("minserve: no room for a whole step's weights");
  }
  args.in_flight = persistent::in_flight<kType>(args);
  LaunchConfig(dim3(static_cast<unsigned>(persistent_decode_blocks(device))), persistent::kThreads,
               besides + args.stages * persistent::kStageBytes, on)
      .cooperative()
      .early()
      .launch(kKernel, "a whole step", args);
}

template <WeightType kType, bool kSplit, bool kBatchInvariant, bool kPieces, int kColumnTiles,
          template <class> class CellOf>
void launch_options(CellTag<CellOf>, PersistentDecodeArgs& args, int device, cudaStream_t on) {
  if constexpr (CellOf<float>::kHasOptions) {
    if (args.linear_candidate || !args.normalize_gates) {
      return launch<CellOf, true, kType, kSplit, kBatchInvariant, kPieces, kColumnTiles>(
          args, device, on);
    }
  }
  launch<CellOf, false, kType, kSplit, kBatchInvariant, kPieces, kColumnTiles>(args, device, on);
}

template <WeightType kType, bool kSplit, bool kBatchInvariant, bool kPieces>
void launch_cell(PersistentDecodeArgs& args, int device, cudaStream_t on) {
  with_cell<PersistentDecodeCells>(args.cell_kind, [&](auto cell) {
    launch_options<kType, kSplit, kBatchInvariant, kPieces, 1>(cell, args, device, on);
  });
}

// Of two column tiles. One kernel whether inputs come in pieces or not: those of so many rows
// mostly do.
void launch_column_tiles(PersistentDecodeArgs& args, int device, cudaStream_t on) {
  static_assert(kMostColumnTiles == 2);
  with_cell<PersistentDecodeCells>(args.cell_kind, [&](auto cell) {
    launch_options<WeightType::bf16, false, false, true, 2>(cell, args, device, on);
  });
}

template <WeightType kType, bool kBatchInvariant = false>
void launch_whole(PersistentDecodeArgs& args, int device, cudaStream_t on) {
  if (args.batch > kColumns) return launch_column_tiles(args, device, on);
  args.in_pieces ? launch_cell<kType, false, kBatchInvariant, true>(args, device, on)
                 : launch_cell<kType, false, kBatchInvariant, false>(args, device, on);
}
template <WeightType kType>
void launch_8_bit(PersistentDecodeArgs& args, int device, cudaStream_t on) {
  splits(kType, args.batch) ? launch_cell<kType, true, false, false>(args, device, on)
                            : launch_whole<kType>(args, device, on);
}

}  // namespace

int persistent_decode_blocks(int device) {
  return multiprocessors(device);
}

// Seen as [blocks, rows, inputs of a block], of which a TMA tile is: a block for each warp of a
// group, 8 rows, swizzled. (The last dimension's stride is shorter than the one before it, which
// drivers take as it is.)
void encode_weight_map(void* to, const void* weight, WeightType type, std::int64_t rows,
                       std::int64_t inputs, int device) {
  const DeviceGuard guard(device);
  const auto block = static_cast<cuuint64_t>(inputs_of_block(type));
  const cuuint64_t bytes = kBlockBytes / block;
  const cuuint64_t sizes[3] = {block, static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(inputs) / block};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(inputs) * bytes, kBlockBytes};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(block), kUnit, persistent::kOfGroup};
  const cuuint32_t steps[3] = {1, 1, 1};
  static_assert(sizeof(CUtensorMap) == kTensorMapBytes);
  const CUresult result = encode_tensor_map()(
      static_cast<CUtensorMap*>(to),
      bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 3,
      const_cast<void*>(weight), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw std::runtime_error("minserve: a matrix has no tensor map");
}

void persistent_decode(PersistentDecodeArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  switch (args.weights) {
    case WeightType::bf16:
      return args.batch_invariant ? launch_whole<WeightType::bf16, true>(args, device, on)
                                  : launch_whole<WeightType::bf16>(args, device, on);
    case WeightType::int8:
      return launch_8_bit<WeightType::int8>(args, device, on);
    case WeightType::fp8:
      return launch_8_bit<WeightType::fp8>(args, device, on);
  }
}

}  // namespace cuda
}  // namespace minserve
