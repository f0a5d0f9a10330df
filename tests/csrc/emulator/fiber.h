// A function with a stack of its own that can stop in the middle and go on later.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>

namespace emulator {

class Fiber {
 public:
  // From outside: goes on until the fiber's next suspend() or its end.
  void resume() {
    if (_setjmp(outside_)) return;
    if (started_) _longjmp(inside_, 1);
    started_ = true;
    // Only the first switch takes the slow way; the others are jumps, which ask nothing of the
    // kernel.
    stack_.reset(new std::uint64_t[kStackWords]);
    stack_[0] = kCanary;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack_.get();
    context.uc_stack.ss_size = kStackWords * sizeof(std::uint64_t);
    context.uc_link = nullptr;
    starting() = this;
    makecontext(&context, &Fiber::enter, 0);
    setcontext(&context);
  }
  // From inside.
  void suspend() {
    if (stack_[0] != kCanary) std::abort();  // the stack is too small
    if (!_setjmp(inside_)) _longjmp(outside_, 1);
  }

  std::function<void()> body;
  bool done = false;

 private:
  static constexpr std::size_t kStackWords = 8192;
  static constexpr std::uint64_t kCanary = 0x5ca1ab1e5ca1ab1e;

  static Fiber*& starting() {
    static Fiber* fiber = nullptr;
    return fiber;
  }
  static void enter() {
    Fiber* const self = starting();
    self->body();
    self->done = true;
    self->suspend();
  }

  jmp_buf inside_, outside_;
  bool started_ = false;
  std::unique_ptr<std::uint64_t[]> stack_;
};

}  // namespace emulator
