// Buffers as components, and slot tables as structs that fit their buffers.

#ifndef JAXZERO_FFI_ATTRIBUTES_H_
#define JAXZERO_FFI_ATTRIBUTES_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/copy.h"
#include "core/dtype.h"
#include "core/plan.h"
#include "ffi/error.h"
#include "xla/ffi/api/ffi.h"

namespace jaxzero {

namespace ffi = ::xla::ffi;

// A buffer seen as real components.
struct View {
  DType dtype;
  int64_t numel;
  void* data;
};

inline ffi::ErrorOr<View> ViewOf(const ffi::AnyBuffer& buffer) {
  const auto numel = static_cast<int64_t>(buffer.element_count());
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      return View{DType::kF32, numel, buffer.untyped_data()};
    case ffi::DataType::BF16:
      return View{DType::kBF16, numel, buffer.untyped_data()};
    case ffi::DataType::F16:
      return View{DType::kF16, numel, buffer.untyped_data()};
    case ffi::DataType::F64:
      return View{DType::kF64, numel, buffer.untyped_data()};
    case ffi::DataType::C64:
      return View{DType::kF32, 2 * numel, buffer.untyped_data()};
    case ffi::DataType::C128:
      return View{DType::kF64, 2 * numel, buffer.untyped_data()};
    default:
      return Invalid("found XLA element type ",
                     static_cast<int>(buffer.element_type()),
                     ", expected F32, BF16, F16, F64, C64 or C128");
  }
}

// Checks that a program means by its attributes what this build does.
inline ffi::Error CheckFormat(int64_t format) {
  if (format == kFormat) return ffi::Error::Success();
  return Invalid("format: found ", format, ", expected ", kFormat,
                 ": another version of jaxzero made this program; trace and "
                 "export it again with this one");
}

// The product of sizes, or -1 if it overflows.
template <typename... Sizes>
int64_t Product(Sizes... sizes) {
  int64_t product = 1;
  bool overflows = false;
  ((overflows |= __builtin_mul_overflow(product, sizes, &product)), ...);
  return overflows ? -1 : product;
}

// Checks what a slot says about itself; its buffers are checked where they are
// bound. `row_end` is where the slots before it end.
inline ffi::Error CheckSlot(const Slot& slot, size_t index, int64_t group_size,
                            int64_t row_numel, int64_t row_end) {
  for (const int64_t size : {slot.outer, slot.length, slot.inner, slot.chunk,
                             slot.begin, slot.count}) {
    if (size < 0) {
      return Invalid("slot ", index, ": found size ", size,
                     ", expected none below zero");
    }
  }
  if (Product(slot.outer, slot.length, slot.inner) < 0 ||
      Product(slot.outer, slot.chunk, slot.inner) < 0) {
    return Invalid("slot ", index, ": sizes exceed 64 bits");
  }
  if (Product(slot.chunk, group_size) < slot.length) {
    return Invalid("slot ", index, ": ", group_size, " ranks of chunk ",
                   slot.chunk, " cannot hold length ", slot.length);
  }
  const int64_t shard_numel = ShardNumel(slot);
  if (slot.begin > shard_numel || slot.count > shard_numel - slot.begin) {
    return Invalid("slot ", index, ": found components [", slot.begin, ", ",
                   slot.begin, " + ", slot.count, "), expected at most ",
                   shard_numel, " of the shard");
  }
  if (slot.row_offset < row_end) {
    return Invalid("slot ", index, ": starts at ", slot.row_offset,
                   " in the row, expected ", row_end, " or more");
  }
  if (slot.row_offset > row_numel || slot.count > row_numel - slot.row_offset) {
    return Invalid("slot ", index, ": ends at ", slot.row_offset, " + ",
                   slot.count, " in the row, expected at most ", row_numel);
  }
  return ffi::Error::Success();
}

// Decodes a slot table, row-major with the columns of kSlotColumns.
inline ffi::ErrorOr<std::vector<Slot>> DecodeSlots(
    ffi::Span<const int64_t> table, int64_t group_size, int64_t row_numel) {
  if (table.size() % kNumSlotColumns != 0) {
    return Invalid("slots: found ", table.size(), " numbers, expected rows of ",
                   kNumSlotColumns);
  }
  std::vector<Slot> slots(table.size() / kNumSlotColumns);
  int64_t row_end = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    std::memcpy(&slots[i], table.begin() + i * kNumSlotColumns, sizeof(Slot));
    JAXZERO_RETURN_IF_ERROR(
        CheckSlot(slots[i], i, group_size, row_numel, row_end));
    row_end = slots[i].row_offset + slots[i].count;
  }
  return slots;
}

// More than there are ranks; few enough that sizes of columns fit 64 bits, also
// where rows are empty.
inline constexpr int64_t kMaxRows = int64_t{1} << 32;

// The length of the rows of a matrix of `num_rows` rows.
inline ffi::ErrorOr<int64_t> RowNumel(const char* name, const View& matrix,
                                      int64_t num_rows) {
  if (num_rows < 1 || num_rows > kMaxRows) {
    return Invalid(name, ": found ", num_rows,
                   " rows, expected at least 1 and at most ", kMaxRows);
  }
  if (matrix.numel % num_rows != 0) {
    return Invalid(name, ": found ", matrix.numel, " components, expected ",
                   num_rows, " equal rows");
  }
  return matrix.numel / num_rows;
}

// A view of `buffer`, which slot number `slot` calls `name` and expects to have
// `numel` components.
inline ffi::ErrorOr<View> CheckedView(const char* name, size_t slot,
                                      const ffi::AnyBuffer& buffer,
                                      int64_t numel) {
  ffi::ErrorOr<View> view = ViewOf(buffer);
  if (view.has_error()) {
    return Invalid("slot ", slot, ": ", name, ": ", view.error().message());
  }
  if (view->numel != numel) {
    return Invalid("slot ", slot, ": ", name, " has ", view->numel,
                   " components, expected ", numel);
  }
  return view;
}

// An index of a slot that must be below `size`.
inline ffi::Error CheckIndex(const char* name, size_t slot, int64_t index,
                             size_t size) {
  if (index < 0 || index >= static_cast<int64_t>(size)) {
    return Invalid("slot ", slot, ": found ", name, " number ", index,
                   ", expected one of ", size);
  }
  return ffi::Error::Success();
}

inline ffi::ErrorOr<View> FindArgument(const char* name, size_t slot,
                                       int64_t index,
                                       const ffi::RemainingArgs& arguments,
                                       int64_t numel) {
  JAXZERO_RETURN_IF_ERROR(CheckIndex(name, slot, index, arguments.size()));
  auto buffer = arguments.get<ffi::AnyBuffer>(static_cast<size_t>(index));
  if (buffer.has_error()) return buffer.error();
  return CheckedView(name, slot, *buffer, numel);
}

inline ffi::ErrorOr<View> FindResult(const char* name, size_t slot,
                                     int64_t index,
                                     const ffi::RemainingRets& results,
                                     size_t size, int64_t numel) {
  JAXZERO_RETURN_IF_ERROR(CheckIndex(name, slot, index, size));
  auto buffer = results.get<ffi::AnyBuffer>(static_cast<size_t>(index));
  if (buffer.has_error()) return buffer.error();
  return CheckedView(name, slot, **buffer, numel);
}

// The base of `result`, or null.
inline ffi::ErrorOr<const void*> FindBase(const Slot& slot, size_t index,
                                          const ffi::RemainingArgs& bases,
                                          const View& result) {
  if (slot.base == -1 && slot.accumulate == 0) return nullptr;
  ffi::ErrorOr<View> base =
      FindArgument("base", index, slot.base, bases, result.numel);
  if (base.has_error()) return base.error();
  if (base->dtype != result.dtype) {
    return Invalid("slot ", index, ": base is ", Name(base->dtype),
                   ", expected ", Name(result.dtype), " as its result");
  }
  // What a slot does not write must already be there.
  if (slot.count < result.numel && base->data != result.data) {
    return Invalid("slot ", index, ": writes ", slot.count, " of ",
                   result.numel, " components, expected a base that shares ",
                   "memory with the result");
  }
  return base->data;
}

// Checks that no leaf is the bucket, whose elements are in another order.
inline ffi::Error CheckApart(const std::vector<BoundSlot>& bound,
                             const void* bucket) {
  for (size_t i = 0; i < bound.size(); ++i) {
    const void* leaf =
        bound[i].result == nullptr ? bound[i].leaf : bound[i].result;
    if (bound[i].slot.count > 0 && leaf == bucket) {
      return Invalid("slot ", i, ": leaf ", bound[i].slot.operand,
                     " shares memory with the bucket, expected its own");
    }
  }
  return ffi::Error::Success();
}

// The last result, `numel` float32 that other calls can wait for.
inline ffi::ErrorOr<float*> FindToken(const char* name,
                                      const ffi::RemainingRets& results,
                                      int64_t numel) {
  if (results.size() == 0) return Invalid(name, ": missing from the results");
  auto buffer = results.get<ffi::AnyBuffer>(results.size() - 1);
  if (buffer.has_error()) return buffer.error();
  const auto found = static_cast<int64_t>((*buffer)->element_count());
  if ((*buffer)->element_type() != ffi::DataType::F32 || found != numel) {
    return Invalid(name, ": found ", found, " components of XLA element type ",
                   static_cast<int>((*buffer)->element_type()), ", expected ",
                   numel, " of F32");
  }
  return (*buffer)->typed_data<float>();
}

// What a launcher is made of: a thread pool, or a stream.
template <typename Launcher>
using ContextOf = typename ffi::CtxDecoding<typename Launcher::Context>::Type;

}  // namespace jaxzero

#endif  // JAXZERO_FFI_ATTRIBUTES_H_
