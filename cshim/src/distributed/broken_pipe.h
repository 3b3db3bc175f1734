// Keeps a lost connection from ending the process.
#pragma once

#include <csignal>
#include <ctime>

namespace ts::distributed {

// While it lives, the threads that the calling thread starts are born with SIGPIPE blocked, and
// stay so. Gloo and TCPStore write to sockets on threads of their own, without MSG_NOSIGNAL: if the
// rank at the other end dies, the kernel signals the writing thread. Go's handler ignores SIGPIPE
// on the threads of Go, but restores the default action, the end of the process, for a signal on
// another thread. With the signal blocked the write fails with EPIPE, which is the collective's
// error.
class BrokenPipeBlocked {
 public:
  BrokenPipeBlocked() noexcept {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  BrokenPipeBlocked(const BrokenPipeBlocked&) = delete;
  BrokenPipeBlocked& operator=(const BrokenPipeBlocked&) = delete;
  ~BrokenPipeBlocked() {
    if (sigismember(&before_, SIGPIPE) == 1) return;
    const timespec now{};
    sigtimedwait(&signal_, nullptr, &now);  // takes the signal of a write of this thread
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t signal_;
  sigset_t before_;
};

}  // namespace ts::distributed
