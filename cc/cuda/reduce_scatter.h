// jaxzero_reduce_scatter: leaves to shards, all buckets in one call.
//
// Per bucket: pack -> one collective -> unpack, in order on the stream that XLA
// gives. Nothing is allocated, waited for or kept between calls.

#ifndef JAXZERO_CUDA_REDUCE_SCATTER_H_
#define JAXZERO_CUDA_REDUCE_SCATTER_H_

#include "xla/ffi/api/ffi.h"

namespace jaxzero {

// The handler of its execute stage; the others are in fused_call.h.
XLA_FFI_Handler* ReduceScatterExecute();

}  // namespace jaxzero

#endif  // JAXZERO_CUDA_REDUCE_SCATTER_H_
