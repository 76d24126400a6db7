// Ranges in a profiler's timeline.

#ifndef JAXZERO_CUDA_RANGE_H_
#define JAXZERO_CUDA_RANGE_H_

#include <algorithm>
#include <cstddef>
#include <string_view>

#ifdef JAXZERO_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace jaxzero {

// Shows a name, in the domain "jaxzero", for as long as it lives. Without a
// profiler, and in a build without NVTX, it does nothing.
class Range {
 public:
#ifdef JAXZERO_NVTX
  explicit Range(std::string_view name) : domain_(Domain()) {
    if (domain_ == nullptr) return;
    char text[kMaxText] = {};  // ends in a zero, which the name does not
    std::copy_n(name.data(), std::min(name.size(), kMaxText - 1), text);
    nvtxEventAttributes_t attributes = {};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = text;  // copied by the profiler
    nvtxDomainRangePushEx(domain_, &attributes);
  }
  ~Range() {
    if (domain_ != nullptr) nvtxDomainRangePop(domain_);
  }
#else
  explicit Range(std::string_view) {}
  ~Range() {}  // not trivial, so that a range is no unused variable
#endif

  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

#ifdef JAXZERO_NVTX
 private:
  static constexpr size_t kMaxText = 64;

  // Null if no profiler was attached when the first range began.
  static nvtxDomainHandle_t Domain() {
    static const nvtxDomainHandle_t domain = nvtxDomainCreateA("jaxzero");
    return domain;
  }

  nvtxDomainHandle_t domain_;
#endif
};

}  // namespace jaxzero

#endif  // JAXZERO_CUDA_RANGE_H_
