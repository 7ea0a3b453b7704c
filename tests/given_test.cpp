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
struct Towers {
  Array<"towers", Tensor<f32, "M F">> towers;
  Tensor<f32, "M"> scale;
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

/// Weights by another seed on each device.
void initialize_by_rank(const Line& mesh) {
  Weights w;
  initialize(mesh, w, sizes, static_cast<std::uint64_t>(mesh.rank() + 1), [](std::string_view) {
    return Normal{0, 1};
  });
}

/// Arrays that are equal on all devices, more than a message has.
void place_equal(const Line& mesh) {
  for (int i = 0; i < 4; ++i) static_cast<void>(place_column(mesh, static_cast<f32>(i)));
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
std::string at_rank(const std::string& rank, const std::string& error) {
  return "all_reduce<`+d -> `>: " + error + " (device " + rank + " (d=" + rank + ") of mesh d=2)";
}
/// What the devices 0 and 1 have called differs, as the error of either one says.
void check_differs(const std::string& error, const std::string& one, const std::string& other,
                   const std::string& remedy) {
  if (under_mpi() && (world_rank() > 1 || world_size() < 2)) return;
  const auto of = [&](const std::string& rank, const std::string& mine, const std::string& peer,
                      const std::string& theirs) {
    return at_rank(rank, "rank " + rank + " of 2 has called " + mine + ", where rank " + peer + " has called " +
                             theirs + ": " + remedy);
  };
  INFO(error);
  CHECK((error == of("0", one, "1", other) || error == of("1", other, "0", one)));
}
/// The same if the messages no longer have the calls.
void check_differs(const std::string& error, const std::string& what, const std::string& remedy) {
  if (under_mpi() && (world_rank() > 1 || world_size() < 2)) return;
  const auto of = [&](const std::string& rank, const std::string& peer) {
    return at_rank(rank,
                   "rank " + rank + " and rank " + peer + " of 2 " + what + " since their last collective: " + remedy);
  };
  INFO(error);
  CHECK((error == of("0", "1") || error == of("1", "0")));
}
/// Device 0 has called this, and device 1 has not.
void check_alone(const std::string& error, const std::string& call, const std::string& remedy) {
  if (under_mpi() && (world_rank() > 1 || world_size() < 2)) return;
  const std::string what = "rank 0 of 2 has called " + call + ", and rank 1 has not: " + remedy;
  INFO(error);
  CHECK((error == at_rank("0", what) || error == at_rank("1", what)));
}

const std::string same_input =
    "a tensor is the same on all ranks of an axis that its spec does not name; give them the same, or name the axis, "
    "as "
    "in `dim/axis`";
const std::string same_steps =
    "all ranks make the same steps, called at the same line; let all of them skip a step or none, and compute the "
    "learning rate and the scale from what they share; for updates of some ranks alone, or a learning rate for each "
    "index of an axis, use a submesh of that axis";

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
                  initialize_by_rank(mesh);
                  communicate(mesh);
                }),
                "random_normal<`M F`> with the key {1, 0}", "random_normal<`M F`> with the key {2, 0}", same_input);
  check_differs(error_on_two([](const Line& mesh) {
                  static_cast<void>(dropout(place_column(mesh, 1), 0.5, {static_cast<std::uint64_t>(mesh.rank()), 4}));
                  communicate(mesh);
                }),
                "dropout with the key {0, 4} and the rate 0.5", "dropout with the key {1, 4} and the rate 0.5",
                same_input);
  check_differs(error_on_two([](const Line& mesh) {
                  static_cast<void>(dropout(place_column(mesh, 1), mesh.rank() == 0 ? 0.5 : 0.25, {3, 4}));
                  communicate(mesh);
                }),
                "dropout with the key {3, 4} and the rate 0.5", "dropout with the key {3, 4} and the rate 0.25",
                same_input);
  check_differs(error_on_two([](const Line& mesh) {
                  initialize_by_rank(mesh);
                  place_equal(mesh);
                  communicate(mesh);
                }),
                "were given different data or keys", same_input);
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
      update + "0.5 at step 1 for 1 leaf, its update number 2",
      update + "0.25 at step 1 for 1 leaf, its update number 2", same_steps);
  check_differs(error_of_steps(
                    rate, [](int rank, std::int64_t step) { return step + rank; }, never),
                update + "0.5 at step 0 for 1 leaf, its update number 1",
                update + "0.5 at step 1 for 1 leaf, its update number 1", same_steps);
  check_alone(error_of_steps(rate, number, [](int rank, std::int64_t step) { return step == 1 && rank == 1; }),
              update + "0.5 at step 1 for 1 leaf, its update number 2", same_steps);
  check_alone(error_of_steps(rate, number, [](int rank, std::int64_t) { return rank == 1; }),
              update + "0.5 at step 0 for 1 leaf, its update number 1", same_steps);
  // More updates than a message has.
  check_alone(error_on_two([](const Line& mesh) {
                Weights w{ones<f32, "M F">(mesh, sizes)};
                auto moments = SGD::init(w);
                const int updates = mesh.rank() == 0 ? 6 : 1;
                for (int i = 0; i < updates; ++i) SGD().update(w, moments, w, 0.5, 1.0, i, every_leaf);
                communicate(mesh);
              }),
              update + "0.5 at step 5 for 1 leaf, its update number 6", same_steps);
  const auto error_of_updates = [](int equal_updates) {
    return error_on_two([=](const Line& mesh) {
      Weights w{ones<f32, "M F">(mesh, sizes)};
      auto moments = SGD::init(w);
      SGD().update(w, moments, w, mesh.rank() == 0 ? 0.5 : 0.25, 1.0, 0, every_leaf);
      for (int i = 0; i < equal_updates; ++i) SGD().update(w, moments, w, 1.0, 1.0, i, every_leaf);
      place_equal(mesh);
      communicate(mesh);
    });
  };
  check_differs(error_of_updates(0), update + "0.5 at step 0 for 1 leaf, its update number 1",
                update + "0.25 at step 0 for 1 leaf, its update number 1", same_steps);
  check_differs(error_of_updates(4), "made different updates", same_steps);
  // A rank clips by the norm of its own gradients.
  check_differs(error_on_two([](const Line& mesh) {
                  Weights w{ones<f32, "M F">(mesh, sizes)};
                  auto moments = SGD::init(w);
                  SGD().update(w, moments, w, 0.5, mesh.rank() == 0 ? 1.0 : 0.25, 0, every_leaf);
                  communicate(mesh);
                }),
                update + "0.5 at step 0 for 1 leaf, its update number 1",
                update + "0.5 at step 0, the gradients times 0.25 for 1 leaf, its update number 1", same_steps);
  check_differs(error_on_two([](const Line& mesh) {  // at two lines
                  Weights w{ones<f32, "M F">(mesh, sizes)};
                  auto moments = SGD::init(w);
                  if (mesh.rank() == 0)
                    SGD().update(w, moments, w, 0.5, 1.0, 0, every_leaf);
                  else
                    SGD().update(w, moments, w, 0.5, 1.0, 0, every_leaf);
                  communicate(mesh);
                }),
                update + "0.5 at step 0 for 1 leaf, its update number 1",
                update + "0.5 at step 0 for 1 leaf, its update number 1", same_steps);
}
/// Updates of weights of which rank r holds r towers, on the mesh or on its own submesh, and all ranks hold one leaf.
void check_trees() {
  const auto error_of_towers = [](bool in_submesh) {
    return error_on_two([=](const Line& mesh) {
      Towers w{{}, place_column(mesh, 1)};
      for (int i = 0; i < mesh.rank(); ++i)
        w.towers.push_back(in_submesh ? ones<f32, "M F">(submesh<"d">(Grid(mesh.device())), sizes)
                                      : ones<f32, "M F">(mesh, sizes));
      auto moments = SGD::init(w);
      SGD().update(w, moments, w, 0.5, 1.0, 0, every_leaf);
      communicate(mesh);
    });
  };
  CHECK(error_of_towers(true) == "no error");
  check_differs(error_of_towers(false), "SGD with the learning rate 0.5 at step 0 for 1 leaf, its update number 1",
                "SGD with the learning rate 0.5 at step 0 for 2 leaves, its update number 1", same_steps);
}
void check_averages() {
  const auto error_of_averages = [](const std::function<double(int rank)>& kept, int averaging) {
    return error_on_two([&](const Line& mesh) {
      Weights w{ones<f32, "M F">(mesh, sizes)}, average = zeros_like(w);
      auto moments = SGD::init(w);
      for (std::int64_t step = 0; step < 2; ++step) {
        SGD().update(w, moments, w, 0.5, 1.0, step, every_leaf);
        if (mesh.rank() < averaging) update_average(average, w, kept(mesh.rank()));
      }
      communicate(mesh);
    });
  };
  const std::string call = "update_average with the kept part ";
  CHECK(error_of_averages([](int) { return 0.75; }, 2) == "no error");
  check_differs(error_of_averages([](int rank) { return 0.75 - 0.25 * rank; }, 2),
                call + "0.75 for 1 leaf, its update number 2", call + "0.5 for 1 leaf, its update number 2",
                same_steps);
  // The average of rank 0 alone, which it would save.
  check_alone(error_of_averages([](int) { return 0.75; }, 1), call + "0.75 for 1 leaf, its update number 2",
              same_steps);
}

}  // namespace

TEST_CASE("inputs that differ between replicas", "[given]") {
  check_inputs();
}

TEST_CASE("steps of an optimizer that differ between devices", "[given]") {
  check_updates();
}

TEST_CASE("steps of an optimizer of trees that differ between devices", "[given]") {
  check_trees();
}

TEST_CASE("steps of an average that differ between devices", "[given]") {
  check_averages();
}

#if defined(SHARDLIB_WITH_MPI)
TEST_CASE("the same between nodes", "[given]") {
  if (!under_mpi() || !detail::shm::node || world_size() < 2) return;
  const Nodes apart(std::vector<int>(static_cast<std::size_t>(world_size()), -1));
  check_inputs();
  check_updates();
  check_averages();
}
#endif

TEST_CASE("a text about inputs that was cut", "[given]") {
  const auto window = [](std::uint64_t seed) {
    detail::GivenInputs inputs;
    detail::GivenInputs::Seen seen;
    for (const std::uint64_t first : {seed, std::uint64_t{12345}})
      inputs.add({.kind = detail::GivenInput::key, .op = {"random_normal", "M", {}}, .first = first, .size = 16}, 1);
    return inputs.since(seen, 1);
  };
  const auto part = detail::GivenPart::inputs;
  const detail::GivenWindow mine = window(1), theirs = window(2);
  REQUIRE(contradiction(mine.sums(), theirs.sums()) == part);
  const std::string text = theirs.describe(part);
  const auto error = [&](std::size_t cut) {
    return error_of([&] { detail::fail_given(0, 2, mine, part, 1, text.substr(0, text.size() - cut)); });
  };
  CHECK(
      error(0) ==
      "rank 0 of 2 has called random_normal<`M`> with the key {1, 0}, where rank 1 has called random_normal<`M`> with "
      "the key {2, 0}: " +
          same_input);
  for (const std::size_t cut : {std::size_t{1}, std::size_t{4}, text.size()})
    CHECK(error(cut) ==
          "rank 0 and rank 1 of 2 were given different data or keys since their last collective: " + same_input);
}

TEST_CASE("a text about updates that was cut", "[given]") {
  const auto window = [](int updates) {
    detail::GivenInputs inputs;
    detail::GivenInputs::Seen seen;
    for (int i = 0; i < updates; ++i)
      inputs.add({.kind = detail::GivenInput::update, .op = {"SGD", {}, {}}, .second = 7, .size = 2}, 1);
    return inputs.since(seen, 1);
  };
  const auto part = detail::GivenPart::updates;
  const detail::GivenWindow mine = window(2), theirs = window(1);
  REQUIRE(contradiction(mine.sums(), theirs.sums()) == part);
  const std::string text = theirs.describe(part);
  const auto error = [&](std::size_t cut) {
    return error_of([&] { detail::fail_given(0, 2, mine, part, 1, text.substr(0, text.size() - cut)); });
  };
  CHECK(error(0) ==
        "rank 0 of 2 has called SGD with the learning rate 0 at step 7 for 2 leaves, its update number 2, and rank 1 "
        "has not: " +
            same_steps);
  for (const std::size_t cut : {std::size_t{1}, text.size()})
    CHECK(error(cut) == "rank 0 and rank 1 of 2 made different updates since their last collective: " + same_steps);
}

TEST_CASE("steps of an optimizer on another factorization of the mesh", "[given]") {
  const std::string error = error_on_two([](const Line& mesh) {
    const Mesh<"x"> line(Device::reinterpreted(mesh.device(), {{"x", 2}}));
    Weights w{ones<f32, "M F">(line, sizes)};
    auto moments = SGD::init(w);
    SGD().update(w, moments, w, mesh.rank() == 0 ? 0.5 : 0.25, 1.0, 0, every_leaf);
    static_cast<void>(item(all_reduce<"+x -> ">(sum(ones<f32, "B/x">(line, sizes)))));
  });
  if (under_mpi() && (world_rank() > 1 || world_size() < 2)) return;
  INFO(error);
  CHECK(error.find("has called SGD with the learning rate 0.5 at step 0 for 1 leaf, its update number 1") !=
        error.npos);
  CHECK(error.find(same_steps) != error.npos);
}

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
    // A helper at one line updates the weights of the stages, as often as each one needs, and those of the whole mesh.
    Weights shared{ones<f32, "M F">(mesh, sizes)};
    auto shared_moments = SGD::init(shared);
    const auto update = [](Weights& weights, decltype(moments)& state, int step) {
      SGD().update(weights, state, weights, 0.5, 1.0, step, every_leaf);
    };
    for (int step = 0; step <= mesh.axis_index("d"); ++step) update(w, moments, step);
    update(shared, shared_moments, 0);
    both();
    // Another factorization of the mesh: what is the same along one of its axes may differ along axes of the groups.
    const Mesh<"x y"> other(Device::reinterpreted(device, {{"x", 2}, {"y", 2}}));
    static_cast<void>(place<Tensor<f32, "M/x">>(other, HostArray<f32>({4}, {row, row, row, row})));
    both();
  });
}
