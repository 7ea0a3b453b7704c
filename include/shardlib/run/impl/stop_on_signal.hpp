// Stopping a run by a signal.
#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <csignal>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

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
      const auto before = std::signal(signal, [](int s) {
        stop_signal = s;
        std::signal(s, SIG_DFL);
      });
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

/// While this object lives, the first of these signals asks the run to stop after its step; the second one kills the
/// process as usual. This thread receives neither, because a handler that runs inside a GEMM of oneDNN 2.6 corrupts the
/// heap (the cause is not known).
class StopOnSignal {
 public:
  StopOnSignal() {
    const sigset_t signals = stop_signal_set();
    pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;
  ~StopOnSignal() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  std::shared_ptr<SignalThread> thread_ = SignalThread::get();
  sigset_t before_{};
};

/// What a run says that stops; `kept`: in a folder.
inline std::string stopped_by_signal(bool kept) {
  return kept ? "stopped by a signal; the same command goes on from here"
              : "stopped by a signal; without --run nothing was kept";
}

}  // namespace shardlib::run::detail
