// Pack and unpack on a stream: slots become the parameters of kernels.

#ifndef JAXZERO_CUDA_LAUNCHER_H_
#define JAXZERO_CUDA_LAUNCHER_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/copy.h"
#include "cuda/launch.h"
#include "xla/ffi/api/ffi.h"

namespace jaxzero {

// Copies between leaves and the rows of a bucket, in either direction.
::xla::ffi::Error CopyRows(cudaStream_t stream, const PackCall& call,
                           Direction direction);

// Collects what rows become, and starts one kernel for as much as it can.
//
// Slots may be added as long as their rows stay as they are until `Flush`.
class Unpacker {
 public:
  // Partials go to `partials`, one per block in the order of adding; null means
  // no statistics.
  Unpacker(cudaStream_t stream, Partial* partials)
      : stream_(stream), partials_(partials) {}

  // Adds the slots of a call. Calls that agree in the dtype, number and length
  // of their rows and in their divisor share kernels.
  ::xla::ffi::Error Add(const UnpackCall& call);

  // Starts what was added.
  ::xla::ffi::Error Flush();

  // Blocks, and so partials, of everything added so far.
  int64_t num_blocks() const { return num_blocks_; }

 private:
  cudaStream_t stream_;
  Partial* partials_;
  UnpackLaunch launch_;
  DType rows_ = DType::kF32;
  double divisor_ = 0;
  int64_t launch_blocks_ = 0;
  int64_t num_blocks_ = 0;
};

// Writes [norm, finite] for each group of partials; group i is
// [ends[i - 1], ends[i]).
::xla::ffi::Error WriteStats(cudaStream_t stream, const Partial* partials,
                             const std::vector<int64_t>& ends, float* stats);

// A stream, and memory for the statistics of a call that has no temp for them.
struct StreamAndScratch {
  cudaStream_t stream;
  ::xla::ffi::ScratchAllocator scratch;
};

// Runs the platform-neutral handlers of ffi/ on CUDA.
class CudaLauncher {
 public:
  using Context = StreamAndScratch;

  explicit CudaLauncher(Context& context) : context_(context) {}

  ::xla::ffi::Error Pack(const PackCall& call);
  ::xla::ffi::Error Unpack(const UnpackCall& call);
  ::xla::ffi::Error UnpackLeaves(const UnpackLeavesCall& call);

 private:
  Context& context_;
};

}  // namespace jaxzero

template <>
struct xla::ffi::CtxDecoding<jaxzero::StreamAndScratch> {
  using Type = jaxzero::StreamAndScratch;

  static std::optional<Type> Decode(const XLA_FFI_Api* api,
                                    XLA_FFI_InvokeContext* context,
                                    DiagnosticEngine& diagnostic) {
    const auto stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(
        api, context, diagnostic);
    auto scratch =
        CtxDecoding<ScratchAllocator>::Decode(api, context, diagnostic);
    if (!stream.has_value() || !scratch.has_value()) return std::nullopt;
    return Type{*stream, *std::move(scratch)};
  }
};

#endif  // JAXZERO_CUDA_LAUNCHER_H_
