// Failures as ffi::Error: never thrown through XLA, printed or fatal.

#ifndef JAXZERO_FFI_ERROR_H_
#define JAXZERO_FFI_ERROR_H_

#include <string>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

#define JAXZERO_RETURN_IF_ERROR(expression)                        \
  do {                                                             \
    if (::xla::ffi::Error error_ = (expression); error_.failure()) \
      return error_;                                               \
  } while (false)

namespace jaxzero {

// Joins text and numbers. Without streams: their locales are looked up through
// symbols that a second libstdc++ in the process may have replaced, which was
// seen to crash beside XLA's CUDA plugin.
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::string text;
  const auto append = [&text](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (append(parts), ...);
  return text;
}

// An argument that contradicts another one, or the slot table.
template <typename... Parts>
::xla::ffi::Error Invalid(const Parts&... parts) {
  return ::xla::ffi::Error::InvalidArgument(Text(parts...));
}

}  // namespace jaxzero

#endif  // JAXZERO_FFI_ERROR_H_
