// Values that move together, and where a block's work lies.

#ifndef JAXZERO_CUDA_VECTOR_CUH_
#define JAXZERO_CUDA_VECTOR_CUH_

#include <cstdint>

#include "core/dtype.h"

namespace jaxzero {

// Neighbouring values that are loaded and stored at once.
template <typename T, int kNumel>
struct alignas(sizeof(T) * kNumel) Vector {
  T values[kNumel];
};

// How many values of two types fill 16 bytes of the wider one.
template <typename A, typename B>
inline constexpr int kVectorNumel =
    16 / static_cast<int>(sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B));

template <int kNumel, typename T>
__device__ bool IsAligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % (sizeof(T) * kNumel) == 0;
}

template <int kNumel, typename T>
__device__ Vector<T, kNumel> LoadVector(const T* pointer) {
  return *reinterpret_cast<const Vector<T, kNumel>*>(pointer);
}

template <int kNumel, typename T>
__device__ void StoreVector(T* pointer, const Vector<T, kNumel>& vector) {
  *reinterpret_cast<Vector<T, kNumel>*>(pointer) = vector;
}

// The slot whose blocks include `block`: the last that does not start after it.
template <typename Slot>
__device__ int FindSlot(const Slot* slots, int num_slots, int block) {
  int low = 0;
  int high = num_slots;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (slots[middle].first_block <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls `f` with a value of the C++ type of `dtype`.
template <typename F>
__device__ void DispatchOnDevice(DType dtype, F f) {
  switch (dtype) {
    case DType::kF32:
      return f(float{});
    case DType::kBF16:
      return f(BFloat16{});
    case DType::kF16:
      return f(Float16{});
    case DType::kF64:
      return f(double{});
  }
}

}  // namespace jaxzero

#endif  // JAXZERO_CUDA_VECTOR_CUH_
