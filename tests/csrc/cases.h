// What both drivers need: options from the command line, tensors, comparison of bits and values.
#pragma once

#include "emulator/cuda.h"

#include <map>

#include "core/vec16.cuh"
#include "cells/gates.h"
#include "core/types.h"

namespace minserve {

// --name value ...; a driver's case. Lists are separated by commas.
class Options {
 public:
  Options(int count, char** given) {
    for (int i = 1; i + 1 < count; i += 2) {
      if (std::strncmp(given[i], "--", 2) != 0) usage(given[i]);
      all_[given[i] + 2] = given[i + 1];
    }
    if (count % 2 == 0) usage(given[count - 1]);
  }
  std::string text(const std::string& name, const std::string& otherwise) {
    const auto found = all_.find(name);
    const std::string value = found == all_.end() ? otherwise : found->second;
    if (found != all_.end()) all_.erase(found);
    return value;
  }
  long number(const std::string& name, long otherwise) {
    return std::stol(text(name, std::to_string(otherwise)));
  }
  std::vector<int> numbers(const std::string& name, const std::string& otherwise) {
    std::vector<int> list;
    const std::string given = text(name, otherwise);
    for (std::size_t at = 0; at < given.size();) {
      std::size_t used = 0;
      list.push_back(std::stoi(given.substr(at), &used));
      at += used + 1;
    }
    return list;
  }
  void none_left() const {
    if (!all_.empty()) usage(all_.begin()->first);
  }
  [[noreturn]] static void usage(const std::string& wrong) {
    std::fprintf(stderr, "not an option here, or without a value: %s\n", wrong.c_str());
    std::exit(2);
  }

 private:
  std::map<std::string, std::string> all_;
};

[[noreturn]] inline void differ(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

template <class T>
double value_of(T x) {
  return static_cast<double>(cuda::to_lane(x));
}
template <class T>
T rounded(double x) {
  T stored;
  cuda::from_lane(&stored, static_cast<typename cuda::ComputeType<T>::type>(x));
  return stored;
}

// NaN whose bits are those by which a word says that it is a carry (csrc/scan/lookback.cuh).
template <class T>
void make_confusing_nan(T* x) {
  std::memset(x, 0xff, sizeof *x);
  *reinterpret_cast<unsigned char*>(x) = 0xfe;
}

// A tensor on the host: rows of `stride` elements, `shift` elements past an aligned address.
template <class T>
struct Tensor {
  std::string name;
  std::size_t shift = 0;
  std::vector<T> values;
  T* device = nullptr;

  void to_device(emulator::Use use) {
    device = static_cast<T*>(
        emulator::allocate(name, values.size() * sizeof(T), use, shift * sizeof(T)));
    if (!values.empty()) std::memcpy(device, values.data(), values.size() * sizeof(T));
  }
  std::vector<T> from_device() const { return std::vector<T>(device, device + values.size()); }
};

// NaN of any bits is NaN.
template <class T>
bool same(T x, T y) {
  const double a = value_of(x), b = value_of(y);
  return std::memcmp(&x, &y, sizeof x) == 0 || (a != a && b != b);
}

template <class T>
double tolerance() {  // of rounding over thousands of steps, of which little is forgotten
  return sizeof(T) == 8 ? 1e-11 : sizeof(T) == 4 ? 5e-5 : 1e-2;
}
template <class T>
void check_value(double got, double want, const std::string& what, long row, long place) {
  const bool near =
      want != want ? got != got : std::fabs(got - want) <= tolerance<T>() * (1 + std::fabs(want));
  if (near) return;
  differ(what + ", row " + std::to_string(row) + ", place " + std::to_string(place) + ": " +
         std::to_string(got) + " instead of " + std::to_string(want));
}
template <class T>
void same_bits(const std::vector<T>& got, const std::vector<T>& want, const std::string& when) {
  if (got.size() != want.size()) differ("other sizes" + when);
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (same(got[i], want[i])) continue;
    differ("other bits" + when + ": element " + std::to_string(i) + " is " +
           std::to_string(value_of(got[i])) + ", was " + std::to_string(value_of(want[i])));
  }
}

}  // namespace minserve
