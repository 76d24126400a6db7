#!/usr/bin/env bash
# All that is to be known on a machine with several GPUs, in one visit of ten minutes:
#
#   benchmarks/multigpu.sh OUT [STEP...]     all steps, or some
#   benchmarks/multigpu.sh --limits          what each may take, and the sum, in seconds
#
# Each step has a hard limit, because a rank that dies leaves the others waiting; what a
# step leaves of its time, later ones may use, so the sum of all limits is a limit too.
# What they find lies in OUT as JSON, PNG and logs, a table as soon as it is measured.
# All steps run, whatever fails; at the end stands a table of all that ran, and the exit
# code is 1 if any of it failed. Missed targets are no failure.
#
# RANKS is the number of GPUs unless set; more ranks than GPUs share them and take small
# sizes. AT_ONCE (2) is how many jobs of tests run at the same time. ARCHIVE names a
# .tar.gz of OUT, renewed after each step. DRY=1 runs the same on CPU devices.
#
# NCCL's variables stay as they are.
#
# shellcheck disable=SC2329 # Steps are called by their names.

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

readonly STEPS=(
  build mixed bandwidth cuda multihost overlap memory fsdp2 sweep targets
)
declare -rA LIMITS=(
  [build]=85 [mixed]=60 [bandwidth]=90 [cuda]=100 [multihost]=75 [overlap]=65
  [memory]=35 [fsdp2]=35 [sweep]=30 [targets]=5
)
readonly GRACE=8 # Seconds between a dump of stacks and the end.
readonly TIME_IS_UP=124 # Also the exit code of timeout, and of the launcher.

limits() {
  local step sum=0
  for step in "${STEPS[@]}"; do
    echo "$step ${LIMITS[$step]}"
    sum=$((sum + LIMITS[$step]))
  done
  echo "sum $sum"
}

refuse() {
  echo "multigpu.sh: $1" >&2
  exit 2
}

if [ "${1:-}" = --limits ]; then
  limits
  exit
fi
[ -n "${1:-}" ] || refuse "name a folder for results"
mkdir -p "$1/logs" || exit
OUT=$(cd "$1" && pwd)
readonly OUT TABLE=$OUT/steps.tsv
shift
[ "$#" -gt 0 ] || set -- "${STEPS[@]}"
for step in "$@"; do
  [ -n "${LIMITS[$step]:-}" ] || refuse "no step '$step': ${STEPS[*]}"
done
readonly DRY=${DRY:-} AT_ONCE=${AT_ONCE:-2}

# Which GPUs: as the launcher counts them, so that all layouts use the same.
GPUS=0 PLATFORM=cuda TINY=() COUNT=() MIXED_STEPS=${MIXED_STEPS:-2000}
# A layer's parameters take NVLink about as long as its tokens take the GPU.
MODEL=(--width 4096 --layers 12 --tokens 4096)
if [ -n "$DRY" ]; then
  PLATFORM=cpu MIXED_STEPS=40 RANKS=${RANKS:-2}
  export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$RANKS"
else
  GPUS=$(python3 -c 'from jaxzero._cli.launch import environment
print(environment.count_gpus())')
  [ "${GPUS:-0}" -gt 0 ] || refuse "no GPU is found; DRY=1 needs none"
  RANKS=${RANKS:-$GPUS}
fi
if [ "$RANKS" -lt "$GPUS" ]; then
  all=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((GPUS - 1)))}
  CUDA_VISIBLE_DEVICES=$(cut -d, -f"1-$RANKS" <<<"$all")
  export CUDA_VISIBLE_DEVICES
  GPUS=$RANKS
fi
if [ "$RANKS" -gt "$GPUS" ]; then
  TINY=(--tiny --repeats 1) COUNT=(--count 2)
  MODEL=(--width 16 --layers 2 --tokens 8 --repeats 1)
fi
readonly GPUS RANKS PLATFORM TINY COUNT MODEL MIXED_STEPS
# No job takes a GPU's memory in advance, because others are there at the same time.
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
ulimit -c 0

# Seconds that are left to this step.
left() {
  echo $((step_end - SECONDS))
}

# Runs a command with a limit in seconds; shows the end of what it printed.
limited() {
  local name=$1 limit=$2 started=$SECONDS status=$TIME_IS_UP
  local log=$OUT/logs/$name.log
  shift 2
  if [ "$limit" -gt 0 ]; then
    timeout -s KILL "$limit" "$@" >"$log" 2>&1
    status=$?
  else
    echo "not started, because no time was left" >"$log"
  fi
  printf '%s\t%d\t%d\t%d\n' \
    "$name" "$status" "$((SECONDS - started))" "$limit" >>"$TABLE"
  echo "== $name: status $status, $((SECONDS - started)) of $limit s"
  tail -n "${LINES_SHOWN:-6}" "$log" | cut -c1-300
  return "$status"
}

# Seconds after which a command with a limit shows where it is.
before_grace() {
  echo $(($1 > GRACE ? $1 - GRACE : 1))
}

# Runs a command as one process per GPU; the output of every rank is kept.
ranks() {
  local name=$1 limit=$2
  shift 2
  limited "$name" "$limit" python3 -m jaxzero launch -n "$RANKS" \
    --platform "$PLATFORM" --timeout "$(before_grace "$limit")" \
    --log-dir "$OUT/logs/$name" -- "$@"
}

# Runs a command as one process that drives all GPUs.
together() {
  local name=$1 limit=$2
  shift 2
  # In the foreground of the outer limit, which then also ends what this one started.
  JAX_PLATFORMS=$PLATFORM JAXZERO_TEST_PLATFORM=$PLATFORM limited "$name" "$limit" \
    timeout --foreground -s ABRT "$(before_grace "$limit")" "$@"
}

# Prints the variables of a job that has one process, with all GPUs.
only_rank() {
  local port
  port=$(python3 -c 'import socket
with socket.create_server(("127.0.0.1", 0)) as probe: print(probe.getsockname()[1])')
  echo "JAXZERO_COORDINATOR=127.0.0.1:$port" JAXZERO_NUM_PROCESSES=1 \
    JAXZERO_PROCESS_ID=0 "JAXZERO_LOCAL_DEVICE_IDS=$(seq -s, 0 $((GPUS - 1)))"
}

# Waits until fewer than so many jobs run.
fewer_than() {
  while [ "$(jobs -rp | wc -l)" -ge "$1" ]; do
    wait -n
  done
}

step_build() {
  local command=(
    python3 -m pip install --no-build-isolation --no-deps
    -C cmake.define.CMAKE_CUDA_ARCHITECTURES=90 -e .
  )
  # A dry run takes what is installed.
  [ -z "$DRY" ] || command=(python3 -c 'import jaxzero')
  JAXZERO_CUDA=on limited build "$(left)" "${command[@]}"
}

# Without it, all of this would measure XLA's own collectives, and say it was jaxzero.
module_is_there() {
  [ -n "$DRY" ] || limited module 30 python3 -c \
    'import sys; from jaxzero import _ffi; sys.exit(_ffi.cuda_obstacle())'
}

step_mixed() {
  # One after the other. Two programs on the same GPUs take turns of milliseconds, and
  # each collective waits for the turns of all its ranks: that looks like a hang.
  local limit=$(($(left) * 6 / 10))
  ranks mixed_ranks "$limit" python benchmarks/mixed.py --out "$OUT" \
    --steps "$MIXED_STEPS" --limit "$(before_grace "$limit")"
  limit=$(left)
  together mixed_together "$limit" python3 benchmarks/mixed.py --out "$OUT" \
    --steps "$MIXED_STEPS" --limit "$(before_grace "$limit")"
}

step_bandwidth() {
  LINES_SHOWN=14 ranks bandwidth "$(left)" \
    python benchmarks/bandwidth.py --out "$OUT" "${TINY[@]}" "${COUNT[@]}"
}

# Both layouts at the same time: they mostly compile, and so the GPUs are mostly idle.
# More at once would wait for each other's turns.
step_cuda() {
  ranks cuda_ranks "$(left)" pytest "${PYTEST[@]}" tests/cuda -m gpu &
  fewer_than "$AT_ONCE"
  together cuda_together "$(left)" \
    python3 -m pytest "${PYTEST[@]}" tests/cuda -m gpu &
  wait
}

step_multihost() {
  local variables
  read -ra variables < <(only_rank)
  ranks multihost_ranks "$(left)" \
    pytest "${PYTEST[@]}" "${MULTIHOST[@]}" tests/multihost &
  fewer_than "$AT_ONCE"
  together multihost_together "$(left)" env "${variables[@]}" \
    python3 -m pytest "${PYTEST[@]}" "${MULTIHOST[@]}" tests/multihost &
  wait
}

step_overlap() {
  LINES_SHOWN=12 ranks overlap "$(left)" \
    python benchmarks/overlap.py --save --out "$OUT" "${MODEL[@]}"
}

# The peak is that of a process, so each way has its own; all at once, because no time
# is measured and two steps have few collectives.
step_memory() {
  local way
  for way in on off native; do
    ranks "memory_$way" "$(left)" python benchmarks/overlap.py --save --out "$OUT" \
      --name "memory_$way" --ways "$way" --layouts listed "${MODEL[@]}" --repeats 1 &
  done
  wait
}

step_fsdp2() {
  local arguments=("${TINY[@]}" --device "$PLATFORM")
  if [ -n "$DRY" ] && ! python3 -c 'import torch' 2>/dev/null; then
    arguments=(--help)
  fi
  LINES_SHOWN=8 ranks fsdp2 "$(left)" \
    python benchmarks/fsdp2.py --out "$OUT" "${arguments[@]}"
}

step_sweep() {
  ranks sweep "$(left)" python benchmarks/sweep.py --out "$OUT" "${TINY[@]}" "${COUNT[@]}"
}

step_targets() {
  LINES_SHOWN=24 limited targets "$(left)" python3 benchmarks/targets.py "$OUT"
}

# What ran this time, in words; fails if any of it did.
report() {
  tail -n "+$((before + 1))" "$TABLE" | awk -F '\t' -v out="$OUT" '
    BEGIN { print "\nstep                 status  seconds  limit" }
    {
      word = $2 == 0 ? "" : $2 == 124 ? "  TIME IS UP" : $2 == 137 ? "  KILLED" : "  FAILED"
      printf "%-20s %6d %8d %6d%s\n", $1, $2, $3, $4, word
      failed += $2 != 0
    }
    END {
      print failed + 0 " of " NR " failed; logs are in " out "/logs"
      exit failed > 0
    }'
}

archive() {
  [ -z "${ARCHIVE:-}" ] ||
    { tar -czf "$ARCHIVE.part" -C "$OUT" . && mv "$ARCHIVE.part" "$ARCHIVE"; }
}

# Every test is named as it starts: the log of a rank that hangs ends with it.
PYTEST=(-v -p no:cacheprovider) MULTIHOST=()
[ -z "$DRY" ] || MULTIHOST=(-k rank_gathers)
readonly PYTEST MULTIHOST
{
  date
  nvidia-smi
  nvidia-smi topo -m
  env | grep '^NCCL_'
} >"$OUT/logs/machine.log" 2>&1

touch "$TABLE"
before=$(wc -l <"$TABLE") spare=0 has_module=""
readonly before
[ -z "$DRY" ] || spare=600 # There processors are few, and no time is measured.
for step in "$@"; do
  step_start=$SECONDS
  step_end=$((step_start + LIMITS[$step] + spare))
  case $step in
    build | fsdp2 | targets) ;;
    *)
      if [ -z "$has_module" ]; then
        module_is_there || break
        has_module=yes
      fi
      ;;
  esac
  "step_$step"
  spare=$((step_end - SECONDS))
  archive
done
report | tee "$OUT/report.txt"
status=$?
archive
exit "$status"
