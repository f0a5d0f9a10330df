// How threads share a scan on the CPU, and which tensors are too large for their caches.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "args.h"

namespace minserve {

// Runs of channels that are one for each thread, or a multiple of that; no wider than allowed.
inline std::int64_t item_width(std::int64_t channels, std::int64_t parts) {
  const std::int64_t of_part = divided_up(channels, parts);
  const std::int64_t runs = divided_up(of_part, kWidestItem);
  return divided_up(divided_up(of_part, runs), kNarrowestItem) * kNarrowestItem;
}

// Bytes beyond which written lines have left the caches by the time anyone reads them.
inline std::int64_t last_level_cache() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  static const std::int64_t found = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (found > 0) return found;
#endif
  return std::int64_t{32} << 20;
}

// How threads share sequences and channels: `columns` parts of the channels times parts of the
// sequences, of which part i starts at sequence edges[i]. The last ends behind the padding tail.
struct CpuPartition {
  std::int64_t columns = 1;
  std::vector<std::int64_t> edges;
};

// Sequences cut where the rows before are nearest to equal parts. Returns the rows of the largest.
inline std::int64_t cut_sequences(const Layout& lay, std::int64_t parts,
                                  std::vector<std::int64_t>& edges) {
  const auto begin = [&](std::int64_t s) { return s > lay.sequences ? lay.tokens : lay.begin(s); };
  edges.assign(1, 0);
  std::int64_t largest = 0, before = 0;
  for (std::int64_t i = 1; i <= parts; ++i) {
    const std::int64_t wanted = lay.tokens * i / parts;
    std::int64_t low = edges.back(), high = lay.sequences + 1;  // the first that begins there or on
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (begin(middle) < wanted) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (i == parts) low = lay.sequences + 1;
    if (i < parts && low > edges.back() && wanted - begin(low - 1) < begin(low) - wanted) --low;
    edges.push_back(low);
    largest = std::max(largest, begin(low) - before);
    before = begin(low);
  }
  return largest;
}

// Rows that are whole, or cut as little as leaves no thread more than a twentieth above another
// way's work: long runs of memory are read faster than short ones.
inline CpuPartition partition_for_cpu(const Layout& lay, std::int64_t threads) {
  CpuPartition best;
  std::int64_t least = 0;
  const std::int64_t narrowest = divided_up(lay.channels, kNarrowestItem);
  for (std::int64_t columns = 1; columns <= std::min(threads, narrowest); ++columns) {
    if (threads % columns != 0) continue;
    CpuPartition other{columns, {}};
    const std::int64_t work =
        cut_sequences(lay, threads / columns, other.edges) * divided_up(narrowest, columns);
    if (columns == 1 || work < least - least / 20) {
      least = work;
      best = std::move(other);
    }
  }
  return best;
}

}  // namespace minserve
