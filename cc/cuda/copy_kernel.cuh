// Leaves to bucket, and back: one block per chunk of a slot in a row.

#ifndef JAXZERO_CUDA_COPY_KERNEL_CUH_
#define JAXZERO_CUDA_COPY_KERNEL_CUH_

#include <cstdint>

#include "core/copy.h"
#include "core/plan.h"
#include "cuda/launch.h"
#include "cuda/vector.cuh"

namespace jaxzero {

// 32-bit division takes a quarter of the time of a 64-bit one.
__device__ inline void DivideWithRemainder(int64_t value, int64_t by,
                                           int64_t* quotient,
                                           int64_t* remainder) {
  if (((value | by) >> 32) == 0) {
    const uint32_t small = static_cast<uint32_t>(value);
    const uint32_t small_by = static_cast<uint32_t>(by);
    *quotient = small / small_by;
    *remainder = small % small_by;
  } else {
    *quotient = value / by;
    *remainder = value % by;
  }
}

// Where the components of one row of a slot lie in its leaf. Component 0 is the
// first that the slot carries.
template <typename Leaf>
class LeafRow {
 public:
  __device__ LeafRow(const CopySlot& slot, int64_t row)
      : part_(PartOf({0, slot.outer, slot.length, slot.inner, slot.chunk,
                      slot.begin, slot.count, 0, -1, 0},
                     row)),
        leaf_(static_cast<Leaf*>(slot.leaf) + part_.first),
        begin_(slot.begin),
        count_(slot.count),
        one_run_(part_.stride == 0 || slot.outer == 1) {}

  // Whether all components below `end` exist and follow each other.
  __device__ bool IsOneRun(int64_t end) const {
    return one_run_ && end <= count_ && begin_ + end <= part_.valid;
  }

  // Whether `kNumel` components from a multiple of that on are aligned.
  template <int kNumel>
  __device__ bool IsVectorAligned() const {
    if (one_run_) return IsAligned<kNumel>(leaf_ + begin_);
    return IsAligned<kNumel>(leaf_) &&
           (part_.block | part_.stride | begin_) % kNumel == 0;
  }

  __device__ Leaf* first() const { return leaf_ + begin_; }

  // Calls each(i, pointer) for the components k + i of `kNumel`, with null for
  // those that do not exist.
  template <int kNumel, typename Each>
  __device__ void ForEach(int64_t k, Each each) const {
    int64_t block = 0;
    int64_t within = begin_ + k;
    if (!one_run_) {
      DivideWithRemainder(within, part_.block, &block, &within);
    }
    for (int i = 0; i < kNumel; ++i) {
      const bool exists = k + i < count_ && within < part_.valid;
      each(i, exists ? leaf_ + block * part_.stride + within : nullptr);
      if (++within == part_.block && !one_run_) {
        within = 0;
        ++block;
      }
    }
  }

  // The first of `kNumel` components that are aligned, exist and follow each
  // other, or null.
  template <int kNumel>
  __device__ Leaf* FindVector(int64_t k) const {
    if (k + kNumel > count_) return nullptr;
    int64_t block = 0;
    int64_t within = begin_ + k;
    if (!one_run_) {
      DivideWithRemainder(within, part_.block, &block, &within);
    }
    if (within + kNumel > part_.valid) return nullptr;
    return leaf_ + block * part_.stride + within;
  }

 private:
  RankPart part_;
  Leaf* leaf_;
  int64_t begin_;
  int64_t count_;
  bool one_run_;
};

// Copies a whole chunk between two runs, several loads in flight per thread.
template <int kNumel, typename From, typename To>
__device__ void CopyWholeChunk(const From* from, To* to,
                               CopyBody<From, To> body) {
  constexpr int kUnroll = 4;
  constexpr int kStep = kThreads * kNumel;
  static_assert(kChunkNumel % (kStep * kUnroll) == 0 ||
                kChunkNumel % kStep == 0);
  constexpr int kSteps = static_cast<int>(kChunkNumel / kStep);
  constexpr int kAtOnce = kSteps < kUnroll ? kSteps : kUnroll;
  const int mine = static_cast<int>(threadIdx.x) * kNumel;
#pragma unroll 1
  for (int step = 0; step < kSteps; step += kAtOnce) {
    Vector<From, kNumel> loaded[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      loaded[u] = LoadVector<kNumel>(from + (step + u) * kStep + mine);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      Vector<To, kNumel> result;
#pragma unroll
      for (int i = 0; i < kNumel; ++i) {
        result.values[i] = body(loaded[u].values[i]);
      }
      StoreVector<kNumel>(to + (step + u) * kStep + mine, result);
    }
  }
}

// Writes the columns [first, end) of a row from a leaf, zero where it has none.
template <typename Leaf, typename Wire>
__device__ void PackChunk(const LeafRow<Leaf>& leaf, Wire* columns,
                          int64_t first, int64_t end, double scale) {
  constexpr int kNumel = kVectorNumel<Leaf, Wire>;
  using Body = CopyBody<Leaf, Wire>;
  const Body body{static_cast<typename Body::Compute>(scale)};
  const bool columns_aligned = IsAligned<kNumel>(columns);
  const bool aligned =
      columns_aligned && leaf.template IsVectorAligned<kNumel>();
  if (aligned && end - first == kChunkNumel && leaf.IsOneRun(end)) {
    CopyWholeChunk<kNumel>(leaf.first() + first, columns + first, body);
    return;
  }
  for (int64_t k = first + static_cast<int64_t>(threadIdx.x) * kNumel; k < end;
       k += kThreads * kNumel) {
    Vector<Leaf, kNumel> loaded = {};
    const Leaf* together =
        aligned ? leaf.template FindVector<kNumel>(k) : nullptr;
    if (together != nullptr) {
      loaded = LoadVector<kNumel>(together);
    } else {
      leaf.template ForEach<kNumel>(k, [&](int i, const Leaf* component) {
        if (component != nullptr) loaded.values[i] = *component;
      });
    }
    Vector<Wire, kNumel> result;
    for (int i = 0; i < kNumel; ++i) {
      result.values[i] = body(loaded.values[i]);
    }
    if (columns_aligned && k + kNumel <= end) {
      StoreVector<kNumel>(columns + k, result);
    } else {
      for (int i = 0; i < kNumel && k + i < end; ++i) {
        columns[k + i] = result.values[i];
      }
    }
  }
}

// Writes the components of a leaf that the columns [first, end) of a row hold.
template <typename Leaf, typename Wire>
__device__ void UnpackLeafChunk(const LeafRow<Leaf>& leaf, const Wire* columns,
                                int64_t first, int64_t end) {
  constexpr int kNumel = kVectorNumel<Leaf, Wire>;
  const CopyBody<Wire, Leaf> body{1};
  const bool aligned =
      IsAligned<kNumel>(columns) && leaf.template IsVectorAligned<kNumel>();
  if (aligned && end - first == kChunkNumel && leaf.IsOneRun(end)) {
    CopyWholeChunk<kNumel>(columns + first, leaf.first() + first, body);
    return;
  }
  for (int64_t k = first + static_cast<int64_t>(threadIdx.x) * kNumel; k < end;
       k += kThreads * kNumel) {
    Leaf* together = aligned ? leaf.template FindVector<kNumel>(k) : nullptr;
    if (together != nullptr) {
      const Vector<Wire, kNumel> loaded = LoadVector<kNumel>(columns + k);
      Vector<Leaf, kNumel> result;
      for (int i = 0; i < kNumel; ++i) {
        result.values[i] = body(loaded.values[i]);
      }
      StoreVector<kNumel>(together, result);
    } else {
      leaf.template ForEach<kNumel>(k, [&](int i, Leaf* component) {
        if (component != nullptr) *component = body(columns[k + i]);
      });
    }
  }
}

template <typename Wire, Direction kDirection>
__global__ void __launch_bounds__(kThreads)
    CopyKernel(const __grid_constant__ CopyLaunch launch) {
  const int block = static_cast<int>(blockIdx.x);
  const CopySlot& slot =
      launch.slots[FindSlot(launch.slots, launch.header.num_slots, block)];
  const int chunks = static_cast<int>(NumChunks(slot.extent));
  const int64_t row = (block - slot.first_block) / chunks;
  const int64_t first = (block - slot.first_block) % chunks * kChunkNumel;
  const int64_t end = Min(first + kChunkNumel, slot.extent);
  Wire* columns = static_cast<Wire*>(launch.header.bucket) +
                  row * launch.header.row_numel + slot.row_offset;
  DispatchOnDevice(slot.dtype, [&](auto type) {
    const LeafRow<decltype(type)> leaf(slot, row);
    if constexpr (kDirection == Direction::kToBucket) {
      PackChunk(leaf, columns, first, end, launch.header.scale);
    } else {
      UnpackLeafChunk(leaf, columns, first, end);
    }
  });
}

}  // namespace jaxzero

#endif  // JAXZERO_CUDA_COPY_KERNEL_CUH_
