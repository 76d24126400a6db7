// Element types and conversions between them, the same bits on host and device.
//
// Every conversion rounds once, to nearest even; subnormals, infinities and
// NaNs are kept. The code selects instead of branching, so that compilers
// vectorise it.

#ifndef JAXZERO_CORE_DTYPE_H_
#define JAXZERO_CORE_DTYPE_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/host_device.h"

namespace jaxzero {

// The types of components. A complex element is two of them.
enum class DType { kF32, kBF16, kF16, kF64 };

// Enums rather than structs: loops that store a scalar and use it again are
// vectorised, those that do so with a struct are not (g++ 12).
enum class BFloat16 : uint16_t {};
enum class Float16 : uint16_t {};

inline constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF64:
      return 8;
  }
  return 0;
}

inline constexpr const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kF64:
      return "float64";
  }
  return "unknown";
}

// The type in which values of these types are scaled and added.
template <typename... Ts>
using ComputeType =
    std::conditional_t<(std::is_same_v<Ts, double> || ...), double, float>;

// Calls `f` with a value of the C++ type of `dtype`.
template <typename F>
auto Dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBF16:
      return f(BFloat16{});
    case DType::kF16:
      return f(Float16{});
    case DType::kF64:
      return f(double{});
    case DType::kF32:
      break;
  }
  return f(float{});
}

namespace internal {

template <typename To, typename From>
JAXZERO_HOST_DEVICE inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

JAXZERO_HOST_DEVICE inline float ToFloat(float value) { return value; }

JAXZERO_HOST_DEVICE inline float ToFloat(BFloat16 value) {
  return BitCast<float>(static_cast<uint32_t>(value) << 16);
}

JAXZERO_HOST_DEVICE inline float ToFloat(Float16 value) {
  const uint32_t sign = (static_cast<uint32_t>(value) & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value) & 0x7fffu;
  // Float32 has 112 exponents below those of float16, and as many above, which
  // infinities and NaNs skip.
  uint32_t bits = (magnitude << 13) + (112u << 23);
  bits += magnitude >= 0x7c00u ? 112u << 23 : 0u;
  // A subnormal is an integer in units of 2^-24.
  const float subnormal =
      static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  bits = magnitude < 0x0400u ? BitCast<uint32_t>(subnormal) : bits;
  return BitCast<float>(bits | sign);
}

// Rounds to odd: an inexact result is the neighbour with an odd last bit. It
// can be rounded again to at most 22 bits as if the first rounding had not
// happened.
JAXZERO_HOST_DEVICE inline float ToFloatOdd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  const double excess = value < 0.0 ? value - back : back - value;
  uint32_t bits = BitCast<uint32_t>(nearest);
  bits -= excess > 0.0 ? 1u : 0u;
  bits |= back < value || back > value ? 1u : 0u;
  return BitCast<float>(bits);
}

JAXZERO_HOST_DEVICE inline BFloat16 ToBFloat16(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x0040u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<BFloat16>(is_nan ? quiet_nan : rounded);
}

JAXZERO_HOST_DEVICE inline Float16 ToFloat16(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half =
      (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the results are subnormal. The last bit of a float32 in [0.5,
  // 1) weighs 2^-24, as theirs does, so that this sum rounds where it should.
  const float shifted = BitCast<float>(magnitude) + 0.5f;
  const uint32_t subnormal = BitCast<uint32_t>(shifted) - (126u << 23);
  half = magnitude < (113u << 23) ? subnormal : half;
  half = magnitude >= (143u << 23) ? 0x7c00u : half;
  half = magnitude > (255u << 23) ? 0x7e00u | (magnitude >> 13 & 0x3ffu) : half;
  return static_cast<Float16>(half | sign);
}

}  // namespace internal

// Converts between any two of the types.
template <typename To, typename From>
JAXZERO_HOST_DEVICE inline To Convert(From from) {
  if constexpr (std::is_same_v<To, From>) {
    return from;
  } else if constexpr (std::is_same_v<From, double>) {
    if constexpr (std::is_same_v<To, float>) {
      return static_cast<float>(from);
    } else {
      return Convert<To>(internal::ToFloatOdd(from));
    }
  } else {
    const float value = internal::ToFloat(from);
    if constexpr (std::is_same_v<To, BFloat16>) {
      return internal::ToBFloat16(value);
    } else if constexpr (std::is_same_v<To, Float16>) {
      return internal::ToFloat16(value);
    } else {
      return static_cast<To>(value);
    }
  }
}

}  // namespace jaxzero

#endif  // JAXZERO_CORE_DTYPE_H_
