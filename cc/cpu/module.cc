// _cpu: the handlers of the CPU platform, for jax.ffi.register_ffi_target.

#include <nanobind/nanobind.h>

#include "core/plan.h"
#include "cpu/launcher.h"
#include "ffi/pack.h"
#include "ffi/unpack.h"
#include "ffi/unpack_leaves.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

namespace jaxzero {
namespace {

XLA_FFI_DEFINE_HANDLER(kPack, Pack<CpuLauncher>, PackBinding<CpuLauncher>());
XLA_FFI_DEFINE_HANDLER(kUnpack, Unpack<CpuLauncher>,
                       UnpackBinding<CpuLauncher>());
XLA_FFI_DEFINE_HANDLER(kUnpackLeaves, UnpackLeaves<CpuLauncher>,
                       UnpackLeavesBinding<CpuLauncher>());

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

NB_MODULE(_cpu, m) {
  m.doc() = "Handlers of jaxzero's custom calls on the CPU.";

  m.def(
      "registrations",
      [] {
        nb::dict targets;
        targets["jaxzero_pack"] = Capsule(kPack);
        targets["jaxzero_unpack"] = Capsule(kUnpack);
        targets["jaxzero_unpack_leaves"] = Capsule(kUnpackLeaves);
        return targets;
      },
      nb::sig("def registrations() -> dict[str, object]"),
      "Returns the handler of each custom call target.");

  m.attr("format") = kFormat;

  m.def(
      "slot_columns",
      [] {
        nb::list columns;
        for (const char* column : kSlotColumns) columns.append(column);
        return nb::tuple(columns);
      },
      nb::sig("def slot_columns() -> tuple[str, ...]"),
      "Returns the columns of a slot table, in order.");
}

}  // namespace
}  // namespace jaxzero
