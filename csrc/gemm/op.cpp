// GEMMs with their epilogues: checks, outputs, arguments. CUDA only.
#include <cstdint>

#include "../cells/traits.h"
#include "../core/operators.h"
#include "launch.h"
#include "../core/require_sm90.h"

namespace minserve {

namespace {

std::uintptr_t address(const Tensor& t) {
  return reinterpret_cast<std::uintptr_t>(t.const_data_ptr());
}

// What TMA asks of matrices, and one access to eight bfloat16 numbers of vectors.
constexpr std::uintptr_t kAlignment = 16;

// x, called x_name, [tokens, inputs], bfloat16 on a GPU, and weight [rows, inputs].
struct Maps {
  Maps(const char* op, const Tensor& x, const char* x_name) : check(op, x, x_name) {
    require_hopper(check, x);
    check.require(x.scalar_type() == ScalarType::BFloat16, x_name, " must be bfloat16, got ",
                  describe(x));
    check.require(x.dim() == 2 && x.is_contiguous(), x_name, " must be a contiguous matrix, got ",
                  describe(x));
    aligned(x, x_name);
  }
  Maps(const char* op, const Tensor& x, const char* x_name, const Tensor& weight)
      : Maps(op, x, x_name) {
    check.tensor(weight, "weight", x.scalar_type(), {-1, x.size(1)}, "[rows, inputs]");
    check.require(weight.is_contiguous(), "weight must be contiguous");
    aligned(weight, "weight");
    check.require(x.size(1) % 8 == 0 && x.size(1) > 0, "inputs must be a multiple of 8, got ",
                  x.size(1));
    check.require(weight.size(0) % 8 == 0 && weight.size(0) > 0,
                  "rows of weight must be a multiple of 8, got ", weight.size(0));
  }

  void aligned(const Tensor& t, const char* name) const {
    check.require(address(t) % kAlignment == 0, name, " must begin at a multiple of ", kAlignment,
                  " bytes");
  }

  void rows(const Tensor& vector, const char* name, const Tensor& like, std::int64_t size) const {
    check.tensor(vector, name, like.scalar_type(), {size}, "one number for each row of weight");
    check.require(vector.is_contiguous(), name, " must be contiguous");
    aligned(vector, name);
  }

  GemmArgs args(Epilogue epilogue, const Tensor& x, const Tensor& weight, std::int64_t gates,
                const MaybeTensor& bias) const {
    GemmArgs args;
    args.epilogue = epilogue;
    args.tokens = x.size(0);
    args.inputs = x.size(1);
    args.channels = weight.size(0) / gates;
    if (bias) {
      rows(*bias, "bias", weight, weight.size(0));
      args.bias = bias->const_data_ptr();
    }
    return args;
  }

  void normed(DeferredNorm& norm, const Tensor& x, const MaybeTensor& squares, double eps,
              const char* name = "squares") const {
    if (!squares) return;
    check.tensor(*squares, name, ScalarType::Float, {divided_up(x.size(1), kSquareRows), x.size(0)},
                 "[inputs / 64, tokens]");
    check.require(squares->is_contiguous(), name, " must be contiguous");
    norm.squares = static_cast<const float*>(squares->const_data_ptr());
    norm.square_blocks = static_cast<int>(squares->size(0));
    norm.width = static_cast<float>(x.size(1));
    norm.eps = static_cast<float>(eps);
  }

  void run(const GemmArgs& args, const Tensor& x, const Tensor& weight,
           std::optional<CellKind> cell = std::nullopt) const {
    if (args.tokens == 0) return;
    cuda::gemm(args, weight.const_data_ptr(), x.const_data_ptr(), cell, x.get_device_index(),
               current_stream(x));
  }

  Check check;
};

struct Norm {  // what the next norm needs of a residual stream
  Tensor scaled, squares;
};

// `squares`: they are asked for without a weight, too.
Norm prepare_norm(GemmArgs& args, const Maps& maps, const Tensor& x, const MaybeTensor& weight,
                  bool squares) {
  maps.check.require(args.channels % kSquareRows == 0, "channels must be a multiple of ",
                     kSquareRows, ", got ", args.channels);
  squares = squares || weight;
  Norm norm{torch::stable::new_empty(x, {weight ? args.tokens : 0, args.channels}),
            torch::stable::new_empty(x, {squares ? args.channels / kSquareRows : 0, args.tokens},
                                     ScalarType::Float)};
  if (weight) {
    maps.rows(*weight, "norm_weight", x, args.channels);
    args.norm_weight = weight->const_data_ptr();
    args.scaled = norm.scaled.mutable_data_ptr();
  }
  if (squares) args.squares_out = static_cast<float*>(norm.squares.mutable_data_ptr());
  return norm;
}

}  // namespace

Tensor linear_map(const Tensor& x, const MaybeTensor& squares, double eps, const Tensor& weight,
                  const MaybeTensor& bias, bool gelu, bool logits, bool batch_invariant) {
  const Maps maps("linear_map", x, "x", weight);
  maps.check.require(!(gelu && logits), "gelu and logits exclude each other");
  GemmArgs args = maps.args(gelu     ? Epilogue::gelu
                            : logits ? Epilogue::logits
                                     : Epilogue::plain,
                            x, weight, 1, bias);
  args.batch_invariant = batch_invariant;
  maps.normed(args, x, squares, eps);
  Tensor out = torch::stable::new_empty(x, {args.tokens, args.channels},
                                        logits ? ScalarType::Float : x.scalar_type());
  args.out = out.mutable_data_ptr();
  maps.run(args, x, weight);
  return out;
}

Tensor linear_swiglu(const Tensor& x, const MaybeTensor& squares, double eps, const Tensor& weight,
                     const MaybeTensor& bias, bool batch_invariant) {
  const Maps maps("linear_swiglu", x, "x", weight);
  maps.check.require(weight.size(0) % 16 == 0,
                     "weight must have as many rows of gates as of ups, a multiple of 8; got ",
                     describe(weight));
  GemmArgs args = maps.args(Epilogue::swiglu, x, weight, 2, bias);
  args.batch_invariant = batch_invariant;
  maps.normed(args, x, squares, eps);
  Tensor out = torch::stable::new_empty(x, {args.tokens, args.channels});
  args.out = out.mutable_data_ptr();
  maps.run(args, x, weight);
  return out;
}

Tensor linear_best(const Tensor& x, const MaybeTensor& squares, double eps, const Tensor& weight,
                   const MaybeTensor& bias, std::int64_t vocabulary) {
  const Maps maps("linear_best", x, "x", weight);
  ArgmaxHeadArgs args;
  args.tokens = x.size(0);
  args.inputs = x.size(1);
  args.channels = weight.size(0);
  maps.check.require(vocabulary >= 1 && vocabulary <= args.channels,
                     "vocabulary must be 1 to the rows of weight, ", args.channels, ", got ",
                     vocabulary);
  args.vocabulary = vocabulary;
  args.tiles = divided_up(args.channels, kArgmaxColumns);
  maps.normed(args, x, squares, eps);
  if (bias) {
    maps.rows(*bias, "bias", weight, args.channels);
    args.bias = bias->const_data_ptr();
  }
  Tensor best = torch::stable::new_empty(x, {args.tokens, args.tiles}, ScalarType::Long);
  args.best = static_cast<std::uint64_t*>(best.mutable_data_ptr());
  if (args.tokens > 0) {
    cuda::argmax_head(args, weight.const_data_ptr(), x.const_data_ptr(), x.get_device_index(),
                      current_stream(x));
  }
  return best;
}

std::tuple<Tensor, Tensor> linear_step(const Tensor& x, const MaybeTensor& squares, double eps,
                                       const Tensor& weight, const MaybeTensor& bias,
                                       const Tensor& state, const Tensor& slots_given,
                                       const std::string& cell, bool linear_candidate,
                                       bool normalize_gates, bool batch_invariant,
                                       const MaybeTensor& lower_bound) {
  const Maps maps("linear_step", x, "x", weight);
  const CellKind kind = require_cell<GemmCells>(maps.check, cell);
  const CellTraits& traits = traits_of(kind);
  const std::int64_t gates = traits.preactivations;
  const bool output_gate = gates > traits.inputs;
  maps.check.require(state.dim() == 2, "state must be [num_slots, channels], got ",
                     describe(state));
  maps.check.require(gates * state.size(1) == weight.size(0) && state.size(1) % 8 == 0,
                     "weight must have ", gates,
                     " rows for each channel of state, a multiple of 8; got ", describe(weight),
                     " and ", describe(state));
  check_state(maps.check, state, state.size(1));
  maps.check.require(state.stride(0) % 4 == 0 && address(state) % 16 == 0,
                     "rows of state must be aligned to 16 bytes");
  maps.check.require(!output_gate || state.size(1) % kSquareRows == 0, "channels of the cell ",
                     traits.name, " must be a multiple of ", kSquareRows, ", got ", state.size(1));
  GemmArgs args = maps.args(Epilogue::plain, x, weight, gates, bias);
  args.batch_invariant = batch_invariant;
  maps.normed(args, x, squares, eps);
  check_options(maps.check, kind, linear_candidate, normalize_gates);
  if (lower_bound) {
    maps.check.require(traits.parameters > 0, "the cell ", traits.name, " has no lower_bound");
    maps.check.tensor(*lower_bound, "lower_bound", ScalarType::Float, {args.channels},
                      "[channels]");
    maps.check.require(lower_bound->is_contiguous(), "lower_bound must be contiguous");
    maps.aligned(*lower_bound, "lower_bound");
    args.parameter = static_cast<const float*>(lower_bound->const_data_ptr());
  }
  const Tensor slots = torch::stable::contiguous(slots_given);
  const Layout layout = step_layout(maps.check, slots, state.size(0), args.tokens, args.channels);
  args.state = static_cast<float*>(state.mutable_data_ptr());
  args.state_stride = state.stride(0);
  args.num_slots = layout.num_slots;
  args.slots = layout.slots;
  args.linear_candidate = linear_candidate;
  args.normalize_gates = normalize_gates;
  Tensor out = torch::stable::new_empty(x, {args.tokens, args.channels});
  args.out = out.mutable_data_ptr();
  Tensor sums = torch::stable::new_empty(
      x, {output_gate ? args.channels / kSquareRows : 0, args.tokens}, ScalarType::Float);
  if (output_gate) args.squares_out = static_cast<float*>(sums.mutable_data_ptr());
  maps.run(args, x, weight, kind);
  return {out, sums};
}

std::tuple<Tensor, Tensor> linear_convolve(const Tensor& x, const MaybeTensor& squares, double eps,
                                           const Tensor& weight, const MaybeTensor& bias,
                                           const Tensor& filter, const MaybeTensor& filter_bias,
                                           const Tensor& state, const Tensor& slots_given,
                                           std::int64_t first) {
  const Maps maps("linear_convolve", x, "x", weight);
  GemmArgs args = maps.args(Epilogue::convolve, x, weight, 1, bias);
  maps.normed(args, x, squares, eps);
  const Check& check = maps.check;
  check.require(args.tokens <= kMostSmallBatch, "x must have at most ", kMostSmallBatch,
                " rows, got ", args.tokens);
  check.tensor(filter, "filter", x.scalar_type(), {-1, kConvolvedTaps}, "[convolved, 4]");
  check.require(filter.is_contiguous(), "filter must be contiguous");
  maps.aligned(filter, "filter");
  args.convolved = filter.size(0);
  check.require(first >= 0 && first % 4 == 0 && args.convolved % 4 == 0 &&
                    first + args.convolved <= args.channels,
                "channels from `first` on, a multiple of 4, must be rows of weight; got ", first,
                " and ", describe(filter));
  args.first_convolved = first;
  args.filter = filter.const_data_ptr();
  if (filter_bias) {
    maps.rows(*filter_bias, "filter_bias", x, args.convolved);
    args.filter_bias = filter_bias->const_data_ptr();
  }
  check.tensor(state, "state", ScalarType::Float, {-1, kConvolvedTaps - 1, args.convolved},
               "[num_slots, 3, convolved]");
  check.require(state.stride(2) == 1 && state.stride(1) % 4 == 0 && state.stride(0) % 4 == 0 &&
                    address(state) % 16 == 0,
                "rows of state must be contiguous and aligned to 16 bytes");
  const Tensor slots = torch::stable::contiguous(slots_given);
  const Layout layout = step_layout(check, slots, state.size(0), args.tokens, args.convolved);
  args.state = static_cast<float*>(state.mutable_data_ptr());
  args.state_stride = state.stride(0);
  args.tap_stride = state.stride(1);
  args.num_slots = layout.num_slots;
  args.slots = layout.slots;
  Tensor out = torch::stable::new_empty(x, {args.tokens, args.channels});
  Tensor convolved = torch::stable::new_empty(x, {args.tokens, args.convolved});
  args.out = out.mutable_data_ptr();
  args.convolved_out = convolved.mutable_data_ptr();
  maps.run(args, x, weight);
  return {out, convolved};
}

std::tuple<Tensor, Tensor> linear_residual(const Tensor& y, const Tensor& weight,
                                           const MaybeTensor& bias, const Tensor& x,
                                           const MaybeTensor& norm_weight, bool batch_invariant,
                                           const MaybeTensor& ahead, bool squares,
                                           const MaybeTensor& y_squares, double eps) {
  const Maps maps("linear_residual_", y, "y", weight);
  const bool wide = x.scalar_type() == ScalarType::Float;
  GemmArgs args =
      maps.args(wide ? Epilogue::wide_residual : Epilogue::residual, y, weight, 1, bias);
  maps.check.tensor(x, "x", wide ? ScalarType::Float : y.scalar_type(),
                    {args.tokens, args.channels}, "[tokens, channels], bfloat16 or float32");
  maps.check.require(
      !wide || (norm_weight && !batch_invariant && !ahead && args.tokens <= kMostSmallBatch),
      "x in float32 takes up to ", kMostSmallBatch,
      " rows, a norm_weight, no fixed_order and nothing ahead; got ", describe(x));
  maps.check.require(x.is_contiguous(), "x is changed in place, so it must be contiguous");
  maps.aligned(x, "x");
  maps.check.require(!overlap(x, y), "x is changed in place, so it must not share memory with y");
  args.batch_invariant = batch_invariant;
  // Rows that a step skipped have squares of 0, which eps keeps from being divided by.
  maps.check.require(!y_squares || eps > 0, "eps must be positive with y_squares, got ", eps);
  maps.normed(args, y, y_squares, eps, "y_squares");
  args.x = x.mutable_data_ptr();
  if (ahead) {
    maps.rows(*ahead, "ahead", y, args.channels);
    args.ahead = ahead->const_data_ptr();
  }
  const Norm norm = prepare_norm(args, maps, y, norm_weight, squares);
  maps.run(args, y, weight);
  return {norm.scaled, norm.squares};
}

std::tuple<Tensor, Tensor, Tensor> linear_embed(const Tensor& tokens, const Tensor& table,
                                                const MaybeTensor& norm_weight, bool squares) {
  const Maps maps("linear_embed", table, "table");
  maps.check.tensor(tokens, "tokens", ScalarType::Int, {-1}, "[tokens], int32");
  maps.check.require(tokens.is_contiguous(), "tokens must be contiguous");
  GemmArgs args;
  args.tokens = tokens.size(0);
  args.channels = table.size(1);
  Tensor x = torch::stable::new_empty(table, {args.tokens, args.channels});
  const Norm norm = prepare_norm(args, maps, table, norm_weight, squares);
  EmbedArgs embed;
  embed.tokens = args.tokens;
  embed.channels = args.channels;
  embed.vocabulary = table.size(0);
  embed.ids = static_cast<const std::int32_t*>(tokens.const_data_ptr());
  embed.table = table.const_data_ptr();
  embed.x = x.mutable_data_ptr();
  embed.norm_weight = args.norm_weight;
  embed.scaled = args.scaled;
  embed.squares = args.squares_out;
  if (args.tokens > 0) {
    cuda::embed(embed, table.get_device_index(), current_stream(table));
  }
  return {x, norm.scaled, norm.squares};
}

}  // namespace minserve
