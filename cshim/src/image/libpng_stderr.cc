// libpng's static library refers to stderr in a way that only works in an executable (it is not
// position-independent in the way that a shared library needs). The shared library is linked with
// --wrap=stderr, which turns that reference into one to the variable here. It is only read by
// libpng's default message functions, which the decoder replaces.
#include <cstdio>

extern "C" {
extern FILE* __real_stderr;
extern FILE* __wrap_stderr;
__attribute__((visibility("hidden"))) FILE* __wrap_stderr = nullptr;
}

namespace {
__attribute__((constructor)) void set_stderr() { __wrap_stderr = __real_stderr; }
}  // namespace
