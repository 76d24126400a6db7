#include "cuda/all_gather.h"

#include <cstdint>
#include <vector>

#include "core/copy.h"
#include "cuda/fused_call.h"
#include "cuda/launcher.h"
#include "cuda/range.h"
#include "ffi/attributes.h"
#include "ffi/error.h"

namespace jaxzero {
namespace {

// One execution.
class Gathering {
 public:
  Gathering(cudaStream_t stream, const FusedCall& call)
      : stream_(stream), call_(call), plan_(call.plan) {}

  ffi::Error BindBuffers(const ffi::RemainingArgs& arguments,
                         const ffi::RemainingRets& results);
  ffi::Error Run(const Ring& ring);

 private:
  ffi::Error BindSlot(size_t index, const ffi::RemainingArgs& arguments,
                      const ffi::RemainingRets& results);
  ffi::Error Gather(const Ring& ring, const Bucket& bucket);

  // Casts a bucket's shards into one row.
  ffi::Error FillRow(const Bucket& bucket, char* row);

  cudaStream_t stream_;
  const FusedCall& call_;
  const FusedPlan& plan_;
  std::vector<BoundSlot> shards_;  // per slot, what is sent
  std::vector<BoundSlot> leaves_;  // per slot, what is written
  char* temp_ = nullptr;
};

// Operands: shards, temp. Results: leaves.
ffi::Error Gathering::BindBuffers(const ffi::RemainingArgs& arguments,
                                  const ffi::RemainingRets& results) {
  const auto num_leaves = static_cast<size_t>(plan_.num_leaves);
  if (arguments.size() != num_leaves + 1 || results.size() != num_leaves) {
    return Invalid("found ", arguments.size(), " operands and ", results.size(),
                   " results, expected ", num_leaves, " shards, a temp, and ",
                   num_leaves);
  }
  shards_.reserve(plan_.slots.size());
  leaves_.reserve(plan_.slots.size());
  for (const Bucket& bucket : plan_.buckets) {
    if (bucket.collective != Collective::kReduceScatter) {
      return Invalid(Describe(plan_, bucket), ": is not scattered");
    }
    for (int64_t i = 0; i < bucket.slot_count; ++i) {
      JAXZERO_RETURN_IF_ERROR(BindSlot(
          static_cast<size_t>(bucket.slot_begin + i), arguments, results));
    }
    const BoundSlot& first = leaves_[static_cast<size_t>(bucket.slot_begin)];
    if (bucket.kind != Kind::kPacked && first.dtype != bucket.dtype()) {
      return Invalid(Describe(plan_, bucket), ": leaf is ", Name(first.dtype));
    }
  }
  const auto temp = FindTemp(arguments, GatherTempBytes(plan_));
  if (temp.has_error()) return temp.error();
  temp_ = *temp;
  return ffi::Error::Success();
}

ffi::Error Gathering::BindSlot(size_t index,
                               const ffi::RemainingArgs& arguments,
                               const ffi::RemainingRets& results) {
  const Slot& slot = plan_.slots[index];
  const int64_t shard_numel = ShardNumel(slot);
  const auto shard =
      FindArgument("shard", index, slot.operand, arguments, shard_numel);
  if (shard.has_error()) return shard.error();
  const auto leaf =
      FindResult("leaf", index, slot.operand, results,
                 static_cast<size_t>(plan_.num_leaves), LeafNumel(slot));
  if (leaf.has_error()) return leaf.error();
  Slot in_shard = slot;
  in_shard.outer = in_shard.inner = 1;
  in_shard.length = in_shard.chunk = shard_numel;
  shards_.push_back({in_shard, shard->dtype, shard->data, nullptr, nullptr});
  leaves_.push_back({slot, leaf->dtype, nullptr, nullptr, leaf->data});
  return ffi::Error::Success();
}

ffi::Error Gathering::Run(const Ring& ring) {
  BucketNames names = call_.bucket_names;
  for (const Bucket& bucket : plan_.buckets) {
    const Range range(names.Take());
    JAXZERO_RETURN_IF_ERROR(
        Within(Gather(ring, bucket), [&] { return Describe(plan_, bucket); }));
  }
  return ffi::Error::Success();
}

ffi::Error Gathering::Gather(const Ring& ring, const Bucket& bucket) {
  const auto first = static_cast<size_t>(bucket.slot_begin);
  const bool packed = bucket.kind == Kind::kPacked;
  char* rows = packed ? temp_ : static_cast<char*>(leaves_[first].result);
  char* row = rows + ring.rank() * bucket.row_bytes();
  // A direct leaf is the rows, and its shard one of them if it needs no cast.
  const bool cast = packed || shards_[first].dtype != bucket.dtype();
  if (cast) JAXZERO_RETURN_IF_ERROR(FillRow(bucket, row));
  const void* send = cast ? row : shards_[first].leaf;
  JAXZERO_RETURN_IF_ERROR(
      ring.AllGather(send, rows, bucket.row_numel, bucket.dtype()));
  if (!packed) return ffi::Error::Success();
  return CopyRows(
      stream_,
      PackCall{leaves_.data() + first, bucket.slot_count, bucket.dtype(), rows,
               bucket.send_rows, bucket.row_numel, 1.0},
      Direction::kToLeaves);
}

ffi::Error Gathering::FillRow(const Bucket& bucket, char* row) {
  return CopyRows(
      stream_,
      PackCall{shards_.data() + bucket.slot_begin, bucket.slot_count,
               bucket.dtype(), row, 1, bucket.row_numel, 1.0},
      Direction::kToBucket);
}

ffi::Error Execute(cudaStream_t stream, CommunicatorContext context,
                   ffi::RemainingArgs arguments, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  const ffi::ErrorOr<FusedCall> call = ReadFusedCall(attributes);
  if (call.has_error()) return call.error();
  Gathering gathering(stream, *call);
  JAXZERO_RETURN_IF_ERROR(gathering.BindBuffers(arguments, results));
  if (call->plan.buckets.empty()) return ffi::Error::Success();
  const ffi::ErrorOr<Ring> ring = Get(context, call->shard, stream);
  if (ring.has_error()) return ring.error();
  return gathering.Run(*ring);
}

}  // namespace

XLA_FFI_Handler* AllGatherExecute() {
  XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                         ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<cudaStream_t>>()
                             .Ctx<ffi::Extension<Collectives>>()
                             .RemainingArgs()  // shards, temp
                             .RemainingRets()  // leaves
                             .Attrs());        // as in ReadFusedCall
  return kExecute;
}

}  // namespace jaxzero
