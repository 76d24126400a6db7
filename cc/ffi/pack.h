// jaxzero_pack: leaves to bucket.

#ifndef JAXZERO_FFI_PACK_H_
#define JAXZERO_FFI_PACK_H_

#include <cstdint>
#include <vector>

#include "core/copy.h"
#include "ffi/attributes.h"
#include "ffi/error.h"
#include "xla/ffi/api/ffi.h"

namespace jaxzero {

// Binds slots to the leaves that pack reads.
inline ffi::ErrorOr<std::vector<BoundSlot>> BindPackedLeaves(
    const std::vector<Slot>& slots, const ffi::RemainingArgs& leaves) {
  std::vector<BoundSlot> bound;
  bound.reserve(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    const Slot& slot = slots[i];
    ffi::ErrorOr<View> leaf =
        FindArgument("leaf", i, slot.operand, leaves, LeafNumel(slot));
    if (leaf.has_error()) return leaf.error();
    bound.push_back({slot, leaf->dtype, leaf->data, nullptr, nullptr});
  }
  return bound;
}

template <typename Launcher>
ffi::Error Pack(ContextOf<Launcher> context, ffi::RemainingArgs leaves,
                ffi::Result<ffi::AnyBuffer> bucket,
                ffi::Span<const int64_t> table, int64_t group_size,
                double pre_scale, int64_t format) {
  JAXZERO_RETURN_IF_ERROR(CheckFormat(format));
  const ffi::ErrorOr<View> view = ViewOf(*bucket);
  if (view.has_error()) return view.error();
  const ffi::ErrorOr<int64_t> row_numel = RowNumel("bucket", *view, group_size);
  if (row_numel.has_error()) return row_numel.error();
  const auto slots = DecodeSlots(table, group_size, *row_numel);
  if (slots.has_error()) return slots.error();
  const auto bound = BindPackedLeaves(*slots, leaves);
  if (bound.has_error()) return bound.error();
  JAXZERO_RETURN_IF_ERROR(CheckApart(*bound, view->data));
  return Launcher(context).Pack(
      PackCall{bound->data(), static_cast<int64_t>(bound->size()), view->dtype,
               view->data, group_size, *row_numel, pre_scale});
}

template <typename Launcher>
auto PackBinding() {
  return ffi::Ffi::Bind()
      .template Ctx<typename Launcher::Context>()        // threads or stream
      .RemainingArgs()                                   // leaves, then tokens
      .template Ret<ffi::AnyBuffer>()                    // bucket
      .template Attr<ffi::Span<const int64_t>>("slots")  // slot table
      .template Attr<int64_t>("group_size")              // rows of the bucket
      .template Attr<double>("pre_scale")                // before the cast
      .template Attr<int64_t>("format");                 // see kFormat
}

}  // namespace jaxzero

#endif  // JAXZERO_FFI_PACK_H_
