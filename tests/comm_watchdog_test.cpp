// Calls that differ between devices are found before they compute, and a device that waits too long names the others.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "scratch.hpp"
#include "support.hpp"

#if defined(SHARDLIB_WITH_MPI)
#include "shardlib/comm/mpi/watch.hpp"
#endif

using namespace shardlib;
using namespace shardlib::test;
using detail::Communication;
using detail::DeviceRecord;
using detail::FlightEntry;
using detail::GroupRecord;

namespace {

Communicator& all_of(Device& device) {
  return device.group({"d"});
}

/// The launch's error on this rank, or "no error". Ranks of MPI meet afterwards, as after every launch of a program.
std::string outcome(const std::string& mesh, const DeviceBody& body, const Watchdog& watchdog) {
  const auto axes = parse_mesh(mesh);
  const std::string error = error_of([&] {
    launch(axes, body,
           {.allow_idle_ranks = true, .tuning = {.patience = std::chrono::milliseconds(300)}, .watchdog = watchdog});
  });
#if defined(SHARDLIB_WITH_MPI)
  if (under_mpi()) detail::mpi::compare_failures(detail::mpi::RankOutcome::success, 0);
#endif
  return error;
}

bool fits(int devices) {
  return !under_mpi() || world_size() >= devices;
}

// A device that waits in collective number `sequence` of group `group`, having started `started` there.
DeviceRecord waiting(int device, std::vector<GroupRecord> groups, std::uint32_t group,
                     FlightEntry::Kind kind = FlightEntry::Kind::collective, int peer = -1,
                     std::uint64_t sequence = 0) {
  Communication wait;
  wait.kind = kind;
  wait.state = FlightEntry::State::waiting;
  wait.peer = peer;
  wait.group = group;
  wait.sequence = sequence;
  wait.text = "something";
  return {.device = device, .groups = std::move(groups), .waiting = wait};
}

}  // namespace

TEST_CASE("who waits for whom follows from the counts of all devices", "[watchdog]") {
  const auto group = [](std::string axes, std::vector<int> members, std::uint64_t started) {
    return GroupRecord{.axes = std::move(axes), .members = std::move(members), .started = started};
  };
  SECTION("a collective waits for those who have not begun it") {
    std::vector<DeviceRecord> devices{waiting(0, {group("d", {0, 1, 2}, 5)}, 0, FlightEntry::Kind::collective, -1, 4),
                                      {.device = 1, .groups = {group("d", {0, 1, 2}, 4)}},
                                      {.device = 2, .groups = {group("d", {0, 1, 2}, 5)}}};
    CHECK(detail::missing(devices, 0) == std::vector{1});
    CHECK(detail::missing(devices, 1).empty());
    CHECK(detail::find_cycle(devices).empty());
    devices[2].answers = false;
    CHECK(detail::missing(devices, 0) == std::vector{1, 2});
  }
  SECTION("a group forms when all its members form it") {
    std::vector<DeviceRecord> devices{waiting(0, {group("d", {0, 1}, 0)}, 0, FlightEntry::Kind::form_group),
                                      {.device = 1}};
    CHECK(detail::missing(devices, 0) == std::vector{1});
    devices[1].groups = {group("d", {0, 1}, 0)};
    CHECK(detail::missing(devices, 0).empty());
  }
  SECTION("a recv waits for its sender alone") {
    GroupRecord mine = group("p", {4, 6, 8}, 0), theirs = mine;
    std::vector<DeviceRecord> devices{{.device = 4, .groups = {mine}},
                                      waiting(6, {mine}, 0, FlightEntry::Kind::recv, 2, 3),
                                      {.device = 8, .groups = {theirs}}};
    devices[2].groups[0].sent[1] = 3;
    CHECK(detail::missing(devices, 1) == std::vector{8});
    devices[2].groups[0].sent[1] = 4;
    CHECK(detail::missing(devices, 1).empty());
  }
  SECTION("a cycle is named") {
    // d: {0, 2}, {1, 3}; t: {0, 1}, {2, 3}
    std::vector<DeviceRecord> devices{waiting(0, {group("d", {0, 2}, 1), group("t", {0, 1}, 0)}, 0),
                                      waiting(1, {group("d", {1, 3}, 0), group("t", {0, 1}, 1)}, 1),
                                      waiting(2, {group("d", {0, 2}, 0), group("t", {2, 3}, 1)}, 1),
                                      waiting(3, {group("d", {1, 3}, 1), group("t", {2, 3}, 0)}, 0)};
    CHECK(detail::find_cycle(devices) ==
          "device 0 waits over d for device 2, which waits over t for device 3, which waits over d for device 1, "
          "which waits over t for device 0");
    // A chain into a cycle is not part of it.
    devices.insert(devices.begin(), waiting(9, {group("e", {0, 9}, 1)}, 0));
    CHECK(detail::find_cycle(devices).starts_with("device 0 waits over d for device 2"));
    devices.erase(devices.begin());
    devices[3].waiting.reset();
    devices[3].groups[0].started = 0;
    CHECK(detail::find_cycle(devices).empty());
  }
  SECTION("as JSON and back") {
    DeviceRecord device = waiting(3, {group("d,t", {1, 3}, 7)}, 0);
    device.last.push_back(*device.waiting);
    const DeviceRecord back = detail::device_record(detail::to_json(device));
    CHECK(detail::to_json(back) == detail::to_json(device));
    CHECK(back.groups[0].members == std::vector{1, 3});
    CHECK(error_of([] { static_cast<void>(detail::device_record("{}")); }).starts_with("a device's recording: "));
  }
}

TEST_CASE("a recorder keeps the last communications, and what a device waits in", "[watchdog]") {
  const auto recorder = std::make_shared<detail::FlightRecorder>(2, Watchdog());
  const detail::GroupRecorder group(recorder, "d", {0, 2});
  const detail::OpInfo op{"all_reduce", "A +d -> A", Site::current()};
  const detail::CollectiveCall call{
      .kind = detail::Collective::all_reduce, .bytes = 64, .dtype = DType::f32, .op = Reduction::sum};
  for (std::size_t i = 0; i < detail::FlightRing::capacity + 5; ++i) group.starts(call, op).ends();
  const auto waits = group.starts(call, op);
  waits.waits();
  const DeviceRecord record = recorder->record();
  CHECK(record.last.size() == detail::FlightRing::capacity);
  REQUIRE(record.waiting.has_value());
  CHECK(record.waiting->sequence == detail::FlightRing::capacity + 5);
  CHECK(record.waiting->text == "all_reduce of 64 bytes (f32 sum) in all_reduce<`A +d -> A`>" + op.at());
  CHECK(record.groups[0].started == detail::FlightRing::capacity + 6);
  CHECK(recorder->record(2).last.size() == 2);
  waits.ends();
  CHECK(!recorder->record().waiting.has_value());
  // One that has not ended stays, however many begin after it.
  const auto early = group.starts(call, op);
  for (std::size_t i = 0; i < detail::FlightRing::capacity + 5; ++i) group.starts(call, op).ends();
  CHECK(!recorder->record().waiting.has_value());
  early.waits();
  early.runs();  // a device runs it, and nobody waits
  CHECK(!recorder->record().waiting.has_value());
  CHECK(recorder->record().last.front().state == FlightEntry::State::running);
  early.waits();
  const DeviceRecord late = recorder->record();
  REQUIRE(late.waiting.has_value());
  CHECK(late.waiting->sequence == detail::FlightRing::capacity + 6);
  CHECK(late.last.size() == detail::FlightRing::capacity + 1);
  CHECK(late.last.front().number == late.waiting->number);
  early.ends();
  CHECK(!recorder->record().waiting.has_value());
  CHECK(recorder->record().last.size() == detail::FlightRing::capacity);
}

TEST_CASE("collectives of one size in another order are an error that names both calls", "[watchdog]") {
  const int count = under_mpi() ? world_size() : 3;
  if (count < 2) return;
  std::vector<std::string> errors(static_cast<std::size_t>(count));
  unsigned first_line = 0, second_line = 0;
  static_cast<void>(error_of([&] {
    on_mesh("d=" + show(count), [&](const DevicePtr& device) {
      Communicator& comm = all_of(*device);
      const Buffer a = make_buffer<float>(*device, 4), b = make_buffer<float>(*device, 4);
      const Buffer sum_a = make_buffer<float>(*device, 4), sum_b = make_buffer<float>(*device, 4);
      if (device->rank() == 0) first_line = __LINE__ + 4, second_line = __LINE__ + 5;
      const bool swapped = device->rank() == 1;
      errors[static_cast<std::size_t>(device->rank())] = error_of([&] {
        for (const bool first : {!swapped, swapped}) {
          if (first) comm.all_reduce(a, sum_a, DType::f32, Reduction::sum).wait();
          if (!first) comm.all_reduce(b, sum_b, DType::f32, Reduction::sum).wait();
        }
      });
      throw Error("stop");
    });
  }));
  const std::string call = "all_reduce of 16 bytes (f32 sum) at " + std::string(__FILE__) + ":";
  int named = 0;
  for (int rank = 0; rank < count; ++rank) {
    const std::string& error = errors[static_cast<std::size_t>(rank)];
    if (under_mpi() && rank != world_rank()) continue;
    INFO(error);
    CHECK(error != "no error");
    if (error == "another device failed") continue;
    ++named;
    CHECK(error.find("rank " + show(rank) + " of " + show(count) + " calls " + call) == 0);
    CHECK(error.find(" where rank ") != std::string::npos);
    CHECK(error.find(call, error.find(" where rank ")) != std::string::npos);
    if (under_mpi()) continue;
    CHECK((error.find(":" + show(first_line)) != std::string::npos &&
           error.find(":" + show(second_line)) != std::string::npos));
  }
  CHECK(named >= 1);
}

TEST_CASE("a device that never comes is named when the timeout is over", "[watchdog]") {
  if (!fits(2)) return;
  const Scratch folder = Scratch::shared(under_mpi(), world_rank());
  const Watchdog watchdog{.timeout = std::chrono::seconds(2), .folder = folder.path()};
  const std::string recording = folder / "flight_recorder/rank_0.json";
  const std::string error = outcome(
      "d=2",
      [&](const DevicePtr& device) {
        Communicator& comm = all_of(*device);
        comm.barrier();
        // However busy the machine is, device 1 comes after device 0 has found that it is absent.
        const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
        while (device->rank() == 1 && !std::filesystem::exists(recording) && std::chrono::steady_clock::now() < end)
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        comm.barrier();
      },
      watchdog);
  INFO(error);
  if (world_rank() > 1) CHECK(error == "no error");
  // Rank 1 may find the barrier complete, since rank 0 has arrived there: run_program ends it with rank 0's status.
  if (world_rank() == 0) {
    CHECK(error.find("longer than the collective timeout of 2.0 s (--collective-timeout") != std::string::npos);
    CHECK(error.find("\n  device 0 has waited ") != std::string::npos);
    CHECK(error.find(" s over d for device 1 in collective 1, barrier of 0 bytes at ") != std::string::npos);
    CHECK(error.find(under_mpi() ? "\n  device 1 does not answer: it is stopped, dead or busy outside of communication"
                                 : "\n  device 1 waits for nobody; ") != std::string::npos);
    CHECK(error.find("a cycle") == std::string::npos);
    const DeviceRecord record = detail::device_record(contents(recording));
    CHECK((record.device == 0 && record.waiting && record.waiting->sequence == 1));
    CHECK(error.find("the last communications of the devices: " + folder.path()) != std::string::npos);
  }
}

TEST_CASE("the longest timeout of all is not over at once", "[watchdog]") {
  if (!fits(2)) return;
  const DeviceBody late = [](const DevicePtr& device) {
    if (device->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    all_of(*device).barrier();
  };
  CHECK(outcome("d=2", late, {.timeout = std::chrono::milliseconds::max()}) == "no error");
}

TEST_CASE("a device is not late because the process was stopped for a while", "[watchdog]") {
  if (under_mpi()) return;
  const DeviceBody stops = [](const DevicePtr& device) {
    if (device->rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // device 0 waits
      expect(std::system(("(sleep 2.5; kill -CONT " + show(getpid()) + ") &").c_str()) == 0);
      kill(getpid(), SIGSTOP);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    all_of(*device).barrier();
  };
  CHECK(outcome("d=2", stops, {.timeout = std::chrono::seconds(2)}) == "no error");
}

TEST_CASE("axes that are waited for in a cycle are named", "[watchdog]") {
  if (!fits(4)) return;
  // Devices 0 and 3 begin with d, 1 and 2 with t.
  const std::string error = outcome("d=2,t=2",
                                    [](const DevicePtr& device) {
                                      Communicator &d = device->group({"d"}), &t = device->group({"t"});
                                      const bool first = device->rank() == 0 || device->rank() == 3;
                                      (first ? d : t).barrier();
                                      (first ? t : d).barrier();
                                    },
                                    {.timeout = std::chrono::seconds(2)});
  INFO(error);
  if (world_rank() == 0)
    CHECK(error.find("\n  a cycle: device 0 waits over d for device 2, which waits over t for device 3, which waits "
                     "over d for device 1, which waits over t for device 0") != std::string::npos);
  else
    CHECK(error == (world_rank() < 4 ? "another device failed" : "no error"));
}
