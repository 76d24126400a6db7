#include "cuda/fused_plan.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cuda/launch.h"
#include "ffi/attributes.h"
#include "ffi/error.h"

namespace jaxzero {
namespace {

// More than a device has, and so few that no sum of sizes overflows: a temp
// that came out too small would be written beyond its end.
constexpr int64_t kMaxBucketBytes = int64_t{1} << 46;

int64_t Align(int64_t bytes) {
  constexpr int64_t kAlignment = 256;  // as allocations are
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

template <typename Enum, size_t kSize>
bool IsOneOf(Enum value, const char* const (&)[kSize]) {
  const auto index = static_cast<int64_t>(value);
  return index >= 0 && index < static_cast<int64_t>(kSize);
}

ffi::Error CheckBucket(const Bucket& bucket, size_t index, int64_t group_size,
                       int64_t slot_begin, int64_t num_slots) {
  constexpr int64_t kNumCommDTypes =
      sizeof(kCommDTypes) / sizeof(kCommDTypes[0]);
  if (!IsOneOf(bucket.kind, kKinds) ||
      !IsOneOf(bucket.collective, kCollectives) || bucket.comm_dtype < 0 ||
      bucket.comm_dtype >= kNumCommDTypes) {
    return Invalid("bucket ", index, ": found kind ",
                   static_cast<int64_t>(bucket.kind), ", collective ",
                   static_cast<int64_t>(bucket.collective), " and comm_dtype ",
                   bucket.comm_dtype, ", which are no such codes");
  }
  if ((bucket.kind == Kind::kLocal) !=
      (bucket.collective == Collective::kNone)) {
    return Invalid("bucket ", index,
                   ": expected a collective exactly if it is not local");
  }
  const bool scatters = bucket.collective == Collective::kReduceScatter;
  const int64_t send_rows = scatters ? group_size : 1;
  if (bucket.kind != Kind::kLocal && bucket.send_rows != send_rows) {
    return Invalid("bucket ", index, ": found ", bucket.send_rows,
                   " rows to send, expected ", send_rows);
  }
  if (bucket.kind != Kind::kLocal && bucket.recv_rows != 1 &&
      bucket.recv_rows != send_rows) {
    return Invalid("bucket ", index, ": found ", bucket.recv_rows,
                   " rows to receive, expected 1 or ", send_rows);
  }
  const int64_t bytes = Product(bucket.row_numel, group_size, int64_t{8});
  if (bucket.row_numel < 0 || bytes < 0 || bytes > kMaxBucketBytes) {
    return Invalid("bucket ", index, ": found ", group_size, " rows of ",
                   bucket.row_numel, ", expected at most ", kMaxBucketBytes,
                   " bytes in float64");
  }
  if (bucket.slot_begin != slot_begin || bucket.slot_count < 1 ||
      bucket.slot_count > num_slots - slot_begin) {
    return Invalid("bucket ", index, ": found slots [", bucket.slot_begin, ", ",
                   bucket.slot_begin, " + ", bucket.slot_count,
                   "), expected them to begin at ", slot_begin, " of ",
                   num_slots);
  }
  if (bucket.pre_scale_exponent < -126 || bucket.pre_scale_exponent > 126) {
    return Invalid("bucket ", index, ": found pre_scale_exponent ",
                   bucket.pre_scale_exponent, ", expected -126 to 126");
  }
  if (bucket.lands != 0 && (bucket.lands != 1 || bucket.kind != Kind::kDirect ||
                            bucket.recv_rows != 1)) {
    return Invalid("bucket ", index, ": found lands ", bucket.lands,
                   ", expected 0 unless it is direct and receives one row");
  }
  return ffi::Error::Success();
}

// A bucket that is not packed is one whole leaf.
ffi::Error CheckSingle(const FusedPlan& plan, const Bucket& bucket,
                       size_t index) {
  if (bucket.kind == Kind::kPacked) return ffi::Error::Success();
  const Slot& slot = *plan.begin(bucket);
  if (bucket.slot_count != 1 || slot.row_offset != 0 || slot.begin != 0 ||
      slot.count != bucket.row_numel || slot.count != ShardNumel(slot)) {
    return Invalid("bucket ", index, ": expected one slot, a whole shard");
  }
  const bool fits = bucket.kind == Kind::kLocal ||
                    LeafNumel(slot) == bucket.send_rows * bucket.row_numel;
  if (!fits ||
      (bucket.collective == Collective::kReduceScatter && slot.outer != 1)) {
    return Invalid("bucket ", index,
                   ": its leaf is not the rows that it sends, one by one");
  }
  return ffi::Error::Success();
}

}  // namespace

bool FusedPlan::Uses(Collective collective) const {
  return std::any_of(buckets.begin(), buckets.end(), [&](const Bucket& bucket) {
    return bucket.collective == collective;
  });
}

FusedPlan ReadFusedPlan(ffi::Span<const int64_t> slots,
                        ffi::Span<const int64_t> buckets) {
  FusedPlan plan = {};
  plan.buckets.resize(buckets.size() / kNumBucketColumns);
  if (!plan.buckets.empty()) {
    std::memcpy(plan.buckets.data(), buckets.begin(),
                plan.buckets.size() * sizeof(Bucket));
  }
  plan.slots.resize(slots.size() / kNumSlotColumns);
  if (!plan.slots.empty()) {
    std::memcpy(plan.slots.data(), slots.begin(),
                plan.slots.size() * sizeof(Slot));
  }
  for (const Slot& slot : plan.slots) {
    // Far larger numbers are refused; they must only not overflow here.
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max() - 1;
    plan.num_leaves =
        std::max(plan.num_leaves, std::min(slot.operand, kMost) + 1);
  }
  return plan;
}

ffi::ErrorOr<FusedPlan> DecodeFusedPlan(ffi::Span<const int64_t> slots,
                                        ffi::Span<const int64_t> buckets,
                                        int64_t group_size) {
  if (group_size < 1) {
    return Invalid("group_size: found ", group_size, ", expected at least 1");
  }
  if (buckets.size() % kNumBucketColumns != 0 ||
      slots.size() % kNumSlotColumns != 0) {
    return Invalid("found ", buckets.size(), " numbers of buckets and ",
                   slots.size(), " of slots, expected rows of ",
                   kNumBucketColumns, " and ", kNumSlotColumns);
  }
  FusedPlan plan = ReadFusedPlan(slots, buckets);
  const auto num_slots = static_cast<int64_t>(plan.slots.size());
  if (plan.num_leaves > num_slots) {
    return Invalid("found ", plan.num_leaves, " leaves in ", num_slots,
                   " slots, expected at least one slot for each");
  }
  int64_t done = 0;
  for (size_t i = 0; i < plan.buckets.size(); ++i) {
    const Bucket& bucket = plan.buckets[i];
    JAXZERO_RETURN_IF_ERROR(
        CheckBucket(bucket, i, group_size, done, num_slots));
    const auto mine =
        DecodeSlots({slots.begin() + done * kNumSlotColumns,
                     static_cast<size_t>(bucket.slot_count * kNumSlotColumns)},
                    group_size, bucket.row_numel);
    if (mine.has_error()) {
      return Invalid("bucket ", i, ": ", mine.error().message());
    }
    JAXZERO_RETURN_IF_ERROR(CheckSingle(plan, bucket, i));
    done += bucket.slot_count;
  }
  if (done != num_slots) {
    return Invalid("found ", num_slots, " slots, expected ", done,
                   " in all buckets");
  }
  return plan;
}

BucketTemp ReduceTemp(const Bucket& bucket, bool replicated) {
  BucketTemp temp;
  if (bucket.kind == Kind::kLocal) return temp;
  const bool packed = bucket.kind == Kind::kPacked;
  const bool exchanges = bucket.recv_rows > 1;
  if (packed) temp.bytes = Align(bucket.send_rows * bucket.row_bytes());
  // A packed bucket receives over what it sent, except in an exchange.
  if ((!packed && bucket.lands == 0) || exchanges) {
    temp.receive = temp.bytes;
    temp.bytes += Align(bucket.recv_rows * bucket.row_bytes());
  }
  if (exchanges && replicated) {
    const int64_t sum_bytes =
        bucket.row_numel * SizeOf(WideDType(bucket.dtype()));
    // At least two rows were sent, which are as large as one wide row.
    if (!packed) {
      temp.sum = temp.bytes;
      temp.bytes += Align(sum_bytes);
    }
  }
  return temp;
}

BucketTemp GatherTemp(const Bucket& bucket) {
  BucketTemp temp;
  if (bucket.kind == Kind::kPacked) {
    temp.bytes = Align(bucket.send_rows * bucket.row_bytes());
  }
  return temp;
}

int64_t ReduceBucketsBytes(const FusedPlan& plan, bool replicated) {
  int64_t bytes = 0;
  for (const Bucket& bucket : plan.buckets) {
    bytes = std::max(bytes, ReduceTemp(bucket, replicated).bytes);
  }
  return bytes;
}

int64_t ReduceTempBytes(const FusedPlan& plan, bool replicated,
                        bool with_stats) {
  int64_t partials = 0;
  for (const Slot& slot : plan.slots) partials += NumChunks(slot.count);
  return ReduceBucketsBytes(plan, replicated) +
         (with_stats ? partials * static_cast<int64_t>(sizeof(Partial)) : 0);
}

int64_t GatherTempBytes(const FusedPlan& plan) {
  int64_t bytes = 0;
  for (const Bucket& bucket : plan.buckets) {
    bytes = std::max(bytes, GatherTemp(bucket).bytes);
  }
  return bytes;
}

std::string Describe(const FusedPlan& plan, const Bucket& bucket) {
  return Text("bucket ", &bucket - plan.buckets.data(), " (",
              kKinds[static_cast<int64_t>(bucket.kind)], ", ", bucket.send_rows,
              " rows of ", bucket.row_numel, " ", Name(bucket.dtype()), ")");
}

}  // namespace jaxzero
