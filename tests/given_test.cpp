// What a program gives its devices alike: host arrays, keys of random numbers, steps of optimizers. Where they differ,
// the next collective is an error.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/shardlib.hpp"
#include "shardlib/support/crc32c.hpp"
#include "support.hpp"
#if defined(SHARDLIB_WITH_MPI)
#include "shm_nodes.hpp"
#endif

using namespace shardlib;
using namespace shardlib::test;

namespace {

struct Weights {
  Tensor<f32, "M F"> w;
};
using Line = Mesh<"d">;
using Grid = Mesh<"d t">;

const Sizes sizes{{"B", 4}, {"M", 4}, {"F", 2}};
const auto every_leaf = [](std::string_view) { return true; };

/// A collective over d.
void communicate(const auto& mesh) {
  static_cast<void>(item(all_reduce<"+d -> ">(sum(ones<f32, "B/d">(mesh, sizes)))));
}
Tensor<f32, "M"> place_column(const Line& mesh, f32 first) {
  return place<Tensor<f32, "M">>(mesh, HostArray<f32>({4}, {first, 1, 2, 3}));
}

/// The error of the devices of d=2, without lines of this file. "no error" if they have none, or if this process has no
/// device.
std::string error_on_two(const std::function<void(const Line&)>& body,
                         std::source_location where = std::source_location::current()) {
  std::mutex mutex;
  std::string error = "no error";
  try {
    on_mesh("d=2", [&](const DevicePtr& device) {
      const std::string here = error_of([&] { body(Line(device)); });
      if (here == "no error" || here == "another device failed") return;
      const std::lock_guard lock(mutex);
      error = without_sites(here, where);
      throw Error("stop");
    });
  } catch (const Error&) {
  } catch (const Failure&) {
    if (world_rank() < 2) throw;  // the others have no device
  }
  return error;
}
/// What the devices 0 and 1 have called differs, as the error of either one says.
void check_differs(const std::string& error, const std::string& one, const std::string& other,
                   const std::string& remedy) {
  if (under_mpi() && (world_rank() > 1 || world_size() < 2)) return;
  const auto of = [&](const std::string& rank, const std::string& mine, const std::string& peer,
                      const std::string& theirs) {
    return "all_reduce<`+d -> `>: rank " + rank + " of 2 has called " + mine + ", where rank " + peer + " has called " +
           theirs + ": " + remedy + " (device " + rank + " (d=" + rank + ") of mesh d=2)";
  };
  INFO(error);
  CHECK((error == of("0", one, "1", other) || error == of("1", other, "0", one)));
}

const std::string same_input =
    "a tensor is the same on all ranks of an axis that its spec does not name; give them the same, or name the axis, "
    "as "
    "in `dim/axis`";
const std::string same_steps =
    "all ranks make the same steps; let all of them skip a step or none, and compute the learning rate from what they "
    "share";

void check_inputs() {
  const auto checksum = [](f32 first) {
    const std::vector<f32> column{first, 1, 2, 3};
    return std::to_string(io::crc32c(std::as_bytes(std::span(column))));
  };
  for (const bool from_memory_too : {false, true}) {
    const std::string error = error_on_two([&](const Line& mesh) {
      communicate(mesh);
      const std::vector<f32> column{mesh.rank() == 0 ? 5.0F : 7.0F, 1, 2, 3};
      static_cast<void>(from_memory_too ? from_memory<f32, "M">(mesh, sizes, std::span(column))
                                        : place_column(mesh, column[0]));
      static_cast<void>(random_normal<f32, "M">(mesh, sizes, {1, 0}));  // alike
      communicate(mesh);
    });
    const std::string call = from_memory_too ? "from_memory<`M`>" : "place<`M`>";
    check_differs(error, call + " with data of the checksum " + checksum(5),
                  call + " with data of the checksum " + checksum(7), same_input);
  }
  check_differs(
      error_on_two([](const Line& mesh) {
        static_cast<void>(random_normal<f32, "M">(mesh, sizes, {static_cast<std::uint64_t>(mesh.rank() + 1), 3}));
        communicate(mesh);
      }),
      "random_normal<`M`> with the key {1, 3}", "random_normal<`M`> with the key {2, 3}", same_input);
  check_differs(error_on_two([](const Line& mesh) {
                  Weights w;
                  initialize(mesh, w, sizes, static_cast<std::uint64_t>(mesh.rank() + 1), [](std::string_view) {
                    return Normal{0, 1};
                  });
                  communicate(mesh);
                }),
                "random_normal<`M F`> with the key {1, 0}", "random_normal<`M F`> with the key {2, 0}", same_input);
  check_differs(error_on_two([](const Line& mesh) {
                  static_cast<void>(dropout(place_column(mesh, 1), 0.5, {static_cast<std::uint64_t>(mesh.rank()), 4}));
                  communicate(mesh);
                }),
                "dropout with the key {0, 4}", "dropout with the key {1, 4}", same_input);
}

/// The error of three steps with these learning rates and numbers, without those that a rank skips.
std::string error_of_steps(const std::function<double(int rank, std::int64_t step)>& rate,
                           const std::function<std::int64_t(int rank, std::int64_t step)>& number,
                           const std::function<bool(int rank, std::int64_t step)>& skips) {
  return error_on_two([&](const Line& mesh) {
    Weights w{ones<f32, "M F">(mesh, sizes)};
    auto moments = SGD::init(w);
    for (std::int64_t step = 0; step < 3; ++step) {
      communicate(mesh);
      const int rank = mesh.rank();
      if (skips(rank, step)) continue;
      SGD().update(w, moments, w, rate(rank, step), 1.0, number(rank, step), every_leaf);
    }
    communicate(mesh);
  });
}
void check_updates() {
  const auto rate = [](int, std::int64_t) { return 0.5; };
  const auto number = [](int, std::int64_t step) { return step; };
  const auto never = [](int, std::int64_t) { return false; };
  const std::string update = "SGD with the learning rate ";
  CHECK(error_of_steps(rate, number, never) == "no error");
  check_differs(
      error_of_steps([](int rank, std::int64_t step) { return step == 1 && rank == 1 ? 0.25 : 0.5; }, number, never),
      update + "0.5 at step 1, its update number 2", update + "0.25 at step 1, its update number 2", same_steps);
  check_differs(error_of_steps(
                    rate, [](int rank, std::int64_t step) { return step + rank; }, never),
                update + "0.5 at step 0, its update number 1", update + "0.5 at step 1, its update number 1",
                same_steps);
  check_differs(error_of_steps(rate, number, [](int rank, std::int64_t step) { return step == 1 && rank == 1; }),
                update + "0.5 at step 2, its update number 3", update + "0.5 at step 2, its update number 2",
                same_steps);
}

}  // namespace

TEST_CASE("inputs that differ between replicas", "[given]") {
  check_inputs();
}

TEST_CASE("steps of an optimizer that differ between devices", "[given]") {
  check_updates();
}

#if defined(SHARDLIB_WITH_MPI)
TEST_CASE("the same between nodes", "[given]") {
  if (!under_mpi() || !detail::shm::node || world_size() < 2) return;
  const Nodes apart(std::vector<int>(static_cast<std::size_t>(world_size()), -1));
  check_inputs();
  check_updates();
}
#endif

TEST_CASE("what devices may be given differently", "[given]") {
  CHECK(error_on_two([](const Line& mesh) {
          const int rank = mesh.rank();
          const auto own = static_cast<f32>(rank), other = 1 - own;
          const auto key = static_cast<std::uint64_t>(rank);
          // Other orders of the same arrays.
          for (const f32 first : {own, other}) static_cast<void>(place_column(mesh, first));
          communicate(mesh);
          // Shards, and numbers of the program.
          static_cast<void>(place<Tensor<f32, "M/d">>(mesh, HostArray<f32>({4}, {own, own, other, other})));
          static_cast<void>(random_normal<f32, "M/d">(mesh, sizes, {key, 0}));
          static_cast<void>(full<f32, "M">(mesh, sizes, own) * static_cast<double>(own));
          communicate(mesh);
          // An array for one device alone, also from a line that serves all.
          if (rank == 0) {
            static_cast<void>(place_column(mesh, 9));
            static_cast<void>(random_normal<f32, "M">(mesh, sizes, {9, 0}));
          }
          communicate(mesh);
          static_cast<void>(place_column(mesh, 8));
          communicate(mesh);
          // Padding, which holds anything.
          static_cast<void>(place<Tensor<f32, "V">>(mesh, HostArray<f32>({3}, {1, 2, 3}), {{"V", 3, 64}}));
          communicate(mesh);
        }) == "no error");
  // A device that makes its batches one step ahead.
  CHECK(error_on_two([](const Line& mesh) {
          int batch = 0;
          const int ahead = mesh.rank();
          for (int step = 0; step < 4; ++step) {
            for (; batch <= step + ahead; ++batch) static_cast<void>(place_column(mesh, static_cast<f32>(batch)));
            communicate(mesh);
          }
        }) == "no error");
}

TEST_CASE("inputs of parts of the mesh", "[given]") {
  on_mesh("d=2,t=2", [](const DevicePtr& device) {
    const Grid mesh(device);
    const auto row = static_cast<f32>(mesh.axis_index("d"));
    const auto both = [&] {
      communicate(mesh);
      static_cast<void>(item(all_reduce<"+d +t -> ">(to_partial<" -> +d +t">(ones<f32, "">(mesh, {})))));
    };
    both();
    // The rows of the mesh have other data. Along t they agree.
    static_cast<void>(place<Tensor<f32, "M/d">>(mesh, HostArray<f32>({4}, {row, row, row, row})));
    both();
    // Stages run other code, with other data and rates, at the same line.
    const Mesh<"t"> stage(Device::submesh(device, "d"));
    Weights w{ones<f32, "M F">(stage, sizes)};
    auto moments = SGD::init(w);
    for (int step = 0; step < 2; ++step) {
      static_cast<void>(place<Tensor<f32, "M">>(stage, HostArray<f32>({4}, {row, 1, 2, 3})));
      static_cast<void>(random_normal<f32, "M">(stage, sizes, {static_cast<std::uint64_t>(row), 0}));
      SGD().update(w, moments, w, 0.5 + static_cast<double>(row), 1.0, step, every_leaf);
      both();
    }
    // Another factorization of the mesh, whose axes cross those of the groups.
    const Mesh<"x"> line(Device::reinterpreted(device, {{"x", 4}}));
    static_cast<void>(place<Tensor<f32, "M">>(line, HostArray<f32>({4}, {row, 1, 2, 3})));
    both();
  });
}
