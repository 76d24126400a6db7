#include "cuda/reduce_scatter.h"

#include <cmath>
#include <cstdint>
#include <optional>
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
class Reduction {
 public:
  Reduction(cudaStream_t stream, const FusedCall& call)
      : stream_(stream), call_(call), plan_(call.plan) {}

  ffi::Error BindBuffers(const ffi::RemainingArgs& arguments,
                         const ffi::RemainingRets& results);
  ffi::Error GetRings(CommunicatorContext& context);
  ffi::Error Run();

 private:
  // The rows of a bucket that are left to add on this rank.
  struct Rows {
    const void* data;
    int64_t num_rows;
    DType dtype;
  };

  ffi::Error BindSlot(size_t index, Kind kind, bool accumulates,
                      const ffi::RemainingArgs& arguments,
                      const ffi::RemainingRets& results);
  ffi::Error BindStats(const ffi::RemainingRets& results);

  // Returns what arrives on this rank, and so far is not scaled.
  ffi::ErrorOr<Rows> Reduce(const Bucket& bucket);
  ffi::Error AddPartialSums(const Bucket& bucket, Rows* rows, char* sum);
  ffi::Error Pack(const Bucket& bucket, void* send);
  UnpackCall Unpacking(const Bucket& bucket, const Rows& rows) const;

  cudaStream_t stream_;
  const FusedCall& call_;
  const FusedPlan& plan_;
  std::vector<BoundSlot> leaves_;  // per slot, what pack reads
  std::vector<BoundSlot> shards_;  // per slot, what unpack adds and writes
  float* stats_ = nullptr;
  char* temp_ = nullptr;
  std::optional<Ring> shard_ring_;
  std::optional<Ring> replicate_ring_;
  std::optional<Ring> all_ring_;
};

// Operands: leaves, then as many accumulators or none, then the temp. Results:
// shards, then statistics if asked for.
ffi::Error Reduction::BindBuffers(const ffi::RemainingArgs& arguments,
                                  const ffi::RemainingRets& results) {
  const auto num_leaves = static_cast<size_t>(plan_.num_leaves);
  const bool accumulates = arguments.size() == 2 * num_leaves + 1;
  const size_t num_results = num_leaves + (call_.with_stats ? 1 : 0);
  if ((!accumulates && arguments.size() != num_leaves + 1) ||
      results.size() != num_results) {
    return Invalid("found ", arguments.size(), " operands and ", results.size(),
                   " results, expected ", num_leaves, " leaves, as many ",
                   "accumulators or none, a temp, and ", num_results);
  }
  leaves_.reserve(plan_.slots.size());
  shards_.reserve(plan_.slots.size());
  for (const Bucket& bucket : plan_.buckets) {
    for (int64_t i = 0; i < bucket.slot_count; ++i) {
      JAXZERO_RETURN_IF_ERROR(
          BindSlot(static_cast<size_t>(bucket.slot_begin + i), bucket.kind,
                   accumulates, arguments, results));
    }
    const BoundSlot& first = leaves_[static_cast<size_t>(bucket.slot_begin)];
    if (bucket.kind != Kind::kPacked && first.dtype != bucket.dtype()) {
      return Invalid(Describe(plan_, bucket), ": leaf is ", Name(first.dtype));
    }
    const BoundSlot& shard = shards_[static_cast<size_t>(bucket.slot_begin)];
    if (bucket.lands != 0 &&
        (shard.dtype != bucket.dtype() || shard.base != nullptr)) {
      return Invalid(Describe(plan_, bucket), ": cannot land in a shard of ",
                     Name(shard.dtype), accumulates ? " that accumulates" : "");
    }
  }
  const auto temp = FindTemp(
      arguments, ReduceTempBytes(plan_, call_.replicated(), call_.with_stats));
  if (temp.has_error()) return temp.error();
  temp_ = *temp;
  return call_.with_stats ? BindStats(results) : ffi::Error::Success();
}

ffi::Error Reduction::BindSlot(size_t index, Kind kind, bool accumulates,
                               const ffi::RemainingArgs& arguments,
                               const ffi::RemainingRets& results) {
  const Slot& slot = plan_.slots[index];
  const auto num_leaves = static_cast<size_t>(plan_.num_leaves);
  // A leaf that needs no collective is given as what this rank owns of it.
  const int64_t leaf_numel =
      kind == Kind::kLocal ? ShardNumel(slot) : LeafNumel(slot);
  const auto leaf =
      FindArgument("leaf", index, slot.operand, arguments, leaf_numel);
  if (leaf.has_error()) return leaf.error();
  const auto shard = FindResult("shard", index, slot.operand, results,
                                num_leaves, ShardNumel(slot));
  if (shard.has_error()) return shard.error();
  const void* base = nullptr;
  if (accumulates) {
    const auto into =
        FindArgument("accumulator", index, plan_.num_leaves + slot.operand,
                     arguments, shard->numel);
    if (into.has_error()) return into.error();
    if (into->dtype != shard->dtype) {
      return Invalid("slot ", index, ": accumulator is ", Name(into->dtype),
                     ", expected ", Name(shard->dtype), " as its result");
    }
    base = into->data;
  }
  leaves_.push_back({slot, leaf->dtype, leaf->data, nullptr, nullptr});
  shards_.push_back({slot, shard->dtype, nullptr, base, shard->data});
  return ffi::Error::Success();
}

ffi::Error Reduction::BindStats(const ffi::RemainingRets& results) {
  auto stats = results.get<ffi::AnyBuffer>(results.size() - 1);
  if (stats.has_error()) return stats.error();
  const size_t expected = 2 * plan_.buckets.size();
  if ((*stats)->element_type() != ffi::DataType::F32 ||
      (*stats)->element_count() != expected) {
    return Invalid("stats: found ", (*stats)->element_count(),
                   " components, expected ", expected, " of F32");
  }
  stats_ = (*stats)->typed_data<float>();
  return ffi::Error::Success();
}

ffi::Error Reduction::GetRings(CommunicatorContext& context) {
  const auto get = [&](const ReplicaGroups& groups,
                       std::optional<Ring>* ring) -> ffi::Error {
    if (groups.group_size == 0) return ffi::Error::Success();
    const auto found = Get(context, groups, stream_);
    if (found.has_error()) return found.error();
    *ring = *found;
    return ffi::Error::Success();
  };
  JAXZERO_RETURN_IF_ERROR(get(call_.shard, &shard_ring_));
  JAXZERO_RETURN_IF_ERROR(get(call_.replicate, &replicate_ring_));
  return get(call_.all, &all_ring_);
}

ffi::Error Reduction::Run() {
  auto* partials = reinterpret_cast<Partial*>(
      temp_ + ReduceBucketsBytes(plan_, call_.replicated()));
  Unpacker unpacker(stream_, call_.with_stats ? partials : nullptr);
  std::vector<int64_t> stats_ends;
  stats_ends.reserve(plan_.buckets.size());
  BucketNames names = call_.bucket_names;
  for (const Bucket& bucket : plan_.buckets) {
    const Range range(names.Take());
    const auto where = [&] { return Describe(plan_, bucket); };
    const ffi::ErrorOr<Rows> rows = Reduce(bucket);
    if (rows.has_error()) return Within(rows.error(), where);
    JAXZERO_RETURN_IF_ERROR(unpacker.Add(Unpacking(bucket, *rows)));
    stats_ends.push_back(unpacker.num_blocks());
    // The next bucket takes the same temp. Local leaves stay where they are,
    // so that any number of them share a kernel.
    if (bucket.kind != Kind::kLocal) {
      JAXZERO_RETURN_IF_ERROR(Within(unpacker.Flush(), where));
    }
  }
  JAXZERO_RETURN_IF_ERROR(unpacker.Flush());
  return call_.with_stats ? WriteStats(stream_, partials, stats_ends, stats_)
                          : ffi::Error::Success();
}

ffi::ErrorOr<Reduction::Rows> Reduction::Reduce(const Bucket& bucket) {
  const DType dtype = bucket.dtype();
  const void* leaf = leaves_[static_cast<size_t>(bucket.slot_begin)].leaf;
  if (bucket.kind == Kind::kLocal) return Rows{leaf, 1, dtype};

  const BucketTemp temp = ReduceTemp(bucket, call_.replicated());
  const bool packed = bucket.kind == Kind::kPacked;
  char* packed_rows = temp_ + temp.send;
  const BoundSlot& shard = shards_[static_cast<size_t>(bucket.slot_begin)];
  char* receive = bucket.lands != 0 ? static_cast<char*>(shard.result)
                                    : temp_ + temp.receive;
  if (packed) JAXZERO_RETURN_IF_ERROR(Pack(bucket, packed_rows));
  const void* send = packed ? packed_rows : leaf;

  if (bucket.collective == Collective::kAllReduce) {
    char* sums = packed ? packed_rows : receive;
    JAXZERO_RETURN_IF_ERROR(
        all_ring_->AllReduce(send, sums, bucket.row_numel, dtype));
    return Rows{sums, 1, dtype};
  }
  if (bucket.recv_rows == 1) {
    char* sums = packed ? packed_rows + shard_ring_->rank() * bucket.row_bytes()
                        : receive;
    JAXZERO_RETURN_IF_ERROR(
        shard_ring_->ReduceScatter(send, sums, bucket.row_numel, dtype));
    if (call_.replicated()) {
      JAXZERO_RETURN_IF_ERROR(
          replicate_ring_->AllReduce(sums, sums, bucket.row_numel, dtype));
    }
    return Rows{sums, 1, dtype};
  }
  JAXZERO_RETURN_IF_ERROR(
      shard_ring_->AllToAll(send, receive, bucket.row_numel, dtype));
  Rows rows{receive, bucket.recv_rows, dtype};
  if (call_.replicated()) {
    JAXZERO_RETURN_IF_ERROR(AddPartialSums(bucket, &rows, temp_ + temp.sum));
  }
  return rows;
}

// Replicas add what each of them has summed, in the wide dtype to stay exact.
ffi::Error Reduction::AddPartialSums(const Bucket& bucket, Rows* rows,
                                     char* sum) {
  const DType wide = WideDType(bucket.dtype());
  const int64_t numel = bucket.row_numel;
  const Slot whole_row = {0, 1, numel, 1, numel, 0, numel, 0, -1, 0};
  const BoundSlot bound = {whole_row, wide, nullptr, nullptr, sum};
  Unpacker adder(stream_, nullptr);
  JAXZERO_RETURN_IF_ERROR(
      adder.Add(UnpackCall{&bound, 1, rows->dtype, rows->data, rows->num_rows,
                           numel, 1.0, false, nullptr}));
  JAXZERO_RETURN_IF_ERROR(adder.Flush());
  *rows = Rows{sum, 1, wide};
  return replicate_ring_->AllReduce(sum, sum, numel, wide);
}

ffi::Error Reduction::Pack(const Bucket& bucket, void* send) {
  return CopyRows(
      stream_,
      PackCall{leaves_.data() + bucket.slot_begin, bucket.slot_count,
               bucket.dtype(), send, bucket.send_rows, bucket.row_numel,
               std::ldexp(1.0, static_cast<int>(bucket.pre_scale_exponent))},
      Direction::kToBucket);
}

UnpackCall Reduction::Unpacking(const Bucket& bucket, const Rows& rows) const {
  const double divisor =
      std::ldexp(call_.divisor, static_cast<int>(bucket.pre_scale_exponent));
  return UnpackCall{shards_.data() + bucket.slot_begin,
                    bucket.slot_count,
                    rows.dtype,
                    rows.data,
                    rows.num_rows,
                    bucket.row_numel,
                    divisor,
                    call_.with_stats,
                    nullptr};
}

ffi::Error Execute(cudaStream_t stream, CommunicatorContext context,
                   ffi::RemainingArgs arguments, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  const ffi::ErrorOr<FusedCall> call = ReadFusedCall(attributes);
  if (call.has_error()) return call.error();
  Reduction reduction(stream, *call);
  JAXZERO_RETURN_IF_ERROR(reduction.BindBuffers(arguments, results));
  JAXZERO_RETURN_IF_ERROR(reduction.GetRings(context));
  return reduction.Run();
}

}  // namespace

XLA_FFI_Handler* ReduceScatterExecute() {
  XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                         ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<cudaStream_t>>()
                             .Ctx<ffi::Extension<Collectives>>()
                             .RemainingArgs()  // leaves, accumulators, temp
                             .RemainingRets()  // shards, stats
                             .Attrs());        // as in ReadFusedCall
  return kExecute;
}

}  // namespace jaxzero
