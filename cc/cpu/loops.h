// The bodies of core/copy.h in loops over runs of components that lie together.

#ifndef JAXZERO_CPU_LOOPS_H_
#define JAXZERO_CPU_LOOPS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/copy.h"
#include "core/dtype.h"

namespace jaxzero {

template <typename From, typename To>
void CopyRun(const From* __restrict from, To* __restrict to, int64_t numel,
             CopyBody<From, To> body) {
  if constexpr (std::is_same_v<From, To>) {
    if (body.scale == 1) {
      std::memcpy(to, from, static_cast<size_t>(numel) * sizeof(To));
      return;
    }
  }
  for (int64_t i = 0; i < numel; ++i) to[i] = body(from[i]);
}

// Sum of squares and finiteness of values, in the same order on every run.
class StatsSum {
 public:
  template <typename Compute>
  void Add(const Compute* values, int64_t numel) {
    // Independent lanes, which compilers vectorise without reordering.
    int64_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        AddTo(lane, values[i + lane]);
      }
    }
    for (int64_t lane = 0; i < numel; ++i, ++lane) AddTo(lane, values[i]);
  }

  void Add(const StatsSum& other) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      squares_[lane] += other.squares_[lane];
      zeros_[lane] += other.zeros_[lane];
    }
  }

  // Writes [norm, 1 if all values were finite else 0].
  void Write(float* stats) const {
    double squares = 0;
    double zeros = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      squares += squares_[lane];
      zeros += zeros_[lane];
    }
    stats[0] = static_cast<float>(std::sqrt(squares));
    stats[1] = zeros == 0 ? 1.0f : 0.0f;
  }

 private:
  static constexpr int64_t kLanes = 8;

  template <typename Compute>
  void AddTo(int64_t lane, Compute value) {
    const auto wide = static_cast<double>(value);
    squares_[lane] += wide * wide;
    zeros_[lane] += wide - wide;  // NaN unless the value is finite
  }

  double squares_[kLanes] = {};
  double zeros_[kLanes] = {};
};

// Unpacks the indices [begin, end); adds what it stored to `stats` unless null.
template <typename Row, typename Out>
void UnpackRun(UnpackBody<Row, Out> body, int64_t num_rows, int64_t begin,
               int64_t end, StatsSum* stats) {
  using Compute = typename UnpackBody<Row, Out>::Compute;
  constexpr int64_t kBlock = 512;  // stays in the first-level cache
  Compute sums[kBlock];
  for (; begin < end; begin += kBlock) {
    const int64_t numel = std::min(kBlock, end - begin);
    for (int64_t i = 0; i < numel; ++i) sums[i] = body.Load(0, begin + i);
    for (int64_t row = 1; row < num_rows; ++row) {
      for (int64_t i = 0; i < numel; ++i) sums[i] += body.Load(row, begin + i);
    }
    // The result may be the same memory as the base, at the same index.
#pragma GCC ivdep
    for (int64_t i = 0; i < numel; ++i) {
      sums[i] = body.Store(sums[i], begin + i);
    }
    if (stats != nullptr) stats->Add(sums, numel);
  }
}

}  // namespace jaxzero

#endif  // JAXZERO_CPU_LOOPS_H_
