// jaxzero_unpack_leaves: bucket to leaves, the inverse of jaxzero_pack.

#ifndef JAXZERO_FFI_UNPACK_LEAVES_H_
#define JAXZERO_FFI_UNPACK_LEAVES_H_

#include <cstdint>
#include <vector>

#include "core/copy.h"
#include "ffi/attributes.h"
#include "ffi/error.h"
#include "xla/ffi/api/ffi.h"

namespace jaxzero {

// Binds slots to the leaves that unpack_leaves writes.
inline ffi::ErrorOr<std::vector<BoundSlot>> BindUnpackedLeaves(
    const std::vector<Slot>& slots, const ffi::RemainingArgs& bases,
    const ffi::RemainingRets& results, size_t num_leaves) {
  std::vector<BoundSlot> bound;
  bound.reserve(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    const Slot& slot = slots[i];
    ffi::ErrorOr<View> leaf = FindResult("leaf", i, slot.operand, results,
                                         num_leaves, LeafNumel(slot));
    if (leaf.has_error()) return leaf.error();
    ffi::ErrorOr<const void*> base = FindBase(slot, i, bases, *leaf);
    if (base.has_error()) return base.error();
    bound.push_back({slot, leaf->dtype, nullptr, nullptr, leaf->data});
  }
  return bound;
}

template <typename Launcher>
ffi::Error UnpackLeaves(ContextOf<Launcher> context, ffi::AnyBuffer bucket,
                        ffi::RemainingArgs bases, ffi::RemainingRets results,
                        ffi::Span<const int64_t> table, int64_t group_size,
                        int64_t format) {
  JAXZERO_RETURN_IF_ERROR(CheckFormat(format));
  const ffi::ErrorOr<View> view = ViewOf(bucket);
  if (view.has_error()) return view.error();
  const ffi::ErrorOr<int64_t> row_numel = RowNumel("bucket", *view, group_size);
  if (row_numel.has_error()) return row_numel.error();
  const ffi::ErrorOr<float*> done = FindToken("done", results, 1);
  if (done.has_error()) return done.error();
  const auto slots = DecodeSlots(table, group_size, *row_numel);
  if (slots.has_error()) return slots.error();
  const auto bound =
      BindUnpackedLeaves(*slots, bases, results, results.size() - 1);
  if (bound.has_error()) return bound.error();
  JAXZERO_RETURN_IF_ERROR(CheckApart(*bound, view->data));
  return Launcher(context).UnpackLeaves(
      UnpackLeavesCall{bound->data(), static_cast<int64_t>(bound->size()),
                       view->dtype, view->data, group_size, *row_numel, *done});
}

template <typename Launcher>
auto UnpackLeavesBinding() {
  return ffi::Ffi::Bind()
      .template Ctx<typename Launcher::Context>()        // threads or stream
      .template Arg<ffi::AnyBuffer>()                    // bucket
      .RemainingArgs()                                   // bases
      .RemainingRets()                                   // leaves, then done
      .template Attr<ffi::Span<const int64_t>>("slots")  // slot table
      .template Attr<int64_t>("group_size")              // rows of the bucket
      .template Attr<int64_t>("format");                 // see kFormat
}

}  // namespace jaxzero

#endif  // JAXZERO_FFI_UNPACK_LEAVES_H_
