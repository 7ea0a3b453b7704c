// Devices as threads of one process. Groups share memory, and the members that wait do the copying.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "shardlib/comm/backend.hpp"
#include "shardlib/comm/collective_work.hpp"
#include "shardlib/comm/communicator.hpp"
#include "shardlib/comm/recordings.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/tuning.hpp"

namespace shardlib {

namespace detail {

/// One collective of a group. It splits into chunks that any member may do once all have posted. So no member has to
/// wait until another one reaches its own `wait`, and requests may be waited for in any order.
class Round {
 public:
  /// `op` is the call of member `first`, which is the first to arrive, and `given` what it was given.
  Round(const CollectiveCall& call, const OpInfo& op, const GivenWindow& given, int first, std::size_t members,
        const Tuning& tuning)
      : work_(call, members, tuning),
        op_(op),
        given_(given),
        first_(first),
        send_(members),
        recv_(members),
        posted_(members),
        next_(members) {}

  [[nodiscard]] const CollectiveCall& call() const { return work_.call(); }
  [[nodiscard]] const GivenWindow& given() const { return given_; }
  [[nodiscard]] int first() const { return first_; }
  [[nodiscard]] std::string describe() const { return detail::describe(call(), op_); }
  [[nodiscard]] bool has_posted(int rank) const { return posted_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] bool ready() const { return waiting_for_ == 0; }
  [[nodiscard]] bool done() const { return left_.load(std::memory_order_acquire) == 0; }

  /// Posts a member's buffers. The caller holds the group's mutex.
  void post(int rank, Buffer send, Buffer recv) {
    const auto r = static_cast<std::size_t>(rank);
    send_[r] = std::move(send);
    recv_[r] = std::move(recv);
    posted_[r] = true;
    --waiting_for_;
  }
  /// When all have posted: does the unclaimed chunks, those of its own part first. Returns true if it did the last
  /// chunk.
  bool help(int rank) {
    bool last = false;
    const std::size_t n = send_.size();
    for (std::size_t k = 0; k < n; ++k) {
      const std::size_t part = (static_cast<std::size_t>(rank) + k) % n;
      for (std::size_t c = next_[part]++; c < work_.chunks(); c = next_[part]++) {
        work_.run(
            part, c, [&](std::size_t i) { return send_[i].data(); }, [&](std::size_t i) { return recv_[i].data(); });
        last = left_.fetch_sub(1, std::memory_order_acq_rel) == 1 || last;
      }
    }
    return last;
  }
  /// After completion: releases this member's buffers.
  void release(int rank) {
    send_[static_cast<std::size_t>(rank)] = {};
    recv_[static_cast<std::size_t>(rank)] = {};
  }

 private:
  CollectiveWork work_;
  OpInfo op_;
  GivenWindow given_;
  int first_;
  std::vector<Buffer> send_;
  std::vector<Buffer> recv_;
  std::vector<bool> posted_;
  std::size_t waiting_for_ = send_.size();
  std::vector<std::atomic<std::size_t>> next_;  ///< the first unclaimed chunk of each part
  std::atomic<std::size_t> left_ = work_.chunks() * send_.size();
};

/// The state that the members of a group share. `mutex` guards all fields, except that waiters spin on `events`.
struct ThreadGroup {
  std::vector<int> members;
  Tuning tuning;
  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<std::uint64_t> events = 0;
  std::map<std::uint64_t, std::shared_ptr<Round>> rounds;      ///< some member has not posted yet
  std::map<std::tuple<int, int, std::uint64_t>, Buffer> mail;  ///< (from, to, number): sent, not yet received

  ThreadGroup(std::vector<int> m, const Tuning& t) : members(std::move(m)), tuning(t) {}
  /// Wakes the waiters. The caller holds the mutex.
  void signal() {
    ++events;
    wake.notify_all();
  }
};

}  // namespace detail

/// The devices of one process with their groups, and which of them have failed or finished.
class ThreadWorld final : public Backend, public std::enable_shared_from_this<ThreadWorld> {
 public:
  explicit ThreadWorld(int devices, const Tuning& tuning = {}, const Watchdog& watchdog = {})
      : finished_(static_cast<std::size_t>(devices)), tuning_(tuning), watchdog_(watchdog) {
    for (int i = 0; i < devices; ++i) recorders_.push_back(std::make_shared<detail::FlightRecorder>(i, watchdog));
    // Spinning pays only while every device has a core.
    spins_ = static_cast<unsigned>(devices) <= std::thread::hardware_concurrency() ? 200 : 2;
  }

  std::unique_ptr<Communicator> group(const std::vector<int>& members, int rank,
                                      const std::shared_ptr<Pool>& pool) override;
  [[nodiscard]] std::shared_ptr<detail::FlightRecorder> recorder(int device) override {
    return recorders_[static_cast<std::size_t>(device)];
  }

  [[nodiscard]] std::chrono::milliseconds timeout() const { return watchdog_.timeout; }  ///< 0: never
  /// Reports that a device has waited longer than the timeout. The first device to report it throws the table of all
  /// devices.
  [[noreturn]] void fail_timeout() {
    if (timed_out_.exchange(true)) throw Aborted();
    std::vector<detail::DeviceRecord> devices;
    for (const auto& recorder : recorders_) devices.push_back(recorder->record());
    throw Error(detail::wait_table(devices, watchdog_) + detail::write_recordings(devices, watchdog_));
  }
  /// Whether some device has waited too long. The others may then wait forever.
  [[nodiscard]] bool timed_out() const { return timed_out_; }

  /// Wakes every waiting device. It throws Aborted, and so does every later communication.
  void abort() {
    aborted_ = true;
    signal_all();
  }
  [[nodiscard]] bool aborted() const { return aborted_; }  ///< whether `abort` has been called
  /// The device will not communicate any more. A device that waits for it gets an Error.
  void finish(int device) {
    finished_[static_cast<std::size_t>(device)] = true;
    signal_all();
  }
  /// Whether `finish` has been called for the device.
  [[nodiscard]] bool finished(int device) const { return finished_[static_cast<std::size_t>(device)]; }
  [[nodiscard]] int spins() const { return spins_; }  ///< how often a waiting device looks before it sleeps

 private:
  void signal_all() {
    const std::lock_guard lock(mutex_);
    for (auto& [members, group] : groups_) {
      const std::lock_guard group_lock(group->mutex);
      group->signal();
    }
  }

  std::mutex mutex_;
  std::map<std::vector<int>, std::shared_ptr<detail::ThreadGroup>> groups_;
  std::atomic<bool> aborted_ = false;
  std::vector<std::atomic<bool>> finished_;
  std::atomic<bool> timed_out_ = false;
  Tuning tuning_;
  Watchdog watchdog_;
  std::vector<std::shared_ptr<detail::FlightRecorder>> recorders_;
  int spins_;
};

namespace detail {

/// A member's place in its group; requests carry a copy.
struct ThreadMember {
  std::shared_ptr<ThreadWorld> world;
  std::shared_ptr<ThreadGroup> group;
  int rank;

  [[nodiscard]] int size() const { return static_cast<int>(group->members.size()); }

  /// Spins briefly, then sleeps until ready() is true. needs(r) returns whether the wait is for rank r. Both are called
  /// with `lock` held.
  template <class Ready, class Needs>
  void wait(std::unique_lock<std::mutex>& lock, std::string_view op, const Ready& ready, const Needs& needs) const {
    using Duration = WaitTime::Clock::duration;
    const Duration timeout = world->timeout(), patience = group->tuning.patience;
    WaitTime time(patience);
    while (!ready()) {
      check_aborted();
      for (int r = 0; r < size(); ++r) {
        const int device = group->members[static_cast<std::size_t>(r)];
        if (needs(r) && world->finished(device)) fail_absent(op, device, r, size());
      }
      const std::uint64_t seen = group->events;
      lock.unlock();
      for (int i = 0; i < world->spins() && group->events == seen; ++i) std::this_thread::yield();
      lock.lock();
      const auto changed = [&] { return group->events != seen; };
      if (timeout.count() == 0) {
        group->wake.wait(lock, changed);
      } else if (!group->wake.wait_for(lock, std::min(timeout - time.so_far(), patience), changed) &&
                 time.so_far() >= timeout) {
        lock.unlock();
        world->fail_timeout();
      }
    }
  }
  void check_aborted() const {
    if (world->aborted()) throw Aborted();
  }
};

class RoundRequest final : public Request::Pending {
 public:
  RoundRequest(ThreadMember me, std::shared_ptr<Round> round) : me_(std::move(me)), round_(std::move(round)) {}

  bool test() override {
    std::unique_lock lock(me_.group->mutex);
    if (!round_->ready()) {
      me_.check_aborted();
      return false;
    }
    lock.unlock();
    help();
    return round_->done();
  }
  void wait() override {
    const auto op = name(round_->call().kind);
    std::unique_lock lock(me_.group->mutex);
    me_.wait(
        lock, op, [&] { return round_->ready(); }, [&](int r) { return !round_->has_posted(r); });
    lock.unlock();
    help();
    lock.lock();
    // A chunk under way in another thread ends by itself, so this wait is for no device in particular.
    me_.wait(
        lock, op, [&] { return round_->done(); }, [](int) { return false; });
    lock.unlock();
    round_->release(me_.rank);
  }

 private:
  void help() {
    if (!round_->help(me_.rank)) return;
    const std::lock_guard lock(me_.group->mutex);
    me_.group->signal();
  }

  ThreadMember me_;
  std::shared_ptr<Round> round_;
};

class MailRequest final : public Request::Pending {
 public:
  MailRequest(ThreadMember me, Buffer buffer, int from, std::uint64_t number)
      : me_(std::move(me)), buffer_(std::move(buffer)), from_(from), number_(number) {}

  bool test() override {
    const std::lock_guard lock(me_.group->mutex);
    if (sent()) return true;
    me_.check_aborted();
    return false;
  }
  void wait() override {
    std::unique_lock lock(me_.group->mutex);
    me_.wait(
        lock, "recv", [&] { return sent(); }, [&](int r) { return r == from_; });
    const Buffer message = std::move(me_.group->mail.extract({from_, me_.rank, number_}).mapped());
    lock.unlock();
    if (message.bytes() != buffer_.bytes()) fail_recv(from_, buffer_.bytes(), message.bytes());
    copy_bytes(buffer_.data(), message.data(), message.bytes());
  }

 private:
  [[nodiscard]] bool sent() const { return me_.group->mail.contains({from_, me_.rank, number_}); }

  ThreadMember me_;
  Buffer buffer_;
  int from_;
  std::uint64_t number_;
};

}  // namespace detail

/// A group of devices that are threads. A `send` never waits for its receiver, because the posted handle keeps the
/// memory alive.
class ThreadCommunicator final : public Communicator {
 public:
  explicit ThreadCommunicator(detail::ThreadMember me)
      : me_(std::move(me)), sent_(me_.group->members.size()), received_(me_.group->members.size()) {}

  [[nodiscard]] int rank() const override { return me_.rank; }
  [[nodiscard]] int size() const override { return me_.size(); }

  [[nodiscard]] bool takes_rows() const override { return true; }

  [[nodiscard]] bool has_views(std::size_t /*bytes*/) const override { return false; }
  void check_failure() const override { me_.check_aborted(); }

 private:
  Request start_collective(const detail::CollectiveCall& call, const detail::OpInfo& op,
                           const Operands& operands) override {
    me_.check_aborted();
    const std::lock_guard lock(me_.group->mutex);
    const auto it = me_.group->rounds.try_emplace(calls_++).first;
    if (!it->second)
      it->second = std::make_shared<detail::Round>(call, op, operands.given, me_.rank, me_.group->members.size(),
                                                   me_.group->tuning);
    const auto round = it->second;
    if (round->call() != call)
      detail::fail_call(me_.rank, me_.group->members.size(), describe(call, op), round->first(), round->describe());
    if (const auto part = contradiction(round->given().sums(), operands.given.sums()))
      detail::fail_given(me_.rank, me_.group->members.size(), operands.given, *part, round->first(),
                         round->given().describe(*part));
    round->post(me_.rank, operands.send, operands.recv);
    if (round->ready()) {
      me_.group->rounds.erase(it);
      me_.group->signal();
    }
    return Request(std::make_unique<detail::RoundRequest>(me_, round));
  }
  Request start_send(const Buffer& buffer, int to, const detail::OpInfo& /*op*/) override {
    me_.check_aborted();
    const std::lock_guard lock(me_.group->mutex);
    me_.group->mail.emplace(std::tuple(me_.rank, to, sent_[static_cast<std::size_t>(to)]++), buffer);
    me_.group->signal();
    return {};
  }
  Request start_recv(const Buffer& buffer, int from, const detail::OpInfo& /*op*/) override {
    const std::uint64_t number = received_[static_cast<std::size_t>(from)]++;
    return Request(std::make_unique<detail::MailRequest>(me_, buffer, from, number));
  }

  detail::ThreadMember me_;
  std::uint64_t calls_ = 0;
  std::vector<std::uint64_t> sent_;
  std::vector<std::uint64_t> received_;
};

inline std::unique_ptr<Communicator> ThreadWorld::group(const std::vector<int>& members, int rank,
                                                        const std::shared_ptr<Pool>&) {
  const std::lock_guard lock(mutex_);
  auto& shared = groups_[members];
  if (!shared) shared = std::make_shared<detail::ThreadGroup>(members, tuning_);
  return std::make_unique<ThreadCommunicator>(detail::ThreadMember{shared_from_this(), shared, rank});
}

}  // namespace shardlib
