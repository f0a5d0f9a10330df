// All layers of a step, as one block of a cluster computes its part of them.
#pragma once

#include "../common/gelu.cuh"
#include "../minlstm/cell.h"
#include "../mingru/cell.h"
#include "stream.cuh"

namespace minserve {
namespace cuda {
namespace wide {

template <template <class> class CellOf, int kTokens, int kSlabs>
class Step : Stream<kTokens> {
  using Base = Stream<kTokens>;
  using Base::args_, Base::at_, Base::memory_, Base::rank_, Base::sequences_, Base::shape_;
  using Base::kEights, Base::lane;
  using Given = Products<kTokens, kSlabs>;
  // Of many sequences sums leave slab by slab, and what is needed besides sums is asked for behind
  // the products, in whose time there are no registers for it.
  static constexpr bool kApart = kTokens > 40;
  static constexpr int kGates = CellOf<float>::kInputs, kGateSlabs = divided_up_by(kGates, 2);

 public:
  // `scales`: what the last norm divides by, of every token, as the sender finds it.
  __device__ __forceinline__ Step(const WideStepArgs& args, unsigned char* memory,
                                  Ring (&rings)[kWideGroups], Arrivals& arrivals,
                                  const Sequences<kTokens>& sequences, const float* scales,
                                  int group)
      : Base(args, memory, arrivals, sequences),
        scales_(scales),
        group_(group),
        given_(Stages<kSlabs>(args, rings[group_],
                              memory + at_.ring + group_ * args.stages * (kSlabs * kSlabBytes))) {}

  // One loop whose body has every kind of product once: each is short and takes its time from
  // fetching instructions, which are still there the next time.
  __device__ __forceinline__ void run() {
    this->look_up();
    const bool convolved = shape_.of.taps > 0;
    Kind kind = convolved ? Kind::mix : Kind::gates;
    if (!convolved) this->send_channels();
    int number = 0;  // of the layer
#pragma unroll 1
    while (kind != Kind::head) {
      const ClusterLayer& layer = args_.layer[number];
      const void* bias = layer.mix_bias;
      int inputs = shape_.mix_steps();
      if (kind == Kind::mix) {
        this->convolve(number);
      } else {
        kind == Kind::gates ? multiply_gates(layer, number) : multiply_up(layer);
        fence_for_copies();
        this->meet_all();  // what has been made is all there, and the stream is read
        bias = kind == Kind::gates ? layer.out_bias : layer.down_bias;
        inputs = (kind == Kind::gates ? shape_.inner() : shape_.hidden()) / 16;
      }
      multiply_made(inputs, kind == Kind::mix);
      if (kind == Kind::mix) {
        kind = Kind::gates;
      } else if (kind == Kind::gates && shape_.of.hidden > 0) {
        kind = Kind::up;
      } else {
        kind = ++number == args_.layers ? Kind::head : convolved ? Kind::mix : Kind::gates;
      }
      this->add(bias, kind != Kind::mix);
      if (kind != Kind::mix) this->send_channels(kind != Kind::head || has_head());
    }
    if (has_head()) {
      multiply_head();
    } else {
      this->await_scales();
      this->leave_hidden(scales_, first_token());
    }
  }

 private:
  // What a product is of: a convolution's results; the residual stream, of which the others are.
  enum class Kind { mix, gates, up, head };

  __device__ __forceinline__ static int warp_of_group() { return threadIdx.x / 32 % 4; }
  __device__ __forceinline__ static int row() { return lane() / 4; }
  __device__ __forceinline__ static int first_of_pair() { return lane() % 4 * 2; }
  // Of the cluster, among all.
  __device__ __forceinline__ static int first_token() {
    return static_cast<int>(blockIdx.x) / kWideBlocks * kTokens;
  }

  __device__ __forceinline__ bool has_head() const { return shape_.of.vocabulary > 0; }

  // All channels of the stream, from what this block has made.
  __device__ __forceinline__ void multiply_made(int steps, bool after_sums) {
    const std::uint32_t inputs = place_in_units(memory_ + at_.made);
#pragma unroll 1
    for (int turn = 0; turn < WideShape::turns(shape_.part_passes()); ++turn) {
      const int pass = turn * kWideGroups + group_, first = (pass * 4 + warp_of_group()) * 2;
      const bool real = pass < shape_.part_passes();
      const auto there = [](int) {};
      typename Given::template Sums<1> sums[2];
      Given::template clear<1>(sums[0]);
      if (!kApart) Given::template clear<1>(sums[1]);
      given_.template give<1>(steps, inputs, there, [] {}, sums[0]);
      if constexpr (kApart) {
        // Sums of one slab are on their way while the other is multiplied.
        given_.finish();
        sums_are_there(sums[0][0]);
        if (after_sums && turn == 0) this->await_readers();
        Given::template clear<1>(sums[1]);
        given_.template give<1>(
            steps, inputs, there,
            [&] {
              if (real) this->send_sums(first, sums[0]);
            },
            sums[1]);
        given_.finish();
        sums_are_there(sums[1][0]);
        if (real) this->send_sums(first + 1, sums[1]);
      } else {
        given_.template give<1>(steps, inputs, there, [] {}, sums[1]);
        given_.finish();
        typename Given::template Sums<2> both;
#pragma unroll
        for (int slab = 0; slab < 2; ++slab) {
          sums_are_there(sums[slab][0]);
#pragma unroll
          for (int i = 0; i < kTokens / 2; ++i) both[slab][i] = sums[slab][0][i];
        }
        if (after_sums && turn == 0) this->await_readers();
        if (real) this->send_sums(first, both);
      }
    }
  }

  // Rows of this block's, from all channels of the stream, and what is made of them: finish(pass,
  // sums). What that needs besides, look(pass) asks for: before the products, or where their sums
  // leave no room for more under way, behind them.
  template <int kHigh, class Look, class Finish>
  __device__ __forceinline__ void multiply_rows(int passes, Look look, Finish finish) {
    const std::uint32_t inputs = place_in_units(memory_ + at_.stream);
    auto await = this->stream_await();
#pragma unroll 1
    for (int turn = 0; turn < WideShape::turns(passes); ++turn) {
      const int pass = turn * kWideGroups + group_;
      const bool real = pass < passes;
      typename Given::template Sums<kHigh> sums;
      Given::template clear<kHigh>(sums);
      if (!kApart && real) look(pass);
      given_.template give<kHigh>(shape_.steps(), inputs, [&](int n) { await(n); }, [] {}, sums);
      if (kApart && real) look(pass);
      if (turn == 0) this->await_scales();
      given_.finish();
#pragma unroll
      for (auto& slab : sums) sums_are_there(slab);
      if (real) finish(pass, sums);
    }
    this->stream_is_read();
  }
  __device__ __forceinline__ void multiply_gates(const ClusterLayer& layer, int number) {
    const auto channel_of = [&](int pass) {  // of this block's
      return (pass * 4 + warp_of_group()) * 8 + row();
    };
    Before before;
    multiply_rows<kGateSlabs>(
        shape_.gate_passes(),
        [&](int pass) { look_before(layer, number, channel_of(pass), before); },
        [&](int pass, const float (&sums)[kGateSlabs][kTokens / 2]) {
          if (args_.linear_candidate || !args_.normalize_gates) {
            const AnyOptions options{args_.linear_candidate, args_.normalize_gates};
            step(options, number, channel_of(pass), before, sums);
          } else {
            step(UsualOptions{}, number, channel_of(pass), before, sums);
          }
        });
  }
  __device__ __forceinline__ void multiply_up(const ClusterLayer& layer) {
    multiply_rows<1>(
        shape_.up_passes(), [](int) {},
        [&](int pass, const float (&sums)[1][kTokens / 2]) {
          lift(layer.up_bias, (pass * 4 + warp_of_group()) * 16 + 2 * row(), sums[0]);
        });
  }

  // The head: the groups have some of the inputs each, and finish every third eight of tokens.
  __device__ __forceinline__ void multiply_head() {
    const int first = shape_.first_of_head(group_);
    const std::uint32_t inputs = place_in_units(memory_ + at_.stream) + first * 2 * kTokens;
    auto await = this->stream_await();
#pragma unroll 1
    for (int pass = 0; pass < shape_.head_passes(); ++pass) {
      typename Given::template Sums<1> sums;
      Given::template clear<1>(sums);
      if (pass > 0) this->meet_all();  // what was told before has been heard
      given_.template give<1>(
          shape_.first_of_head(group_ + 1) - first, inputs, [&](int n) { await(first + n); }, [] {},
          sums);
      if (pass == 0) this->await_scales();
      given_.finish();
      sums_are_there(sums[0]);
      share_out(sums[0]);
      const int sixteen = pass * 4 + warp_of_group();
      leave((sixteen * kWideBlocks + rank_) * 16 + 2 * row(), sums[0]);
    }
  }
  // The groups tell each other their sums of the others' tokens, and add up those of their own, in
  // the same order whoever does.
  __device__ __forceinline__ void share_out(float (&sums)[kTokens / 2]) {
    const auto told = [&](int eight, int from) {
      auto* all = reinterpret_cast<float4*>(memory_ + at_.inbox);
      return all + (eight * 2 + (from + 2 - eight % kWideGroups) % kWideGroups) * 128 +
             threadIdx.x % 128;
    };
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const float* own = sums + 4 * j;
      if (!finishes(j)) *told(j, group_) = {own[0], own[1], own[2], own[3]};
    }
    this->meet_all();
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      if (!finishes(j)) continue;
      float* four = sums + 4 * j;
      float4 all = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int from = 0; from < kWideGroups; ++from) {
        float4 of = {four[0], four[1], four[2], four[3]};
        if (from != j % kWideGroups) of = *told(j, from);
        all.x += of.x, all.y += of.y, all.z += of.z, all.w += of.w;
      }
      four[0] = all.x, four[1] = all.y, four[2] = all.z, four[3] = all.w;
    }
  }
  __device__ __forceinline__ bool finishes(int eight) const {
    return eight % kWideGroups == group_;
  }
  __device__ __forceinline__ float2 scales_of(int eight) const {
    return *reinterpret_cast<const float2*>(scales_ + eight * 8 + first_of_pair());
  }

  // What a step needs besides its sums.
  struct Before {
    float shift[2 * kGateSlabs];
    float state[kEights][2];
  };
  __device__ __forceinline__ float* states_of(int number, int channel) const {
    return args_.cell + number * args_.cell_layer_stride + rank_ * shape_.inner() + channel;
  }
  // Where two neighbouring sequences' states are, or negative. Read again each time: what is made
  // of them would take the registers of a product.
  __device__ __forceinline__ void rows_of(int eight, long long (&rows)[2]) const {
    asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];"
                 : "=l"(rows[0]), "=l"(rows[1])
                 : "r"(shared_address(sequences_.rows + eight * 8 + first_of_pair())));
  }
  __device__ __forceinline__ void look_before(const ClusterLayer& layer, int number, int channel,
                                              Before& before) const {
#pragma unroll
    for (int gate = 0; gate < 2 * kGateSlabs; ++gate) {
      before.shift[gate] = 0.0f;
      if (layer.gates_bias && gate < kGates) {
        before.shift[gate] = to_lane(static_cast<const bf16*>(
            layer.gates_bias)[gate * shape_.of.inner + rank_ * shape_.inner() + channel]);
      }
    }
    const float* states = states_of(number, channel);
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      long long rows[2];
      rows_of(j, rows);
      before.state[j][0] = rows[0] < 0 ? 0.0f : states[rows[0]];
      before.state[j][1] = rows[1] < 0 ? 0.0f : states[rows[1]];
    }
  }

  // The recurrence's step.
  template <class Options>
  __device__ __forceinline__ void step(const Options& options, int number, int channel,
                                       const Before& before,
                                       const float (&sums)[kGateSlabs][kTokens / 2]) {
    float* states = states_of(number, channel);
    unsigned char* made = memory_ + at_.made;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const float2 scales = scales_of(j);
      long long rows[2];
      rows_of(j, rows);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = i == 0 ? scales.x : scales.y;
        float in[2 * kGateSlabs];  // rounded as pre-activations in memory are, two at once
#pragma unroll
        for (int slab = 0; slab < kGateSlabs; ++slab) {
          const float* of = sums[slab] + 4 * j + i;
          const float2 both =
              whole::numbers(rounded(of[0] * scale + before.shift[2 * slab],
                                     of[2] * scale + before.shift[2 * slab + 1], bf16{}));
          in[2 * slab] = both.x, in[2 * slab + 1] = both.y;
        }
        const float h = whole::stepped<CellOf>(
            options, reinterpret_cast<const float (&)[kGates]>(in), before.state[j][i]);
        if (rows[i] >= 0) states[rows[i]] = h;
        *reinterpret_cast<unsigned short*>(
            made + place_of<kTokens>(channel, j * 8 + first_of_pair() + i)) =
            static_cast<unsigned short>(rounded(rows[i] >= 0 ? h : 0.0f, 0.0f, bf16{}));
      }
    }
  }

  // An MLP's upper half: two neighbouring channels of this block's.
  __device__ __forceinline__ void lift(const void* bias, int channel,
                                       const float (&sums)[kTokens / 2]) {
    if (channel >= shape_.hidden()) return;
    float2 shift = {0.0f, 0.0f};
    if (bias) shift = whole::load_pair(bias, rank_ * shape_.hidden() + channel);
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const float2 scales = scales_of(j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = i == 0 ? scales.x : scales.y;
        *reinterpret_cast<unsigned*>(memory_ + at_.made +
                                     place_of<kTokens>(channel, j * 8 + first_of_pair() + i)) =
            rounded(gelu(sums[4 * j + i] * scale + shift.x),
                    gelu(sums[4 * j + 2 + i] * scale + shift.y), bf16{});
      }
    }
  }

  // The logits of two neighbouring tokens of the vocabulary.
  __device__ __forceinline__ void leave(int channel, const float (&sums)[kTokens / 2]) {
    const int vocabulary = shape_.of.vocabulary;
    const auto* bias = static_cast<const bf16*>(args_.head_bias);
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      if (channel + high >= vocabulary) return;
      const float shift = bias ? to_lane(bias[channel + high]) : 0.0f;
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        if (!finishes(j)) continue;
        const float2 scales = scales_of(j);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int token = first_token() + j * 8 + first_of_pair() + i;
          if (token < args_.batch) {
            args_.logits[static_cast<std::int64_t>(token) * vocabulary + channel + high] =
                sums[4 * j + 2 * high + i] * (i == 0 ? scales.x : scales.y) + shift;
          }
        }
      }
    }
  }

  const float* const scales_;
  const int group_;  // of warps, the same in all lanes
  Given given_;
};

}  // namespace wide
}  // namespace cuda
}  // namespace minserve
