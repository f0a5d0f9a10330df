// How a team comes together, and how its threads sleep.
#include <algorithm>
#include <chrono>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

#include "../core/tensor_checks.h"
#include "run_in_team.h"

namespace minserve {

#if defined(__linux__)
void sleep_while(const std::int32_t* at, std::int32_t value) {
  syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_sleepers(const std::int32_t* at) {
  syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(const std::int32_t*, std::int32_t) {
  std::this_thread::yield();
}
void wake_sleepers(const std::int32_t*) {}
#endif

namespace {

constexpr std::int64_t kClosed = std::int64_t{1} << 32;
// How long the first thread waits for the others. Threads that sleep take some 50 us to come.
constexpr auto kJoiningTime = std::chrono::milliseconds(1);
// Weights per thread and row below which another one costs more than it brings.
constexpr std::int64_t kGrainBytes = 48 * 1024;

// The number of a new thread, or -1 when the team is closed; see thread_team.h.
std::int64_t join(ThreadTeam& team, bool first, std::int64_t pieces, std::int64_t wanted) {
  const std::int64_t me = __atomic_fetch_add(&team.joined, 1, __ATOMIC_ACQ_REL);
  if (me >= kClosed) return -1;
  __atomic_fetch_add(&team.claimed, pieces, __ATOMIC_ACQ_REL);
  if (!first) {
    team.passed.wait_while(0, nullptr, 0);
    return me;
  }
  const auto last_call = std::chrono::steady_clock::now() + kJoiningTime;
  while (__atomic_load_n(&team.claimed, __ATOMIC_ACQUIRE) < wanted &&
         std::chrono::steady_clock::now() < last_call) {
    spin_pause();
  }
  team.size =
      static_cast<std::int32_t>(__atomic_fetch_add(&team.joined, kClosed, __ATOMIC_ACQ_REL));
  team.passed.set(1);
  return me;
}

}  // namespace

void run_in_team(std::int64_t threads, const std::function<void(ThreadTeam&, std::int64_t)>& run) {
  ThreadTeam team;
  torch::stable::parallel_for(0, threads, 1, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t me = join(team, begin == 0, end - begin, threads);
    if (me >= 0) run(team, me);
  });
}

std::int64_t threads_worth(std::int64_t weight_bytes, std::int64_t rows) {
  const std::int64_t most =
      std::max<std::int64_t>(1, weight_bytes / kGrainBytes) * std::max<std::int64_t>(1, rows / 4);
  return std::clamp<std::int64_t>(torch::stable::get_num_threads(), 1, most);
}

}  // namespace minserve
