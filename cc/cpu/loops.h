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
    double squares[kLanes] = {};
    double zeros[kLanes] = {};
    const auto add = [&](int64_t lane, Compute value) {
      const auto wide = static_cast<double>(value);
      squares[lane] += wide * wide;
      if constexpr (kSquareMayOverflow<Compute>) zeros[lane] += wide - wide;
    };
    int64_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) add(lane, values[i + lane]);
    }
    for (int64_t lane = 0; i < numel; ++i, ++lane) add(lane, values[i]);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      squares_ += squares[lane];
      zeros_ += kSquareMayOverflow<Compute> ? zeros[lane]
                                            : squares[lane] - squares[lane];
    }
  }

  void Add(const StatsSum& other) {
    squares_ += other.squares_;
    zeros_ += other.zeros_;
  }

  // Writes [norm, 1 if all values were finite else 0].
  void Write(float* stats) const {
    stats[0] = static_cast<float>(std::sqrt(squares_));
    stats[1] = zeros_ == 0 ? 1.0f : 0.0f;
  }

 private:
  static constexpr int64_t kLanes = 8;

  // If not, the squares themselves show whether all values are finite.
  template <typename Compute>
  static constexpr bool kSquareMayOverflow = std::is_same_v<Compute, double>;

  double squares_ = 0;
  double zeros_ = 0;  // x - x of values: NaN if one is not finite
};

// Components that lie together in a row and in the shard.
template <typename Row, typename Out>
struct UnpackRun {
  using Compute = ComputeType<Row, Out>;

  const Row* rows;  // in the first row
  int64_t num_rows;
  int64_t row_numel;  // from a row to the next
  const Out* base;    // null if nothing is added
  Out* out;           // may be the same memory as `base`, or as a single row
  int64_t numel;
  Divide<Compute> divide;

  // Adds what it stored to `stats` unless null.
  void operator()(StatsSum* stats) const {
    WithConstant(base != nullptr, [&](auto adds) {
      WithConstant(divide.multiplies, [&](auto multiplies) {
        Compute sums[kBlock];
        for (int64_t begin = 0; begin < numel; begin += kBlock) {
          const int64_t size = std::min(kBlock, numel - begin);
          Sum(begin, size, sums);
          Store<adds, multiplies>(begin, size, sums);
          if (stats != nullptr) stats->Add(sums, size);
        }
      });
    });
  }

 private:
  static constexpr int64_t kBlock = 512;  // stays in the first-level cache

  void Sum(int64_t begin, int64_t size, Compute* sums) const {
    for (int64_t row = 0; row < num_rows; ++row) {
      const Row* values = rows + (row * row_numel + begin);
      if (row == 0) {
        for (int64_t i = 0; i < size; ++i)
          sums[i] = Convert<Compute>(values[i]);
      } else {
        for (int64_t i = 0; i < size; ++i)
          sums[i] += Convert<Compute>(values[i]);
      }
    }
  }

  // Replaces the sums by what it stored for them.
  template <bool kAdds, bool kMultiplies>
  void Store(int64_t begin, int64_t size, Compute* __restrict sums) const {
    const Divide<Compute> by{divide.number, kMultiplies};
    const Out* bases = kAdds ? base + begin : nullptr;
    Out* outs = out + begin;
    // `base` and `out` are disjoint or the same, so that iterations never meet.
#pragma GCC ivdep
    for (int64_t i = 0; i < size; ++i) {
      const Out stored = Finish(sums[i], by, kAdds, kAdds ? bases[i] : Out{});
      outs[i] = stored;
      sums[i] = Convert<Compute>(stored);
    }
  }

  // Lifts a condition out of the loops in `f`, which are then vectorised.
  template <typename F>
  static void WithConstant(bool condition, F f) {
    condition ? f(std::true_type{}) : f(std::false_type{});
  }
};

}  // namespace jaxzero

#endif  // JAXZERO_CPU_LOOPS_H_
