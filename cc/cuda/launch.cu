#include <atomic>
#include <cstdint>
#include <limits>

#include "core/dtype.h"
#include "cuda/copy_kernel.cuh"
#include "cuda/launch.h"
#include "cuda/unpack_kernel.cuh"

namespace jaxzero {
namespace {

const void* CopyKernelOf(DType bucket, Direction direction) {
  return Dispatch(bucket, [&](auto type) {
    using Wire = decltype(type);
    return direction == Direction::kToBucket
               ? reinterpret_cast<const void*>(
                     CopyKernel<Wire, Direction::kToBucket>)
               : reinterpret_cast<const void*>(
                     CopyKernel<Wire, Direction::kToLeaves>);
  });
}

const void* UnpackKernelOf(DType rows, bool with_stats) {
  return Dispatch(rows, [&](auto type) {
    using Row = decltype(type);
    return with_stats ? reinterpret_cast<const void*>(UnpackKernel<Row, true>)
                      : reinterpret_cast<const void*>(UnpackKernel<Row, false>);
  });
}

template <typename Launch>
cudaError_t StartKernel(const void* kernel, const Launch& launch,
                        int64_t num_blocks, cudaStream_t stream) {
  if (num_blocks == 0) return cudaSuccess;
  if (num_blocks < 0 || num_blocks > std::numeric_limits<int32_t>::max()) {
    return cudaErrorInvalidConfiguration;  // as a grid, and as block numbers
  }
  void* parameters[] = {const_cast<Launch*>(&launch)};
  const cudaError_t status =
      cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(num_blocks)),
                       dim3(kThreads), parameters, 0, stream);
  // The error is returned; it must not be found again by someone else's check.
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
  return status;
}

}  // namespace

cudaError_t Start(const CopyLaunch& launch, DType bucket, Direction direction,
                  int64_t num_blocks, cudaStream_t stream) {
  return StartKernel(CopyKernelOf(bucket, direction), launch, num_blocks,
                     stream);
}

cudaError_t Start(const UnpackLaunch& launch, DType rows, int64_t num_blocks,
                  cudaStream_t stream) {
  return StartKernel(UnpackKernelOf(rows, launch.header.partials != nullptr),
                     launch, num_blocks, stream);
}

cudaError_t Start(const StatsLaunch& launch, cudaStream_t stream) {
  return StartKernel(reinterpret_cast<const void*>(StatsKernel), launch,
                     launch.header.num_groups, stream);
}

cudaError_t LoadKernels() {
  static std::atomic<uint64_t> loaded{0};  // one bit per device
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((loaded.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
  cudaFuncAttributes attributes;
  status = cudaFuncGetAttributes(&attributes,
                                 reinterpret_cast<const void*>(StatsKernel));
  for (const DType dtype :
       {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    for (const void* kernel :
         {CopyKernelOf(dtype, Direction::kToBucket),
          CopyKernelOf(dtype, Direction::kToLeaves),
          UnpackKernelOf(dtype, false), UnpackKernelOf(dtype, true)}) {
      if (status == cudaSuccess) {
        status = cudaFuncGetAttributes(&attributes, kernel);
      }
    }
  }
  if (status == cudaSuccess) {
    loaded.fetch_or(bit, std::memory_order_release);
  } else {
    static_cast<void>(cudaGetLastError());
  }
  return status;
}

}  // namespace jaxzero
