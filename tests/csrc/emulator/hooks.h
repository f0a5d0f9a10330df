// Every access to memory in code compiled with -fsanitize=thread calls one of these. The
// sanitizer's own library, which would want real threads, is not linked.
#pragma once

#include <cstddef>

namespace emulator {
void touch(const void* at, std::size_t bytes, bool writes);
}

#define EMULATOR_HOOKS(bytes)                    \
  void __tsan_read##bytes(void* at) {            \
    emulator::touch(at, bytes, false);           \
  }                                              \
  void __tsan_write##bytes(void* at) {           \
    emulator::touch(at, bytes, true);            \
  }                                              \
  void __tsan_unaligned_read##bytes(void* at) {  \
    emulator::touch(at, bytes, false);           \
  }                                              \
  void __tsan_unaligned_write##bytes(void* at) { \
    emulator::touch(at, bytes, true);            \
  }                                              \
  void __tsan_volatile_read##bytes(void* at) {   \
    emulator::touch(at, bytes, false);           \
  }                                              \
  void __tsan_volatile_write##bytes(void* at) {  \
    emulator::touch(at, bytes, true);            \
  }

extern "C" {
EMULATOR_HOOKS(1)
EMULATOR_HOOKS(2)
EMULATOR_HOOKS(4)
EMULATOR_HOOKS(8)
EMULATOR_HOOKS(16)
void __tsan_read_range(void* at, std::size_t bytes) {
  emulator::touch(at, bytes, false);
}
void __tsan_write_range(void* at, std::size_t bytes) {
  emulator::touch(at, bytes, true);
}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
#undef EMULATOR_HOOKS
