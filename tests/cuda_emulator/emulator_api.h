// Shared by the libraries of emulated launchers: calls, schedules and poisoned memory.
//
// Every launcher returns null or the emulator's error text, in memory of this library.
#pragma once

#include <string>

#include "cuda_on_cpu.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

inline const char* keep(std::string text) {
  static thread_local std::string kept;  // ranks may run in threads of their own
  kept = std::move(text);
  return kept.c_str();
}

template <class Body>
const char* guarded(Body body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return keep(error.what());
  }
}

}  // namespace
