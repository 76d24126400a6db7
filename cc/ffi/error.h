// Failures as ffi::Error: never thrown through XLA, printed or fatal.

#ifndef JAXZERO_FFI_ERROR_H_
#define JAXZERO_FFI_ERROR_H_

#include <sstream>
#include <string>

#include "xla/ffi/api/ffi.h"

#define JAXZERO_RETURN_IF_ERROR(expression)                        \
  do {                                                             \
    if (::xla::ffi::Error error_ = (expression); error_.failure()) \
      return error_;                                               \
  } while (false)

namespace jaxzero {

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// An argument that contradicts another one, or the slot table.
template <typename... Parts>
::xla::ffi::Error Invalid(const Parts&... parts) {
  return ::xla::ffi::Error::InvalidArgument(Text(parts...));
}

}  // namespace jaxzero

#endif  // JAXZERO_FFI_ERROR_H_
