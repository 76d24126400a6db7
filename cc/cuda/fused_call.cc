#include "cuda/fused_call.h"

#include <algorithm>
#include <utility>

#include "ffi/attributes.h"
#include "ffi/error.h"

namespace jaxzero {
namespace {

namespace ffi = ::xla::ffi;

// Reads attributes and remembers the first failure.
class Reader {
 public:
  explicit Reader(const ffi::Dictionary& attributes)
      : attributes_(attributes) {}

  template <typename T>
  T Get(const char* name) {
    ffi::ErrorOr<T> value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    if (error_.success()) {
      error_ = Invalid("attribute ", name, ": ", value.error().message());
    }
    return T{};
  }

  const ffi::Error& error() const { return error_; }

 private:
  const ffi::Dictionary& attributes_;
  ffi::Error error_;
};

using Numbers = ffi::Span<const int64_t>;

ReplicaGroups GroupsOf(Numbers ids, int64_t group_size) {
  return {ids, ids.size() == 0 ? 0 : group_size};
}

ffi::Error CheckUse(const char* name, const ReplicaGroups& groups, bool used) {
  JAXZERO_RETURN_IF_ERROR(CheckGroups(name, groups));
  if ((groups.group_size > 0) != used) {
    return Invalid(name, ": found ", groups.ids.size(), " devices, expected ",
                   used ? "those of the mesh" : "none");
  }
  return ffi::Error::Success();
}

// Whether there is one name per bucket.
bool AreNamesOf(BucketNames names, const FusedPlan& plan) {
  return std::all_of(plan.buckets.begin(), plan.buckets.end(),
                     [&](const Bucket&) { return !names.Take().empty(); }) &&
         names.empty();
}

}  // namespace

std::string_view BucketNames::Take() {
  const size_t end = std::min(text_.find(';'), text_.size());
  const std::string_view name = text_.substr(0, end);
  text_.remove_prefix(std::min(end + 1, text_.size()));
  return name;
}

ffi::ErrorOr<FusedCall> ReadFusedCall(const ffi::Dictionary& attributes) {
  Reader reader(attributes);
  const auto slots = reader.Get<Numbers>("slots");
  const auto buckets = reader.Get<Numbers>("buckets");
  const auto bucket_names = reader.Get<std::string_view>("bucket_names");
  const auto group_size = reader.Get<int64_t>("group_size");
  const auto replicas = reader.Get<int64_t>("replicas");
  const auto shard = reader.Get<Numbers>("shard_groups");
  const auto replicate = reader.Get<Numbers>("replicate_groups");
  const auto all = reader.Get<Numbers>("all_groups");
  const auto divisor = reader.Get<double>("divisor");
  const auto with_stats = reader.Get<int64_t>("with_stats");
  if (reader.error().failure()) return reader.error();
  return FusedCall{ReadFusedPlan(slots, buckets),
                   BucketNames(bucket_names),
                   GroupsOf(shard, group_size),
                   GroupsOf(replicate, replicas),
                   GroupsOf(all, group_size * replicas),
                   replicas,
                   divisor,
                   with_stats != 0};
}

ffi::Error InstantiateFusedCall(ffi::Dictionary attributes) {
  Reader reader(attributes);
  // First, because another version may know other attributes.
  const auto format = reader.Get<int64_t>("format");
  if (reader.error().failure()) return reader.error();
  JAXZERO_RETURN_IF_ERROR(CheckFormat(format));
  constexpr size_t kNumAttributes = 11;  // what ReadFusedCall reads, and format
  if (attributes.size() != kNumAttributes) {
    return Invalid("found ", attributes.size(), " attributes, expected ",
                   kNumAttributes);
  }
  const auto slots = reader.Get<Numbers>("slots");
  const auto buckets = reader.Get<Numbers>("buckets");
  const auto group_size = reader.Get<int64_t>("group_size");
  const auto replicas = reader.Get<int64_t>("replicas");
  if (reader.error().failure()) return reader.error();
  constexpr int64_t kMostRanks = int64_t{1} << 31;
  if (group_size < 1 || replicas < 1 || group_size > kMostRanks ||
      replicas > kMostRanks) {
    return Invalid("found ", group_size, " ranks and ", replicas,
                   " replicas, expected 1 to ", kMostRanks, " of both");
  }
  const auto plan = DecodeFusedPlan(slots, buckets, group_size);
  if (plan.has_error()) return plan.error();
  const ffi::ErrorOr<FusedCall> call = ReadFusedCall(attributes);
  if (call.has_error()) return call.error();
  if (!AreNamesOf(call->bucket_names, *plan)) {
    return Invalid("bucket_names: expected one for each of ",
                   plan->buckets.size(), " buckets");
  }
  const bool scatters = plan->Uses(Collective::kReduceScatter);
  JAXZERO_RETURN_IF_ERROR(CheckUse("shard_groups", call->shard, scatters));
  JAXZERO_RETURN_IF_ERROR(CheckUse("replicate_groups", call->replicate,
                                   scatters && call->replicated()));
  return CheckUse("all_groups", call->all, plan->Uses(Collective::kAllReduce));
}

ffi::Error PrepareFusedCall(CommunicatorContext context, ffi::RemainingArgs,
                            ffi::RemainingRets, ffi::Dictionary attributes) {
  const ffi::ErrorOr<FusedCall> call = ReadFusedCall(attributes);
  if (call.has_error()) return call.error();
  JAXZERO_RETURN_IF_ERROR(Request(context, call->shard));
  JAXZERO_RETURN_IF_ERROR(Request(context, call->replicate));
  return Request(context, call->all);
}

ffi::Error InitializeFusedCall(ffi::RemainingArgs, ffi::RemainingRets,
                               ffi::Dictionary attributes) {
  const ffi::ErrorOr<FusedCall> call = ReadFusedCall(attributes);
  if (call.has_error()) return call.error();
  if (call->plan.Uses(Collective::kReduceScatter) ||
      call->plan.Uses(Collective::kAllReduce)) {
    const ffi::ErrorOr<const Nccl*> nccl = LoadedNccl();
    if (nccl.has_error()) return nccl.error();
  }
  return CheckCuda(LoadKernels(), "loading kernels");
}

ffi::ErrorOr<char*> FindTemp(const ffi::RemainingArgs& arguments,
                             int64_t expected_bytes) {
  if (arguments.size() == 0) return Invalid("temp: missing from the operands");
  auto buffer = arguments.get<ffi::AnyBuffer>(arguments.size() - 1);
  if (buffer.has_error()) return buffer.error();
  const auto bytes = static_cast<int64_t>(buffer->size_bytes());
  if (buffer->element_type() != ffi::DataType::U8 || bytes < expected_bytes) {
    return Invalid("temp: found ", bytes, " bytes, expected at least ",
                   expected_bytes, " of U8");
  }
  return static_cast<char*>(buffer->untyped_data());
}

}  // namespace jaxzero
