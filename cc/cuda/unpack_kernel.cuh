// Rows to shards, and the statistics of what was stored.

#ifndef JAXZERO_CUDA_UNPACK_KERNEL_CUH_
#define JAXZERO_CUDA_UNPACK_KERNEL_CUH_

#include <cstdint>
#include <type_traits>

#include "core/copy.h"
#include "core/plan.h"
#include "cuda/launch.h"
#include "cuda/vector.cuh"

namespace jaxzero {

// Enough threads to keep the memory busy; limits the registers of each.
inline constexpr int kBlocksPerMultiprocessor = 3;

// Statistics of the values that one thread stored.
struct ThreadStats {
  double squares = 0;
  bool finite = true;

  template <typename Compute>
  __device__ void Add(Compute value) {
    const double wide = static_cast<double>(value);
    squares += wide * wide;
    finite = finite && isfinite(value);
  }
};

// Adds the sums of all threads in an order that depends on nothing else; thread
// 0 gets the result.
__device__ inline Partial AddThreads(double squares, bool finite) {
  constexpr int kWarpSize = 32;
  constexpr int kWarps = kThreads / kWarpSize;
  __shared__ double warp_squares[kWarps];
  const bool all_finite = __syncthreads_and(finite) != 0;
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    squares += __shfl_down_sync(0xffffffffu, squares, offset);
  }
  if (threadIdx.x % kWarpSize == 0) {
    warp_squares[threadIdx.x / kWarpSize] = squares;
  }
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < kWarps; ++warp) total += warp_squares[warp];
  }
  return {total, all_finite ? 1.0 : 0.0};
}

// One slot's rows, base and result.
template <typename Row, typename Out, bool kStats>
class SlotRows {
 public:
  using Compute = ComputeType<Row, Out>;
  static constexpr int kNumel = kVectorNumel<Row, Out>;

  __device__ SlotRows(const UnpackSlot& slot, const UnpackHeader& header)
      : rows_(static_cast<const Row*>(slot.rows)),
        base_(static_cast<const Out*>(slot.base)),
        out_(static_cast<Out*>(slot.out)),
        num_rows_(header.num_rows),
        row_numel_(header.row_numel) {
    if constexpr (std::is_same_v<Compute, double>) {
      divide_ = header.divide_wide;
    } else {
      divide_ = header.divide;
    }
  }

  __device__ void UnpackChunk(int64_t first, int64_t end, ThreadStats& stats) {
    const bool aligned = IsAligned<kNumel>(rows_) && IsAligned<kNumel>(out_) &&
                         IsAligned<kNumel>(base_) &&
                         (num_rows_ == 1 || row_numel_ % kNumel == 0);
    if (!aligned) {
      for (int64_t k = first + threadIdx.x; k < end; k += kThreads) {
        UnpackAt<1, 1>(k, stats);
      }
      return;
    }
    constexpr int kAtOnce = kNumel == 8 ? 2 : 4;  // more would spill registers
    constexpr int kStep = kThreads * kNumel;
    int64_t k = first + static_cast<int64_t>(threadIdx.x) * kNumel;
    for (; first + kStep * kAtOnce <= end; first += kStep * kAtOnce) {
      UnpackAt<kNumel, kAtOnce>(k, stats);
      k += kStep * kAtOnce;
    }
    for (; k + kNumel <= end; k += kStep) UnpackAt<kNumel, 1>(k, stats);
    for (; k < end; ++k) UnpackAt<1, 1>(k, stats);
  }

 private:
  // Unpacks `kAtOnce` vectors, a step of all threads apart; all of a row's
  // loads are in flight before the first is used.
  template <int kWidth, int kAtOnce>
  __device__ void UnpackAt(int64_t k, ThreadStats& stats) {
    constexpr int kStep = kThreads * kWidth;
    Vector<Row, kWidth> row[kAtOnce];
    Vector<Out, kWidth> base[kAtOnce] = {};
    Compute sums[kAtOnce][kWidth];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      row[u] = LoadVector<kWidth>(rows_ + k + u * kStep);
    }
    if (base_ != nullptr) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        base[u] = LoadVector<kWidth>(base_ + k + u * kStep);
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        sums[u][i] = Convert<Compute>(row[u].values[i]);
      }
    }
#pragma unroll 1
    for (int64_t r = 1; r < num_rows_; ++r) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        row[u] = LoadVector<kWidth>(rows_ + r * row_numel_ + k + u * kStep);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          sums[u][i] += Convert<Compute>(row[u].values[i]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      Vector<Out, kWidth> result;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        result.values[i] =
            Finish(sums[u][i], divide_, base_ != nullptr, base[u].values[i]);
        if constexpr (kStats) stats.Add(Convert<Compute>(result.values[i]));
      }
      StoreVector<kWidth>(out_ + k + u * kStep, result);
    }
  }

  const Row* rows_;
  const Out* base_;
  Out* out_;
  int64_t num_rows_;
  int64_t row_numel_;
  Divide<Compute> divide_;
};

template <typename Row, bool kStats>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    UnpackKernel(const __grid_constant__ UnpackLaunch launch) {
  const int block = static_cast<int>(blockIdx.x);
  const UnpackSlot& slot =
      launch.slots[FindSlot(launch.slots, launch.header.num_slots, block)];
  const int64_t first = (block - slot.first_block) * kChunkNumel;
  const int64_t end = Min(first + kChunkNumel, slot.count);
  ThreadStats stats;
  DispatchOnDevice(slot.dtype, [&](auto type) {
    SlotRows<Row, decltype(type), kStats>(slot, launch.header)
        .UnpackChunk(first, end, stats);
  });
  if constexpr (kStats) {
    const Partial partial = AddThreads(stats.squares, stats.finite);
    if (threadIdx.x == 0) launch.header.partials[block] = partial;
  }
}

// One block per group of partials.
__global__ void __launch_bounds__(kThreads)
    StatsKernel(const __grid_constant__ StatsLaunch launch) {
  const int group = static_cast<int>(blockIdx.x);
  double squares = 0;
  bool finite = true;
  for (int i = launch.begins[group] + static_cast<int>(threadIdx.x);
       i < launch.begins[group + 1]; i += kThreads) {
    const Partial partial = launch.header.partials[i];
    squares += partial.squares;
    finite = finite && partial.finite == 1.0;
  }
  const Partial sum = AddThreads(squares, finite);
  if (threadIdx.x == 0) {
    launch.header.stats[2 * group] = static_cast<float>(sqrt(sum.squares));
    launch.header.stats[2 * group + 1] = static_cast<float>(sum.finite);
  }
}

}  // namespace jaxzero

#endif  // JAXZERO_CUDA_UNPACK_KERNEL_CUH_
