// Defines stderr for libpng. libpng's static library refers to stderr by a relocation that works
// only in an executable, because it is not position-independent enough for a shared library. Our
// shared library is linked with --wrap=stderr, which redirects the reference to the variable here.
// Only libpng's default message functions read it, and the decoder replaces them.
#include <cstdio>

extern "C" {
extern FILE* __real_stderr;
extern FILE* __wrap_stderr;
__attribute__((visibility("hidden"))) FILE* __wrap_stderr = nullptr;
}

namespace {
__attribute__((constructor)) void set_stderr() { __wrap_stderr = __real_stderr; }
}  // namespace
