// XLA's communicators for the axes of a call.
//
// A communicator is requested in the prepare stage and asked for in every
// execution: between two, XLA may replace it.

#ifndef JAXZERO_CUDA_COMMUNICATOR_H_
#define JAXZERO_CUDA_COMMUNICATOR_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "cuda/nccl.h"
#include "xla/ffi/api/collectives_api.h"
#include "xla/ffi/api/ffi.h"

namespace jaxzero {

using CommunicatorContext = ::xla::ffi::internal::CommunicatorContextBase<
    ::xla::ffi::internal::ErrorPolicy>;

// Any version with the calls of 0.1, which later ones only add to.
struct Collectives
    : ::xla::ffi::internal::CollectivesExtensionBase<CommunicatorContext> {
  static bool Support(int32_t major, int32_t minor) {
    return major == 0 && minor >= 1;
  }
};

// What XLA offers of the extension, also if it is nothing that works here.
struct OfferedCollectives {
  bool found;
  int32_t major;
  int32_t minor;

  bool supported() const { return found && Collectives::Support(major, minor); }
};

// All groups of a mesh along some axes, by position in the mesh. The order
// inside a group is the order of its ranks.
struct ReplicaGroups {
  ::xla::ffi::Span<const int64_t> ids;
  int64_t group_size;  // 0 if the call does not use these groups
};

::xla::ffi::Error CheckGroups(const char* name, const ReplicaGroups& groups);

::xla::ffi::Error Request(CommunicatorContext& context,
                          const ReplicaGroups& groups);

::xla::ffi::ErrorOr<Ring> Get(CommunicatorContext& context,
                              const ReplicaGroups& groups, cudaStream_t stream);

}  // namespace jaxzero

namespace xla::ffi {

// Unlike the decoding of Extension<Collectives>, this one takes any version,
// and none.
template <>
struct CtxDecoding<::jaxzero::OfferedCollectives> {
  using Type = ::jaxzero::OfferedCollectives;

  static std::optional<Type> Decode(const XLA_FFI_Api* api,
                                    XLA_FFI_InvokeContext* context,
                                    DiagnosticEngine& diagnostic);
};

}  // namespace xla::ffi

#endif  // JAXZERO_CUDA_COMMUNICATOR_H_
