// Runs a function by a team of threads.
#pragma once

#include <functional>

#include "thread_team.h"

namespace minserve {

// Calls run(team, thread) by up to `threads` threads of torch's pool at once, thread being 0 to
// team.size - 1; returns when all have.
void run_in_team(std::int64_t threads, const std::function<void(ThreadTeam&, std::int64_t)>& run);

// Threads that bytes of weights, read for so many rows at a time, are worth: up to as many as torch
// has.
std::int64_t threads_worth(std::int64_t weight_bytes, std::int64_t rows);

}  // namespace minserve
