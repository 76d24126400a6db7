// Runs chunks of work on XLA's intra-op pool and on the calling thread.

#ifndef JAXZERO_CPU_PARALLEL_FOR_H_
#define JAXZERO_CPU_PARALLEL_FOR_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxzero {

// Calls run(chunk) for every chunk in [0, num_chunks) and returns when all are
// done.
//
// All threads of the pool may be inside handlers that wait like this one, so it
// never waits for a task that has not begun: the caller takes chunks itself
// until none is left, then waits only for those that running tasks have taken.
// A task that begins later finds no chunk and touches nothing but the shared
// state.
template <typename Run>
void ParallelFor(::xla::ffi::ThreadPool& pool, int64_t num_chunks, Run run) {
  struct State {
    State(int64_t chunks, Run work)
        : num_chunks(chunks), run(std::move(work)) {}

    void Work() {
      int64_t completed = 0;
      for (int64_t chunk; (chunk = next.fetch_add(1)) < num_chunks;) {
        run(chunk);
        ++completed;
      }
      if (completed == 0) return;
      const std::lock_guard<std::mutex> lock(mutex);
      done += completed;
      if (done == num_chunks) all_done.notify_all();
    }

    const int64_t num_chunks;
    const Run run;
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_done;
    int64_t done = 0;
  };

  const int64_t num_helpers = std::min(num_chunks, pool.num_threads()) - 1;
  if (num_helpers < 1) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) run(chunk);
    return;
  }
  const auto state = std::make_shared<State>(num_chunks, std::move(run));
  for (int64_t i = 0; i < num_helpers; ++i) {
    pool.Schedule([state] { state->Work(); });
  }
  state->Work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done == num_chunks; });
}

}  // namespace jaxzero

#endif  // JAXZERO_CPU_PARALLEL_FOR_H_
