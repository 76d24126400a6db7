"""Which file may use which: the arrows of the architecture, read off the sources."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jaxzero"
SOURCES = ROOT / "cc"

# Python: a file imports only files above it, and exactly these other packages.

LAYERS: dict[str, set[str]] = {
    "_dtypes": {"ml_dtypes", "numpy"},
    "_policy": set(),
    "_cut": set(),
    "_plan": set(),
    "_plan_table": set(),
    "_tree": {"jax", "numpy"},
    "_axis": {"jax", "numpy"},
    "_ffi": {"jax", "numpy"},
    "_stats": {"jax"},
    "_debug": {"jax", "numpy"},
    "_transports.names": set(),
    "_transports.xla": {"jax", "numpy"},
    "_transports.nccl": {"jax", "numpy"},
    "_transports": {"jax"},
    "_reduce": {"jax"},
    "_shard_grads": set(),
    "_gather_params": {"jax"},
    "_shard_params": {"jax", "numpy"},
    "_l2": {"jax"},
    "_norm": {"jax"},
    "_norm_clip": {"jax"},
    "_loss_scale": {"jax", "numpy"},
    "_gathered": {"jax", "numpy"},
    "_layer_turns": {"jax"},
    "_layer_passes": {"jax"},
    "_apply_layers": {"jax"},
    "_train.layout": {"jax", "numpy"},
    "_train.make_layout": {"jax", "numpy"},
    "_units.inline": {"jax"},
    "_units.body": {"jax"},
    "_units.find": {"jax"},
    "_units.split": {"jax"},
    "_units.residuals": {"jax"},
    "_units.parameters": {"jax"},
    "_units.schedule": {"jax"},
    "_units.sliced": {"jax"},
    "_units.scan": {"jax"},
    "_units.loss": {"jax"},
    "_units": set(),
    "_train.options": {"jax"},
    "_train.state": {"jax"},
    "_train.empty": {"jax"},
    "_train.grads": {"jax"},
    "_train.step": {"jax"},
    "_train.optimizer_layout": {"jax"},
    "_train.elementwise": {"jax", "numpy"},
    "_train.optimizer": {"jax"},
    "_train.processes": {"jax", "numpy"},
    "_train.batch": {"jax", "numpy"},
    "_train.export": {"jax"},
    "_train.restore": {"jax", "numpy"},
    "_train.programs": {"jax"},
    "_train.zero3": {"jax"},
    "_train": set(),
    "_memory.live": set(),
    "_memory.step": set(),
    "_memory.moments": set(),
    "_memory": set(),
    "_estimate": {"jax"},
    "": set(),
}
"""The library, from the bottom to `jaxzero` itself."""

UPWARD = {("_plan", "_plan_table")}
"""Inside a function, when a plan is printed."""

BENCH = {
    "_bench": set(),
    "_bench.trees": set(),
    "_bench.table": set(),
    "_bench.environment": {"jax"},
    "_bench.timing": {"jax"},
    "_bench.per_rank": {"jax"},
    "_bench.rivals": {"jax"},
    "_bench.workload": {"jax", "numpy"},
    "_bench.check": {"jax", "numpy"},
    "_bench.limits": {"jax", "numpy"},
    "_bench.memory": {"jax"},
    "_bench.comparison": {"jax"},
}
"""What measures the library, from the bottom; beside this it uses `jaxzero` only."""

COMMANDS = {
    "bench": {"_bench.comparison", "_bench.environment", "_bench.memory"},
    "bench_devices": {"testing"},
    "bench_options": {"_bench.comparison", "_bench.trees"},
    "bench_report": {"_bench.comparison", "_bench.environment", "_bench.table"},
    "doctor_install": {"_ffi", "_transports"},
}
"""What a command may use beside commands and `jaxzero`."""

UNSTABLE = re.compile(
    r"get_abstract_mesh|ManualAxisType|manual_axis_type|\.mat\b|\.vma\b|pcast\b"
)
"""What JAX has changed before: the abstract mesh and the types that vary over it."""


def module_name(path: Path) -> str:
    """Returns the dotted name below `jaxzero`; a package is named by its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name: str) -> Iterator[tuple[str, bool]]:
    """Yields what a file imports, and whether it does so inside a function.

    Files of this package are yielded as in `MODULES` with a leading dot, others as
    their top package.
    """
    tree = ast.parse(MODULES[name].read_text())
    inside = {
        child
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for child in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            known = [target for target in below if internal(target) is not None]
            targets = known + [str(node.module)] * (len(known) < len(below))
        else:
            continue
        for target in targets:
            own = internal(target)
            top = target.partition(".")[0]
            if own is not None:
                yield f".{own}", node in inside
            elif top not in sys.stdlib_module_names:
                yield top, node in inside


def internal(target: str) -> str | None:
    """Returns the name in `MODULES` of an absolute import, or None."""
    top, _, name = target.partition(".")
    return name if top == "jaxzero" and name in MODULES else None


def in_library(name: str) -> bool:
    return not name.startswith(("_bench", "_cli", "testing", "__main__"))


def test_table_lists_every_file_of_the_library():
    assert set(LAYERS) == {name for name in MODULES if in_library(name)}


@pytest.mark.parametrize("name", LAYERS, ids=lambda name: name or "jaxzero")
def test_library_file_imports_only_files_above_it(name):
    order = list(LAYERS)
    for target, is_inside in imports(name):
        if not target.startswith("."):
            continue
        target = target[1:]
        assert in_library(target), f"{name} imports {target}"
        if (name, target) in UPWARD:
            assert is_inside
        else:
            assert order.index(target) < order.index(name), f"{name} imports {target}"


def test_every_exception_is_needed():
    for name, target in UPWARD:
        assert f".{target}" in dict(imports(name))
    for command, private in COMMANDS.items():
        used = {target[1:] for target, _ in imports(f"_cli.{command}")}
        assert private <= used


@pytest.mark.parametrize("name", LAYERS, ids=lambda name: name or "jaxzero")
def test_library_file_imports_exactly_the_packages_of_the_table(name):
    found = {target for target, _ in imports(name) if not target.startswith(".")}
    assert found == LAYERS[name]


def test_table_lists_every_file_that_measures():
    assert set(BENCH) == {name for name in MODULES if name.startswith("_bench")}


@pytest.mark.parametrize("name", BENCH)
def test_what_measures_uses_the_public_library_and_files_above(name):
    order = list(BENCH)
    packages = set()
    for target, _ in imports(name):
        if target.startswith("._bench"):
            above = order.index(target[1:]) < order.index(name)
            assert above, f"{name} imports {target}"
        elif target.startswith("."):
            assert target == ".", f"{name} imports {target}"
        else:
            packages.add(target)
    assert packages == BENCH[name]


COMMAND_FILES = [name for name in MODULES if name.startswith("_cli.")]


@pytest.mark.parametrize("name", COMMAND_FILES)
def test_command_uses_the_public_library(name):
    allowed = COMMANDS.get(name.removeprefix("_cli."), set())
    for target, _ in imports(name):
        own = target.startswith("._cli")
        assert (
            own or target == "." or target[1:] in allowed or not target.startswith(".")
        ), f"{name} imports {target}"


@pytest.mark.parametrize("name", [name for name in MODULES if "testing" in name])
def test_launcher_does_not_need_the_library(name):
    """It starts processes before JAX is set up, so it imports little."""
    for target, _ in imports(name):
        assert target in {"jax", "._cli.arguments"} or target.startswith(".testing"), (
            f"{name} imports {target}"
        )


def test_program_imports_a_command_only_when_it_is_asked_for():
    assert not set(imports("__main__"))


@pytest.mark.parametrize("name", [name for name in MODULES if in_library(name)])
def test_unstable_api_is_used_in_one_file(name):
    used = set(UNSTABLE.findall(MODULES[name].read_text()))
    assert bool(used) == (name == "_axis"), f"{name or 'jaxzero'} uses {used}"


# C++: core <- ffi <- cpu and cuda.

FOLDERS: dict[str, set[str]] = {
    "core": {"core"},
    "ffi": {"core", "ffi"},
    "cpu": {"core", "ffi", "cpu"},
    "cuda": {"core", "ffi", "cuda"},
}

CPP_FILES = sorted(
    path.relative_to(SOURCES).as_posix()
    for path in SOURCES.rglob("*")
    if path.suffix in {".h", ".cc", ".cu", ".cuh"}
)

OTHERS: dict[str, str] = {
    "xla/": r"(ffi|cpu|cuda)/.*\.(h|cc)",
    "nanobind/": r"(cpu|cuda)/module\.cc",
    "cuda_runtime_api.h": r"cuda/.*",
    "nccl.h": r"cuda/nccl\.h",
    "nvtx3/": r"cuda/range\.h",
    "sys/mman.h": r"cpu/huge_pages\.h",
    "unistd.h": r"cpu/huge_pages\.h",
    "dlfcn.h": r"cuda/nccl\.cc",
}
"""Headers that are neither ours nor standard C++, and the files that may have them.

Kernels (.cu, .cuh) see neither XLA nor Python, and no binding sees device code.
"""


def includes(name: str) -> list[str]:
    text = (SOURCES / name).read_text()
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', text, re.MULTILINE)


def test_folders_of_cpp_files_are_known():
    assert {name.partition("/")[0] for name in CPP_FILES} <= set(FOLDERS)


@pytest.mark.parametrize("name", CPP_FILES)
def test_includes_point_down(name):
    folder = name.partition("/")[0]
    for header in includes(name):
        if header in CPP_FILES:
            assert header.partition("/")[0] in FOLDERS[folder], header
            continue
        other = [
            pattern for start, pattern in OTHERS.items() if header.startswith(start)
        ]
        if other:
            assert re.fullmatch(other[0], name), header
        else:
            assert re.fullmatch(r"[a-z_]+", header), f"{header} is no standard header"


@pytest.mark.parametrize(
    "name", [n for n in CPP_FILES if not n.endswith((".h", ".cc"))]
)
def test_kernel_files_are_included_by_kernel_files_only(name):
    if name.endswith(".cu"):
        return
    users = {other for other in CPP_FILES if name in includes(other)}
    assert users and all(user.endswith((".cu", ".cuh")) for user in users)


def test_no_two_cpp_files_include_each_other():
    graph = {name: [h for h in includes(name) if h in CPP_FILES] for name in CPP_FILES}

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        for header in graph[name]:
            visit(header, (*above, name))

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize(
    "name", [name for name in CPP_FILES if name.endswith((".h", ".cuh"))]
)
def test_include_guard_is_the_path(name):
    text = (SOURCES / name).read_text()
    guard = "JAXZERO_" + re.sub(r"[/.]", "_", name).upper() + "_"
    assert f"#ifndef {guard}\n#define {guard}\n" in text
    assert text.rstrip().endswith(f"#endif  // {guard}")
