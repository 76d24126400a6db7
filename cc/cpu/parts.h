// The columns [begin, end) of one row, all of one slot: the piece of a call
// that a thread handles at once.

#ifndef JAXZERO_CPU_PARTS_H_
#define JAXZERO_CPU_PARTS_H_

#include <cstdint>
#include <cstring>

#include "core/copy.h"
#include "core/dtype.h"
#include "core/plan.h"
#include "cpu/loops.h"

namespace jaxzero {

// Calls `f` with values of the C++ types of both.
template <typename F>
void DispatchPair(DType from, DType to, F f) {
  Dispatch(from, [&](auto first) {
    Dispatch(to, [&](auto second) { f(first, second); });
  });
}

inline void PackPart(const PackCall& call, int64_t row, const BoundSlot& bound,
                     int64_t begin, int64_t end) {
  DispatchPair(bound.dtype, call.dtype, [&](auto from, auto to) {
    using Leaf = decltype(from);
    using Wire = decltype(to);
    using Body = CopyBody<Leaf, Wire>;
    const Body body{static_cast<typename Body::Compute>(call.pre_scale)};
    const auto* leaf = static_cast<const Leaf*>(bound.leaf);
    auto* columns = static_cast<Wire*>(call.bucket) + row * call.row_numel;
    const int64_t shift = bound.slot.row_offset - bound.slot.begin;
    ForEachRun(
        PartOf(bound.slot, row), begin - shift, end - shift,
        [&](int64_t leaf_index, int64_t component, int64_t numel) {
          CopyRun(leaf + leaf_index, columns + (component + shift), numel,
                  body);
        },
        [&](int64_t component, int64_t numel) {
          std::memset(static_cast<void*>(columns + (component + shift)), 0,
                      static_cast<size_t>(numel) * sizeof(Wire));
        });
  });
}

inline void UnpackLeavesPart(const UnpackLeavesCall& call, int64_t row,
                             const BoundSlot& bound, int64_t begin,
                             int64_t end) {
  DispatchPair(call.dtype, bound.dtype, [&](auto from, auto to) {
    using Wire = decltype(from);
    using Leaf = decltype(to);
    const CopyBody<Wire, Leaf> body{1};
    const auto* columns =
        static_cast<const Wire*>(call.bucket) + row * call.row_numel;
    auto* leaf = static_cast<Leaf*>(bound.result);
    const int64_t shift = bound.slot.row_offset - bound.slot.begin;
    ForEachRun(
        PartOf(bound.slot, row), begin - shift, end - shift,
        [&](int64_t leaf_index, int64_t component, int64_t numel) {
          CopyRun(columns + (component + shift), leaf + leaf_index, numel,
                  body);
        },
        [](int64_t, int64_t) {});
  });
}

// Adds what it stored to `stats` unless null.
inline void UnpackPart(const UnpackCall& call, const BoundSlot& bound,
                       int64_t begin, int64_t end, StatsSum* stats) {
  DispatchPair(call.dtype, bound.dtype, [&](auto from, auto to) {
    using Row = decltype(from);
    using Out = decltype(to);
    using Run = UnpackRun<Row, Out>;
    const int64_t first = begin - bound.slot.row_offset + bound.slot.begin;
    const auto* base = static_cast<const Out*>(bound.base);
    const Run run{static_cast<const Row*>(call.rows) + begin,
                  call.num_rows,
                  call.row_numel,
                  base == nullptr ? nullptr : base + first,
                  static_cast<Out*>(bound.result) + first,
                  end - begin,
                  Divide<typename Run::Compute>::By(call.divisor)};
    run(stats);
  });
}

}  // namespace jaxzero

#endif  // JAXZERO_CPU_PARTS_H_
