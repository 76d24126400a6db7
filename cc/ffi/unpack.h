// jaxzero_unpack: rows to shards.

#ifndef JAXZERO_FFI_UNPACK_H_
#define JAXZERO_FFI_UNPACK_H_

#include <cstdint>
#include <vector>

#include "core/copy.h"
#include "ffi/attributes.h"
#include "ffi/error.h"
#include "xla/ffi/api/ffi.h"

namespace jaxzero {

// Binds slots to the results that unpack writes and the bases that it adds.
inline ffi::ErrorOr<std::vector<BoundSlot>> BindShards(
    const std::vector<Slot>& slots, const ffi::RemainingArgs& bases,
    const ffi::RemainingRets& results, size_t num_shards) {
  std::vector<BoundSlot> bound;
  bound.reserve(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    const Slot& slot = slots[i];
    ffi::ErrorOr<View> shard = FindResult("shard", i, slot.operand, results,
                                          num_shards, ShardNumel(slot));
    if (shard.has_error()) return shard.error();
    ffi::ErrorOr<const void*> base = FindBase(slot, i, bases, *shard);
    if (base.has_error()) return base.error();
    bound.push_back({slot, shard->dtype, nullptr,
                     slot.accumulate != 0 ? *base : nullptr, shard->data});
  }
  return bound;
}

// A row may be written in place if every element stays where it is.
inline ffi::Error CheckInPlace(const std::vector<BoundSlot>& bound,
                               const View& rows, int64_t num_rows) {
  for (size_t i = 0; i < bound.size(); ++i) {
    const Slot& slot = bound[i].slot;
    if (slot.count == 0 || bound[i].result != rows.data) continue;
    if (num_rows != 1 || slot.row_offset != slot.begin ||
        bound[i].dtype != rows.dtype) {
      return Invalid("slot ", i, ": shard ", slot.operand,
                     " shares memory with the rows, expected one row of ",
                     Name(bound[i].dtype), " and row_offset ", slot.begin,
                     ", found ", num_rows, " of ", Name(rows.dtype), " and ",
                     slot.row_offset);
    }
  }
  return ffi::Error::Success();
}

// A base may share memory with its own result, which reads it first.
inline ffi::Error CheckBases(const std::vector<BoundSlot>& bound) {
  for (size_t i = 0; i < bound.size(); ++i) {
    const void* base = bound[i].base;
    if (base == nullptr || base == bound[i].result) continue;
    for (size_t other = 0; other < bound.size(); ++other) {
      if (bound[other].slot.count > 0 && bound[other].result == base) {
        return Invalid("slot ", i, ": its base shares memory with the result ",
                       "of slot ", other, ", expected its own");
      }
    }
  }
  return ffi::Error::Success();
}

template <typename Launcher>
ffi::Error Unpack(ContextOf<Launcher> context, ffi::AnyBuffer rows,
                  ffi::RemainingArgs bases, ffi::RemainingRets results,
                  ffi::Span<const int64_t> table, int64_t num_rows,
                  double divisor, int64_t with_stats, int64_t format) {
  JAXZERO_RETURN_IF_ERROR(CheckFormat(format));
  const ffi::ErrorOr<View> view = ViewOf(rows);
  if (view.has_error()) return view.error();
  const ffi::ErrorOr<int64_t> row_numel = RowNumel("rows", *view, num_rows);
  if (row_numel.has_error()) return row_numel.error();
  const ffi::ErrorOr<float*> stats = FindToken("stats", results, 2);
  if (stats.has_error()) return stats.error();
  const auto slots = DecodeSlots(table, 1, *row_numel);
  if (slots.has_error()) return slots.error();
  const auto bound = BindShards(*slots, bases, results, results.size() - 1);
  if (bound.has_error()) return bound.error();
  JAXZERO_RETURN_IF_ERROR(CheckInPlace(*bound, *view, num_rows));
  JAXZERO_RETURN_IF_ERROR(CheckBases(*bound));
  return Launcher(context).Unpack(UnpackCall{
      bound->data(), static_cast<int64_t>(bound->size()), view->dtype,
      view->data, num_rows, *row_numel, divisor, with_stats != 0, *stats});
}

template <typename Launcher>
auto UnpackBinding() {
  return ffi::Ffi::Bind()
      .template Ctx<typename Launcher::Context>()        // threads or stream
      .template Arg<ffi::AnyBuffer>()                    // rows
      .RemainingArgs()                                   // bases
      .RemainingRets()                                   // shards, then stats
      .template Attr<ffi::Span<const int64_t>>("slots")  // slot table
      .template Attr<int64_t>("num_rows")                // rows to add
      .template Attr<double>("divisor")                  // after the sum
      .template Attr<int64_t>("with_stats")              // 0 leaves stats zero
      .template Attr<int64_t>("format");                 // see kFormat
}

}  // namespace jaxzero

#endif  // JAXZERO_FFI_UNPACK_H_
