// Which rows of a packed batch a scan on the CPU reads, and in which order sequences stand.
#pragma once

#include <algorithm>
#include <vector>

#include "args.h"

namespace minserve {

struct GatedRuns {
  std::vector<GatedRun> runs;  // the longest first, so that those that go on are in front
  std::vector<SkippedRows> skipped;
};

inline GatedRuns gated_runs(const Layout& layout) {
  GatedRuns found;
  for (std::int64_t s = 0; s <= layout.sequences; ++s) {
    const std::int64_t begin = layout.begin(s), end = layout.end(s), slot = layout.slot(s);
    if (begin == end) continue;
    if (slot < 0) {
      found.skipped.push_back({begin, end});
    } else {
      found.runs.push_back({begin, end - begin, slot});
    }
  }
  std::stable_sort(found.runs.begin(), found.runs.end(),
                   [](const GatedRun& a, const GatedRun& b) { return a.length > b.length; });
  return found;
}

}  // namespace minserve
