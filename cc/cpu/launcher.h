// Pack and unpack on XLA's thread pool.
//
// A call is cut into chunks of its bucket, not of its leaves: a chunk may hold
// part of one leaf or hundreds of small ones. The cut depends on sizes alone,
// so that statistics are summed in the same order whatever thread takes what.

#ifndef JAXZERO_CPU_LAUNCHER_H_
#define JAXZERO_CPU_LAUNCHER_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/copy.h"
#include "core/dtype.h"
#include "core/plan.h"
#include "cpu/float_environment.h"
#include "cpu/huge_pages.h"
#include "cpu/loops.h"
#include "cpu/parallel_for.h"
#include "cpu/parts.h"
#include "xla/ffi/api/ffi.h"

namespace jaxzero {

class CpuLauncher {
 public:
  using Context = ::xla::ffi::ThreadPool;

  explicit CpuLauncher(Context pool) : pool_(pool) {}

  ::xla::ffi::Error Pack(const PackCall& call) {
    const int64_t size = SizeOf(call.dtype);
    PreferHugePages(call.bucket, call.group_size * call.row_numel * size);
    ForEachPart(
        call, call.group_size, size,
        [&](int64_t, int64_t row, const BoundSlot& bound, int64_t begin,
            int64_t end) { PackPart(call, row, bound, begin, end); },
        [&](int64_t row, int64_t begin, int64_t end) {
          std::memset(static_cast<char*>(call.bucket) +
                          (row * call.row_numel + begin) * size,
                      0, static_cast<size_t>((end - begin) * size));
        });
    return ::xla::ffi::Error::Success();
  }

  ::xla::ffi::Error Unpack(const UnpackCall& call) {
    for (int64_t i = 0; i < call.num_slots; ++i) {
      const BoundSlot& bound = call.slots[i];
      PreferHugePages(bound.result,
                      ShardNumel(bound.slot) * SizeOf(bound.dtype));
    }
    // Chunks are columns: all rows of a column are added in one place.
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
    for (int64_t i = 0; i < call.num_slots; ++i) {
      const BoundSlot& bound = call.slots[i];
      PreferHugePages(bound.result,
                      LeafNumel(bound.slot) * SizeOf(bound.dtype));
    }
    ForEachPart(
        call, call.group_size, SizeOf(call.dtype),
        [&](int64_t, int64_t row, const BoundSlot& bound, int64_t begin,
            int64_t end) { UnpackLeavesPart(call, row, bound, begin, end); },
        [](int64_t, int64_t, int64_t) {});
    call.done[0] = 0;
    return ::xla::ffi::Error::Success();
  }

 private:
  // Small enough to share work evenly, large enough to hide what a chunk costs
  // by itself (below a microsecond).
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

  Context pool_;
};

}  // namespace jaxzero

#endif  // JAXZERO_CPU_LAUNCHER_H_
