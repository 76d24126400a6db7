// jaxzero_all_gather: shards to leaves, all buckets in one call.
//
// Per bucket: cast into this rank's row -> one all-gather in place -> unpack.

#ifndef JAXZERO_CUDA_ALL_GATHER_H_
#define JAXZERO_CUDA_ALL_GATHER_H_

#include "xla/ffi/api/ffi.h"

namespace jaxzero {

// The handler of its execute stage; the others are in fused_call.h.
XLA_FFI_Handler* AllGatherExecute();

}  // namespace jaxzero

#endif  // JAXZERO_CUDA_ALL_GATHER_H_
