// The NCCL that XLA has loaded.
//
// A communicator belongs to one copy of the library, and XLA's is the only one
// that knows ours. So nothing is linked: the symbols are looked up in the copy
// that is already in the process.

#ifndef JAXZERO_CUDA_NCCL_H_
#define JAXZERO_CUDA_NCCL_H_

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <string>

#include "core/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace jaxzero {

struct Nccl {
  decltype(&ncclGetVersion) GetVersion;
  decltype(&ncclGetErrorString) GetErrorString;
  decltype(&ncclGetLastError) GetLastError;
  decltype(&ncclCommCount) CommCount;
  decltype(&ncclCommUserRank) CommUserRank;
  decltype(&ncclCommGetAsyncError) CommGetAsyncError;
  decltype(&ncclGroupStart) GroupStart;
  decltype(&ncclGroupEnd) GroupEnd;
  decltype(&ncclReduceScatter) ReduceScatter;
  decltype(&ncclAllReduce) AllReduce;
  decltype(&ncclAllGather) AllGather;
  decltype(&ncclSend) Send;
  decltype(&ncclRecv) Recv;
  int version;
};

// Finds the loaded library. Fails if there is none, or if it is too old.
::xla::ffi::ErrorOr<const Nccl*> LoadedNccl();

// "2.28.9" for 22809.
std::string NcclVersionText(int version);

ncclDataType_t ToNccl(DType dtype);

// One rank's end of a communicator, borrowed from XLA for one execution.
//
// The calls are collective and asynchronous on `stream`; counts are components.
class Ring {
 public:
  static ::xla::ffi::ErrorOr<Ring> Of(const Nccl& nccl, ncclComm_t comm,
                                      int64_t expected_size,
                                      cudaStream_t stream);

  int64_t size() const { return size_; }
  int64_t rank() const { return rank_; }

  // Sums `send`, [size, count]; this rank receives its row. `receive` may be
  // that row of `send`.
  ::xla::ffi::Error ReduceScatter(const void* send, void* receive,
                                  int64_t count, DType dtype) const;
  // Sums `count` components; `receive` may be `send`.
  ::xla::ffi::Error AllReduce(const void* send, void* receive, int64_t count,
                              DType dtype) const;
  // Collects rows into [size, count]; `send` may be this rank's row of it.
  ::xla::ffi::Error AllGather(const void* send, void* receive, int64_t count,
                              DType dtype) const;
  // Sends row r of [size, count] to rank r; receives as many.
  ::xla::ffi::Error AllToAll(const void* send, void* receive, int64_t count,
                             DType dtype) const;

 private:
  Ring(const Nccl& nccl, ncclComm_t comm, cudaStream_t stream)
      : nccl_(&nccl), comm_(comm), stream_(stream) {}

  ::xla::ffi::Error Check(ncclResult_t result, const char* call, int64_t count,
                          DType dtype) const;

  // Waits until a communicator that does not block has taken a call.
  ncclResult_t Settle(ncclResult_t result) const;

  const Nccl* nccl_;
  ncclComm_t comm_;
  cudaStream_t stream_;
  int64_t size_ = 0;
  int64_t rank_ = 0;
};

}  // namespace jaxzero

#endif  // JAXZERO_CUDA_NCCL_H_
