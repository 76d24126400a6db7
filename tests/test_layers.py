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
    "_interrupt": set(),
    "_dtypes": {"ml_dtypes", "numpy"},
    "_numbers": set(),
    "_policy": set(),
    "_cut": set(),
    "_text": set(),
    "_plan.types": set(),
    "_plan.plan": set(),
    "_plan.planner": set(),
    "_plan": set(),
    "_tree": {"jax", "numpy"},
    "_axis": {"jax", "numpy"},
    "_empty": {"jax"},
    "_padding": {"jax"},
    "_layout": {"jax"},
    "_make_layout": {"jax"},
    "_ffi": {"jax", "numpy"},
    "_norms.stats": {"jax"},
    "_collectives.debug": {"jax", "numpy"},
    "_transports.alive": set(),
    "_transports.transport": {"jax"},
    "_transports.names": set(),
    "_transports.xla": {"jax", "numpy"},
    "_transports.nccl": {"jax", "numpy"},
    "_transports": {"jax"},
    "_collectives.leaves": set(),
    "_collectives.make_plan": set(),
    "_collectives.linear": {"jax"},
    "_collectives.prepare": {"jax"},
    "_collectives.plain": {"jax"},
    "_collectives.reduce": {"jax"},
    "_collectives.shard_grads": set(),
    "_collectives.shards": set(),
    "_collectives.gather": {"jax"},
    "_collectives.gather_params": set(),
    "_collectives.shard_params": {"jax", "numpy"},
    "_collectives": set(),
    "_norms.scaled_sum": {"jax"},
    "_norms.global_norm": {"jax"},
    "_norms.clip": {"jax"},
    "_norms.loss_scale": {"jax", "numpy"},
    "_norms": set(),
    "_gathered": {"jax", "numpy"},
    "_layer_turns": {"jax"},
    "_layer_passes": {"jax"},
    "_apply_layers": {"jax"},
    "_train.batch_dims": {"jax"},
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
    "_train.extra_args": {"jax"},
    "_train.state": {"jax"},
    "_train.shard_uses": {"jax"},
    "_train.grads": {"jax"},
    "_train.step": {"jax"},
    "_train.optimizer_layout": {"jax"},
    "_train.elementwise": {"jax", "numpy"},
    "_train.optimizer": {"jax"},
    "_train.processes": {"jax", "numpy"},
    "_train.params_layout": {"jax", "numpy"},
    "_train.agreed_layout": {"jax"},
    "_train.batch": {"jax", "numpy"},
    "_train.export": {"jax"},
    "_train.place": {"jax", "numpy"},
    "_train.restore": {"jax", "numpy"},
    "_train.programs": {"jax"},
    "_train.zero3": {"jax"},
    "_train": set(),
    "_memory.step": set(),
    "_memory.moments": set(),
    "_memory.estimate": {"jax"},
    "_memory": set(),
    "": set(),
    "_rank_variables": set(),
    "distributed": {"jax"},
}
"""The library, from the bottom to `jaxzero` itself."""


COMMANDS = {
    "arguments": {"_typeshed"},
    "models": {"jax"},
    "free_memory": set(),
    "bench": set(),
    "bench.trees": {"jax"},
    "bench.table": set(),
    "bench.environment": {"jax"},
    "bench.timing": {"jax"},
    "bench.per_rank": {"jax"},
    "bench.rivals": {"jax"},
    "bench.workload": {"jax", "numpy"},
    "bench.check": {"jax", "numpy"},
    "bench.limits": {"jax", "numpy"},
    "bench.memory": {"jax"},
    "bench.comparison": {"jax"},
    "doctor": set(),
    "doctor.fact": set(),
    "doctor.limit": set(),
    "doctor.libnccl": set(),
    "doctor.install": {"numpy"},
    "doctor.machine": {"jax"},
    "doctor.collectives": {"jax", "numpy"},
    "doctor.self_test": {"jax", "numpy"},
    "doctor.command": set(),
    "bench.devices": {"jax"},
    "bench.options": {"jax"},
    "bench.report": set(),
    "bench.command": {"jax"},
    "launch": set(),
    "launch.watchdog": set(),
    "launch.program": set(),
    "launch.ranks": set(),
    "launch.environment": set(),
    "launch.command": set(),
    "plan": set(),
    "plan.command": {"jax"},
    "demo": set(),
    "demo.model": {"jax"},
    "demo.text": {"numpy"},
    "demo.check": set(),
    "demo.options": set(),
    "demo.needs": {"jax"},
    "demo.progress": set(),
    "demo.memory": {"jax", "optax"},
    "demo.training": {"jax", "optax"},
    "demo.result": {"jax"},
    "demo.plot": {"matplotlib", "numpy"},
    "demo.run": {"jax", "optax"},
    "demo.command": {"jax"},
    "": set(),
}
"""The commands, from the bottom; beside these files they use public names only."""

PRIVATE = {
    "launch.environment": {"_rank_variables"},
    "doctor.install": {"_ffi", "_transports"},
}
"""What else a command may use: `doctor` looks at parts of the library."""

UNSTABLE = re.compile(
    r"get_abstract_mesh|ManualAxisType|manual_axis_type|\.mat\b|\.vma\b|pcast\b"
)
"""What JAX has changed before: the abstract mesh and the types that vary over it."""


def module_name(path: Path) -> str:
    """Returns the dotted name below `jaxzero`; a package is named by its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name: str) -> Iterator[str]:
    """Yields what a file imports.

    Files of this package are yielded as in `MODULES` with a leading dot, others as
    their top package.
    """
    tree = ast.parse(MODULES[name].read_text())
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
                yield f".{own}"
            elif top not in sys.stdlib_module_names:
                yield top


def internal(target: str) -> str | None:
    """Returns the name in `MODULES` of an absolute import, or None."""
    top, _, name = target.partition(".")
    return name if top == "jaxzero" and name in MODULES else None


def in_library(name: str) -> bool:
    return not name.startswith(("_cli", "__main__"))


def test_table_lists_every_file_of_the_library():
    assert set(LAYERS) == {name for name in MODULES if in_library(name)}


@pytest.mark.parametrize("name", LAYERS, ids=lambda name: name or "jaxzero")
def test_library_file_imports_only_files_above_it(name):
    order = list(LAYERS)
    for target in imports(name):
        if not target.startswith("."):
            continue
        target = target[1:]
        assert in_library(target), f"{name} imports {target}"
        assert order.index(target) < order.index(name), f"{name} imports {target}"


def test_every_exception_is_needed():
    for command, private in PRIVATE.items():
        used = {target[1:] for target in imports(f"_cli.{command}")}
        assert private <= used


@pytest.mark.parametrize("name", LAYERS, ids=lambda name: name or "jaxzero")
def test_library_file_imports_exactly_the_packages_of_the_table(name):
    found = {target for target in imports(name) if not target.startswith(".")}
    assert found == LAYERS[name]


def below_commands(name: str) -> str | None:
    """Returns a module's name in `COMMANDS`, or None."""
    return name.removeprefix("_cli").removeprefix(".") if name[:4] == "_cli" else None


def test_table_lists_every_file_of_the_commands():
    assert set(COMMANDS) == {below_commands(name) for name in MODULES} - {None}


@pytest.mark.parametrize("name", COMMANDS, ids=lambda name: name or "_cli")
def test_command_imports_public_names_and_files_above_it(name):
    order = list(COMMANDS)
    packages = set()
    for target in imports(f"_cli.{name}".rstrip(".")):
        if not target.startswith("."):
            packages.add(target)
            continue
        own = below_commands(target[1:])
        if own is None:
            assert target[1:] in {"", "distributed", *PRIVATE.get(name, ())}, (
                f"{name}: {target}"
            )
        else:
            assert order.index(own) < order.index(name), f"{name} imports {own}"
    assert packages == COMMANDS[name]


def test_program_imports_a_command_only_when_it_is_asked_for():
    assert set(imports("__main__")) == {"._interrupt"}


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
