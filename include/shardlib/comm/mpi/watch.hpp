// Detects that a rank waits for one that has left: questions between ranks, and the outcome of the program.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shardlib/comm/mpi/process.hpp"
#include "shardlib/comm/recordings.hpp"
#include "shardlib/comm/shm/group.hpp"
#include "shardlib/comm/shm/node.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/tuning.hpp"

namespace shardlib::detail::mpi {

/// This rank's communication in one group. The counts show later which communications it took part in.
struct GroupLog {
  std::vector<int> members;  ///< ranks of MPI_COMM_WORLD
  Tuning tuning = {};
  std::uint64_t collectives = 0;  ///< forming the group is the first
  std::vector<std::uint64_t> sent = std::vector<std::uint64_t>(members.size());
  std::vector<std::uint64_t> received = std::vector<std::uint64_t>(members.size());
  std::shared_ptr<shm::Group> shared = {};  ///< null: some member is on another node, or ranks share no memory

  /// A hash of the members, which identifies the group in a question.
  [[nodiscard]] std::uint64_t key() const {
    Fingerprint print;
    for (const int member : members) print.add(static_cast<std::uint64_t>(member));
    return print.value();
  }
};

/// One communication of a group, identified by the waiting rank.
struct LeaveQuery {
  enum Kind : std::uint64_t { collective, send, recv };
  std::uint64_t launch = 0;
  std::uint64_t group = 0;
  std::uint64_t kind = collective;
  std::uint64_t number = 0;  ///< counted from 0: in the group, or from one rank to the other
  friend bool operator==(const LeaveQuery&, const LeaveQuery&) = default;
};

/// The answer repeats the question, because the asker may have gone on.
struct Answer {
  LeaveQuery question;
  std::uint64_t absent = 0;  ///< 1: the rank that answers has left the launch and took no part
  std::int64_t missed = -1;  ///< the absent rank that it waited for itself, which made it leave
};

/// This rank's launches, questions and answers. It sends nothing unless a rank waits longer than Tuning::patience.
class Watch {
 public:
  using Logs = std::vector<std::shared_ptr<const GroupLog>>;

  std::uint64_t begin_launch(std::shared_ptr<const FlightRecorder> recorder) {
    recorder_ = std::move(recorder);
    others_have_timed_out_ = false;
    return ++launches_;
  }
  void end_launch(std::uint64_t launch, Logs logs) {
    constexpr std::size_t remembered = 64;
    left_[launch] = std::move(logs);
    if (left_.size() > remembered) left_.erase(left_.begin());
    std::erase_if(missed_, [this](const auto& entry) { return entry.first < left_.begin()->first; });
  }

  /// Answers the questions of other ranks. Every loop that may wait long must call it now and then. `launches_over`:
  /// this rank starts no launch until the asking ranks have reached the same point.
  void answer(bool launches_over = false) {
    answer_states();
    MPI_Status status;
    while (arrived(question_tag, status)) {
      Answer reply;
      receive(&reply.question, sizeof reply.question, status);
      reply.absent = absent(reply.question, status.MPI_SOURCE, launches_over) ? 1 : 0;
      if (const auto missed = missed_.find(reply.question.launch); missed != missed_.end())
        reply.missed = missed->second;
      post(reply, status.MPI_SOURCE, answer_tag);
    }
  }
  /// Asks `ranks` about a communication of ours that does not complete. Returns a rank that has left without taking
  /// part, by an earlier answer, or -1.
  int ask(const LeaveQuery& question, const std::vector<int>& ranks) {
    answer();
    int found = -1;
    MPI_Status status;
    while (arrived(answer_tag, status)) {
      Answer reply;
      receive(&reply, sizeof reply, status);
      asked_.erase(status.MPI_SOURCE);
      if (reply.absent == 0 || reply.question != question) continue;
      // Reports the rank that left first, not a rank that left because it waited for that one.
      const auto first = std::ranges::find(ranks, static_cast<int>(reply.missed));
      found = first != ranks.end() ? *first : status.MPI_SOURCE;
    }
    if (found >= 0) missed_[question.launch] = found;
    for (const int rank : ranks) {
      if (found < 0 && rank != process.rank && asked_.insert(rank).second) post(question, rank, question_tag);
    }
    return found;
  }
  /// Answers ranks that have waited too long with what this rank has recorded.
  void answer_states() {
    MPI_Status status;
    while (arrived(state_question_tag, status)) {
      std::uint64_t launch = 0;
      receive(&launch, sizeof launch, status);
      if (launch != launches_ || !recorder_) continue;
      others_have_timed_out_ = true;
      post(to_json(recorder_->record(1)), status.MPI_SOURCE, state_answer_tag);
    }
  }
  /// Whether another rank of this launch has waited too long. Then this rank ends as well, if it waits.
  [[nodiscard]] bool others_have_timed_out() const { return others_have_timed_out_; }

  /// Tells the other ranks that this rank has waited too long, and collects what they have recorded. The lowest rank
  /// that answers throws the table of all, the others Aborted.
  [[noreturn]] void fail_timeout(const std::vector<int>& ranks, std::chrono::milliseconds patience) {
    std::vector<DeviceRecord> devices;
    std::size_t mine = 0;
    for (const int rank : ranks) {
      if (rank == process.rank) mine = devices.size();
      devices.push_back(rank == process.rank ? recorder_->record() : DeviceRecord{.device = rank, .answers = false});
      if (rank != process.rank) post(launches_, rank, state_question_tag);
    }
    const auto all_answer = [&] { return std::ranges::all_of(devices, &DeviceRecord::answers); };
    const auto end = std::chrono::steady_clock::now() + patience;
    while (!all_answer() && std::chrono::steady_clock::now() < end) {
      answer();
      MPI_Status status;
      while (arrived(state_answer_tag, status)) {
        const DeviceRecord record = device_record(receive_text(status));
        if (const auto it = std::ranges::find(devices, record.device, &DeviceRecord::device); it != devices.end())
          *it = record;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (DeviceRecord& device : devices) {
      const FlightRing* const ring = !device.answers && shm::node ? shm::node->ring(device.device) : nullptr;
      if (ring != nullptr) device = record_of_silent(device.device, *ring);
    }
    const std::string wait = "rank " + std::to_string(process.rank) + ": " + describe_wait(devices, mine) + "\n";
    std::fputs(wait.c_str(), stderr);
    const bool first = std::ranges::find_if(devices, &DeviceRecord::answers)->device == process.rank;
    const std::string table = wait_table(devices, recorder_->watchdog());
    // Each rank writes its own recording. The first one also writes those of the silent ranks of its node.
    std::erase_if(devices, [&](const DeviceRecord& d) { return d.device != process.rank && (!first || d.answers); });
    const std::string where = write_recordings(devices, recorder_->watchdog());
    if (first) throw Error(table + where);
    std::this_thread::sleep_for(patience / 4);  // the first to fail ends the job
    throw Aborted();
  }

  /// Receives the messages that are still on their way to this rank. All ranks have stopped asking.
  void clear() {
    answer();
    MPI_Status status;
    while (arrived(answer_tag, status)) {
      Answer reply;
      receive(&reply, sizeof reply, status);
    }
    while (arrived(state_answer_tag, status)) receive_text(status);
    asked_.clear();
    others_have_timed_out_ = false;
  }

  static constexpr int question_tag = 1;
  static constexpr int answer_tag = 2;
  static constexpr int call_tag = 3;
  static constexpr int state_question_tag = 4;
  static constexpr int state_answer_tag = 5;
  static constexpr int first_free_tag = 6;

 private:
  [[nodiscard]] bool absent(const LeaveQuery& question, int asker, bool launches_over) const {
    const auto launch = left_.find(question.launch);
    // The rank is in the launch, has not reached it, or left it too long ago to be recorded.
    if (launch == left_.end()) return launches_over && question.launch > launches_;
    for (const auto& log : launch->second) {
      const auto place = std::ranges::find(log->members, asker);
      if (log->key() != question.group || place == log->members.end()) continue;
      const auto rank = static_cast<std::size_t>(place - log->members.begin());
      // The asker waits to receive what this rank would have sent.
      const std::uint64_t done = question.kind == LeaveQuery::collective ? log->collectives
                                 : question.kind == LeaveQuery::recv     ? log->sent[rank]
                                                                         : log->received[rank];
      return done <= question.number;
    }
    return true;
  }

  static bool arrived(int tag, MPI_Status& status) {
    int there = 0;
    check(MPI_Iprobe(MPI_ANY_SOURCE, tag, process.control, &there, &status), "asking other ranks", 0);
    return there != 0;
  }
  static void receive(void* to, std::size_t bytes, const MPI_Status& status) {
    check(MPI_Recv(to, static_cast<int>(bytes), MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, process.control,
                   MPI_STATUS_IGNORE),
          "asking other ranks", bytes);
  }
  static std::string receive_text(const MPI_Status& status) {
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    std::string text(static_cast<std::size_t>(bytes), '\0');
    receive(text.data(), text.size(), status);
    return text;
  }
  /// No one waits for this send. Its buffer is freed by a later one, or never if it does not complete.
  static void post(const std::string& message, int to, int tag) {
    static auto* const sent = new std::list<std::pair<std::string, MPI_Request>>;
    sent->remove_if([](auto& earlier) {
      int done = 0;
      return MPI_Test(&earlier.second, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done != 0;
    });
    auto& [kept, request] = sent->emplace_back(message, MPI_REQUEST_NULL);
    check(MPI_Isend(kept.data(), static_cast<int>(kept.size()), MPI_BYTE, to, tag, process.control, &request),
          "asking other ranks", kept.size());
  }
  template <class T>
  static void post(const T& message, int to, int tag) {
    post(std::string(reinterpret_cast<const char*>(&message), sizeof message), to, tag);
  }

  std::uint64_t launches_ = 0;
  std::map<std::uint64_t, Logs> left_;
  std::map<std::uint64_t, int> missed_;  ///< for each launch, the absent rank that this one waited for
  std::set<int> asked_;                  ///< ranks that owe an answer
  std::shared_ptr<const FlightRecorder> recorder_;
  bool others_have_timed_out_ = false;
};
inline Watch watch;

/// The last communication that a rank of this node started, if it can be known.
inline std::string last_of(int rank) {
  const FlightRing* const ring = shm::node ? shm::node->ring(rank) : nullptr;
  const auto last = ring == nullptr ? std::vector<Communication>() : record_of_silent(rank, *ring).last;
  return last.empty() ? "" : last.back().text;
}

/// Tells a waiting loop when to ask: after Tuning::patience, then ten times in that span. It rarely reads the clock. In
/// a long wait it yields the core, for a thousandth of the time so far and at most a millisecond a turn.
class Impatience {
 public:
  explicit Impatience(std::chrono::milliseconds patience) : patience_(patience) {}
  bool turn() {
    using std::chrono::milliseconds;
    if (++turns_ % 256 != 0 && waited_ < milliseconds(50)) return false;
    if (turns_ == 256) time_.emplace(patience_);
    waited_ = time_->so_far();
    if (waited_ >= milliseconds(50)) std::this_thread::sleep_for(std::min<Duration>(waited_ / 1000, milliseconds(1)));
    if (waited_ < next_) return false;
    next_ = waited_ + patience_ / 10;
    return true;
  }
  /// Whether the wait has lasted longer than the timeout; 0 means no timeout.
  [[nodiscard]] bool exceeds(std::chrono::milliseconds timeout) const {
    return timeout.count() != 0 && waited_ > timeout;
  }

 private:
  using Duration = WaitTime::Clock::duration;
  std::chrono::milliseconds patience_;
  std::uint64_t turns_ = 0;
  std::optional<WaitTime> time_;
  Duration waited_{}, next_ = patience_;  ///< so far, and until the next question
};

/// The comparison of the ranks' outcomes. `some` also if the others do not answer.
enum class Failures { none, all_alike, all, some, one_has_died };
enum class RankOutcome { success, failure, idle };

inline bool any_has_died() {
  return std::ranges::any_of(process.neighbors, &WatchedProcess::has_ended);
}

/// Compares the outcomes of all ranks. A failed rank waits at most two seconds for the others, because they may wait
/// for it. A rank that has not failed answers questions meanwhile, so that ranks that wait for it fail.
inline Failures compare_failures(RankOutcome outcome, std::uint64_t hash) {
  const bool failed = outcome == RankOutcome::failure;
  const std::uint64_t mine[4] = {failed ? 1U : 0U, outcome == RankOutcome::success ? 1U : 0U, failed ? hash : 0,
                                 failed ? ~hash : 0};
  // Static, because MPI still owns it after the two seconds.
  static std::uint64_t all[4];
  static std::uint64_t sent[4];
  std::copy_n(mine, 4, sent);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Iallreduce(sent, all, 4, MPI_UINT64_T, MPI_MAX, process.control, &request), "compare_failures",
        sizeof sent);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  auto nap = std::chrono::microseconds(1);
  int dead_for = 0;  // naps
  for (int done = 0;;) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "compare_failures", sizeof sent);
    if (done != 0) break;
    if (failed && std::chrono::steady_clock::now() > deadline) return Failures::some;
    // A rank has ended without an outcome: it was killed, or called std::exit. A rank that succeeded has already
    // answered.
    if (!failed && any_has_died() && ++dead_for > 2000) return Failures::one_has_died;
    failed ? watch.answer_states() : watch.answer(true);
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, std::chrono::microseconds(1000));
  }
  watch.clear();
  if (all[0] == 0) return Failures::none;
  if (all[1] != 0) return Failures::some;
  return all[2] == ~all[3] ? Failures::all_alike : Failures::all;
}

}  // namespace shardlib::detail::mpi
