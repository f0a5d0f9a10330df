// The part of cuBLASLt that is used here, from the library that torch for CUDA has loaded: nothing
// is linked and no header is needed. The interface (cublasLt.h) is the same in CUDA 12 and 13. The
// library's own functions create descriptors, because their sizes differ.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace minserve {

// How a product is computed: kernel, tile, cluster and so on, in the library's own words.
struct BlasAlgorithm {
  std::uint64_t words[8];
};

class BlasLt {
 public:
  using Handle = void*;
  using Description = void*;
  struct Proposal {
    BlasAlgorithm algorithm;
    std::size_t workspace;
    int state;  // of no use unless 0
    float waves;
    int reserved[4];
  };

  // Names of the interface, as numbers.
  static constexpr int kNotSupported = 15;                 // CUBLAS_STATUS_NOT_SUPPORTED
  static constexpr int kComputeFloat = 68;                 // CUBLAS_COMPUTE_32F
  static constexpr int kFloat = 0, kHalf = 2, kBf16 = 14;  // cudaDataType
  static constexpr int kTransposeA = 3;                    // CUBLASLT_MATMUL_DESC_TRANSA
  static constexpr std::int32_t kTransposed = 1;           // CUBLAS_OP_T
  static constexpr int kMostWorkspace = 1;                 // CUBLASLT_MATMUL_PREF_...
  static constexpr int kLeastAlignment[] = {5, 6, 7, 8};   // of A, B, C and D
  static constexpr int kClusterShape = 8;                  // CUBLASLT_ALGO_CONFIG_...
  static constexpr std::uint16_t kNoCluster = 2;           // ..._CLUSTER_SHAPE_1x1x1

  // Null where torch has loaded none, or one that lacks what is called here.
  static const BlasLt* find() {
    static const BlasLt* const found = [] {
      void* library = nullptr;
      for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
        if (!library) library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
      }
      const BlasLt* const loaded = library ? new BlasLt(library) : nullptr;
      return loaded && loaded->complete_ ? loaded : nullptr;
    }();
    return found;
  }

  static void check(int status, const char* what) {
    if (status == 0) return;
    throw std::runtime_error(std::string("minserve: cuBLASLt: ") + what + ": status " +
                             std::to_string(status));
  }

  int (*create)(Handle*) = nullptr;
  int (*create_product)(Description*, int compute, int scale) = nullptr;
  int (*destroy_product)(Description) = nullptr;
  int (*set_product)(Description, int name, const void*, std::size_t) = nullptr;
  int (*create_matrix)(Description*, int type, std::uint64_t rows, std::uint64_t columns,
                       std::int64_t stride) = nullptr;
  int (*destroy_matrix)(Description) = nullptr;
  int (*create_preference)(Description*) = nullptr;
  int (*destroy_preference)(Description) = nullptr;
  int (*set_preference)(Description, int name, const void*, std::size_t) = nullptr;
  int (*propose)(Handle, Description product, Description a, Description b, Description c,
                 Description d, Description preference, int wanted, Proposal*, int* got) = nullptr;
  int (*set_algorithm)(BlasAlgorithm*, int name, const void*, std::size_t) = nullptr;
  int (*check_algorithm)(Handle, Description product, Description a, Description b, Description c,
                         Description d, const BlasAlgorithm*, Proposal*) = nullptr;
  int (*multiply)(Handle, Description product, const void* alpha, const void* a, Description,
                  const void* b, Description, const void* beta, const void* c, Description, void* d,
                  Description, const BlasAlgorithm*, void* workspace, std::size_t,
                  void* stream) = nullptr;

 private:
  bool complete_ = true;

  explicit BlasLt(void* library) {
    const auto get = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      complete_ = complete_ && function;
    };
    get(create, "cublasLtCreate");
    get(create_product, "cublasLtMatmulDescCreate");
    get(destroy_product, "cublasLtMatmulDescDestroy");
    get(set_product, "cublasLtMatmulDescSetAttribute");
    get(create_matrix, "cublasLtMatrixLayoutCreate");
    get(destroy_matrix, "cublasLtMatrixLayoutDestroy");
    get(create_preference, "cublasLtMatmulPreferenceCreate");
    get(destroy_preference, "cublasLtMatmulPreferenceDestroy");
    get(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    get(propose, "cublasLtMatmulAlgoGetHeuristic");
    get(set_algorithm, "cublasLtMatmulAlgoConfigSetAttribute");
    get(check_algorithm, "cublasLtMatmulAlgoCheck");
    get(multiply, "cublasLtMatmul");
  }
};

}  // namespace minserve
