// What the fused calls share: their attributes, buffers and first stages.

#ifndef JAXZERO_CUDA_FUSED_CALL_H_
#define JAXZERO_CUDA_FUSED_CALL_H_

#include <cstdint>
#include <string_view>

#include "cuda/communicator.h"
#include "cuda/error.h"
#include "cuda/fused_plan.h"
#include "cuda/launch.h"
#include "xla/ffi/api/ffi.h"

namespace jaxzero {

// The names of buckets in a profiler, in order. The text belongs to XLA, so
// that no call makes or copies any.
class BucketNames {
 public:
  // Each name ends in a semicolon.
  explicit BucketNames(std::string_view text) : text_(text) {}

  // Returns the next name, or an empty one after the last.
  std::string_view Take();

  bool empty() const { return text_.empty(); }

 private:
  std::string_view text_;
};

// The attributes of a fused call.
struct FusedCall {
  FusedPlan plan;
  BucketNames bucket_names;
  ReplicaGroups shard;      // along the shard axes
  ReplicaGroups replicate;  // along the replicate axes, of partial sums
  ReplicaGroups all;        // along both
  int64_t replicas;
  double divisor;
  bool with_stats;

  bool replicated() const { return replicas > 1; }
};

// Reads attributes that `InstantiateFusedCall` has accepted: the stages after
// it run in every execution, where checking hundreds of slots again would show.
::xla::ffi::ErrorOr<FusedCall> ReadFusedCall(
    const ::xla::ffi::Dictionary& attributes);

// Checks, while XLA compiles, all that can be known then: a mistake that only
// one rank found later would leave the others waiting.
::xla::ffi::Error InstantiateFusedCall(::xla::ffi::Dictionary attributes);

// Requests the communicators.
::xla::ffi::Error PrepareFusedCall(CommunicatorContext context,
                                   ::xla::ffi::RemainingArgs,
                                   ::xla::ffi::RemainingRets,
                                   ::xla::ffi::Dictionary attributes);

// Loads kernels and finds NCCL, before any rank waits for another.
::xla::ffi::Error InitializeFusedCall(::xla::ffi::RemainingArgs,
                                      ::xla::ffi::RemainingRets,
                                      ::xla::ffi::Dictionary attributes);

// The temp, which is the last operand: the only one that a call writes, and no
// other call reads. It is at least as large as expected.
::xla::ffi::ErrorOr<char*> FindTemp(const ::xla::ffi::RemainingArgs& arguments,
                                    int64_t expected_bytes);

}  // namespace jaxzero

#endif  // JAXZERO_CUDA_FUSED_CALL_H_
