#include "plan_check.h"

#include <cstring>

#include "../cells/traits.h"

namespace minserve {

namespace {

constexpr std::int64_t kVersion = 6;
constexpr std::int64_t kMost = std::int64_t{1} << 32;       // of any width: products of two fit
constexpr std::int64_t kMostHeads = std::int64_t{1} << 20;  // and of a head's channels

class Reader {
 public:
  Reader(const Check& check, const Tensor& weights, const Tensor& plan)
      : check_(check),
        base_(static_cast<const char*>(weights.const_data_ptr())),
        bytes_(weights.size(0)),
        next_(static_cast<const std::int64_t*>(plan.const_data_ptr())),
        left_(plan.size(0)) {}

  std::int64_t number(std::int64_t least, std::int64_t most) {
    check_.require(left_ > 0, "plan ends too early");
    const std::int64_t value = *next_;
    check_.require(least <= value && value <= most, "plan holds ", value, " where ", least, " to ",
                   most, " are allowed");
    ++next_;
    --left_;
    return value;
  }
  double real() {
    const std::int64_t bits = number(INT64_MIN, INT64_MAX);
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  // Where `bytes` bytes begin; null for offset -1.
  const char* place(std::int64_t bytes) {
    const std::int64_t offset = number(-1, bytes_);
    if (offset < 0) return nullptr;
    check_.require(offset % 64 == 0 && bytes <= bytes_ - offset, "plan names ", bytes, " bytes at ",
                   offset, " of weights with ", bytes_);
    return base_ + offset;
  }
  const float* vector(std::int64_t count) {
    return reinterpret_cast<const float*>(place(4 * up_to(count, kPanel)));
  }
  const float* needed(std::int64_t count) {
    const float* at = vector(count);
    check_.require(at, "plan leaves out a vector of ", count);
    return at;
  }
  Kind stored(bool half) {
    const auto kind = static_cast<Kind>(number(0, 2));
    check_.require(kind == Kind::i8 || (kind == Kind::bf16) == half,
                   "plan has matrices of another type than the model");
    return kind;
  }
  CellKind cell() {
    const auto kind = static_cast<CellKind>(number(0, kCells - 1));
    require_cell<CpuModelCells>(check_, traits_of(kind).name);
    return kind;
  }
  Convolution convolution(std::int64_t taps, std::int64_t channels) {
    Convolution conv;
    conv.taps = vector(taps * up_to(channels, kPanel));
    conv.bias = vector(channels);
    conv.channels = channels;
    check_.require((taps > 0) == (conv.taps != nullptr) && (taps > 0 || !conv.bias),
                   "plan must have all of a convolution or nothing");
    return conv;
  }
  // Four numbers: type, weights, scale, bias.
  Matrix matrix(bool half, std::int64_t inputs, std::int64_t outputs, std::int64_t gates) {
    Matrix m;
    m.inputs = inputs;
    m.outputs = outputs;
    m.gates = gates;
    m.stored = stored(half);
    m.data = place(m.bytes());
    m.scale = vector(m.panels() * kPanel);
    m.bias = vector(m.panels() * kPanel);
    check_.require((m.stored == Kind::i8) == (m.scale != nullptr) || !m.data,
                   "plan must give int8 matrices, and only them, a scale");
    return m;
  }
  void end() const { check_.require(left_ == 0, "plan has ", left_, " numbers too many"); }
  const Check& check() const { return check_; }

 private:
  const Check& check_;
  const char* base_;
  std::int64_t bytes_;
  const std::int64_t* next_;
  std::int64_t left_;
};

constexpr std::int64_t kRnnLayers = -1;  // where others have their number of states

bool has_output_gate(CellKind cell) {
  return traits_of(cell).preactivations > traits_of(cell).inputs;
}

// A layer of Mamba-2.
LayerPlan read_ssd_layer(Reader& from, const Plan& plan) {
  LayerPlan layer;
  layer.cell_norm = from.needed(plan.width);
  layer.gates =
      from.matrix(plan.half, plan.width, up_to(plan.inner, kPanel) + ssd_columns(plan), 1);
  layer.gates.in_order = true;
  layer.gate_convs[0] = from.convolution(plan.gate_taps, ssd_convolved(plan));
  layer.A = from.needed(plan.heads);
  layer.D = from.needed(plan.heads);
  layer.dt_bias = from.needed(plan.heads);
  layer.gated_norm = from.needed(plan.inner);
  layer.out = from.matrix(plan.half, plan.inner, plan.width, 1);
  from.check().require(layer.gates.data && layer.out.data, "plan leaves out a matrix");
  return layer;
}

// A layer of Mamba.
LayerPlan read_selective_layer(Reader& from, const Plan& plan) {
  const std::int64_t width = plan.width, inner = plan.inner;
  LayerPlan layer;
  layer.cell_norm = from.needed(width);
  layer.gates = from.matrix(plan.half, width, inner, 2);
  layer.gates.in_order = true;
  layer.gate_convs[0] = from.convolution(plan.gate_taps, inner);
  layer.select = from.matrix(plan.half, inner, plan.rank + 2 * plan.states, 1);
  layer.dt = from.matrix(plan.half, plan.rank, inner, 1);
  layer.dt.in_order = true;
  layer.A = from.needed(inner * plan.states);
  layer.D = from.needed(inner);
  layer.out = from.matrix(plan.half, inner, width, 1);
  from.check().require(layer.gates.data && layer.select.data && layer.dt.data && layer.out.data,
                       "plan leaves out a matrix");
  return layer;
}

// A layer of GRU or LSTM.
LayerPlan read_rnn_layer(Reader& from, const Plan& plan, bool first) {
  LayerPlan layer;
  layer.gates =
      from.matrix(plan.half, first ? plan.embedding_width : plan.inner, plan.inner, plan.rnn_gates);
  layer.recurrent = from.matrix(plan.half, plan.inner, plan.inner, plan.rnn_gates);
  layer.gates.in_order = layer.recurrent.in_order = true;
  from.check().require(layer.gates.data && layer.recurrent.data, "plan leaves out a matrix");
  return layer;
}

LayerPlan read_layer(Reader& from, const Plan& plan, std::int64_t l) {
  if (plan.rnn_gates > 0) return read_rnn_layer(from, plan, l == 0);
  if (plan.heads > 0) return read_ssd_layer(from, plan);
  if (plan.states > 0) return read_selective_layer(from, plan);
  const Check& check = from.check();
  const std::int64_t width = plan.width, inner = plan.inner;
  const CellTraits& cell = traits_of(plan.cell);
  LayerPlan layer;
  layer.conv = from.convolution(plan.taps, width);
  layer.pointwise = from.matrix(plan.half, width, width, 1);
  check.require((plan.taps > 0) == (layer.pointwise.data != nullptr),
                "plan must have all of a convolution or nothing");
  layer.cell_norm = from.needed(width);
  layer.gates = from.matrix(plan.half, width, inner, cell.preactivations);
  layer.gates.in_order = true;
  check.require(layer.gates.data, "plan leaves out a gate matrix");
  if (has_output_gate(plan.cell)) {
    for (Convolution& conv : layer.gate_convs) conv = from.convolution(plan.gate_taps, inner);
    layer.output_norm = from.needed(inner);
  }
  if (cell.parameters > 0) layer.parameter = from.needed(inner);
  layer.out = from.matrix(plan.half, inner, width, 1);
  check.require(layer.out.data || inner == width, "plan leaves out an out projection");
  layer.mlp_norm = from.vector(width);
  layer.up =
      from.matrix(plan.half, width, plan.hidden, plan.activation == MlpActivation::swiglu ? 2 : 1);
  layer.down = from.matrix(plan.half, plan.hidden, width, 1);
  check.require((plan.hidden > 0) == (layer.mlp_norm != nullptr) &&
                    (plan.hidden > 0) == (layer.up.data != nullptr) &&
                    (plan.hidden > 0) == (layer.down.data != nullptr),
                "plan must have all of an MLP or nothing");
  return layer;
}

// What the recurrence of Mamba-2 is, beside its states and heads.
void read_heads(Reader& from, Plan& p) {
  const Check& check = from.check();
  check.require(p.states <= kMostSsdStates, "plan has ", p.states, " states; allowed: 1 to ",
                kMostSsdStates);
  p.head_dim = from.number(1, kMostHeads);
  p.groups = from.number(1, p.heads);
  check.require(p.heads % p.groups == 0, "plan has ", p.groups, " groups of ", p.heads, " heads");
  p.least_dt = static_cast<float>(from.real());
  p.most_dt = static_cast<float>(from.real());
}

}  // namespace

PackedModel read_plan(const Check& check, const Tensor& weights, const Tensor& plan) {
  check.tensor(weights, "weights", ScalarType::Byte, {-1}, "[bytes]");
  check.tensor(plan, "plan", ScalarType::Long, {-1}, "[numbers]");
  check.require(weights.is_cpu(), "weights must be on the CPU, got ", describe(weights));
  check.require(weights.is_contiguous() && plan.is_contiguous(),
                "weights and plan must be contiguous");
  check.require(reinterpret_cast<std::uintptr_t>(weights.const_data_ptr()) % 64 == 0,
                "weights must begin at a multiple of 64 bytes");
  Reader from(check, weights, plan);
  PackedModel model;
  Plan& p = model.plan;
  from.number(kVersion, kVersion);
  p.states = from.number(kRnnLayers, kMostStates);
  const bool rnn = p.states == kRnnLayers;  // GRU or LSTM
  if (rnn) {
    p.states = 0;
    p.rnn_gates = from.number(kGruGates, kLstmGates);
  }
  const bool selective = p.states > 0;  // Mamba or Mamba-2
  if (selective) p.heads = from.number(0, kMostHeads);
  if (p.heads > 0) {
    read_heads(from, p);
  } else if (selective) {
    p.rank = from.number(1, kMost);
    p.selection_eps = static_cast<float>(from.real());
  } else if (!rnn) {
    p.cell = from.cell();
    p.linear_candidate = from.number(0, 1);
    p.normalize_gates = from.number(0, 1);
  }
  p.half = from.number(0, 1);
  p.eps = static_cast<float>(from.real());
  p.layers = from.number(1, 4096);
  p.width = from.number(1, kMost);
  p.inner = from.number(1, kMost);
  p.embedding_width = rnn ? from.number(1, kMost) : p.width;
  check.require(!rnn || p.inner == p.width, "plan has ", p.inner, " units of a width of ", p.width);
  check.require(p.heads == 0 || p.inner == p.heads * p.head_dim, "plan has ", p.inner,
                " channels of ", p.heads, " heads of ", p.head_dim);
  p.hidden = from.number(0, selective || rnn ? 0 : kMost);
  p.vocab = from.number(1, kMost);
  p.taps = from.number(0, selective || rnn ? 0 : 256);
  p.activation = static_cast<MlpActivation>(from.number(0, 1));
  p.gate_taps = from.number(selective ? 2 : 0,
                            selective || (!rnn && has_output_gate(p.cell)) ? kMostGateTaps : 0);
  check.require(p.gate_taps != 1, "plan has convolutions of one tap between gates and recurrence");
  p.embedding_stored = from.stored(p.half);
  const std::int64_t element = p.embedding_stored == Kind::f32    ? 4
                               : p.embedding_stored == Kind::bf16 ? 2
                                                                  : 1;
  p.embedding = from.place(p.vocab * p.embedding_width * element);
  check.require(p.embedding || p.embedding_width == p.width,
                "plan leaves out an embedding of another width than the head's");
  p.embedding_scale = from.vector(p.vocab);
  check.require(!p.embedding || (p.embedding_stored == Kind::i8) == (p.embedding_scale != nullptr),
                "plan must give an int8 embedding, and only it, a scale");
  if (!rnn) p.norm = from.needed(p.width);
  p.head = from.matrix(p.half, p.width, p.vocab, 1);
  check.require(p.head.data, "plan leaves out the head");
  model.layers.reserve(static_cast<std::size_t>(p.layers));
  for (std::int64_t l = 0; l < p.layers; ++l) model.layers.push_back(read_layer(from, p, l));
  from.end();
  model.weight_bytes = weights.size(0);
  return model;
}

}  // namespace minserve
