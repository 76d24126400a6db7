#include "cuda/communicator.h"

#include <vector>

#include "ffi/error.h"

namespace jaxzero {
namespace {

namespace ffi = ::xla::ffi;

// What XLA's own reduce-scatters use, so that they share a communicator.
constexpr int64_t kCommunicationId = 0;

std::vector<std::vector<int64_t>> Rows(const ReplicaGroups& groups) {
  std::vector<std::vector<int64_t>> rows;
  const auto size = static_cast<size_t>(groups.group_size);
  rows.reserve(groups.ids.size() / size);
  for (const int64_t* ids = groups.ids.begin(); ids != groups.ids.end();
       ids += size) {
    rows.emplace_back(ids, ids + size);
  }
  return rows;
}

}  // namespace

ffi::Error CheckGroups(const char* name, const ReplicaGroups& groups) {
  const auto numel = static_cast<int64_t>(groups.ids.size());
  if (groups.group_size == 0 && numel == 0) return ffi::Error::Success();
  if (groups.group_size < 2 || numel == 0 || numel % groups.group_size != 0) {
    return Invalid(name, ": found ", numel, " devices in groups of ",
                   groups.group_size,
                   ", expected equal groups of at least 2, or none");
  }
  std::vector<bool> seen(groups.ids.size());
  for (const int64_t id : groups.ids) {
    if (id < 0 || id >= numel || seen[static_cast<size_t>(id)]) {
      return Invalid(name, ": found device ", id, ", expected each of 0 to ",
                     numel - 1, " once");
    }
    seen[static_cast<size_t>(id)] = true;
  }
  return ffi::Error::Success();
}

ffi::Error Request(CommunicatorContext& context, const ReplicaGroups& groups) {
  if (groups.group_size == 0) return ffi::Error::Success();
  return context.RequestCommunicator(ffi::GroupMode::kFlattenedId, Rows(groups),
                                     kCommunicationId);
}

ffi::ErrorOr<Ring> Get(CommunicatorContext& context,
                       const ReplicaGroups& groups, cudaStream_t stream) {
  const ffi::ErrorOr<const Nccl*> nccl = LoadedNccl();
  if (nccl.has_error()) return nccl.error();
  const auto handle = context.GetCommunicator(ffi::GroupMode::kFlattenedId,
                                              Rows(groups), kCommunicationId);
  if (handle.has_error()) return handle.error();
  return Ring::Of(**nccl, reinterpret_cast<ncclComm_t>(*handle),
                  groups.group_size, stream);
}

}  // namespace jaxzero

namespace xla::ffi {

std::optional<::jaxzero::OfferedCollectives>
CtxDecoding<::jaxzero::OfferedCollectives>::Decode(
    const XLA_FFI_Api* api, XLA_FFI_InvokeContext* context,
    DiagnosticEngine& diagnostic) {
  XLA_FFI_InvokeContext_FindExtension_Args args = {};
  args.struct_size = XLA_FFI_InvokeContext_FindExtension_Args_STRUCT_SIZE;
  args.ctx = context;
  args.extension_type = ::jaxzero::Collectives::kExtensionType;
  XLA_FFI_Error* error = api->XLA_FFI_InvokeContext_FindExtension(&args);
  if (error != nullptr) {
    diagnostic.Emit(internal::GetErrorMessage(api, error));
    internal::DestroyError(api, error);
    return std::nullopt;
  }
  if (args.extension == nullptr) return Type{false, 0, 0};
  const XLA_FFI_ExtensionId& id = args.extension->id;
  return Type{true, id.major_version, id.minor_version};
}

}  // namespace xla::ffi
