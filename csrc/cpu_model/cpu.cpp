// The language model on the CPU: the phases of a step or of a prefill, as every thread of a team
// goes through them. Compiled once per instruction set; see core/vec.h.
#include "../core/subnormals_cpu.h"
#include "gated_recurrence.h"
#include "selection.h"
#include "ssd_inputs.h"

namespace minserve {
namespace MS_ISA {
namespace {

constexpr std::int64_t kFetchedEarly = 128 * 1024;  // bytes of weights, while waiting for others

// How a product is cut: into `across` runs of panels, each of which `down` threads share by rows.
struct Cut {
  Range rows, panels;
};
Cut cut_of(std::int64_t rows, std::int64_t rows_of_block, std::int64_t units, std::int64_t gates,
           std::int64_t thread, std::int64_t size) {
  std::int64_t best = 1, least = -1;
  const std::int64_t blocks = (rows + rows_of_block - 1) / rows_of_block;
  for (std::int64_t down = 1; down <= size && down <= blocks; ++down) {
    if (size % down) continue;
    const std::int64_t across = size / down;
    const std::int64_t longest = ((units + across - 1) / across) * ((blocks + down - 1) / down);
    if (least < 0 || longest < least) {
      least = longest;
      best = down;
    }
  }
  const Range part = part_of(units, thread / best, size / best);
  return {part_of(rows, thread % best, best), {part.begin * gates, part.end * gates}};
}

template <class Fed>
class Model {
 public:
  Model(const Work& work, ThreadTeam& team, std::int64_t thread)
      : work_(work), plan_(*work.plan), to_(work.buffers), team_(team), thread_(thread) {
    fed_stride_ = fed_row_bytes(plan_.width, kElement);
    h_stride_ = fed_row_bytes(plan_.inner, kElement);
    mlp_stride_ = fed_row_bytes(plan_.hidden, kElement);
    selected_stride_ = selected_row_bytes(plan_, kElement);
  }

  void run() {
    if (work_.hidden) {
      feed_rows(work_.hidden, plan_.width, to_.fed, fed_stride_);
      wait_before(plan_.head);
      return head(to_.fed);
    }
    embed();
    if (plan_.rnn_gates == kGruGates) return gated_layers<GruUnit<VF>>();
    if (plan_.rnn_gates == kLstmGates) return gated_layers<LstmUnit<VF>>();
    wait_before(first_matrix(work_.layers[0]));
    for (std::int64_t l = 0; l < plan_.layers; ++l) {
      if (plan_.heads > 0) {
        ssd_layer(l);
      } else if (plan_.states > 0) {
        selective_layer(l);
      } else {
        front(l);
        back(l);
      }
    }
    if (work_.logits) {
      head(norm(plan_.norm, plan_.head));
    } else if (work_.normed) {
      const Range mine = part_of(work_.rows, thread_, team_.size);
      for (std::int64_t r = mine.begin; r < mine.end; ++r) {
        float* to = work_.normed + r * plan_.width;
        norm_row(x(r), plan_.norm, plan_.width, plan_.eps,
                 [&](std::int64_t c, VF v, auto lanes) { store(to + c, v, lanes); });
      }
    }
  }

 private:
  static constexpr std::int64_t kElement = sizeof(typename Fed::element);

  float* x(std::int64_t row) const { return to_.x + row * plan_.embedding_width; }

  // --- waiting, and what is read after it

  Cut cut(const Matrix& m) const {
    // What goes from row to row stays with one thread.
    const bool by_rows = !m.in_order || !work_.layout.cu_seqlens;
    return cut_of(work_.rows, by_rows ? kRowsOfBlock<Fed> : work_.rows, m.panels() / m.gates,
                  m.gates, thread_, team_.size);
  }
  void wait_before(const Matrix& next) {
    const Cut mine = cut(next);
    std::int64_t stride;
    const char* from = next.at(mine.panels.begin, stride);
    const std::int64_t bytes =
        (mine.panels.end - mine.panels.begin) * next.steps() * next.step_bytes();
    team_.barrier(from, bytes < kFetchedEarly ? bytes : kFetchedEarly);
  }
  const Matrix& first_matrix(const LayerPlan& layer) const {
    return layer.conv.taps ? layer.pointwise : layer.gates;
  }
  const Matrix& after_back(std::int64_t l) const {
    return l + 1 < plan_.layers ? first_matrix(work_.layers[l + 1]) : plan_.head;
  }

  // --- rows into what matrices read

  template <class F>
  void each_piece(const F& f) const {  // (row, begin, end): a row's channels in runs
    constexpr std::int64_t run = 64;
    const std::int64_t width = plan_.embedding_width, runs = (width + run - 1) / run;
    const Range mine = part_of(work_.rows * runs, thread_, team_.size);
    for (std::int64_t i = mine.begin; i < mine.end; ++i) {
      const std::int64_t begin = i % runs * run;
      f(i / runs, begin, begin + run < width ? begin + run : width);
    }
  }
  void embed() const {
    each_piece([&](std::int64_t row, std::int64_t begin, std::int64_t end) {
      const std::int64_t token = work_.long_tokens
                                     ? static_cast<const std::int64_t*>(work_.tokens)[row]
                                     : static_cast<const std::int32_t*>(work_.tokens)[row];
      if (token < 0 || token >= plan_.vocab) {  // of a row that is skipped: the host has looked
        for (std::int64_t c = begin; c < end; ++c) x(row)[c] = 0.0f;
      } else if (plan_.embedding) {
        table_row(plan_, token, begin, end, x(row));
      } else {
        packed_row(plan_.head, token, begin, end, x(row));
      }
    });
  }
  void feed_rows(const float* from, std::int64_t width, char* to, std::int64_t stride) const {
    const Range mine = part_of(work_.rows, thread_, team_.size);
    for (std::int64_t r = mine.begin; r < mine.end; ++r) {
      each_vector(0, width, [&](std::int64_t c, auto lanes) {
        Fed::put(to + r * stride, c, load<VF>(from + r * width + c, lanes));
      });
    }
  }
  // RMSNorm of x for `next`; a few rows by every thread for itself.
  const char* norm(const float* weight, const Matrix& next) {
    const bool own = work_.rows <= kOwnRows;
    char* to = own ? to_.own + thread_ * kOwnRows * fed_stride_ : to_.fed;
    const Range mine = own ? Range{0, work_.rows} : part_of(work_.rows, thread_, team_.size);
    for (std::int64_t r = mine.begin; r < mine.end; ++r) {
      norm_row(x(r), weight, plan_.width, plan_.eps,
               [&](std::int64_t c, VF v, auto) { Fed::put(to + r * fed_stride_, c, v); });
    }
    if (!own) wait_before(next);
    return to;
  }

  // --- matrices

  template <class F>
  void product(const Matrix& m, const char* fed, std::int64_t stride, F&& finish) const {
    const Cut mine = cut(m);
    // What goes from row to row has all rows of its panels one after the other. Others go in even
    // parts, of whole blocks: the weights of all panels pass for each.
    constexpr std::int64_t block = kRowsOfBlock<Fed>;
    const std::int64_t all = mine.rows.end - mine.rows.begin;
    const std::int64_t most = m.in_order ? work_.rows : rows_in_cache<Fed>(stride);
    const std::int64_t parts = all <= most ? 1 : (all - 1) / most + 1;
    for (std::int64_t part = 0; part < parts; ++part) {
      const Range blocks = part_of((all + block - 1) / block, part, parts);
      const std::int64_t end = blocks.end * block < all ? blocks.end * block : all;
      multiply<Fed>(m, fed, stride, {mine.rows.begin + blocks.begin * block, mine.rows.begin + end},
                    mine.panels, finish);
    }
  }
  // row_scales: of each row, what its sums are multiplied with; null: nothing.
  void add_to_x(const Matrix& m, const char* fed, std::int64_t stride,
                const float* row_scales = nullptr) const {
    product(m, fed, stride,
            [&](std::int64_t row, std::int64_t panel, std::int64_t panels, const float* sums) {
              const Output out{m, panel, sums, row_scales ? row_scales[row] : 1.0f};
              each_output(out, panels, [&](std::int64_t c, auto lanes, VF v) {
                store(x(row) + c, load<VF>(x(row) + c, lanes) + v, lanes);
              });
            });
  }
  void head(const char* fed) const {
    product(plan_.head, fed, fed_stride_,
            [&](std::int64_t row, std::int64_t panel, std::int64_t panels, const float* sums) {
              float* to = work_.logits + row * plan_.vocab;
              each_output(Output{plan_.head, panel, sums}, panels,
                          [&](std::int64_t c, auto lanes, VF v) { store(to + c, v, lanes); });
            });
  }

  // --- the halves of a layer

  void front(std::int64_t l) {
    const LayerPlan& layer = work_.layers[l];
    if (layer.conv.taps) {
      convolve_rows(l);
      wait_before(layer.pointwise);
      add_to_x(layer.pointwise, to_.fed, fed_stride_);
      wait_before(layer.gates);
    }
    const char* fed = norm(layer.cell_norm, layer.gates);
    with_cell<CpuModelCells>(plan_.cell, [&](auto cell) { recur(cell, l, fed); });
    wait_before(layer.out.data ? layer.out : layer.mlp_norm ? layer.up : after_back(l));
  }

  void back(std::int64_t l) {
    const LayerPlan& layer = work_.layers[l];
    const Matrix& after = layer.mlp_norm ? layer.up : after_back(l);
    if (layer.out.data) {
      add_to_x(layer.out, to_.h, h_stride_, h_scales(layer, cut(layer.out).rows));
      wait_before(after);
    } else {
      add_hidden(layer);
      wait_before(after);
    }
    if (!layer.mlp_norm) return;
    const char* fed = norm(layer.mlp_norm, layer.up);
    if (plan_.activation == MlpActivation::swiglu) {
      product(layer.up, fed, fed_stride_,
              [&](std::int64_t row, std::int64_t panel, std::int64_t panels, const float* sums) {
                char* to = to_.mlp + row * mlp_stride_;
                const Output out{layer.up, panel, sums};
                for (std::int64_t p = 0; p < panels; p += 2) {
                  const std::int64_t first = (panel + p) / 2 * kPanel;
#pragma GCC unroll 4
                  for (int part = 0; part < kParts; ++part) {
                    Fed::put(to, first + part * kWidth,
                             silu(out.vector(p, part)) * out.vector(p + 1, part));
                  }
                }
              });
    } else {
      product(layer.up, fed, fed_stride_,
              [&](std::int64_t row, std::int64_t panel, std::int64_t panels, const float* sums) {
                char* to = to_.mlp + row * mlp_stride_;
                each_output(Output{layer.up, panel, sums}, panels,
                            [&](std::int64_t c, auto, VF v) { Fed::put(to, c, gelu_for<Fed>(v)); });
              });
    }
    wait_before(layer.down);
    add_to_x(layer.down, to_.mlp, mlp_stride_);
    wait_before(after_back(l));
  }

  // --- a layer of Mamba

  void selective_layer(std::int64_t l) {
    const LayerPlan& layer = work_.layers[l];
    const char* fed = norm(layer.cell_norm, layer.gates);
    product(layer.gates, fed, fed_stride_,
            SelectiveInputs<Fed>(work_, l, cut(layer.gates).rows.begin));
    wait_before(layer.select);
    const std::int64_t columns = up_to(layer.select.outputs, kPanel);
    product(layer.select, to_.h, h_stride_,
            [&](std::int64_t row, std::int64_t panel, std::int64_t panels, const float* sums) {
              each_output(Output{layer.select, panel, sums}, panels,
                          [&](std::int64_t c, auto lanes, VF v) {
                            store(to_.selection + row * columns + c, v, lanes);
                          });
            });
    wait_before(layer.dt);
    const char* selected = select(layer);
    const char* rest = selected + fed_row_bytes(plan_.rank, kElement);
    float* const wide =
        work_.half_cell ? to_.own_states + thread_ * kMostPanels * kPanel * plan_.states : nullptr;
    with_states(plan_.states, [&](auto vectors) {
      product(layer.dt, selected, selected_stride_,
              SelectiveRecurrence<decltype(vectors)::value, Fed>(work_, l, cut(layer.dt).rows.begin,
                                                                 rest, selected_stride_, wide));
    });
    wait_before(layer.out);
    add_to_x(layer.out, to_.h, h_stride_);
    wait_before(after_back(l));
  }

  // Rows of dt and B | C, behind their norms if they have some; a few rows by every thread for
  // itself.
  const char* select(const LayerPlan& layer) {
    const bool own = work_.rows <= kOwnRows;
    char* to = own ? to_.own_selected + thread_ * kOwnRows * selected_stride_ : to_.selected;
    const std::int64_t columns = up_to(layer.select.outputs, kPanel), rank = plan_.rank;
    const auto scale = [&](const float* part, std::int64_t width) {
      return plan_.selection_eps > 0 ? inverse_rms_of(part, width, plan_.selection_eps) : 1.0f;
    };
    const Range mine = own ? Range{0, work_.rows} : part_of(work_.rows, thread_, team_.size);
    for (std::int64_t r = mine.begin; r < mine.end; ++r) {
      const float* const from = to_.selection + r * columns;
      char* const row = to + r * selected_stride_;
      const float of_dt = scale(from, rank);
      each_vector(0, rank, [&](std::int64_t c, auto lanes) {
        Fed::put(row, c, load<VF>(from + c, lanes) * of_dt);
      });
      float* const rest = reinterpret_cast<float*>(row + fed_row_bytes(rank, kElement));
      for (std::int64_t at = 0; at < 2 * plan_.states; at += plan_.states) {
        const float of_part = scale(from + rank + at, plan_.states);
        each_vector(0, plan_.states, [&](std::int64_t n, auto lanes) {
          store(rest + at + n, load<VF>(from + rank + at + n, lanes) * of_part, lanes);
        });
      }
    }
    if (!own) wait_before(layer.dt);
    return to;
  }

  // --- a layer of Mamba-2

  void ssd_layer(std::int64_t l) {
    const LayerPlan& layer = work_.layers[l];
    const char* fed = norm(layer.cell_norm, layer.gates);
    product(layer.gates, fed, fed_stride_, SsdInputs(work_, l, cut(layer.gates).rows.begin));
    wait_before(layer.out);  // the recurrence before it reads no weights worth fetching
    const SsdArgs args = ssd_args(work_, l);
    const Range mine = part_of(ssd_items(args), thread_, team_.size);
    work_.ssd(args, mine.begin, mine.end);
    wait_before(layer.out);
    const char* h = gated_norm(layer);
    add_to_x(layer.out, h, h_stride_);
    wait_before(after_back(l));
  }

  // Rows of y silu(z), each group divided by its RMS, times the norm's weight; a few rows by every
  // thread for itself.
  const char* gated_norm(const LayerPlan& layer) {
    const bool own = work_.rows <= kOwnRows;
    char* to = own ? to_.own_h + thread_ * kOwnRows * h_stride_ : to_.h;
    const std::int64_t columns = up_to(plan_.inner, kPanel), width = plan_.inner / plan_.groups;
    const Range mine = own ? Range{0, work_.rows} : part_of(work_.rows, thread_, team_.size);
    for (std::int64_t r = mine.begin; r < mine.end; ++r) {
      const float* const y = to_.ssd + r * ssd_columns(plan_);
      const float* const gate = to_.gate + r * columns;
      for (std::int64_t first = 0; first < plan_.inner; first += width) {
        gated_norm_row(y + first, gate + first, layer.gated_norm + first, width, plan_.eps,
                       [&](std::int64_t c, VF v) { Fed::put(to + r * h_stride_, first + c, v); });
      }
    }
    if (!own) wait_before(layer.out);
    return to;
  }

  // --- layers of GRU or LSTM, which read the embedding and then each other's h

  template <class Unit>
  void gated_layers() {
    const std::int64_t stride = fed_row_bytes(plan_.embedding_width, kElement);
    each_piece([&](std::int64_t row, std::int64_t begin, std::int64_t end) {  // those of embed()
      each_vector(begin, end, [&](std::int64_t c, auto lanes) {
        Fed::put(to_.fed + row * stride, c, load<VF>(x(row) + c, lanes));
      });
    });
    feed_states();
    wait_before(work_.layers[0].gates);
    for (std::int64_t l = 0; l < plan_.layers; ++l) {
      gated_layer<Unit>(l, l == 0 ? stride : h_stride_);
      if (l + 1 < plan_.layers) wait_before(work_.layers[l + 1].gates);
    }
    if (!work_.logits) return;
    wait_before(plan_.head);
    head(rows_of_h(plan_.layers - 1));
  }
  char* rows_of_h(std::int64_t l) const { return l % 2 == 0 ? to_.h : to_.fed; }
  // h of all runs before step t.
  char* carried(std::int64_t l, std::int64_t t) const {
    return to_.carried + (2 * l + t % 2) * work_.run_count * h_stride_;
  }
  void feed_states() const {
    const Range mine = part_of(plan_.layers * work_.run_count, thread_, team_.size);
    for (std::int64_t i = mine.begin; i < mine.end; ++i) {
      const std::int64_t l = i / work_.run_count, r = i % work_.run_count;
      const std::int64_t slot = work_.runs[r].slot;
      const float* const h =
          static_cast<const float*>(work_.cell) + l * work_.cell_layer + slot * work_.cell_slot;
      each_vector(0, plan_.inner, [&](std::int64_t c, auto lanes) {
        Fed::put(carried(l, 0) + r * h_stride_, c,
                 slot < 0 ? splat<VF>(0.0f) : load<VF>(h + c, lanes));
      });
    }
  }

  // W x + b of all rows, then step by step U h + c of all sequences. A thread has the same units in
  // both, so nobody waits between the two.
  template <class Unit>
  void gated_layer(std::int64_t l, std::int64_t stride) {
    const LayerPlan& layer = work_.layers[l];
    const std::int64_t columns = layer.gates.panels() * kPanel;
    product(layer.gates, l == 0 ? to_.fed : rows_of_h(l - 1), stride,
            [&](std::int64_t row, std::int64_t panel, std::int64_t panels, const float* sums) {
              const Output out{layer.gates, panel, sums};
              float* const to = to_.pre + row * columns + panel * kPanel;
              for (std::int64_t p = 0; p < panels; ++p) {
#pragma GCC unroll 4
                for (int part = 0; part < kParts; ++part) {
                  store(to + p * kPanel + part * kWidth, out.vector(p, part), Full{});
                }
              }
            });
    const Cut mine = cut(layer.recurrent);
    GatedRecurrence<Fed, Unit> advance(work_, l, rows_of_h(l), h_stride_);
    advance.skip(mine.panels);
    const std::int64_t steps = work_.run_count > 0 ? work_.runs[0].length : 0;
    std::int64_t running = work_.run_count;
    for (std::int64_t t = 0; t < steps; ++t) {
      if (t > 0) wait_before(layer.recurrent);
      while (work_.runs[running - 1].length <= t) --running;
      const Range runs = work_.layout.cu_seqlens ? Range{0, running} : mine.rows;
      advance.begin(t, carried(l, t + 1));
      multiply<Fed>(layer.recurrent, carried(l, t), h_stride_, runs, mine.panels, advance);
    }
  }

  void convolve_rows(std::int64_t l) const {
    // Runs of channels of whole sequences, narrower where there are few.
    const Layout& layout = work_.layout;
    const std::int64_t sequences = layout.sequences + 1;  // the last: padding
    const std::int64_t wide = 4 * kPanel;
    const bool many = sequences * plan_.width >= 4 * wide * team_.size;
    const std::int64_t run = many ? wide : kPanel;
    const std::int64_t runs = (plan_.width + run - 1) / run;
    const Range mine = part_of(sequences * runs, thread_, team_.size);
    const auto put = [&](std::int64_t row, std::int64_t c, VF v) {
      Fed::put(to_.fed + row * fed_stride_, c, v);
    };
    for (std::int64_t i = mine.begin; i < mine.end; ++i) {
      const Sequence at = sequence_of(layout, i / runs);
      const std::int64_t begin = i % runs * run;
      const std::int64_t end = begin + run < plan_.width ? begin + run : plan_.width;
      if (at.slot >= 0) {
        convolve(plan_, work_.layers[l].conv, at, to_.x, work_.conv.at(l, at.slot), work_.conv.tap,
                 begin, end, put);
        continue;
      }
      for (std::int64_t row = at.begin; row < at.end; ++row) {
        each_vector(begin, end, [&](std::int64_t c, auto) { put(row, c, splat<VF>(0.0f)); });
      }
    }
  }

  template <template <class> class CellOf>
  void recur(CellTag<CellOf>, std::int64_t l, const char* fed) const {
    with_options<CellOf<VF>::kHasOptions>(
        plan_, [&](const auto& options) { recur_with<CellOf<VF>>(options, l, fed); });
  }
  template <class Cell, class O>
  void recur_with(const O& options, std::int64_t l, const char* fed) const {
    const Matrix& gates = work_.layers[l].gates;
    product(gates, fed, fed_stride_,
            Recurrence<Cell, O, Fed>(options, work_, l, cut(gates).rows.begin));
  }
  // What rows of h are yet to be multiplied with: RMSNorm's factor, if the cell has an output gate.
  // Null: nothing.
  const float* h_scales(const LayerPlan& layer, Range rows) const {
    if (!layer.output_norm) return nullptr;
    const std::int64_t panels = up_to(plan_.inner, kPanel) / kPanel;
    float* const scales = to_.scales + thread_ * work_.rows;
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      VF sums = splat<VF>(0.0f);
      each_vector(0, panels, [&](std::int64_t p, auto lanes) {
        sums = sums + load<VF>(to_.squares + r * panels + p, lanes);
      });
      scales[r] = inverse_rms(sum_of(sums), plan_.inner, plan_.eps);
    }
    return scales;
  }

  // x += h, where there is no projection.
  void add_hidden(const LayerPlan& layer) const {
    const float* const scales = h_scales(layer, {0, work_.rows});
    each_piece([&](std::int64_t row, std::int64_t begin, std::int64_t end) {
      const auto* h = reinterpret_cast<const typename Fed::element*>(to_.h + row * h_stride_);
      const float scale = scales ? scales[row] : 1.0f;
      each_vector(begin, end, [&](std::int64_t c, auto lanes) {
        store(x(row) + c, load<VF>(x(row) + c, lanes) + load<VF>(h + c, lanes) * scale, lanes);
      });
    });
  }

  const Work& work_;
  const Plan& plan_;
  const Buffers& to_;
  ThreadTeam& team_;
  const std::int64_t thread_;
  std::int64_t fed_stride_, h_stride_, mlp_stride_, selected_stride_;
};

}  // namespace

std::int64_t fed_bytes(bool half) {
  return half ? sizeof(FedHalf::element) : sizeof(FedFloat::element);
}

void run_cpu_model(const Work& work, ThreadTeam& team, std::int64_t thread) {
  const WithoutSubnormals as_tiles_have_them;
  if (work.plan->half) {
    Model<FedHalf>(work, team, thread).run();
  } else {
    Model<FedFloat>(work, team, thread).run();
  }
}

}  // namespace MS_ISA
}  // namespace minserve
