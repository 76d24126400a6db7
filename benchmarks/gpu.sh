#!/usr/bin/env bash
# Builds with CUDA, then tests and measures on the GPUs that are here:
#
#   benchmarks/gpu.sh OUT STEP...    steps: build test ranks train soak kill
#                                    sanitize bench
#
# Several ranks share a GPU where there are fewer GPUs than ranks. Every step has a
# hard time limit, because a rank that dies leaves the others waiting, and writes
# OUT/<step>.log; the last lines of each are shown. All steps run, whatever fails.

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly OUT=$1
shift
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
export RANKS=${RANKS:-"2 3 4"} BENCH_RANKS=${BENCH_RANKS:-"1 2 4"}

# Runs a command with a limit in seconds; shows the end of what it printed.
limited() {
  local name=$1 limit=$2 started=$SECONDS status
  shift 2
  timeout -s KILL "$limit" "$@" >"$OUT/$name.log" 2>&1
  status=$?
  echo "== $name: status $status, $((SECONDS - started)) s"
  tail -n "${LINES_SHOWN:-6}" "$OUT/$name.log" | cut -c1-300
}

launch() {
  local ranks=$1
  shift
  python3 -m jaxzero launch -n "$ranks" --platform cuda --timeout 400 -- "$@"
}
export -f launch

step_build() {
  JAXZERO_CUDA=on limited build 300 \
    python3 -m pip install --no-build-isolation --no-deps -e .
}

step_test() {
  JAXZERO_TEST_PLATFORM=cuda limited test_1 300 \
    python3 -m pytest tests/cuda -m gpu -q
}

step_ranks() {
  # At the same time: they mostly compile, and the processors are many.
  local ranks
  for ranks in $RANKS; do
    limited "test_$ranks" 410 bash -c "launch $ranks pytest tests/cuda -m gpu -q" &
  done
  limited multihost_4 410 bash -c "launch 4 pytest tests/multihost -q" &
  wait
  limited smoke_8 180 bash -c \
    "launch 8 pytest tests/cuda -m gpu -q -k 'exact and defaults'"
}

step_train() {
  # One after the other: many processes on a GPU take turns of milliseconds, and every
  # collective waits for the turns of all its ranks.
  local ranks
  for ranks in ${TRAIN_RANKS:-1 2 4}; do
    limited "train_$ranks" 250 bash -c \
      "launch $ranks pytest tests/multihost/test_training.py \
        tests/multihost/test_zero3.py -v"
  done
}

# With checks of gradients and poisoned temp memory, then at full speed.
step_soak() {
  JAXZERO_DEBUG=1 limited soak_2 250 bash -c \
    "launch 2 pytest tests/multihost/test_overlap.py -v"
  limited soak_4 200 bash -c \
    "launch 4 pytest tests/multihost/test_overlap.py -v -k hybrid"
}

step_kill() {
  limited kill_4 60 bash -c "launch 4 python tests/cuda/dying_rank.py"
}

step_sanitize() {
  local tool
  for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
    JAXZERO_TEST_PLATFORM=cuda limited "$tool" 200 \
      compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
      python3 -m pytest tests/cuda -m gpu -q -k "exact or statistics or come_back"
  done
}

step_bench() {
  local ranks
  for ranks in $BENCH_RANKS; do
    if [ "$ranks" = 1 ]; then
      LINES_SHOWN=12 limited bench_1 200 python3 benchmarks/gpu.py --save
    else
      LINES_SHOWN=24 limited "bench_$ranks" 280 \
        bash -c "launch $ranks python benchmarks/gpu.py --save"
    fi
  done
  cp benchmarks/results/gpu_*.json "$OUT"
}

for step in "$@"; do
  "step_$step"
done
