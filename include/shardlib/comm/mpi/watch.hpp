// Detects ranks that wait for a rank that has left: questions between ranks, and how the program ended.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "shardlib/comm/mpi/process.hpp"
#include "shardlib/comm/shm/group.hpp"
#include "shardlib/comm/single.hpp"

namespace shardlib::detail::mpi {

/// What this rank has done in one group: by these counts it can say later what it took part in.
struct GroupLog {
  std::vector<int> members;  ///< ranks of MPI_COMM_WORLD
  Tuning tuning = {};
  std::uint64_t collectives = 0;  ///< forming the group is the first
  std::vector<std::uint64_t> sent = std::vector<std::uint64_t>(members.size());
  std::vector<std::uint64_t> received = std::vector<std::uint64_t>(members.size());
  std::shared_ptr<shm::Group> shared = {};  ///< null: some member is on another node, or ranks share no memory

  /// The members, hashed: the group's name in a question.
  [[nodiscard]] std::uint64_t key() const {
    std::uint64_t hash = 14695981039346656037U;
    for (const int member : members) hash = (hash ^ static_cast<std::uint64_t>(member)) * 1099511628211U;
    return hash;
  }
};

/// One communication of a group, as the rank that waits for it names it.
struct Question {
  enum Kind : std::uint64_t { collective, send, recv };
  std::uint64_t launch = 0;
  std::uint64_t group = 0;
  std::uint64_t kind = collective;
  std::uint64_t number = 0;  ///< counted from 0: in the group, or from one rank to the other
  friend bool operator==(const Question&, const Question&) = default;
};

/// The answer repeats the question, since the asker may have moved on.
struct Answer {
  Question question;
  std::uint64_t absent = 0;  ///< 1: the rank that answers has left the launch and took no part
  std::int64_t missed = -1;  ///< the absent rank that it waited for itself, which made it leave
};

/// This rank's launches and its questions and answers. Nothing is sent unless a rank waits longer than
/// Tuning::patience.
class Watch {
 public:
  using Logs = std::vector<std::shared_ptr<const GroupLog>>;

  std::uint64_t begin_launch() { return ++launches_; }
  void end_launch(std::uint64_t launch, Logs logs) {
    constexpr std::size_t remembered = 64;
    left_[launch] = std::move(logs);
    if (left_.size() > remembered) left_.erase(left_.begin());
    std::erase_if(missed_, [this](const auto& entry) { return entry.first < left_.begin()->first; });
  }

  /// Answers the questions of other ranks. Every loop that may wait long must call it now and then.
  void answer() {
    MPI_Status status;
    while (arrived(question_tag, status)) {
      Answer reply;
      receive(&reply.question, sizeof reply.question, status);
      reply.absent = absent(reply.question, status.MPI_SOURCE) ? 1 : 0;
      if (const auto missed = missed_.find(reply.question.launch); missed != missed_.end())
        reply.missed = missed->second;
      post(reply, status.MPI_SOURCE, answer_tag);
    }
  }
  /// Asks `ranks` about a communication of ours that does not complete. Returns one that has left without taking part,
  /// as an earlier answer said, or -1.
  int ask(const Question& question, const std::vector<int>& ranks) {
    answer();
    int found = -1;
    MPI_Status status;
    while (arrived(answer_tag, status)) {
      Answer reply;
      receive(&reply, sizeof reply, status);
      asked_.erase(status.MPI_SOURCE);
      if (reply.absent == 0 || reply.question != question) continue;
      // The rank that left first is the cause, not a rank that left because it waited for the first.
      const auto first = std::ranges::find(ranks, static_cast<int>(reply.missed));
      found = first != ranks.end() ? *first : status.MPI_SOURCE;
    }
    if (found >= 0) missed_[question.launch] = found;
    for (const int rank : ranks) {
      if (found < 0 && rank != process.rank && asked_.insert(rank).second) post(Answer{question}, rank, question_tag);
    }
    return found;
  }
  /// Takes what is still on its way to us, when all ranks have stopped asking.
  void clear() {
    answer();
    MPI_Status status;
    while (arrived(answer_tag, status)) {
      Answer reply;
      receive(&reply, sizeof reply, status);
    }
    asked_.clear();
  }

  static constexpr int question_tag = 1;
  static constexpr int answer_tag = 2;
  static constexpr int first_free_tag = 3;

 private:
  [[nodiscard]] bool absent(const Question& question, int asker) const {
    const auto launch = left_.find(question.launch);
    if (launch == left_.end()) return false;  // still there, or left so long ago that it is forgotten
    for (const auto& log : launch->second) {
      const auto place = std::ranges::find(log->members, asker);
      if (log->key() != question.group || place == log->members.end()) continue;
      const auto rank = static_cast<std::size_t>(place - log->members.begin());
      // What the asker waits to receive is what this rank would have sent.
      const std::uint64_t done = question.kind == Question::collective ? log->collectives
                                 : question.kind == Question::recv     ? log->sent[rank]
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
  /// Nobody waits for these few bytes to leave, so they stay where they are for good.
  static void post(const Answer& message, int to, int tag) {
    static auto* const sent = new std::list<Answer>;
    const Answer& kept = sent->emplace_back(message);
    const std::size_t bytes = tag == question_tag ? sizeof kept.question : sizeof kept;
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Isend(&kept, static_cast<int>(bytes), MPI_BYTE, to, tag, process.control, &request), "asking other ranks",
          bytes);
    MPI_Request_free(&request);
  }

  std::uint64_t launches_ = 0;
  std::map<std::uint64_t, Logs> left_;
  std::map<std::uint64_t, int> missed_;  ///< by launch, the absent rank that this one waited for
  std::set<int> asked_;                  ///< ranks that owe an answer
};
inline Watch watch;

/// Tells a waiting loop when to ask: after Tuning::patience, then ten times in that span. Looks at the clock rarely.
class Impatience {
 public:
  explicit Impatience(std::chrono::milliseconds patience) : patience_(patience) {}
  bool turn() {
    if (++turns_ % 256 != 0) return false;
    const auto now = std::chrono::steady_clock::now();
    if (turns_ == 256) next_ = now + patience_;
    if (now < next_) return false;
    next_ = now + patience_ / 10;
    return true;
  }

 private:
  std::chrono::milliseconds patience_;
  std::uint64_t turns_ = 0;
  std::chrono::steady_clock::time_point next_;
};

/// How the ranks' outcomes compare; `some` also when the others do not answer.
enum class Failures { none, all_alike, all, some };
enum class RankOutcome { success, failure, idle };

/// Compares the outcomes of all ranks. A failed rank waits at most two seconds for the others, which may wait for it. A
/// rank that has not failed answers questions meanwhile, so that ranks that wait for it fail.
inline Failures compare_failures(RankOutcome outcome, std::uint64_t hash) {
  const bool failed = outcome == RankOutcome::failure;
  const std::uint64_t mine[4] = {failed ? 1U : 0U, outcome == RankOutcome::success ? 1U : 0U, failed ? hash : 0,
                                 failed ? ~hash : 0};
  // Static, because after the two seconds MPI still owns it.
  static std::uint64_t all[4];
  static std::uint64_t sent[4];
  std::copy_n(mine, 4, sent);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Iallreduce(sent, all, 4, MPI_UINT64_T, MPI_MAX, process.control, &request), "compare_failures",
        sizeof sent);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  auto nap = std::chrono::microseconds(1);
  for (int done = 0;;) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "compare_failures", sizeof sent);
    if (done != 0) break;
    if (failed && std::chrono::steady_clock::now() > deadline) return Failures::some;
    if (!failed) watch.answer();
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, std::chrono::microseconds(1000));
  }
  watch.clear();
  if (all[0] == 0) return Failures::none;
  if (all[1] != 0) return Failures::some;
  return all[2] == ~all[3] ? Failures::all_alike : Failures::all;
}

}  // namespace shardlib::detail::mpi
