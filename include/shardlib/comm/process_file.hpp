// Watches other processes of this machine without signals.
#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

namespace shardlib::detail {

/// A file descriptor that closes itself; -1: none.
class OwnedFile {
 public:
  explicit OwnedFile(int number = -1) : number_(number) {}
  OwnedFile(OwnedFile&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  OwnedFile& operator=(OwnedFile&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~OwnedFile() {
    if (number_ != -1) close(number_);
  }
  [[nodiscard]] int number() const { return number_; }

 private:
  int number_;
};

/// A process that runs now. The system may reuse the process's number; the descriptor still refers to this process.
class WatchedProcess {
 public:
  WatchedProcess() = default;
  explicit WatchedProcess(pid_t process) : file_(static_cast<int>(syscall(SYS_pidfd_open, process, 0))) {}
  /// Returns false also if the system does not allow watching. Then only the launcher notices a death.
  [[nodiscard]] bool has_ended() const {
    pollfd file{.fd = file_.number(), .events = POLLIN, .revents = 0};
    return file.fd != -1 && poll(&file, 1, 0) > 0;
  }

 private:
  OwnedFile file_;
};

}  // namespace shardlib::detail
