// Standard streams that are closed, that have lost their reader, or that accept no more data.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <string>

namespace shardlib::detail {

/// If 0, 1 or 2 is closed, a file that is opened later would take its number and receive what the program prints. So it
/// is opened for the wrong direction, so that its use fails as before.
inline void occupy_standard_streams() {
  for (const int stream : {0, 1, 2}) {
    if (fcntl(stream, F_GETFD) != -1 || errno != EBADF) continue;
    const int opened = open("/dev/null", stream == 0 ? O_WRONLY : O_RDONLY);
    if (opened != -1 && opened != stream) close(opened);
  }
}

/// Set when the reader of standard output has left, as in `| head`.
inline volatile std::sig_atomic_t reader_left = 0;

/// A reader of standard output that leaves does not end the program: what is printed later goes nowhere. A file that
/// reaches the limit of its size (ulimit -f) is an error of the write, not a signal.
inline void keep_running_without_reader() {
  if (std::signal(SIGPIPE, SIG_IGN) == SIG_DFL) {
    std::signal(SIGPIPE, [](int) {
      const int before = errno;
      pollfd output{STDOUT_FILENO, POLLOUT, 0};
      if (poll(&output, 1, 0) == 1 && (output.revents & POLLERR) != 0) {
        const int nowhere = open("/dev/null", O_WRONLY);
        if (nowhere >= 0 && dup2(nowhere, STDOUT_FILENO) >= 0) reader_left = 1;
        if (nowhere >= 0) close(nowhere);
      }
      errno = before;
    });
  }
  std::signal(SIGXFSZ, SIG_IGN);
}

/// Why standard output did not accept everything that was printed; empty if it did. A reader that left early is no
/// error.
inline std::string output_error() {
  if (reader_left != 0) return {};
  errno = 0;
  std::cout.flush();
  const bool failed = std::fflush(stdout) != 0 || std::ferror(stdout) != 0 || !std::cout;
  if (!failed || errno == EPIPE) return {};
  return "cannot write to standard output" + (errno == 0 ? std::string() : ": " + std::string(std::strerror(errno)));
}

}  // namespace shardlib::detail
