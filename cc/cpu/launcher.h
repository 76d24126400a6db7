// Pack and unpack on XLA's thread pool.
//
// A call is cut into chunks of its bucket, not of its leaves: a chunk may hold
// part of one leaf or hundreds of small ones. The cut depends on sizes alone,
// so that statistics are summed in the same order whatever thread takes what.

#ifndef JAXZERO_CPU_LAUNCHER_H_
#define JAXZERO_CPU_LAUNCHER_H_

#include <algorithm>
#include <cfenv>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/copy.h"
#include "core/dtype.h"
#include "core/plan.h"
#include "cpu/loops.h"
#include "cpu/parallel_for.h"
#include "xla/ffi/api/ffi.h"

namespace jaxzero {

// Gradual underflow and rounding to nearest, whatever the thread is set to:
// XLA's pool flushes subnormals, its callers may not, and results must not
// depend on who takes which chunk.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

class CpuLauncher {
 public:
  using Context = ::xla::ffi::ThreadPool;

  explicit CpuLauncher(Context pool) : pool_(pool) {}

  ::xla::ffi::Error Pack(const PackCall& call) {
    ForEachPart(
        call, call.group_size, SizeOf(call.dtype),
        [&](int64_t, int64_t row, const BoundSlot& bound, int64_t begin,
            int64_t end) { PackPart(call, row, bound, begin, end); },
        [&](int64_t row, int64_t begin, int64_t end) {
          const int64_t size = SizeOf(call.dtype);
          std::memset(static_cast<char*>(call.bucket) +
                          (row * call.row_numel + begin) * size,
                      0, static_cast<size_t>((end - begin) * size));
        });
    return ::xla::ffi::Error::Success();
  }

  ::xla::ffi::Error Unpack(const UnpackCall& call) {
    // Chunks cover columns: all rows of a column are added in one place.
    const int64_t size = SizeOf(call.dtype) * call.num_rows;
    std::vector<StatsSum> partial(
        call.with_stats ? NumChunks(call.row_numel, size) : 0);
    ForEachPart(
        call, 1, size,
        [&](int64_t chunk, int64_t, const BoundSlot& bound, int64_t begin,
            int64_t end) {
          StatsSum* stats = call.with_stats ? &partial[chunk] : nullptr;
          UnpackPart(call, bound, begin, end, stats);
        },
        [](int64_t, int64_t, int64_t) {});
    call.stats[0] = call.stats[1] = 0;
    if (call.with_stats) {
      StatsSum sum;
      for (const StatsSum& part : partial) sum.Add(part);
      sum.Write(call.stats);
    }
    return ::xla::ffi::Error::Success();
  }

  ::xla::ffi::Error UnpackLeaves(const UnpackLeavesCall& call) {
    ForEachPart(
        call, call.group_size, SizeOf(call.dtype),
        [&](int64_t, int64_t row, const BoundSlot& bound, int64_t begin,
            int64_t end) { UnpackLeavesPart(call, row, bound, begin, end); },
        [](int64_t, int64_t, int64_t) {});
    call.done[0] = 0;
    return ::xla::ffi::Error::Success();
  }

 private:
  // Small enough for the caches and for many chunks per thread, large enough to
  // hide what a chunk costs by itself (below a microsecond).
  static constexpr int64_t kChunkBytes = 128 << 10;

  static int64_t ChunkNumel(int64_t size) {
    return std::max<int64_t>(kChunkBytes / size, 1024);
  }
  static int64_t NumChunks(int64_t numel, int64_t size) {
    return (numel + ChunkNumel(size) - 1) / ChunkNumel(size);
  }

  // Cuts a matrix of `num_rows` rows, `size` bytes per component, into chunks,
  // and calls part(chunk, row, slot, begin, end) and gap(row, begin, end) for
  // their columns that belong to a slot and to none.
  template <typename Call, typename Part, typename Gap>
  void ForEachPart(const Call& call, int64_t num_rows, int64_t size, Part part,
                   Gap gap) {
    const int64_t numel = num_rows * call.row_numel;
    ParallelFor(pool_, NumChunks(numel, size), [&](int64_t chunk) {
      const DefaultFloatEnvironment environment;
      int64_t begin = chunk * ChunkNumel(size);
      const int64_t end = std::min(begin + ChunkNumel(size), numel);
      while (begin < end) {
        const int64_t row = begin / call.row_numel;
        const int64_t row_start = row * call.row_numel;
        const int64_t stop = std::min(end, row_start + call.row_numel);
        ForEachColumnRange(
            call.slots, call.slots + call.num_slots, begin - row_start,
            stop - row_start,
            [&](const BoundSlot& bound, int64_t from, int64_t to) {
              part(chunk, row, bound, from, to);
            },
            [&](int64_t from, int64_t to) { gap(row, from, to); });
        begin = stop;
      }
    });
  }

  template <typename Part, typename Gap>
  static void ForEachColumnRange(const BoundSlot* slots, const BoundSlot* last,
                                 int64_t begin, int64_t end, Part part,
                                 Gap gap) {
    const BoundSlot* bound =
        std::partition_point(slots, last, [&](const BoundSlot& candidate) {
          return candidate.slot.row_offset + candidate.slot.count <= begin;
        });
    for (; bound != last && bound->slot.row_offset < end; ++bound) {
      const int64_t from = std::max(begin, bound->slot.row_offset);
      const int64_t to =
          std::min(end, bound->slot.row_offset + bound->slot.count);
      if (begin < from) gap(begin, from);
      if (from < to) part(*bound, from, to);
      begin = std::max(from, to);
    }
    if (begin < end) gap(begin, end);
  }

  // The three parts below get columns [begin, end) of a row, all of one slot.

  static void PackPart(const PackCall& call, int64_t row,
                       const BoundSlot& bound, int64_t begin, int64_t end) {
    DispatchPair(bound.dtype, call.dtype, [&](auto from, auto to) {
      using Leaf = decltype(from);
      using Wire = decltype(to);
      const Slot& slot = bound.slot;
      const auto* leaf = static_cast<const Leaf*>(bound.leaf);
      const int64_t shift = row * call.row_numel + slot.row_offset - slot.begin;
      Wire* shard = static_cast<Wire*>(call.bucket) + shift;
      using Body = CopyBody<Leaf, Wire>;
      const Body body{static_cast<typename Body::Compute>(call.pre_scale)};
      const int64_t column_shift = slot.begin - slot.row_offset;
      ForEachRun(
          PartOf(slot, row), begin + column_shift, end + column_shift,
          [&](int64_t leaf_index, int64_t component, int64_t numel) {
            CopyRun(leaf + leaf_index, shard + component, numel, body);
          },
          [&](int64_t component, int64_t numel) {
            std::memset(static_cast<void*>(shard + component), 0,
                        static_cast<size_t>(numel) * sizeof(Wire));
          });
    });
  }

  static void UnpackPart(const UnpackCall& call, const BoundSlot& bound,
                         int64_t begin, int64_t end, StatsSum* stats) {
    DispatchPair(call.dtype, bound.dtype, [&](auto from, auto to) {
      using Row = decltype(from);
      using Out = decltype(to);
      using Body = UnpackBody<Row, Out>;
      const int64_t shift = bound.slot.begin - bound.slot.row_offset;
      const Body body{static_cast<const Row*>(call.rows),
                      call.row_numel,
                      static_cast<const Out*>(bound.base),
                      static_cast<Out*>(bound.result),
                      shift,
                      Divide<typename Body::Compute>::By(call.divisor)};
      UnpackRun(body, call.num_rows, begin, end, stats);
    });
  }

  static void UnpackLeavesPart(const UnpackLeavesCall& call, int64_t row,
                               const BoundSlot& bound, int64_t begin,
                               int64_t end) {
    DispatchPair(call.dtype, bound.dtype, [&](auto from, auto to) {
      using Wire = decltype(from);
      using Leaf = decltype(to);
      const Slot& slot = bound.slot;
      const int64_t shift = row * call.row_numel + slot.row_offset - slot.begin;
      const Wire* shard = static_cast<const Wire*>(call.bucket) + shift;
      auto* leaf = static_cast<Leaf*>(bound.result);
      const int64_t column_shift = slot.begin - slot.row_offset;
      ForEachRun(
          PartOf(slot, row), begin + column_shift, end + column_shift,
          [&](int64_t leaf_index, int64_t component, int64_t numel) {
            CopyRun(shard + component, leaf + leaf_index, numel,
                    CopyBody<Wire, Leaf>{1});
          },
          [](int64_t, int64_t) {});
    });
  }

  template <typename F>
  static void DispatchPair(DType from, DType to, F f) {
    Dispatch(from, [&](auto first) {
      Dispatch(to, [&](auto second) { f(first, second); });
    });
  }

  Context pool_;
};

}  // namespace jaxzero

#endif  // JAXZERO_CPU_LAUNCHER_H_
