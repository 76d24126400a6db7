// What pack and unpack do to one element, and the calls that they are part of.
//
// A launcher decides which thread handles which index; the arithmetic is here
// once. Launchers must not let the compiler fuse a multiplication and an
// addition (g++ -ffp-contract=off, nvcc -fmad=false), so that all platforms
// round alike.

#ifndef JAXZERO_CORE_COPY_H_
#define JAXZERO_CORE_COPY_H_

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/host_device.h"
#include "core/plan.h"

namespace jaxzero {

// A slot with the buffers behind its indices.
struct BoundSlot {
  Slot slot;
  DType dtype;       // of the leaf or shard
  const void* leaf;  // what pack reads
  const void* base;  // what unpack adds; null if it adds nothing
  void* result;      // what unpack writes
};

// Leaves to bucket. Everything that no leaf covers becomes zero.
struct PackCall {
  const BoundSlot* slots;  // ascending in row_offset, without overlap
  int64_t num_slots;
  DType dtype;   // of the bucket
  void* bucket;  // [group_size, row_numel]
  int64_t group_size;
  int64_t row_numel;
  double pre_scale;  // multiplied before the cast to the bucket's dtype
};

// Rows to shards: result = sum of rows / divisor [+ base].
struct UnpackCall {
  const BoundSlot* slots;  // ascending in row_offset, without overlap
  int64_t num_slots;
  DType dtype;       // of the rows
  const void* rows;  // [num_rows, row_numel]
  int64_t num_rows;
  int64_t row_numel;
  double divisor;
  bool with_stats;
  float* stats;  // [norm of what was written, 1 if all of it is finite else 0]
};

// Bucket to leaves: the inverse of pack.
struct UnpackLeavesCall {
  const BoundSlot* slots;  // ascending in row_offset, without overlap
  int64_t num_slots;
  DType dtype;         // of the bucket
  const void* bucket;  // [group_size, row_numel]
  int64_t group_size;
  int64_t row_numel;
  float* done;  // one zero, for calls that wait for this one
};

// Division by a constant.
template <typename Compute>
struct Divide {
  Compute number;
  bool multiplies;  // by `number`, rather than divides by it

  // A power of two has an exact reciprocal, and a multiplication is cheaper.
  static Divide By(double divisor) {
    constexpr uint64_t kFraction = (uint64_t{1} << 52) - 1;
    const auto reciprocal = static_cast<Compute>(1.0 / divisor);
    const bool exact =
        (internal::BitCast<uint64_t>(divisor) & kFraction) == 0 &&
        1.0 / static_cast<double>(reciprocal) == divisor;
    return {exact ? reciprocal : static_cast<Compute>(divisor), exact};
  }

  JAXZERO_HOST_DEVICE Compute operator()(Compute value) const {
    return multiplies ? value * number : value / number;
  }
};

// One element of pack, and of its inverse with `scale` 1.
template <typename From, typename To>
struct CopyBody {
  using Compute = ComputeType<From, To>;
  Compute scale;

  JAXZERO_HOST_DEVICE To operator()(From value) const {
    return Convert<To>(Convert<Compute>(value) * scale);
  }
};

// One element of unpack, from the sum of all rows in row order. The result is
// as it is stored, that is, rounded.
template <typename Out, typename Compute>
JAXZERO_HOST_DEVICE Out Finish(Compute sum, const Divide<Compute>& divide,
                               bool adds, Out base) {
  Compute value = divide(sum);
  if (adds) value += Convert<Compute>(base);
  return Convert<Out>(value);
}

}  // namespace jaxzero

#endif  // JAXZERO_CORE_COPY_H_
