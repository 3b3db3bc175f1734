// Prevents a lost connection from ending the process.
#pragma once

#include <csignal>
#include <ctime>

namespace ts::distributed {

// While this object exists, threads started by the calling thread have SIGPIPE blocked for their
// whole life. Gloo and TCPStore write to sockets on their own threads, without MSG_NOSIGNAL: if the
// rank at the other end dies, the kernel signals the writing thread. Go's handler ignores SIGPIPE
// on Go's threads. For a signal on another thread it restores the default action, which ends the
// process. With the signal blocked the write fails with EPIPE instead, which becomes the
// collective's error.
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
    sigtimedwait(&signal_, nullptr, &now);  // removes the signal of a write on this thread
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t signal_;
  sigset_t before_;
};

}  // namespace ts::distributed
