// Kernels over many slots at once: their parameters, and how they are started.
//
// The slots of a launch travel in its parameters, not in device memory: nothing
// has to be allocated, copied ahead or kept alive. A launch takes as many slots
// as parameters hold; thousands of leaves are a few launches.

#ifndef JAXZERO_CUDA_LAUNCH_H_
#define JAXZERO_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/copy.h"
#include "core/dtype.h"
#include "core/host_device.h"

namespace jaxzero {

// What a kernel's parameters may take on compute capability 7.0 and later
// (32764 bytes), as a multiple of the alignment of the structs below.
inline constexpr int64_t kMaxParameterBytes = 32760;

inline constexpr int kThreads = 256;

// Components of a slot that one block handles: enough to hide what a block
// costs to start, few enough that a single leaf of some MB fills the device.
inline constexpr int64_t kChunkNumel = 8192;

JAXZERO_HOST_DEVICE inline constexpr int64_t NumChunks(int64_t numel) {
  return (numel + kChunkNumel - 1) / kChunkNumel;
}

// A leaf and its place in every row of a bucket.
struct CopySlot {
  void* leaf;          // read by pack, written by its inverse
  int64_t row_offset;  // where the slot starts in a row
  int64_t extent;      // components up to the next slot; pack zeroes the rest
  int64_t begin;       // first shard component of the slot
  int64_t count;       // shard components of the slot
  int64_t outer;       // these four as in Slot
  int64_t length;
  int64_t inner;
  int64_t chunk;
  int32_t first_block;  // of this slot; it has NumChunks(extent) per row
  DType dtype;          // of the leaf
};

struct CopyHeader {
  void* bucket;  // [num_rows, row_numel]
  int64_t row_numel;
  double scale;  // multiplied before the cast to the bucket's dtype
  int32_t num_slots;
};

struct CopyLaunch {
  static constexpr int kMaxSlots = static_cast<int>(
      (kMaxParameterBytes - sizeof(CopyHeader)) / sizeof(CopySlot));
  CopyHeader header;
  CopySlot slots[kMaxSlots];
};
static_assert(sizeof(CopyLaunch) <= kMaxParameterBytes);

// Rows that become part of a shard.
struct UnpackSlot {
  const void* rows;     // the slot's first component in the first row
  const void* base;     // what is added to it; null if nothing
  void* out;            // where it goes; may be `base`, or a single row
  int64_t count;        // components
  int32_t first_block;  // of this slot; it has NumChunks(count)
  DType dtype;          // of base and out
};

// What one block saw of the values that it stored.
struct Partial {
  double squares;  // their sum
  double finite;   // 1 if all of them are, else 0
};

struct UnpackHeader {
  int64_t num_rows;
  int64_t row_numel;     // from a component of one row to the next row's
  Divide<float> divide;  // one of the two is used, after the dtypes
  Divide<double> divide_wide;
  Partial* partials;  // one per block; null without statistics
  int32_t num_slots;
};

struct UnpackLaunch {
  static constexpr int kMaxSlots = static_cast<int>(
      (kMaxParameterBytes - sizeof(UnpackHeader)) / sizeof(UnpackSlot));
  UnpackHeader header;
  UnpackSlot slots[kMaxSlots];
};
static_assert(sizeof(UnpackLaunch) <= kMaxParameterBytes);

// Partials that become statistics: those of group i end where i + 1 begins.
struct StatsHeader {
  const Partial* partials;
  float* stats;  // [num_groups, 2]: norm, 1 if all values are finite else 0
  int32_t num_groups;
};

struct StatsLaunch {
  static constexpr int kMaxGroups = static_cast<int>(
      (kMaxParameterBytes - sizeof(StatsHeader)) / sizeof(int32_t) - 1);
  StatsHeader header;
  int32_t begins[kMaxGroups + 1];
};
static_assert(sizeof(StatsLaunch) <= kMaxParameterBytes);

enum class Direction { kToBucket, kToLeaves };

// Each starts one kernel and returns what CUDA says about it.
cudaError_t Start(const CopyLaunch& launch, DType bucket, Direction direction,
                  int64_t num_blocks, cudaStream_t stream);
cudaError_t Start(const UnpackLaunch& launch, DType rows, int64_t num_blocks,
                  cudaStream_t stream);
cudaError_t Start(const StatsLaunch& launch, cudaStream_t stream);

// Loads all kernels onto the current device. CUDA otherwise loads a kernel when
// it is first started, which waits for the device, and so for other ranks.
cudaError_t LoadKernels();

}  // namespace jaxzero

#endif  // JAXZERO_CUDA_LAUNCH_H_
