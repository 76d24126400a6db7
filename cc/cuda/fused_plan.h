// The plan of a fused call, decoded and checked, and its temporary memory.

#ifndef JAXZERO_CUDA_FUSED_PLAN_H_
#define JAXZERO_CUDA_FUSED_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/bucket.h"
#include "core/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxzero {

struct FusedPlan {
  std::vector<Bucket> buckets;
  std::vector<Slot> slots;  // of all buckets, each ascending in row_offset
  int64_t num_leaves;       // operands that slots refer to

  const Slot* begin(const Bucket& bucket) const {
    return slots.data() + bucket.slot_begin;
  }
  bool Uses(Collective collective) const;
};

// Copies tables that `DecodeFusedPlan` has accepted before.
FusedPlan ReadFusedPlan(::xla::ffi::Span<const int64_t> slots,
                        ::xla::ffi::Span<const int64_t> buckets);

// Copies tables and checks them.
::xla::ffi::ErrorOr<FusedPlan> DecodeFusedPlan(
    ::xla::ffi::Span<const int64_t> slots,
    ::xla::ffi::Span<const int64_t> buckets, int64_t group_size);

// Where a bucket's buffers are in the temp, in bytes from its start. Buckets
// use the same memory in turns.
struct BucketTemp {
  int64_t send = 0;     // [send_rows, row_numel] of a packed bucket
  int64_t receive = 0;  // the rows that come back
  int64_t sum = 0;      // one row in the wide dtype, summed over the ranks
  int64_t bytes = 0;
};

BucketTemp ReduceTemp(const Bucket& bucket, bool replicated);
BucketTemp GatherTemp(const Bucket& bucket);

// The temp that all buckets need, and where the partial statistics begin.
int64_t ReduceBucketsBytes(const FusedPlan& plan, bool replicated);
int64_t ReduceTempBytes(const FusedPlan& plan, bool replicated,
                        bool with_stats);
int64_t GatherTempBytes(const FusedPlan& plan);

// The dtype in which rows that come back are added.
inline DType WideDType(DType comm_dtype) {
  return comm_dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

// "bucket 3 (packed, 8 rows of 1024 bfloat16)", for messages.
std::string Describe(const FusedPlan& plan, const Bucket& bucket);

}  // namespace jaxzero

#endif  // JAXZERO_CUDA_FUSED_PLAN_H_
