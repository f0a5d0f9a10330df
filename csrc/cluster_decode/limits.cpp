// Which models a cluster decode step takes, for builds of every kind.
#include "../core/operators.h"
#include "args.h"

namespace minserve {

std::string cluster_decode_refusal(std::int64_t layers, std::int64_t width, std::int64_t inner,
                                   std::int64_t hidden, std::int64_t taps) {
  constexpr std::int64_t kUnit = 16 * kClusterBlocks, kMostChannels = 1 << 16;
  std::ostringstream why;
  if (layers < 1 || layers > kMostClusterLayers) {
    why << "a model must have 1 to " << kMostClusterLayers << " layers, got " << layers;
  } else if (width < 1 || width % kClusterWidthUnit != 0 || width > kMostClusterWidth) {
    why << "d_model must be a multiple of " << kClusterWidthUnit << " up to " << kMostClusterWidth
        << ", got " << width;
  } else if (inner < 1 || inner % kUnit != 0 || inner > kMostChannels || hidden < 0 ||
             hidden % kUnit != 0 || hidden > kMostChannels) {
    why << "inner and hidden channels must be multiples of " << kUnit << ", got " << inner
        << " and " << hidden;
  } else if (taps != 0 && (taps < 2 || taps > kMostClusterTaps)) {
    why << "a convolution must have 2 to " << kMostClusterTaps << " taps, got " << taps;
  }
  return why.str();
}

}  // namespace minserve
