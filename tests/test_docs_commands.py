"""The shell commands of the documents run, with stand-ins for what is not here."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "BUILD.md", *sorted(map(str, ROOT.glob("docs/*.md")))]
BLOCKS = [
    pytest.param(
        block, id=f"{Path(name).name}-{number}{'-sphinx' * ('sphinx' in block)}"
    )
    for name in DOCUMENTS
    for number, block in enumerate(
        re.findall(r"```sh\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    )
]

# The environment that these tests run in is the one that `pip` and `venv` would make.
PIP = """\
#!/bin/bash
[ "$1" = install ] || exit 2
for argument in "${@:2}"; do
  case "$argument" in
    -e | --no-build-isolation | . | .\\[*] | [a-z]*) ;;
    *) exit 2 ;;
  esac
done
"""
PYTHON = f"""\
#!/bin/bash
case "$*" in
  "-m venv"*) ;;
  "-m pytest -n 2") exec {sys.executable} "$@" tests/test_cut.py ;;
  "-m jaxzero demo")
    exec {sys.executable} "$@" --steps 2 --batch 8 --accumulate 1 --blocks 1 \\
      --length 8 ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
# Other tests run those that are only found here.
PYTEST = f"""\
#!/bin/bash
exec {sys.executable} -m pytest --collect-only -q "$@"
"""
SBATCH = """\
#!/bin/bash
exec bash "$1"
"""
# Two tasks on this machine, with the variables that Slurm gives them.
SRUN = f"""\
#!{sys.executable}
import os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
tasks = [
    subprocess.Popen(
        command,
        env=os.environ
        | dict(
            SLURM_JOB_ID="{random.randrange(4096)}", SLURM_STEP_NODELIST="127.0.0.1",
            SLURM_NTASKS="2", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="1",
            SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank),
        ),
    )
    for rank in range(2)
]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Returns a folder that looks like a clone, with the stand-ins in .venv/bin."""
    for path in ROOT.iterdir():
        if path.name not in {".venv", "build", "dist", "jaxzero"}:
            (tmp_path / path.name).symlink_to(path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in {
        "pip": PIP,
        "python": PYTHON,
        "python3": PYTHON,
        "pytest": PYTEST,
        "sbatch": SBATCH,
        "srun": SRUN,
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    guide = (ROOT / "docs/clusters.md").read_text()
    (program,) = re.findall(r"```python\n(# train\.py\n.*?)```", guide, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    return tmp_path


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_commands_run_and_print_what_their_comments_say(
    block: str, clone: Path
) -> None:
    if "sphinx" in block:
        pytest.importorskip("sphinx")
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    path = f"{clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", block],
        cwd=clone,
        env=inherited | {"PATH": path, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for promised in re.findall(r"  # (.+)", block):
        assert promised in done.stdout


def test_there_are_commands_to_run() -> None:
    assert len(BLOCKS) >= 6


@pytest.mark.parametrize("name", [*DOCUMENTS, "CONTRIBUTING.md"])
def test_there_are_no_other_blocks(name: str) -> None:
    """Only kinds that a test runs, pictures made of letters, and what Sphinx reads."""
    kinds = re.findall(r"^ *```(\S+)", (ROOT / name).read_text(), re.MULTILINE)
    assert set(kinds) <= {"sh", "python", "{toctree}", "{include}"}
