// _cuda: the handlers of the CUDA platform, for jax.ffi.register_ffi_target.

#include <nanobind/nanobind.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/bucket.h"
#include "core/plan.h"
#include "cuda/all_gather.h"
#include "cuda/communicator.h"
#include "cuda/error.h"
#include "cuda/fused_call.h"
#include "cuda/launcher.h"
#include "cuda/reduce_scatter.h"
#include "ffi/pack.h"
#include "ffi/unpack.h"
#include "ffi/unpack_leaves.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

namespace jaxzero {
namespace {

XLA_FFI_DEFINE_HANDLER(kPack, Pack<CudaLauncher>, PackBinding<CudaLauncher>());
XLA_FFI_DEFINE_HANDLER(kUnpack, Unpack<CudaLauncher>,
                       UnpackBinding<CudaLauncher>());
XLA_FFI_DEFINE_HANDLER(kUnpackLeaves, UnpackLeaves<CudaLauncher>,
                       UnpackLeavesBinding<CudaLauncher>());
XLA_FFI_DEFINE_HANDLER(kInstantiate, InstantiateFusedCall,
                       ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kPrepare, PrepareFusedCall,
                       ffi::Ffi::BindPrepare()
                           .Ctx<ffi::Extension<Collectives>>()
                           .RemainingArgs()  // not looked at
                           .RemainingRets()  // not looked at
                           .Attrs());
XLA_FFI_DEFINE_HANDLER(kInitialize, InitializeFusedCall,
                       ffi::Ffi::BindInitialize()
                           .RemainingArgs()  // not looked at
                           .RemainingRets()  // not looked at
                           .Attrs());
// Kernels are loaded before a call runs; see LoadKernels.
XLA_FFI_DEFINE_HANDLER(
    kLoad,
    [](ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
      return CheckCuda(LoadKernels(), "loading kernels");
    },
    ffi::Ffi::BindInitialize()
        .RemainingArgs()  // not looked at
        .RemainingRets()  // not looked at
        .Attrs());

// Whether temporary memory starts as NaNs, so that reading what no kernel wrote
// shows in every result.
bool PoisonsTemps() {
  static const bool poisons = [] {
    const char* debug = std::getenv("JAXZERO_DEBUG");
    return debug != nullptr && std::strcmp(debug, "1") == 0;
  }();
  return poisons;
}

// A buffer whose contents do not matter: the memory that a fused call works in.
XLA_FFI_DEFINE_HANDLER(
    kTemp,
    [](cudaStream_t stream, ffi::RemainingArgs,
       ffi::Result<ffi::AnyBuffer> temp, int64_t,
       int64_t format) -> ffi::Error {
      JAXZERO_RETURN_IF_ERROR(CheckFormat(format));
      if (!PoisonsTemps()) return ffi::Error::Success();
      constexpr int kNanByte = 0xff;  // all ones are a NaN in every dtype
      return CheckCuda(cudaMemsetAsync(temp->untyped_data(), kNanByte,
                                       temp->size_bytes(), stream),
                       "poisoning a temp");
    },
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .RemainingArgs()            // those of the fused call, not read
        .Ret<ffi::AnyBuffer>()      // the temp
        .Attr<int64_t>("digest")    // of the fused call
        .Attr<int64_t>("format"));  // see kFormat

// For `doctor`: writes whether XLA's collectives extension is there and fits,
// and its version. Only a handler that runs sees the extension.
ffi::Error WriteOffer(cudaStream_t stream, OfferedCollectives offered,
                      ffi::Result<ffi::BufferR1<ffi::S32>> result) {
  const int32_t numbers[] = {offered.found, offered.supported(), offered.major,
                             offered.minor};
  if (result->element_count() != std::size(numbers)) {
    return Invalid("result: found ", result->element_count(),
                   " elements, expected ", std::size(numbers));
  }
  // CUDA has read memory that is not pinned when the call returns.
  return CheckCuda(
      cudaMemcpyAsync(result->typed_data(), numbers, sizeof(numbers),
                      cudaMemcpyHostToDevice, stream),
      "copying the version of an extension");
}

XLA_FFI_DEFINE_HANDLER(kCollectivesProbe, WriteOffer,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<OfferedCollectives>()
                           .Ret<ffi::BufferR1<ffi::S32>>());  // four numbers

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict CopyStages(XLA_FFI_Handler* execute) {
  nb::dict stages;
  stages["initialize"] = Capsule(kLoad);
  stages["execute"] = Capsule(execute);
  return stages;
}

nb::dict FusedStages(XLA_FFI_Handler* execute) {
  nb::dict stages;
  stages["instantiate"] = Capsule(kInstantiate);
  stages["prepare"] = Capsule(kPrepare);
  stages["initialize"] = Capsule(kInitialize);
  stages["execute"] = Capsule(execute);
  return stages;
}

template <size_t kSize>
nb::tuple Names(const char* const (&names)[kSize]) {
  nb::list list;
  for (const char* name : names) list.append(name);
  return nb::tuple(list);
}

std::vector<int64_t> Numbers(const nb::bytes& table) {
  std::vector<int64_t> numbers(table.size() / sizeof(int64_t));
  std::memcpy(numbers.data(), table.c_str(), numbers.size() * sizeof(int64_t));
  return numbers;
}

FusedPlan PlanOf(const nb::bytes& slots, const nb::bytes& buckets,
                 int64_t group_size) {
  const std::vector<int64_t> slot_table = Numbers(slots);
  const std::vector<int64_t> bucket_table = Numbers(buckets);
  auto plan =
      DecodeFusedPlan({slot_table.data(), slot_table.size()},
                      {bucket_table.data(), bucket_table.size()}, group_size);
  if (plan.has_error()) throw nb::value_error(plan.error().message().c_str());
  return *plan;
}

NB_MODULE(_cuda, m) {
  m.doc() = "Handlers of jaxzero's custom calls on CUDA.";

  m.def(
      "registrations",
      [] {
        nb::dict targets;
        targets["jaxzero_pack"] = CopyStages(kPack);
        targets["jaxzero_unpack"] = CopyStages(kUnpack);
        targets["jaxzero_unpack_leaves"] = CopyStages(kUnpackLeaves);
        nb::dict temp;
        temp["execute"] = Capsule(kTemp);
        targets["jaxzero_temp"] = temp;
        targets["jaxzero_reduce_scatter"] = FusedStages(ReduceScatterExecute());
        targets["jaxzero_all_gather"] = FusedStages(AllGatherExecute());
        return targets;
      },
      nb::sig("def registrations() -> dict[str, dict[str, object]]"),
      "Returns the handler of each stage of each custom call target.");

  m.attr("format") = kFormat;

  m.def(
      "slot_columns", [] { return Names(kSlotColumns); },
      nb::sig("def slot_columns() -> tuple[str, ...]"),
      "Returns the columns of a slot table, in order.");

  m.def(
      "bucket_columns", [] { return Names(kBucketColumns); },
      nb::sig("def bucket_columns() -> tuple[str, ...]"),
      "Returns the columns of a bucket table, in order.");

  m.def(
      "bucket_codes",
      [] {
        const char* dtypes[std::size(kCommDTypes)];
        for (size_t i = 0; i < std::size(kCommDTypes); ++i) {
          dtypes[i] = Name(kCommDTypes[i]);
        }
        nb::dict codes;
        codes["kind"] = Names(kKinds);
        codes["collective"] = Names(kCollectives);
        codes["comm_dtype"] = Names(dtypes);
        return codes;
      },
      nb::sig("def bucket_codes() -> dict[str, tuple[str, ...]]"),
      "Returns the names whose positions a bucket table holds, per column.");

  m.def(
      "reduce_temp_bytes",
      [](const nb::bytes& slots, const nb::bytes& buckets, int64_t group_size,
         int64_t replicas, bool with_stats) {
        return ReduceTempBytes(PlanOf(slots, buckets, group_size), replicas > 1,
                               with_stats);
      },
      nb::arg("slots"), nb::arg("buckets"), nb::arg("group_size"),
      nb::arg("replicas"), nb::arg("with_stats"),
      "Returns the size of the last operand of jaxzero_reduce_scatter.");

  m.def(
      "gather_temp_bytes",
      [](const nb::bytes& slots, const nb::bytes& buckets, int64_t group_size) {
        return GatherTempBytes(PlanOf(slots, buckets, group_size));
      },
      nb::arg("slots"), nb::arg("buckets"), nb::arg("group_size"),
      "Returns the size of the last operand of jaxzero_all_gather.");

  m.def(
      "collectives_probe", [] { return Capsule(kCollectivesProbe); },
      nb::sig("def collectives_probe() -> object"),
      "Returns a handler of four int32 numbers: whether XLA offers its "
      "collectives extension, whether that works here, its major and minor "
      "version.");

  // What `doctor` reports of a build.
  m.attr("cuda_version") = CUDART_VERSION;
  m.attr("nccl_header_version") = NCCL_VERSION_CODE;
  m.attr("collectives_version") =
      nb::make_tuple(Collectives::kMajorVersion, Collectives::kMinorVersion);
  m.attr("architectures") = JAXZERO_CUDA_ARCHITECTURES;
}

}  // namespace
}  // namespace jaxzero
