#include "cuda/nccl.h"

#include <dlfcn.h>

#include <mutex>
#include <thread>

#include "cuda/error.h"

namespace jaxzero {
namespace {

namespace ffi = ::xla::ffi;

// The first version with the data types and calls that are used here.
constexpr int kOldestVersion = 21800;

template <typename Function>
bool Find(void* library, const char* name, Function* function,
          std::string* missing) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr) *missing = name;
  return *function != nullptr;
}

ffi::ErrorOr<Nccl> FindNccl() {
  void* library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return Internal(
        "XLA has not loaded libnccl.so.2, whose communicators jaxzero uses; "
        "install jax[cuda13], or use Policy(transport='xla')");
  }
  Nccl nccl = {};
  std::string missing;
  const bool complete =
      Find(library, "ncclGetVersion", &nccl.GetVersion, &missing) &&
      Find(library, "ncclGetErrorString", &nccl.GetErrorString, &missing) &&
      Find(library, "ncclGetLastError", &nccl.GetLastError, &missing) &&
      Find(library, "ncclCommCount", &nccl.CommCount, &missing) &&
      Find(library, "ncclCommUserRank", &nccl.CommUserRank, &missing) &&
      Find(library, "ncclCommGetAsyncError", &nccl.CommGetAsyncError,
           &missing) &&
      Find(library, "ncclGroupStart", &nccl.GroupStart, &missing) &&
      Find(library, "ncclGroupEnd", &nccl.GroupEnd, &missing) &&
      Find(library, "ncclReduceScatter", &nccl.ReduceScatter, &missing) &&
      Find(library, "ncclAllReduce", &nccl.AllReduce, &missing) &&
      Find(library, "ncclAllGather", &nccl.AllGather, &missing) &&
      Find(library, "ncclSend", &nccl.Send, &missing) &&
      Find(library, "ncclRecv", &nccl.Recv, &missing);
  if (!complete) return Internal("libnccl.so.2 has no ", missing);
  const ncclResult_t result = nccl.GetVersion(&nccl.version);
  if (result != ncclSuccess) {
    return Internal("ncclGetVersion: ", nccl.GetErrorString(result));
  }
  if (nccl.version < kOldestVersion) {
    return Internal("libnccl.so.2 is version ", NcclVersionText(nccl.version),
                    ", expected ", NcclVersionText(kOldestVersion),
                    " or later");
  }
  return nccl;
}

// Runs calls as one NCCL group. The group is closed on every path: NCCL counts
// open groups per thread, and one left open would hold back all later calls of
// XLA on this thread.
template <typename Calls>
ncclResult_t InNcclGroup(const Nccl& nccl, Calls calls) {
  ncclResult_t result = nccl.GroupStart();
  if (result != ncclSuccess) return result;
  result = calls();
  const ncclResult_t end = nccl.GroupEnd();
  return result == ncclSuccess || result == ncclInProgress ? end : result;
}

}  // namespace

ffi::ErrorOr<const Nccl*> LoadedNccl() {
  static std::mutex mutex;
  static Nccl found = {};
  const std::lock_guard<std::mutex> lock(mutex);
  if (found.version == 0) {
    const ffi::ErrorOr<Nccl> nccl = FindNccl();
    if (nccl.has_error()) return nccl.error();
    found = *nccl;
  }
  return &found;
}

std::string NcclVersionText(int version) {
  return Text(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

ncclDataType_t ToNccl(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kF16:
      return ncclFloat16;
    case DType::kF64:
      return ncclFloat64;
    case DType::kF32:
      break;
  }
  return ncclFloat32;
}

ffi::ErrorOr<Ring> Ring::Of(const Nccl& nccl, ncclComm_t comm,
                            int64_t expected_size, cudaStream_t stream) {
  Ring ring(nccl, comm, stream);
  int size = 0;
  int rank = 0;
  ncclResult_t result = nccl.CommCount(comm, &size);
  if (result == ncclSuccess) result = nccl.CommUserRank(comm, &rank);
  if (result != ncclSuccess) {
    return Internal("communicator of ", expected_size,
                    " ranks: ", nccl.GetErrorString(result));
  }
  if (size != expected_size) {
    return Internal("found a communicator of ", size, " ranks, expected ",
                    expected_size);
  }
  ring.size_ = size;
  ring.rank_ = rank;
  return ring;
}

ffi::Error Ring::ReduceScatter(const void* send, void* receive, int64_t count,
                               DType dtype) const {
  return Check(nccl_->ReduceScatter(send, receive, static_cast<size_t>(count),
                                    ToNccl(dtype), ncclSum, comm_, stream_),
               "ncclReduceScatter", count, dtype);
}

ffi::Error Ring::AllReduce(const void* send, void* receive, int64_t count,
                           DType dtype) const {
  return Check(nccl_->AllReduce(send, receive, static_cast<size_t>(count),
                                ToNccl(dtype), ncclSum, comm_, stream_),
               "ncclAllReduce", count, dtype);
}

ffi::Error Ring::AllGather(const void* send, void* receive, int64_t count,
                           DType dtype) const {
  return Check(nccl_->AllGather(send, receive, static_cast<size_t>(count),
                                ToNccl(dtype), comm_, stream_),
               "ncclAllGather", count, dtype);
}

ffi::Error Ring::AllToAll(const void* send, void* receive, int64_t count,
                          DType dtype) const {
  const auto* from = static_cast<const char*>(send);
  auto* to = static_cast<char*>(receive);
  const int64_t bytes = count * SizeOf(dtype);
  const ncclResult_t result = InNcclGroup(*nccl_, [&] {
    for (int64_t peer = 0; peer < size_; ++peer) {
      const int id = static_cast<int>(peer);
      ncclResult_t call =
          nccl_->Send(from + peer * bytes, static_cast<size_t>(count),
                      ToNccl(dtype), id, comm_, stream_);
      if (call != ncclSuccess && call != ncclInProgress) return call;
      call = nccl_->Recv(to + peer * bytes, static_cast<size_t>(count),
                         ToNccl(dtype), id, comm_, stream_);
      if (call != ncclSuccess && call != ncclInProgress) return call;
    }
    return ncclSuccess;
  });
  return Check(result, "ncclSend and ncclRecv", count, dtype);
}

ffi::Error Ring::Check(ncclResult_t result, const char* call, int64_t count,
                       DType dtype) const {
  result = Settle(result);
  if (result == ncclSuccess) return ffi::Error::Success();
  return Internal(call, " of ", count, " ", Name(dtype), " on rank ", rank_,
                  " of ", size_, ": ", nccl_->GetErrorString(result), ": ",
                  nccl_->GetLastError(comm_));
}

ncclResult_t Ring::Settle(ncclResult_t result) const {
  while (result == ncclInProgress) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = nccl_->CommGetAsyncError(comm_, &state);
    result = asked == ncclSuccess ? state : asked;
    if (result == ncclInProgress) std::this_thread::yield();
  }
  return result;
}

}  // namespace jaxzero
