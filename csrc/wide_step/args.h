// A decode step of some hundred sequences through a small model: how its blocks share weights, and
// what lies where in their memory; shared by host and device code.
#pragma once

#include "../cluster_step/args.h"

namespace minserve {

constexpr int kWideBlocks = 8;  // of a cluster, which have all weights of the model, a part each
constexpr int kWideGroups = 3;  // of warps that multiply; each has a stream of weights of its own

// Weights come in slabs of 64 rows by 16 inputs, as warpgroups' products read them.
constexpr int kSlabRows = 64, kSlabBytes = kSlabRows * 16 * 2;

// Slabs of a ring's stage: with many sequences there is little room.
constexpr int slabs_of_stage(int tokens) {
  return tokens > 72 ? 2 : 4;
}

// What a group of warps has of a product: so many passes of so many slabs each.
struct WideRun {
  int passes, slabs;
};

// What the products of a model are to a block.
struct WideShape {
  ClusterShape of;

  constexpr int own() const { return of.width / kWideBlocks; }
  constexpr int inner() const { return of.inner / kWideBlocks; }
  constexpr int hidden() const { return of.hidden / kWideBlocks; }
  // Steps of 16 inputs: of all channels of the residual stream, of those of one block. All products
  // have an even number of them, for stages have one, two or four, and what is left over is half of
  // four. So those of what comes out of a convolution are filled up, with zeros.
  constexpr int steps() const { return of.width / 16; }
  constexpr int own_steps() const { return own() / 16; }
  constexpr int mix_steps() const { return 2 * divided_up_by(own_steps(), 2); }

  // Passes of all groups. Of rows that read the whole stream one is a slab high; of gates, a warp's
  // eight channels take sixteen rows of each slab. Of rows that are all channels of the stream one
  // is two slabs, one after the other.
  constexpr int gate_passes() const { return inner() / 8 / 4; }
  constexpr int gate_slabs() const { return divided_up_by(of.gates, 2); }
  constexpr int up_passes() const { return divided_up_by(hidden(), kSlabRows); }
  constexpr int head_passes() const {
    return divided_up_by(of.vocabulary, kWideBlocks * kSlabRows);
  }
  constexpr int part_passes() const { return of.width / (2 * kSlabRows); }

  // The groups take turns, and all have as many, some with zeros: what one does is then no question
  // of which it is, so that addresses of products are found by the units that have one for a warp.
  static constexpr int kRuns = 5;  // of a layer
  constexpr WideRun run(int number) const {
    switch (number) {
      case 0:
        return {of.taps > 0 ? 2 * turns(part_passes()) : 0, mix_steps()};
      case 1:
        return {turns(gate_passes()), gate_slabs() * steps()};
      case 2:
        return {2 * turns(part_passes()), inner() / 16};
      case 3:
        return {turns(up_passes()), steps()};
      default:
        return {of.hidden > 0 ? 2 * turns(part_passes()) : 0, hidden() / 16};
    }
  }
  // Of the head there is often but one pass: the groups have some of each one's steps.
  constexpr int first_of_head(int group) const { return group * (steps() / 4) / kWideGroups * 4; }
  constexpr WideRun head_run(int group) const {
    return {head_passes(), first_of_head(group + 1) - first_of_head(group)};
  }
  // Of a group's stream; the last one's is the longest.
  constexpr std::int64_t slabs(int layers, int group) const {
    std::int64_t all = 0;
    for (int number = 0; number < kRuns; ++number) {
      const WideRun one = run(number);
      all += one.passes * one.slabs;
    }
    const WideRun head = head_run(group);
    return all * layers + head.passes * head.slabs;
  }
  static constexpr int turns(int passes) { return divided_up_by(passes, kWideGroups); }
};

// Where things are in a block's shared memory, in bytes, for so many sequences of its cluster.
struct WideLayout {
  // The residual stream, [width / 8, tokens, 8], this block's channels first, which stay;
  // afterwards sums over this block's part of the inputs, on their way to the blocks whose channels
  // they are.
  int stream = 0;
  int squares = 0;  // sums of the stream's squares, fp32 [width / 16, tokens]
  // All blocks' sums of this block's channels; of the head, what groups of warps tell each other.
  int inbox = 0;
  int made = 0;  // channels that this block has made, of a recurrence, an MLP, a convolution
  int ring = 0;  // slabs of weights
  // Of a block's channels, and of their squares.
  int channel_bytes = 0, square_bytes = 0;

  WideLayout() = default;
  constexpr WideLayout(const WideShape& shape, int tokens)
      : stream(0),
        squares(shape.of.width * tokens * 2),
        inbox(squares + shape.steps() * tokens * 4),
        made(inbox + inbox_bytes(shape, tokens)),
        ring(made + most_made(shape) * tokens * 2),
        channel_bytes(shape.own() * tokens * 2),
        square_bytes(shape.own_steps() * tokens * 4) {}

  // The sums that two groups have of the tokens that the third one finishes.
  static constexpr int told_bytes(int tokens) { return tokens / 8 * 2 * 128 * 16; }

 private:
  static constexpr int inbox_bytes(const WideShape& shape, int tokens) {
    const int sums = shape.of.width * tokens * 2, told = told_bytes(tokens);
    return sums > told ? sums : told;
  }
  static constexpr int most_made(const WideShape& shape) {
    int most = shape.inner() > shape.hidden() ? shape.inner() : shape.hidden();
    const int mixed = shape.of.taps > 0 ? 16 * shape.mix_steps() : 0;
    if (mixed > most) most = mixed;
    return most;
  }
};

// Found on the host: what is made of arguments otherwise takes registers that products need.
struct WideStepArgs : ClusterStepArgs {
  WideShape wide;
  WideLayout at;
};

}  // namespace minserve
