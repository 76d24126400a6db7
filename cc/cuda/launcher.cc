#include "cuda/launcher.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/plan.h"
#include "cuda/error.h"

namespace jaxzero {
namespace {

namespace ffi = ::xla::ffi;

constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();

// A launch that is being filled with the slots of a bucket.
class CopyFiller {
 public:
  CopyFiller(cudaStream_t stream, const PackCall& call, Direction direction)
      : stream_(stream), call_(call), direction_(direction) {
    launch_.header = {call.bucket, call.row_numel, call.pre_scale, 0};
  }

  ffi::Error Add(CopySlot slot) {
    const int64_t blocks = NumChunks(slot.extent) * call_.group_size;
    if (blocks == 0) return ffi::Error::Success();
    if (launch_.header.num_slots == CopyLaunch::kMaxSlots ||
        blocks_ + blocks > kMaxBlocks) {
      JAXZERO_RETURN_IF_ERROR(Flush());
    }
    slot.first_block = static_cast<int32_t>(blocks_);
    launch_.slots[launch_.header.num_slots++] = slot;
    blocks_ += blocks;
    return ffi::Error::Success();
  }

  ffi::Error Flush() {
    const cudaError_t status =
        Start(launch_, call_.dtype, direction_, blocks_, stream_);
    launch_.header.num_slots = 0;
    blocks_ = 0;
    return CheckCuda(status, direction_ == Direction::kToBucket
                                 ? "pack kernel"
                                 : "unpack_leaves kernel");
  }

 private:
  cudaStream_t stream_;
  const PackCall& call_;
  Direction direction_;
  CopyLaunch launch_;
  int64_t blocks_ = 0;
};

CopySlot Gap(int64_t end) {
  CopySlot gap = {};
  gap.extent = end;
  return gap;
}

}  // namespace

ffi::Error CopyRows(cudaStream_t stream, const PackCall& call,
                    Direction direction) {
  const bool packs = direction == Direction::kToBucket;
  CopyFiller filler(stream, call, direction);
  const int64_t start =
      call.num_slots == 0 ? call.row_numel : call.slots[0].slot.row_offset;
  if (packs) JAXZERO_RETURN_IF_ERROR(filler.Add(Gap(start)));
  for (int64_t i = 0; i < call.num_slots; ++i) {
    const BoundSlot& bound = call.slots[i];
    const Slot& slot = bound.slot;
    const int64_t next = i + 1 < call.num_slots
                             ? call.slots[i + 1].slot.row_offset
                             : call.row_numel;
    CopySlot copy = {};
    copy.leaf = packs ? const_cast<void*>(bound.leaf) : bound.result;
    copy.row_offset = slot.row_offset;
    copy.extent = packs ? next - slot.row_offset : slot.count;
    copy.begin = slot.begin;
    copy.count = slot.count;
    copy.outer = slot.outer;
    copy.length = slot.length;
    copy.inner = slot.inner;
    copy.chunk = slot.chunk;
    copy.dtype = bound.dtype;
    JAXZERO_RETURN_IF_ERROR(filler.Add(copy));
  }
  return filler.Flush();
}

ffi::Error Unpacker::Add(const UnpackCall& call) {
  const UnpackHeader& header = launch_.header;
  if (launch_blocks_ > 0 &&
      (call.dtype != rows_ || call.num_rows != header.num_rows ||
       (call.num_rows > 1 && call.row_numel != header.row_numel) ||
       call.divisor != divisor_)) {
    JAXZERO_RETURN_IF_ERROR(Flush());
  }
  for (int64_t i = 0; i < call.num_slots; ++i) {
    const BoundSlot& bound = call.slots[i];
    const Slot& slot = bound.slot;
    const int64_t blocks = NumChunks(slot.count);
    if (blocks == 0) continue;
    if (launch_blocks_ > 0 && (header.num_slots == UnpackLaunch::kMaxSlots ||
                               launch_blocks_ + blocks > kMaxBlocks)) {
      JAXZERO_RETURN_IF_ERROR(Flush());
    }
    if (launch_blocks_ == 0) {
      rows_ = call.dtype;
      divisor_ = call.divisor;
      launch_.header = {
          call.num_rows,
          call.row_numel,
          Divide<float>::By(call.divisor),
          Divide<double>::By(call.divisor),
          partials_ == nullptr ? nullptr : partials_ + num_blocks_,
          0};
    }
    const int64_t out_size = SizeOf(bound.dtype);
    const auto* base = static_cast<const char*>(bound.base);
    launch_.slots[launch_.header.num_slots++] = {
        static_cast<const char*>(call.rows) +
            slot.row_offset * SizeOf(call.dtype),
        base == nullptr ? nullptr : base + slot.begin * out_size,
        static_cast<char*>(bound.result) + slot.begin * out_size,
        slot.count,
        static_cast<int32_t>(launch_blocks_),
        bound.dtype};
    launch_blocks_ += blocks;
    num_blocks_ += blocks;
  }
  return ffi::Error::Success();
}

ffi::Error Unpacker::Flush() {
  if (launch_blocks_ == 0) return ffi::Error::Success();
  const cudaError_t status = Start(launch_, rows_, launch_blocks_, stream_);
  launch_blocks_ = 0;
  return CheckCuda(status, "unpack kernel");
}

ffi::Error WriteStats(cudaStream_t stream, const Partial* partials,
                      const std::vector<int64_t>& ends, float* stats) {
  const auto num_groups = static_cast<int64_t>(ends.size());
  if (num_groups > 0 && ends.back() > kMaxBlocks) {
    return Invalid("statistics of ", ends.back(), " blocks, expected at most ",
                   kMaxBlocks);
  }
  for (int64_t first = 0; first < num_groups;
       first += StatsLaunch::kMaxGroups) {
    const int64_t groups =
        std::min<int64_t>(num_groups - first, StatsLaunch::kMaxGroups);
    StatsLaunch launch;
    launch.header = {partials, stats + 2 * first, static_cast<int32_t>(groups)};
    launch.begins[0] = first == 0 ? 0 : static_cast<int32_t>(ends[first - 1]);
    for (int64_t i = 0; i < groups; ++i) {
      launch.begins[i + 1] = static_cast<int32_t>(ends[first + i]);
    }
    JAXZERO_RETURN_IF_ERROR(CheckCuda(Start(launch, stream), "stats kernel"));
  }
  return ffi::Error::Success();
}

ffi::Error CudaLauncher::Pack(const PackCall& call) {
  return CopyRows(context_.stream, call, Direction::kToBucket);
}

ffi::Error CudaLauncher::Unpack(const UnpackCall& call) {
  int64_t num_blocks = 0;
  for (int64_t i = 0; i < call.num_slots; ++i) {
    num_blocks += NumChunks(call.slots[i].slot.count);
  }
  Partial* partials = nullptr;
  if (call.with_stats && num_blocks > 0) {
    const size_t bytes = static_cast<size_t>(num_blocks) * sizeof(Partial);
    const auto memory = context_.scratch.Allocate(bytes, alignof(Partial));
    if (!memory.has_value()) {
      return Internal("no scratch memory for ", bytes, " bytes of statistics");
    }
    partials = static_cast<Partial*>(*memory);
  }
  Unpacker unpacker(context_.stream, partials);
  JAXZERO_RETURN_IF_ERROR(unpacker.Add(call));
  JAXZERO_RETURN_IF_ERROR(unpacker.Flush());
  if (call.with_stats) {
    return WriteStats(context_.stream, partials, {num_blocks}, call.stats);
  }
  return CheckCuda(
      cudaMemsetAsync(call.stats, 0, 2 * sizeof(float), context_.stream),
      "cudaMemsetAsync of stats");
}

ffi::Error CudaLauncher::UnpackLeaves(const UnpackLeavesCall& call) {
  JAXZERO_RETURN_IF_ERROR(
      CopyRows(context_.stream,
               PackCall{call.slots, call.num_slots, call.dtype,
                        const_cast<void*>(call.bucket), call.group_size,
                        call.row_numel, 1.0},
               Direction::kToLeaves));
  return CheckCuda(
      cudaMemsetAsync(call.done, 0, sizeof(float), context_.stream),
      "cudaMemsetAsync of done");
}

}  // namespace jaxzero
