// What CUDA says, as ffi::Error.

#ifndef JAXZERO_CUDA_ERROR_H_
#define JAXZERO_CUDA_ERROR_H_

#include <cuda_runtime_api.h>

#include "ffi/error.h"

namespace jaxzero {

template <typename... Parts>
::xla::ffi::Error Internal(const Parts&... parts) {
  return ::xla::ffi::Error::Internal(Text(parts...));
}

inline ::xla::ffi::Error CheckCuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return ::xla::ffi::Error::Success();
  return Internal(what, ": ", cudaGetErrorName(status), ": ",
                  cudaGetErrorString(status));
}

// The same failure, with where it happened before its text. `where` is a
// function, because nobody should pay for the text of a success.
template <typename Where>
::xla::ffi::Error Within(const ::xla::ffi::Error& error, Where where) {
  if (error.success()) return error;
  return {error.errc().value(), where() + ": " + error.message()};
}

}  // namespace jaxzero

#endif  // JAXZERO_CUDA_ERROR_H_
