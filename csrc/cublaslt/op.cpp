// Products of the library by a given one of its algorithms: out [tokens, rows] (+)= x weight^T.
//
// To the library, whose matrices are stored by columns, the weight is the transpose of A, x is B
// and out is C and D.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "../core/operators.h"
#include "dynamic_api.h"

namespace minserve {

namespace {

constexpr int kProposals = 8;
constexpr std::uint32_t kAlignment = 16;  // bytes, of what is multiplied and written

const BlasLt& library() {
  const BlasLt* found = BlasLt::find();
  if (!found) throw std::runtime_error("minserve: this torch has loaded no cuBLASLt");
  return *found;
}

// Of a device, for as long as the process lives.
BlasLt::Handle handle(int device) {
  static std::mutex mutex;
  static std::map<int, BlasLt::Handle> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  BlasLt::Handle& own = handles[device];
  if (!own) BlasLt::check(library().create(&own), "cublasLtCreate");
  return own;
}

class Described {
 public:
  using Destroy = int (*)(BlasLt::Description);
  template <class Create, class... Args>
  Described(Create create, Destroy destroy, const Args&... args) : destroy_(destroy) {
    BlasLt::check(create(&own_, args...), "description");
  }
  ~Described() { destroy_(own_); }
  Described(const Described&) = delete;
  Described& operator=(const Described&) = delete;
  operator BlasLt::Description() const { return own_; }

 private:
  BlasLt::Description own_ = nullptr;
  Destroy destroy_;
};

struct Product {
  Product(const char* op, const Tensor& x, const Tensor& weight, const Tensor& out)
      : check(op, x, "x"), type(check.dtype(false)) {
    check.require(!x.is_cpu(), "needs a GPU, got ", describe(x));
    check.require(type == Dtype::bf16 || type == Dtype::f16, "x must be bfloat16 or float16, got ",
                  describe(x));
    check.tensor(x, "x", x.scalar_type(), {-1, -1}, "[tokens, inputs]");
    check.tensor(weight, "weight", x.scalar_type(), {-1, x.size(1)}, "[rows, inputs]");
    single = out.scalar_type() == ScalarType::Float;
    check.tensor(out, "out", single ? ScalarType::Float : x.scalar_type(),
                 {x.size(0), weight.size(0)}, "[tokens, rows]");
    check.require(x.size(1) > 0 && weight.size(0) > 0, "weight must not be empty, got ",
                  describe(weight));
    placed(x, "x");
    placed(weight, "weight");
    placed(out, "out");
  }

  void placed(const Tensor& t, const char* name) const {
    check.require(t.is_contiguous() &&
                      reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % kAlignment == 0 &&
                      t.size(t.dim() - 1) * bytes_of(t) % kAlignment == 0,
                  name, " must be contiguous, and it and its rows must begin at multiples of ",
                  kAlignment, " bytes, got ", describe(t));
  }

  Check check;
  Dtype type;
  bool single;  // out is float32
};

// The same for the library.
struct Descriptions {
  Descriptions(const BlasLt& lt, const Product& product, const Tensor& x, const Tensor& weight)
      : type(product.type == Dtype::bf16 ? BlasLt::kBf16 : BlasLt::kHalf),
        tokens(static_cast<std::uint64_t>(x.size(0))),
        inputs(static_cast<std::uint64_t>(x.size(1))),
        rows(static_cast<std::uint64_t>(weight.size(0))),
        operation(lt.create_product, lt.destroy_product, BlasLt::kComputeFloat, BlasLt::kFloat),
        a(lt.create_matrix, lt.destroy_matrix, type, inputs, rows, x.size(1)),
        b(lt.create_matrix, lt.destroy_matrix, type, inputs, tokens, x.size(1)),
        d(lt.create_matrix, lt.destroy_matrix, product.single ? BlasLt::kFloat : type, rows, tokens,
          weight.size(0)) {
    BlasLt::check(lt.set_product(operation, BlasLt::kTransposeA, &BlasLt::kTransposed,
                                 sizeof BlasLt::kTransposed),
                  "transposed weight");
  }

  int type;
  std::uint64_t tokens, inputs, rows;
  Described operation, a, b, d;
};

}  // namespace

Tensor product_algorithms(const Tensor& x, const Tensor& weight, const Tensor& out) {
  const Product product("product_algorithms", x, weight, out);
  std::vector<BlasAlgorithm> found;
  if (BlasLt::find() && x.size(0) > 0) {
    const BlasLt& lt = library();
    const int device = x.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    const Descriptions all(lt, product, x, weight);
    const Described preference(lt.create_preference, lt.destroy_preference);
    const std::size_t workspace = 0;
    BlasLt::check(
        lt.set_preference(preference, BlasLt::kMostWorkspace, &workspace, sizeof workspace),
        "workspace");
    for (const int matrix : BlasLt::kLeastAlignment) {
      BlasLt::check(lt.set_preference(preference, matrix, &kAlignment, sizeof kAlignment),
                    "alignment");
    }
    std::vector<BlasLt::Proposal> proposals(kProposals);
    int got = 0;
    const int status = lt.propose(handle(device), all.operation, all.a, all.b, all.d, all.d,
                                  preference, kProposals, proposals.data(), &got);
    if (status != BlasLt::kNotSupported) BlasLt::check(status, "cublasLtMatmulAlgoGetHeuristic");
    for (int n = 0; n < got; ++n) {
      if (proposals[n].state != 0) continue;
      BlasAlgorithm algorithm = proposals[n].algorithm;
      found.push_back(algorithm);
      // The same without a cluster of blocks, which the library seldom proposes and which is often
      // quicker where there are fewer tiles than multiprocessors.
      BlasLt::Proposal checked;
      if (lt.set_algorithm(&algorithm, BlasLt::kClusterShape, &BlasLt::kNoCluster,
                           sizeof BlasLt::kNoCluster) == 0 &&
          lt.check_algorithm(handle(device), all.operation, all.a, all.b, all.d, all.d, &algorithm,
                             &checked) == 0 &&
          checked.workspace == 0 && std::memcmp(&algorithm, &found.back(), sizeof algorithm) != 0) {
        found.push_back(algorithm);
      }
    }
  }
  constexpr std::int64_t kWords = sizeof(BlasAlgorithm) / sizeof(std::uint64_t);
  const Tensor result =
      torch::stable::empty({static_cast<std::int64_t>(found.size()), kWords}, ScalarType::Long,
                           std::nullopt, torch::headeronly::DeviceType::CPU);
  std::copy(found.begin(), found.end(), static_cast<BlasAlgorithm*>(result.mutable_data_ptr()));
  return result;
}

void product(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& algorithm,
             bool add) {
  const Product product("product_", x, weight, out);
  product.check.require(algorithm.is_cpu() && algorithm.scalar_type() == ScalarType::Long &&
                            algorithm.dim() == 1 && algorithm.is_contiguous() &&
                            algorithm.numel() * 8 == sizeof(BlasAlgorithm),
                        "algorithm must be a row of product_algorithms, got ", describe(algorithm));
  product.check.require(!overlap(out, x) && !overlap(out, weight),
                        "out must not share memory with x or weight");
  if (x.size(0) == 0) return;
  const BlasLt& lt = library();
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Descriptions all(lt, product, x, weight);
  const float alpha = 1.0f, beta = add ? 1.0f : 0.0f;
  void* const to = out.mutable_data_ptr();
  BlasLt::check(lt.multiply(handle(device), all.operation, &alpha, weight.const_data_ptr(), all.a,
                            x.const_data_ptr(), all.b, &beta, to, all.d, to, all.d,
                            static_cast<const BlasAlgorithm*>(algorithm.const_data_ptr()), nullptr,
                            0, current_stream(x)),
                "cublasLtMatmul");
}

}  // namespace minserve
