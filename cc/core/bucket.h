// The buckets of a fused call: which slots travel together, and how.

#ifndef JAXZERO_CORE_BUCKET_H_
#define JAXZERO_CORE_BUCKET_H_

#include <cstdint>

#include "core/dtype.h"

namespace jaxzero {

enum class Kind : int64_t {
  kPacked,  // through a send buffer
  kDirect,  // one leaf, read in place
  kLocal,   // no collective: one rank, or already summed
};
inline constexpr const char* kKinds[] = {"packed", "direct", "local"};

enum class Collective : int64_t {
  kNone,
  kReduceScatter,  // or its inverse, in a gather
  kAllReduce,
};
inline constexpr const char* kCollectives[] = {"none", "reduce_scatter",
                                               "all_reduce"};

// The dtypes of a wire, in the order of DType.
inline constexpr DType kCommDTypes[] = {DType::kF32, DType::kBF16, DType::kF16,
                                        DType::kF64};

// One row of a bucket table.
struct Bucket {
  Kind kind;
  Collective collective;
  int64_t comm_dtype;          // index into kCommDTypes
  int64_t send_rows;           // one per rank; 1 for an all-reduce
  int64_t recv_rows;           // rows that come back; several are summed
  int64_t row_numel;           // components of a row, padding included
  int64_t slot_begin;          // first of its rows in the slot table
  int64_t slot_count;          // number of them
  int64_t pre_scale_exponent;  // power of two multiplied before the sum
  int64_t lands;               // 1: a direct leaf's shard receives its sum

  DType dtype() const { return kCommDTypes[comm_dtype]; }
  int64_t row_bytes() const { return row_numel * SizeOf(dtype()); }
};

// The columns of a bucket table, in the order of the fields of Bucket.
inline constexpr const char* kBucketColumns[] = {
    "kind",      "collective", "comm_dtype", "send_rows",          "recv_rows",
    "row_numel", "slot_begin", "slot_count", "pre_scale_exponent", "lands"};
inline constexpr int64_t kNumBucketColumns =
    sizeof(kBucketColumns) / sizeof(kBucketColumns[0]);
static_assert(sizeof(Bucket) == kNumBucketColumns * sizeof(int64_t));

}  // namespace jaxzero

#endif  // JAXZERO_CORE_BUCKET_H_
