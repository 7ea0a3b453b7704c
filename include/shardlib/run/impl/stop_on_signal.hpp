// Stopping a run by a signal.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <future>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "shardlib/run/run_directory.hpp"

namespace shardlib::run::detail {

inline std::atomic<int> stop_signal = 0;

/// The signals that ask a run to stop: from users, from a closing terminal, and from batch systems before a job's time
/// limit.
inline constexpr std::array stop_signals{SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2};
inline sigset_t stop_signal_set() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : stop_signals) sigaddset(&set, signal);
  return set;
}

/// The path of the file LATEST of the run that signals stop, empty without --run. Handlers read it at any time, so it
/// is in static memory. Only the process whose `speaks_of_stop` is set
/// says something: the first rank.
inline std::array<char, 4096> latest_of_stop{};
inline std::atomic<bool> speaks_of_stop = false;

/// Writes to stderr by what a handler may call.
inline void say_in_handler(std::initializer_list<std::string_view> texts) {
  for (const std::string_view text : texts)
    if (::write(STDERR_FILENO, text.data(), text.size()) < 0) return;
}

/// The second signal of a kind ends the process as usual, by that signal. Before, it says what the run has kept.
inline void end_by_signal(int signal) {
  std::signal(signal, SIG_DFL);
  if (speaks_of_stop) {
    const std::string_view latest = latest_of_stop.data();
    std::array<char, 64> name{};
    const int file = latest.empty() ? -1 : ::open(latest.data(), O_RDONLY | O_CLOEXEC);
    const ssize_t length = file < 0 ? -1 : ::read(file, name.data(), name.size());
    say_in_handler({"\nended at once by a second signal; "});
    if (latest.empty())
      say_in_handler({"without --run nothing was kept\n"});
    else if (length <= 0)
      say_in_handler({"no checkpoint is complete yet, so the same command starts again\n"});
    else
      say_in_handler({"the newest checkpoint is ", latest.substr(0, latest.rfind('/') + 1),
                      std::string_view(name.data(), static_cast<std::size_t>(length - 1)),
                      ": the same command resumes from there\n"});
  }
  ::raise(signal);
}

inline void ask_to_stop(int signal) {
  const int error = errno;  // of the code that the handler interrupts
  stop_signal = signal;
  std::signal(signal, end_by_signal);
  if (signal == SIGINT && speaks_of_stop)
    say_in_handler({"\nstopping after this step; a second Ctrl-C ends at once\n"});
  errno = error;
}

/// The signal handlers and their thread, one for all devices of the process.
class SignalThread {
 public:
  static std::shared_ptr<SignalThread> get() {
    static std::mutex mutex;
    static std::weak_ptr<SignalThread> current;
    const std::lock_guard lock(mutex);
    auto thread = current.lock();
    if (!thread) current = thread = std::make_shared<SignalThread>();
    return thread;
  }
  SignalThread() {
    stop_signal = 0;
    for (const int signal : stop_signals) {
      const auto before = std::signal(signal, ask_to_stop);
      if (before == SIG_IGN) std::signal(signal, SIG_IGN);  // nohup
    }
    thread_ = std::thread([end = end_.get_future()] {
      const sigset_t signals = stop_signal_set();
      pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
      end.wait();
    });
  }
  SignalThread(const SignalThread&) = delete;
  SignalThread& operator=(const SignalThread&) = delete;
  ~SignalThread() {
    end_.set_value();
    thread_.join();
    for (const int signal : stop_signals) {
      if (std::signal(signal, SIG_DFL) == SIG_IGN) std::signal(signal, SIG_IGN);
    }
  }

 private:
  std::promise<void> end_;
  std::thread thread_;
};

/// While this object lives, the first of these signals asks the run to stop after its step; a second one of the same
/// kind kills the process as usual. This thread receives neither, because a handler that runs inside a GEMM of oneDNN
/// 2.6 corrupts the heap (the cause is not known). With `run`, a folder or a default-constructed RunDirectory, the
/// handlers say what happens.
class StopOnSignal {
 public:
  explicit StopOnSignal(const RunDirectory* run = nullptr) {
    const std::string latest = run != nullptr && run->exists() ? run->checkpoints() + "/LATEST" : "";
    speaks_ = run != nullptr && latest.size() < latest_of_stop.size();
    if (speaks_) {
      latest_of_stop = {};
      std::ranges::copy(latest, latest_of_stop.begin());
      speaks_of_stop = true;
    }
    const sigset_t signals = stop_signal_set();
    pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;
  ~StopOnSignal() {
    if (speaks_) speaks_of_stop = false;
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  bool speaks_ = false;
  std::shared_ptr<SignalThread> thread_ = SignalThread::get();
  sigset_t before_{};
};

/// The message of a run that stops; `saved` says whether a checkpoint holds its last step.
inline std::string stopped_by_signal(bool saved) {
  return saved ? "stopped by a signal; the same command resumes from here"
               : "stopped by a signal; no checkpoint was kept, so the same command starts again";
}

}  // namespace shardlib::run::detail
