// Checkpoints: any mesh loads what any mesh has saved, bit for bit; nothing but whole ones is ever taken for whole;
// failures end alike on every device. On threads and under mpirun.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <shardlib/io/agree.hpp>
#include <shardlib/io/checkpoint/checkpoint.hpp>
#include <shardlib/io/checkpoint/layout.hpp>
#include <shardlib/io/formats/zarr.hpp>
#include <shardlib/io/impl/temporary.hpp>
#include <shardlib/shardlib.hpp>
#include <shardlib/support/crc32c.hpp>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include "random_bits.hpp"
#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using io::Checkpoint;
using io::CheckpointMeta;

namespace {

using DT = Mesh<"d t">;

struct Layer {
  Tensor<f32, "M/d F/t"> w;
  Tensor<bf16, "F/t/d"> bias;
};
struct Weights {
  Tensor<f32, "V/t M/d"> embed;
  Array<"layers", Layer> layers;
  Tensor<i32, ""> count;
  Tensor<u8, "M"> bytes;
  Tensor<bool_, "V/d"> mask;
  Tensor<u32, "M/t 2"> pairs;
  Tensor<f64, "V F/d/t"> wide;
  Tensor<f32, "Z/d V"> none;
};

constexpr std::int64_t V = 10, M = 13, F = 7;

/// A tensor whose elements tell their global place and `salt`, all their bits in use.
template <class T>
T numbered(const DT& mesh, std::vector<std::int64_t> shape, int salt) {
  using D = typename T::value_type;
  HostArray<D> host(std::move(shape));
  fill_with_bits(host, static_cast<std::uint64_t>(salt) * 1000003U + 1);
  const std::int64_t n = mesh.size();
  return place<T>(mesh, host, {{"V", V, round_up(V, n)}, {"M", M, round_up(M, n)}, {"F", F, round_up(F, n)}});
}

Weights make_state(const DT& mesh, int salt) {
  Weights s;
  const auto n = [&]<class T>(T& leaf, std::vector<std::int64_t> shape) {
    leaf = numbered<T>(mesh, std::move(shape), salt == 0 ? 0 : ++salt);
  };
  n(s.embed, {V, M});
  for (int i = 0; i < 3; ++i) {
    Layer layer;
    n(layer.w, {M, F});
    n(layer.bias, {F});
    s.layers.push_back(layer);
  }
  n(s.count, {});
  n(s.bytes, {M});
  n(s.mask, {V});
  n(s.pairs, {M, 2});
  n(s.wide, {V, F});
  n(s.none, {0, V});
  return s;
}

/// A leaf has no elements.
void expect_state(const Weights& found, const Weights& expected) {
  expect_same_bits(found, expected, "the state", 1);
}

CheckpointMeta some_meta() {
  CheckpointMeta meta;
  meta.data_hash = "abc";
  meta.user = {{"config", "d_model = 13\n\"quoted\""}, {"", "empty key"}};
  return meta;
}

/// A device of its own, outside any launch.
DT alone() {
  return DT(DevicePtr::make(std::vector<AxisSize>{{"d", 1}, {"t", 1}}, 0, nullptr, 1, tuning));
}

/// All devices set the same hook, which threads share.
void set_hook(Device& device, const std::function<void(std::string_view phase, int device)>& hook) {
  io::together(device, "", [&] {
    if (device.rank() == 0 || under_mpi()) test::checkpoint_phase = hook;
  });
}

/// The names in the folder, sorted.
std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

/// Removes a folder into which other devices write.
void remove_while_written(const std::string& path) {
  std::error_code busy;
  do {
    std::filesystem::remove_all(path, busy);
  } while (busy);
}

Scratch shared_folder() {
  return Scratch::shared(under_mpi(), world_rank());
}

}  // namespace

TEST_CASE("crc32c: published values; table and hardware agree", "[checkpoint]") {
  CHECK(io::crc32c(io::as_bytes("123456789")) == 0xe3069283U);
  CHECK(io::crc32c(io::as_bytes("")) == 0);
  CHECK(io::crc32c(io::as_bytes(std::string(32, '\0'))) == 0x8a9136aaU);  // RFC 3720, B.4
  CHECK(io::crc32c(io::as_bytes(std::string(32, '\xff'))) == 0x62a8ab43U);
  std::mt19937 random(1);
  std::string text;
  for (std::size_t n = 0; n < 100; ++n) {
    const auto bytes = io::as_bytes(text);
    CHECK(io::crc32c(bytes) == ~io::detail::crc32c_by_table(~0U, bytes.data(), n));
    CHECK(io::crc32c(bytes.subspan(n / 3), io::crc32c(bytes.first(n / 3))) == io::crc32c(bytes));
    text += static_cast<char>(random());
  }
  CHECK(io::hex(0x00c0ffeeU) == "00c0ffee");
}

TEST_CASE("checkpoint: every mesh loads what every mesh has saved, bit for bit", "[checkpoint]") {
  const std::vector<std::string> meshes{"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=4,t=1", "d=2,t=2", "d=1,t=3"};
  const Scratch scratch = shared_folder();
  // All arrays in files of one device, some, and none.
  const std::uint64_t merge_below = GENERATE(std::uint64_t{1} << 20, std::uint64_t{150}, std::uint64_t{0});
  const Temporarily limit(tuning.merged_array, merge_below);
  for (const std::string& from : meshes) {
    const std::string folder = scratch / (from + "-" + std::to_string(merge_below));
    const bool ran =
        on_mesh(from, [&](const DT& mesh) { io::save(mesh, folder, 7, make_state(mesh, 5), some_meta()); });
    if (!ran) continue;
    for (const std::string& to : meshes) {
      INFO(from << " to " << to);
      on_mesh(to, [&](const DT& mesh) {
        Weights state = make_state(mesh, 0);
        const CheckpointMeta meta = io::load(mesh, folder + "/step-00000007", state);
        expect_state(state, make_state(mesh, 5));
        CheckpointMeta expected = some_meta();
        expected.step = 7;
        expect(meta == expected, "meta");
      });
    }
  }
}

TEST_CASE("checkpoint: models of submeshes need names of their own", "[checkpoint]") {
  const Scratch scratch = shared_folder();
  on_mesh("d=2,e=2,t=1", [&](const Mesh<"d e t">& mesh) {
    const auto part = submesh<"e">(mesh);
    const int e = mesh.axis_index("e");
    const auto of = [&](double value) { return full<f32, "M/d">(part, {{"M", 4}}, value); };
    expect_error([&] { io::save(mesh, scratch / "one", 1, of(e)); },
                 "checkpoint '" + scratch / "one" +
                     "/step-00000001' was not saved: the leaf 'value' has other values on device 1 than on device 0; "
                     "if they are of several submeshes, give the leaves of each names of its own with `rename`, or "
                     "save each submesh with its own mesh into a folder of its own");
    io::save(mesh, scratch / "equal", 1, of(5));
    const io::Rename own = [e](const std::string& name) { return name + "." + std::to_string(e); };
    io::save(mesh, scratch / "both", 1, of(e + 1), {}, {.rename = own});
    auto back = of(0);
    io::load(mesh, scratch / "both/step-00000001", back, {.ignore_extra = true, .rename = own});
    expect(std::ranges::all_of(back.span(), [&](f32 x) { return x == static_cast<f32>(e + 1); }), "its own values");
  });
}

TEST_CASE("checkpoint: what stands in the folder", "[checkpoint]") {
  const Scratch scratch = shared_folder();
  on_mesh("d=2,t=1", [&](const DT& mesh) { io::save(mesh, scratch.path(), 100, make_state(mesh, 5), some_meta()); });
  if (world_rank() != 0 || (under_mpi() && world_size() < 2)) return;
  CHECK(contents(scratch / "LATEST") == "step-00000100\n");
  const Checkpoint checkpoint = Checkpoint::open(scratch / "step-00000100");
  CHECK(checkpoint.damages().empty());
  std::vector<std::string> names;
  for (const auto& array : checkpoint.arrays()) names.push_back(array.name);
  CHECK(names == std::vector<std::string>{"bytes", "count", "embed", "layers.0.bias", "layers.0.w", "layers.1.bias",
                                          "layers.1.w", "layers.2.bias", "layers.2.w", "mask", "none", "pairs",
                                          "wide"});
  const io::CheckpointArray& embed = *checkpoint.find("embed");
  CHECK(embed.shape == io::Index{V, M});
  CHECK(embed.dims == std::vector<std::string>{"V", "M"});
  CHECK(embed.bytes() == 520);
  CHECK(checkpoint.find("layers.0.bias")->dtype == DType::bf16);
  CHECK(checkpoint.find("layers.0") == nullptr);
  // Small arrays are one file, and layers one array. Nothing in the folder that the manifest does not list.
  CHECK(std::filesystem::exists(scratch / "step-00000100/bytes/0"));
  CHECK(std::filesystem::exists(scratch / "step-00000100/embed/0.0"));
  CHECK_FALSE(std::filesystem::exists(scratch / "step-00000100/embed/0.1"));
  CHECK(std::filesystem::exists(scratch / "step-00000100/layers.w/0.0.0"));
  CHECK(files_below(scratch / "step-00000100").size() == 3 + 9 * 2 + 8);  // `none` has no chunk
  std::vector<std::string> listed{"manifest.json"};
  for (const auto& file : checkpoint.files()) listed.push_back(file.path);
  std::sort(listed.begin(), listed.end());
  CHECK(files_below(scratch / "step-00000100") == listed);
}

TEST_CASE("checkpoint: a flipped bit, a truncation or a loss of any file is found and named", "[checkpoint][damage]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const DT mesh = alone();
  const Weights old = make_state(mesh, 5), state = make_state(mesh, 50);
  io::save(mesh, scratch.path(), 1, old);
  io::save(mesh, scratch.path(), 2, state);
  const std::string folder = scratch / "step-00000002";
  std::mt19937 random(3);
  int checked = 0;
  for (const std::string& file : files_below(folder)) {
    const std::string path = folder + "/" + file, whole = contents(path);
    const auto expect_found = [&](const std::string& how) {
      INFO(file << " " << how);
      Weights loaded = make_state(mesh, 0);
      const std::string message = error_of([&] { io::load(mesh, folder, loaded); });
      CHECK(message.find("is damaged: '" + file + "'") != std::string::npos);
      expect_state(loaded, make_state(mesh, 0));
      ++checked;
    };
    const bool manifest = file == "manifest.json";
    for (std::size_t i = 0; i < (manifest ? 200U : 3U) && !whole.empty(); ++i) {
      std::string bytes = whole;
      bytes[i < 60 && manifest ? i : random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
      put(path, bytes);
      expect_found("flipped");
    }
    for (const std::size_t size : {std::size_t{0}, whole.size() / 2, whole.size() - 1}) {
      if (size >= whole.size()) continue;
      put(path, whole.substr(0, size));
      expect_found("truncated");
    }
    put(path, whole + "x");
    expect_found("longer");
    std::filesystem::remove(path);
    if (manifest) {
      CHECK(error_of([&] { static_cast<void>(Checkpoint::open(folder)); }) ==
            "checkpoint '" + folder + "' is damaged: 'manifest.json' is missing");
    } else {
      expect_found("removed");
    }
    // The newest whole one is then the older one.
    if (file == "embed/0.0" || manifest) {
      CHECK(io::newest_whole(scratch.path()) == scratch / "step-00000001");
      CHECK(io::newest_whole(mesh, scratch.path()) == scratch / "step-00000001");
      REQUIRE_FALSE(std::filesystem::exists(folder));
      std::filesystem::rename(folder + ".damaged", folder);
    }
    put(path, whole);
  }
  CHECK(checked > 200);
  CHECK(io::newest_whole(scratch.path()) == folder);
  for (const std::string step : {"/step-00000001", "/step-00000002"})
    std::filesystem::remove(scratch.path() + step + "/embed/0.0");
  const std::string none =
      "none of the 2 checkpoints in '" + scratch.path() + "' is whole: restore one, or start afresh in another folder";
  expect_error([&] { static_cast<void>(io::newest_whole(scratch.path())); }, none);
  expect_error([&] { static_cast<void>(io::newest_whole(mesh, scratch.path())); }, none);
  CHECK_FALSE(io::newest_whole(scratch / "nowhere"));
  CHECK_FALSE(io::newest_whole(mesh, scratch / "nowhere"));
}

TEST_CASE("checkpoint: damage that one device finds is told to all", "[checkpoint]") {
  const Scratch scratch = shared_folder();
  for (const std::string axes : {"d=2,t=1", "d=2,t=2"}) {
    const std::string folder = scratch / (axes + "\n");  // a path may have any character
    on_mesh(axes, [&](const DevicePtr& device) {
      const DT mesh(device);
      Weights state = make_state(mesh, 5);
      io::save(mesh, folder, 1, state);
      io::save(mesh, folder, 2, state);
      const std::string newest = folder + "/step-00000002", file = newest + "/wide/0.0";
      io::together(*device, "", [&] {
        if (device->rank() == 0) put(file, contents(file).substr(1));
      });
      const std::string message = error_of([&] { io::load(mesh, newest, state); });
      expect(message.find("is damaged: 'wide/0.0' has ") != std::string::npos, message);
      const auto all = io::gather_texts(*device, message);
      expect(std::ranges::count(all, message) == mesh.size(), "not the same message everywhere");
      expect(io::newest_whole(mesh, folder) == folder + "/step-00000001", "newest whole");
      const auto opened = io::open_newest(mesh, folder);
      expect(opened && opened->meta().step == 1, "opened");
      const io::CheckpointMeta meta = io::load(mesh, *opened, state, {.verify = false});
      expect(meta.step == 1, "the step that was loaded");
      expect_state(state, make_state(mesh, 5));
    });
  }
}

TEST_CASE("checkpoint: devices that would load different ones are found", "[checkpoint]") {
  const Scratch scratch = shared_folder();
  on_mesh("d=2,t=1", [&](const DT& mesh) {
    Weights state = make_state(mesh, 5), other = make_state(mesh, 6);
    io::save(mesh, scratch / "a", 1, state);
    io::save(mesh, scratch / "b", 1, other);
    const std::string mine = scratch / (mesh.device()->rank() == 0 ? "a/step-00000001" : "b/step-00000001");
    expect_error([&] { io::load(mesh, mine, state); },
                 "device 1 reads another checkpoint under '" + mine +
                     "' than device 0: give all of them the same folder, on a file system that all nodes share");
    expect_state(state, make_state(mesh, 5));
  });
}

TEST_CASE("checkpoint: a write that fails on one device fails alike on all, and nothing is lost", "[checkpoint]") {
  for (const std::string axes : {"d=1,t=1", "d=2,t=1", "d=2,t=2"}) {
    const Scratch scratch = shared_folder();
    on_mesh(axes, [&](const DT& mesh) {
      io::save(mesh, scratch.path(), 1, make_state(mesh, 5));
      const int last = mesh.size() - 1;
      for (const std::string where : {"planned", "metadata", "chunk", "chunks", "manifest"}) {
        const int who = where == "manifest" ? 0 : last;
        {
          set_hook(*mesh.device(), [&, who](std::string_view phase, int d) {
            if (phase == where && d == who) throw Error("no space left, says the test");
          });
          const std::string message = error_of([&] { io::save(mesh, scratch.path(), 2, make_state(mesh, 50)); });
          std::string expected =
              "checkpoint '" + scratch.path() + "/step-00000002' was not saved: no space left, says the test";
          if (mesh.size() > 1) {
            const std::string place = who == 0 ? "0 (d=0,t=0)" : mesh.size() == 2 ? "1 (d=1,t=0)" : "3 (d=1,t=1)";
            expected += " (on device " + place + " of mesh " + axes + ")";
          }
          expect(message == expected, where + ": " + message);
          set_hook(*mesh.device(), nullptr);
        }
        expect(io::newest_whole(mesh, scratch.path()) == scratch / "step-00000001", "the old one is gone");
        expect(names_in(scratch.path()).size() == 2, where + ": something is left over");
      }
      io::save(mesh, scratch.path(), 2, make_state(mesh, 50));
      Weights state = make_state(mesh, 0);
      io::load(mesh, scratch / "step-00000002", state);
      expect_state(state, make_state(mesh, 50));
    });
  }
}

TEST_CASE("checkpoint: files that someone removes during a save are an error of storage on all devices",
          "[checkpoint]") {
  for (const std::string axes : {"d=1,t=1", "d=2,t=1", "d=2,t=2"}) {
    const Scratch scratch = shared_folder();
    on_mesh(axes, [&](const DT& mesh) {
      const std::string folder = scratch / "checkpoints", name = "checkpoint '" + folder + "/step-00000002' ";
      for (const bool all : {false, true})  // the whole folder, or that of the checkpoint alone
        for (const std::string where : {"metadata", "chunk", "chunks", "manifest", "renamed", "latest"}) {
          const bool saved = where == "renamed" || where == "latest";
          if (saved && !all) continue;
          const int who = where == "chunk" || where == "chunks" ? mesh.size() - 1 : 0;
          set_hook(*mesh.device(), [&, who](std::string_view phase, int d) {
            if (phase != where || d != who) return;
            for (const std::string& entry : names_in(folder))
              if (entry.find(".tmp-") != std::string::npos) remove_while_written(folder + "/" + entry);
            if (all) std::filesystem::remove_all(folder);
            if (where == "latest") put(folder, "a file");
          });
          const std::string message = error_of<StorageError>([&] { io::save(mesh, folder, 2, make_state(mesh, 50)); });
          set_hook(*mesh.device(), nullptr);
          const char* const why = where == "latest" ? "': Not a directory" : "': No such file or directory";
          expect(message.starts_with(name + (saved ? "is saved, but: cannot " : "was not saved: cannot ")) &&
                     message.find(why) != std::string::npos,
                 where + ": " + message);
          const auto texts = io::gather_texts(*mesh.device(), message);
          expect(texts.front() == texts.back(), where + ": not the same message everywhere");
          io::together(*mesh.device(), "", [&] {
            if (where == "latest" && mesh.device()->rank() == 0) std::filesystem::remove(folder);
          });
          io::save(mesh, folder, 2, make_state(mesh, 5));
          expect(io::newest_whole(mesh, folder) == folder + "/step-00000002", where + ": the next save is whole");
        }
    });
  }
}

TEST_CASE("checkpoint: values that are not finite are refused where the program says so, and nothing is lost",
          "[checkpoint]") {
  struct State {
    Tensor<f32, "M/d"> good, bad;
  };
  for (const std::string axes : {"d=1,t=1", "d=2,t=1"}) {
    const Scratch scratch = shared_folder();
    on_mesh(axes, [&](const DT& mesh) {
      const auto state = [&](double value) {
        const auto ones_of = [&](double x) { return full<f32, "M/d">(mesh, {{"M", 8}}, x); };
        return State{ones_of(1), ones_of(value)};
      };
      io::save(mesh, scratch.path(), 1, state(2), {}, {.keep = 1, .finite = true});
      for (const double value : {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
        const std::string message =
            error_of([&] { io::save(mesh, scratch.path(), 2, state(value), {}, {.keep = 1, .finite = true}); });
        expect(message == "checkpoint '" + scratch.path() +
                              "/step-00000002' was not saved: the leaf 'bad' has 8 values that are not finite, so the "
                              "training has diverged; the checkpoints before this one stay" +
                              (mesh.size() == 1 ? "" : " (on device 0 (d=0,t=0) of mesh d=2,t=1)"),
               message);
        expect(io::newest_whole(mesh, scratch.path()) == scratch / "step-00000001", "the old one is gone");
      }
      io::save(mesh, scratch.path(), 2, state(std::numeric_limits<double>::quiet_NaN()));
      expect(io::newest_whole(mesh, scratch.path()) == scratch / "step-00000002", "a program may save what it likes");
    });
  }
}

TEST_CASE("checkpoint: the system's own errors", "[checkpoint]") {
  const Scratch scratch = shared_folder();
  if (world_rank() == 0) put(scratch / "file", "x");
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
  on_mesh("d=2,t=1", [&](const DevicePtr& device) {
    const DT mesh(device);
    Weights state = make_state(mesh, 5);
    const std::string at_file = error_of([&] { io::save(mesh, scratch / "file", 3, state); });
    expect(at_file.find("checkpoint '" + scratch.path() +
                        "/file/step-00000003' was not saved: cannot make the folder") == 0,
           at_file);
    // One device may write no more than 100 bytes to a file (under mpirun; threads share the limit).
    const bool limited = device->rank() == 1;
    io::together(*device, "", [&] {
      const rlimit small{100, before.rlim_max};
      if (limited) setrlimit(RLIMIT_FSIZE, &small);
    });
    const std::string too_large = error_of([&] { io::save(mesh, scratch / "a", 3, state); });
    io::together(*device, "", [&] {
      if (limited) setrlimit(RLIMIT_FSIZE, &before);
    });
    expect(too_large.find("File too large") != std::string::npos, too_large);
    const auto all = io::gather_texts(*device, too_large);
    expect(all[0] == all[1], "not the same message everywhere");
    io::save(mesh, scratch / "a", 3, state);
    expect(io::newest_whole(mesh, scratch / "a").has_value(), "saved now");
  });
  signal(SIGXFSZ, handler);
}

TEST_CASE("checkpoint: killed at any moment, the newest whole one is there", "[checkpoint]") {
  if (under_mpi()) return;  // a rank must not fork
  for (const std::string where :
       {"planned", "metadata", "chunk", "chunks", "manifest", "renamed", "latest", "pruned"}) {
    INFO(where);
    const Scratch scratch;
    {
      const DT mesh = alone();
      io::save(mesh, scratch.path(), 1, make_state(mesh, 5));
    }
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      test::checkpoint_phase = [&](std::string_view phase, int) {
        if (phase == where) kill(getpid(), SIGKILL);
      };
      const DT mesh = alone();
      io::save(mesh, scratch.path(), 2, make_state(mesh, 50), {}, {.keep = 1});
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    REQUIRE(WIFSIGNALED(status));
    const DT mesh = alone();
    const auto newest = io::newest_whole(mesh, scratch.path());
    REQUIRE(newest);
    const bool saved = where == "latest" || where == "pruned";
    CHECK(*newest == scratch / (saved ? "step-00000002" : "step-00000001"));
    Weights state = make_state(mesh, 0);
    io::load(mesh, *newest, state);
    expect_state(state, make_state(mesh, saved ? 50 : 5));
    // The next save clears what was left.
    io::save(mesh, scratch.path(), 3, state, {}, {.keep = 1});
    CHECK(names_in(scratch.path()) == std::vector<std::string>{"LATEST", "step-00000003"});
  }
}

TEST_CASE("checkpoint: an asynchronous save holds the values of its moment", "[checkpoint]") {
  for (const std::string axes : {"d=1,t=1", "d=2,t=1", "d=2,t=2"}) {
    const Scratch scratch = shared_folder();
    std::atomic<bool> go = false;
    on_mesh(axes, [&](const DevicePtr& device) {
      const DT mesh(device);
      set_hook(*device, [&](std::string_view phase, int) {
        while (phase == "chunk" && !go) usleep(100);
      });
      {
        io::AsyncSaver saver(mesh, scratch.path());
        Weights state = make_state(mesh, 5);
        saver.save(1, state);
        expect(saver.in_flight(), "in flight");
        // Updates that would overwrite memory nobody else holds on to.
        for (int i = 0; i < 3; ++i) state.embed = std::move(state.embed) * 2.0 + 1.0;
        state = make_state(mesh, 50);
        saver.poll();
        expect(saver.in_flight(), "still in flight");
        expect(!std::filesystem::exists(scratch / "step-00000001"), "committed too early");
        // No device may release the writers while another has yet to look.
        io::together(*device, "", [] {});
        go = true;
        saver.save(2, state);  // waits for the first: at most one is under way
        expect(std::filesystem::exists(scratch / "step-00000001"), "not committed");
        expect(!std::filesystem::exists(scratch / "step-00000002"), "committed too early");
        for (int i = 0; saver.in_flight(); ++i) {
          expect(i < 100000, "poll never commits");
          usleep(100);
          saver.poll();
        }
        expect(std::filesystem::exists(scratch / "step-00000002"), "not committed by poll");
        saver.flush();
      }
      for (const auto& [step, salt] : {std::pair{1, 5}, {2, 50}}) {
        Weights state = make_state(mesh, 0);
        io::load(mesh, scratch / io::checkpoint_name(step), state);
        expect_state(state, make_state(mesh, salt));
      }
      // An error in the background comes with the next call, on all devices, and then the saver goes on.
      set_hook(*device, [&](std::string_view phase, int d) {
        if (phase == "chunk" && d == mesh.size() - 1) throw Error("the disk is gone");
      });
      io::AsyncSaver saver(mesh, scratch.path());
      saver.save(3, make_state(mesh, 5));
      const std::string message = error_of([&] { saver.flush(); });
      expect(message.find("step-00000003' was not saved: the disk is gone") != std::string::npos, message);
      set_hook(*device, nullptr);
      saver.save(4, make_state(mesh, 5));
      saver.flush();
      expect(io::newest_whole(mesh, scratch.path()) == scratch / "step-00000004", "newest");
    });
  }
}

TEST_CASE("checkpoint: a damaged one that was passed over does not count as kept", "[checkpoint]") {
  const Scratch scratch = shared_folder();
  for (const std::string axes : {"d=1,t=1", "d=2,t=2"}) {
    const std::string folder = scratch / axes;
    on_mesh(axes, [&](const DT& mesh) {
      Weights state = make_state(mesh, 5);
      for (const int step : {10, 15, 20}) io::save(mesh, folder, step, state, {}, {.keep = 2});
      io::together(*mesh.device(), "", [&] {
        if (mesh.device()->rank() == 0) put(folder + "/step-00000020/wide/0.0", "x");
      });
      expect(io::newest_whole(mesh, folder) == folder + "/step-00000015", "goes back");
      io::save(mesh, folder, 24, state, {}, {.keep = 2});
      const std::vector<std::string> kept{folder + "/step-00000024", folder + "/step-00000015"};
      expect(io::list_checkpoints(folder) == kept, "the whole one before it is kept");
      expect(std::filesystem::exists(folder + "/step-00000020.damaged/manifest.json"), "there to be looked at");
    });
  }
}

TEST_CASE("checkpoint: an old one that cannot be removed is a warning, and goes with a later save", "[checkpoint]") {
  if (under_mpi()) return;
  const Scratch scratch;
  const std::string folder = scratch / "checkpoints", errors = scratch / "stderr";
  const DT mesh = alone();
  const Weights state = make_state(mesh, 5);
  std::filesystem::create_directories(folder);
  // The rights of files mean nothing to root.
  constexpr uid_t nobody = 65534;
  const bool root = geteuid() == 0;
  if (root) REQUIRE(chown(scratch.path().c_str(), nobody, nobody) == 0);
  if (root) REQUIRE(chown(folder.c_str(), nobody, nobody) == 0);
  std::fflush(stderr);
  const int before = dup(STDERR_FILENO);
  if (root) REQUIRE(seteuid(nobody) == 0);
  const int file = open(errors.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  dup2(file, STDERR_FILENO);
  std::string said;
  try {
    io::save(mesh, folder, 1, state);
    chmod((folder + "/step-00000001/wide").c_str(), 0500);
    io::save(mesh, folder, 2, state, {}, {.keep = 1});
    std::fflush(stderr);
    said = contents(errors);
    chmod((folder + "/step-00000001.old-pruned/wide").c_str(), 0700);
    io::save(mesh, folder, 3, state, {}, {.keep = 1});
  } catch (const Error& error) {
    said += error.what();
  }
  std::fflush(stderr);
  dup2(before, STDERR_FILENO);
  close(before);
  close(file);
  if (root) REQUIRE(seteuid(0) == 0);
  CHECK(said == "warning: '" + folder +
                    "/step-00000001' is not needed any more, but was not removed: cannot remove the folder '" + folder +
                    "/step-00000001.old-pruned': Permission denied; the next save tries again\n");
  CHECK(contents(errors) == said);
  CHECK(names_in(folder) == std::vector<std::string>{"LATEST", "step-00000003"});
}

TEST_CASE("checkpoint: one that the storage refuses to read is not taken for a damaged one", "[checkpoint]") {
  if (under_mpi()) return;
  const Scratch scratch;
  const DT mesh = alone();
  Weights state = make_state(mesh, 5);
  constexpr uid_t nobody = 65534;  // the rights of files mean nothing to root
  const bool root = geteuid() == 0;
  for (const int step : {1, 2, 3}) io::save(mesh, scratch.path(), step, state, {.validation_loss = step});
  const std::string newest = scratch / "step-00000003", file = newest + "/wide/0.0";
  if (root) REQUIRE(std::system(("chown -R 65534 '" + scratch.path() + "'").c_str()) == 0);
  if (root) REQUIRE(seteuid(nobody) == 0);
  chmod(file.c_str(), 0);
  const std::string all = error_of<StorageError>([&] { static_cast<void>(io::open_newest(mesh, scratch.path())); }),
                    one = error_of<StorageError>([&] { static_cast<void>(io::newest_whole(scratch.path())); }),
                    load = error_of<StorageError>([&] { io::load(mesh, newest, state); });
  chmod(file.c_str(), 0600);
  // Nor does retention remove one whose loss cannot be read.
  chmod((scratch / "step-00000001/.zattrs").c_str(), 0);
  io::save(mesh, scratch.path(), 4, state, {.validation_loss = 4}, {.keep = 1, .keep_best = 1});
  chmod((scratch / "step-00000001/.zattrs").c_str(), 0600);
  if (root) REQUIRE(seteuid(0) == 0);
  const std::string message = "cannot read '" + file +
                              "': Permission denied: start again when it can be read, or move '" + newest +
                              "' away to go back to an older checkpoint";
  CHECK(all == message);
  CHECK(one == message);
  CHECK(load == message);
  CHECK(names_in(scratch.path()) ==
        std::vector<std::string>{"LATEST", "step-00000001", "step-00000002", "step-00000004"});
}

TEST_CASE("checkpoint: retention, LATEST, and a step saved again", "[checkpoint]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const DT mesh = alone();
  const auto steps = [&] {
    std::vector<std::string> names;
    for (const std::string& path : io::list_checkpoints(scratch.path()))
      names.push_back(path.substr(path.rfind('-') + 1));
    return names;
  };
  const Weights state = make_state(mesh, 5);
  for (const int step : {10, 20, 30}) io::save(mesh, scratch.path(), step, state);
  CHECK(steps() == std::vector<std::string>{"00000030", "00000020", "00000010"});
  io::save(mesh, scratch.path(), 40, state, {}, {.keep = 2});
  CHECK(steps() == std::vector<std::string>{"00000040", "00000030"});
  // Resumed from an older one: later steps are of another future; they stay, but are not the newest.
  io::save(mesh, scratch.path(), 35, make_state(mesh, 50), {}, {.keep = 2});
  CHECK(steps() == std::vector<std::string>{"00000035", "00000030", "00000040"});
  CHECK(io::newest_whole(scratch.path()) == scratch / "step-00000035");
  io::save(mesh, scratch.path(), 35, make_state(mesh, 60), {}, {.keep = 1});
  Weights loaded = make_state(mesh, 0);
  io::load(mesh, scratch / "step-00000035", loaded);
  expect_state(loaded, make_state(mesh, 60));
  CHECK(steps() == std::vector<std::string>{"00000035", "00000040"});
  for (const std::string latest : {"nonsense", "", "step-35", "step-00000099"}) {
    put(scratch / "LATEST", latest);
    CHECK(io::newest_whole(scratch.path()) == scratch / "step-00000040");
  }
  std::filesystem::remove(scratch / "LATEST");
  std::filesystem::create_directories(scratch / "LATEST");
  CHECK(io::newest_whole(scratch.path()) == scratch / "step-00000040");
  CHECK(io::newest_whole(mesh, scratch.path()) == scratch / "step-00000040");
  std::filesystem::remove(scratch / "LATEST");
  std::filesystem::create_directories(scratch / "step-00000090.tmp-x");
  const std::string saved_now = io::detail::temporary_name(scratch / "step-00000091");  // by a living process
  std::filesystem::create_directories(saved_now);
  std::filesystem::create_directories(scratch / "step-best");
  CHECK(steps().size() == 2);
  io::save(mesh, scratch.path(), 35, state, {}, {.keep = 1});
  CHECK(std::filesystem::exists(saved_now));
  CHECK(!std::filesystem::exists(scratch / "step-00000090.tmp-x"));
  CHECK(io::checkpoint_name(123456789012) == "step-123456789012");
  expect_error<UsageError>([&] { io::save(mesh, scratch.path(), 1, state, {}, {.keep = -1}); },
                           "checkpoints: keep -1 is negative; 0 keeps all");
  expect_error<UsageError>([&] { io::save(mesh, scratch.path(), -1, state); },
                           "checkpoint '" + scratch.path() + "/step-000000-1' was not saved: the step -1 is negative");
}

namespace {
struct Before {
  Tensor<f32, "A"> kept, renamed_a, longer, narrow, gone;
};
struct After {
  Tensor<f32, "A"> kept, renamed_b;
  Tensor<f32, "A B"> longer;
  Tensor<i32, "A"> narrow;
};
}  // namespace

TEST_CASE("checkpoint: dims in another order are an error, also where their sizes are equal", "[checkpoint]") {
  const Scratch scratch = shared_folder();
  on_mesh("d=2,t=1", [&](const DevicePtr& device) {
    const DT mesh(device);
    const Sizes sizes{{"A", 4}, {"B", 4}, {"C", 4}};
    io::save(mesh, scratch.path(), 1, random_normal<f32, "A/d B">(mesh, sizes, {1, 1}));
    auto turned = zeros<f32, "B A/d">(mesh, sizes);
    const std::string path = scratch / "step-00000001";
    expect_error<UsageError>(
        [&] { io::load(mesh, path, turned); },
        "the checkpoint '" + path +
            "' does not fit this program:\n"
            "  'value' has the dims A B in the checkpoint, but B A in the program: take it in that "
            "order, then `rearrange` it, or `rename` the dims if only their names have changed");
    auto renamed = zeros<f32, "A C/d">(mesh, sizes);  // another name is another program's
    io::load(mesh, path, renamed);
    expect(renamed.span()[0] != 0, "a dim of another name");
  });
}

TEST_CASE("checkpoint: all that does not fit is one error, with the nearest names", "[checkpoint]") {
  const Scratch scratch = shared_folder();
  on_mesh("d=2,t=1", [&](const DT& mesh) {
    const auto ones_of = [&] { return ones<f32, "A">(mesh, {{"A", 4}}); };
    io::save(mesh, scratch.path(), 1, Before{ones_of(), ones_of(), ones_of(), ones_of(), ones_of()});
    After after{ones_of() * 3.0, ones_of(), ones<f32, "A B">(mesh, {{"A", 4}, {"B", 2}}), iota<"A">(mesh, 4)};
    const std::string path = scratch / "step-00000001";
    expect_error<UsageError>([&] { io::load(mesh, path, after); },
                             "the checkpoint '" + path +
                                 "' does not fit this program:\n"
                                 "  'renamed_b' is not in the checkpoint (nearest there: 'renamed_a')\n"
                                 "  'longer' is [4] in the checkpoint, but [4, 2] in the program\n"
                                 "  'narrow' is f32 in the checkpoint, but i32 in the program\n"
                                 "  'gone' is in the checkpoint, but not in the program\n"
                                 "  'renamed_a' is in the checkpoint, but not in the program");
    expect(after.kept.span()[0] == 3, "the tree has changed");
    struct Part {
      Tensor<f32, "A"> kept, other;
    } part{ones_of() * 3.0, ones_of() * 3.0};
    io::load(mesh, path, part,
             {.ignore_extra = true, .rename = [](const std::string& name) { return name == "other" ? "gone" : name; }});
    expect(part.kept.span()[0] == 1 && part.other.span()[3] == 1, "a part of the checkpoint");
    Part empty;
    expect_error<UsageError>(
        [&] { io::load(mesh, path, empty); },
        "load: the leaf 'kept' is empty: make the tree first (zeros or random values), for its sizes");
    expect_error<UsageError>([&] { io::load(mesh, scratch / "nowhere", part); },
                             "'" + scratch.path() + "/nowhere' is not a checkpoint: there is no such folder");
    expect_error<UsageError>(
        [&] { io::load(mesh, scratch.path(), part); },
        "'" + scratch.path() +
            "' is not a checkpoint: it has no manifest.json; give one of its checkpoints, such as '" + path + "'");
  });
}

namespace {
struct Experts {
  Tensor<bf16, "F/t/d"> router;
  Array<"experts", Tensor<f32, "M/d F/t">> up;
};
struct Mixed {
  std::optional<Tensor<i32, "">> count, none;
  Array<"layers", std::variant<Layer, Experts>> layers;
};
Mixed mixed(const DT& mesh, int salt) {
  const Weights w = make_state(mesh, salt);
  return {w.count, std::nullopt, {w.layers[0], Experts{w.layers[1].bias, {w.layers[1].w, w.layers[2].w}}, w.layers[2]}};
}
}  // namespace

TEST_CASE("checkpoint: the tree that is given says what a std::optional or std::variant holds", "[checkpoint]") {
  const Scratch scratch = shared_folder();
  for (const std::string from : {"d=1,t=1", "d=2,t=2"}) {
    const std::string folder = scratch / from, path = folder + "/step-00000007";
    if (!on_mesh(from, [&](const DT& mesh) { io::save(mesh, folder, 7, mixed(mesh, 5), {}); })) continue;
    for (const std::string to : {"d=1,t=1", "d=2,t=1", "d=2,t=2"}) {
      INFO(from << " to " << to);
      on_mesh(to, [&](const DT& mesh) {
        Mixed found = mixed(mesh, 0);
        io::load(mesh, path, found);
        expect_same_bits(found, mixed(mesh, 5));
        Mixed other = found;
        other.layers[0] = other.layers[1];
        other.count.reset();
        const std::string error = error_of([&] { io::load(mesh, path, other); });
        for (const char* part :
             {"'layers.0.router' is not in the checkpoint", "'layers.0.bias' is in the checkpoint, but",
              "'count' is in the checkpoint, but not in the program"})
          expect(error.find(part) != std::string::npos, error);
      });
    }
  }
}

namespace {
struct Stage {
  Array<"layers", Layer> layers;
};
}  // namespace

TEST_CASE("checkpoint: pipeline stages save their own layers, and any layout loads them", "[checkpoint]") {
  const Scratch scratch = shared_folder();
  const Temporarily limit(tuning.merged_array, std::uint64_t{GENERATE(std::uint64_t{1} << 20, std::uint64_t{0})});
  const bool merged = tuning.merged_array > 0;
  // Two stages of two layers each; each device's tree holds its own stage.
  const bool ran = on_mesh("p=2,d=1,t=1", [&](const DevicePtr& device) {
    const int stage = device->axis_index("p");
    const Mesh<"p d t"> mesh(device);
    const auto rename = [stage](const std::string& name) {
      return "layers." + std::to_string(2 * stage + (name[7] - '0')) + name.substr(8);
    };
    const auto layers = [&](double scale) {
      Stage s;
      for (int i = 0; i < 2; ++i)
        s.layers.push_back({full<f32, "M/d F/t">(mesh, {{"M", 4}, {"F", 2}}, scale * (2 * stage + i + 1)),
                            full<bf16, "F/t/d">(mesh, {{"F", 2}}, scale * (2 * stage + i + 1))});
      return s;
    };
    io::save(mesh, scratch.path(), 1, layers(1), {}, {.rename = rename});
    Stage again = layers(0);
    io::load(mesh, scratch / "step-00000001", again, {.rename = rename});
    for (std::size_t i = 0; i < 2; ++i)
      expect(again.layers[i].w.span()[0] == static_cast<float>(2 * stage + static_cast<int>(i) + 1), "a stage's layer");
    // One array of four layers: the two of a stage are a file.
    std::vector<std::string> files{"0.0.0"};
    if (!merged) files.emplace_back("1.0.0");
    if (device->rank() == 0) {
      auto found = files_below(scratch / "step-00000001/layers.w");
      std::erase_if(found, [](const std::string& file) { return file[0] == '.'; });
      expect(found == files, "the files of the layers' array");
    }
    io::together(*device, "", [] {});
  });
  if (!ran) return;
  on_mesh("d=1,t=2", [&](const DT& mesh) {
    Stage whole;
    for (int i = 0; i < 4; ++i)
      whole.layers.push_back(
          {zeros<f32, "M/d F/t">(mesh, {{"M", 4}, {"F", 2}}), zeros<bf16, "F/t/d">(mesh, {{"F", 2}})});
    io::load(mesh, scratch / "step-00000001", whole);
    for (std::size_t i = 0; i < 4; ++i)
      for (const float x : whole.layers[i].w.span()) expect(x == static_cast<float>(i + 1), "a layer of the whole");
  });
}

TEST_CASE("checkpoint: a name that cannot be a file's", "[checkpoint]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const DT mesh = alone();
  const Before tree{ones<f32, "A">(mesh, {{"A", 4}}), ones<f32, "A">(mesh, {{"A", 4}}),
                    ones<f32, "A">(mesh, {{"A", 4}}), ones<f32, "A">(mesh, {{"A", 4}}),
                    ones<f32, "A">(mesh, {{"A", 4}})};
  const std::string what = "checkpoint '" + scratch.path() + "/step-00000001' was not saved: ";
  for (const std::string name : {"", "../x", "a b", ".zattrs", "a..b"})
    CHECK(error_of([&] {
            io::save(mesh, scratch.path(), 1, tree, {}, {.rename = [&](const auto&) { return name; }});
          }) == what + "'" + name + "' is not a name for a leaf: use letters, digits, _, - and single dots");
  CHECK(error_of([&] { io::save(mesh, scratch.path(), 1, tree, {}, {.rename = [](const auto&) { return "a"; }}); }) ==
        what + "two leaves have the name 'a'");
  CHECK(error_of([&] { io::save(mesh, scratch.path(), 1, Before{}); }) ==
        what + "the leaf 'kept' is empty: give it a value first");
}

TEST_CASE("checkpoint: which leaves are one array", "[checkpoint]") {
  if (world_rank() != 0) return;
  using io::detail::LeafShards;
  io::detail::Leaves leaves;
  const auto add = [&](const std::string& name, io::Index shape = {4}, std::vector<int> who = {0}) {
    LeafShards leaf{{name, DType::f32, shape, {"A"}}, shape, {}};
    leaf.holders[io::Index(shape.size(), 0)] = std::move(who);
    leaves[name] = leaf;
  };
  const auto names = [&] {
    std::string text;
    for (const auto& array : io::detail::plan_arrays(leaves, 2, 0)) {
      text += (text.empty() ? "" : ", ") + array.stored.array.name;
      if (!array.stored.leaves.empty()) text += " (" + array.stored.leaves + ")";
      for (const auto& file : array.files) text += fmt::format(" {}@{}", file.path, file.writer);
    }
    leaves.clear();
    return text;
  };
  // The number that most leaves differ in; a gap, a leading zero, another shape or a name that is taken: none.
  for (const char* name : {"nu.0.layers.0.w", "nu.0.layers.1.w", "mu.layers.0.w", "mu.layers.1.w"}) add(name);
  CHECK(names() ==
        "mu.layers.w (mu.layers.*.w) mu.layers.w/0.0@0, nu.0.layers.w (nu.0.layers.*.w) nu.0.layers.w/0.0@0");
  for (const char* name : {"a.0", "a.2", "b.00", "b.01", "c.0", "0", "1"}) add(name);
  CHECK(names() == "0 0/0@0, 1 1/0@0, a.0 a.0/0@0, a.2 a.2/0@0, b.00 b.00/0@0, b.01 b.01/0@0, c.0 c.0/0@0");
  add("a.0.w");
  add("a.1.w", {5});
  add("b.0.w");
  add("b.1.w");
  add("b.w");
  CHECK(names() == "a.0.w a.0.w/0@0, a.1.w a.1.w/0@0, b.0.w b.0.w/0@0, b.1.w b.1.w/0@0, b.w b.w/0@0");
  // Stages of two devices, one after the other and in turns; replicas take turns.
  for (int i = 0; i < 4; ++i) add("a." + std::to_string(i), {4}, {i / 2});
  for (int i = 0; i < 4; ++i) add("b." + std::to_string(i), {4}, {i % 2});
  for (int i = 0; i < 2; ++i) add("c." + std::to_string(i), {4}, {0, 1});
  add("d", {4}, {0, 1});
  CHECK(names() == "a (a.*) a/0.0@0 a/1.0@1, b (b.*) b/0.0@0 b/1.0@1 b/2.0@0 b/3.0@1, c (c.*) c/0.0@0, d d/0@1");
}

TEST_CASE("checkpoint: one of version 1, an array for each leaf, is read", "[checkpoint]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const std::string folder = scratch / "step-00000003";
  const io::ZarrGroup group = io::ZarrGroup::create(folder);
  group.set_attributes({{"format", "shardlib-checkpoint"},
                        {"version", 1},
                        {"step", 3},
                        {"data_hash", "x"},
                        {"user", nlohmann::json::object()}});
  for (int layer = 0; layer < 2; ++layer) {
    const std::string name = "layers." + std::to_string(layer) + ".w";
    const io::ZarrArray array = io::ZarrArray::create(folder + "/" + name, {.shape = {4, 2}, .chunks = {2, 2}});
    array.write_all<float>(std::vector<float>(8, static_cast<float>(layer + 1)));
    array.set_attributes({{"_ARRAY_DIMENSIONS", {"M", "F"}}});
  }
  std::string rest = " \"format\": \"shardlib-checkpoint\",\n \"version\": 1,\n \"files\": {\n";
  const auto files = files_below(folder);
  for (const std::string& file : files)
    rest += fmt::format(
        "  \"{}\": {{\"bytes\": {}, \"crc32c\": \"{}\"}}{}\n", file, contents(folder + "/" + file).size(),
        io::hex(io::crc32c(io::as_bytes(contents(folder + "/" + file)))), &file == &files.back() ? "" : ",");
  rest += " }\n}\n";
  put(folder + "/manifest.json", "{\"crc32c\": \"" + io::hex(io::crc32c(io::as_bytes(rest))) + "\",\n" + rest);
  struct Tree {
    struct Inner {
      Tensor<f32, "M F"> w;
    };
    Array<"layers", Inner> layers;
  };
  const DT mesh = alone();
  Tree tree;
  for (int i = 0; i < 2; ++i) tree.layers.push_back({zeros<f32, "M F">(mesh, {{"M", 4}, {"F", 2}})});
  CHECK(io::load(mesh, folder, tree).data_hash == "x");
  for (std::size_t i = 0; i < 2; ++i)
    for (const float x : tree.layers[i].w.span()) CHECK(x == static_cast<float>(i + 1));
}

TEST_CASE("checkpoint: an array that names its leaves wrongly", "[checkpoint]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  int step = 0;
  const auto leaves_error = [&](const nlohmann::json& leaves, const io::Index& shape, const std::string& other) {
    const std::string folder = scratch / io::checkpoint_name(step++);
    const io::ZarrGroup group = io::ZarrGroup::create(folder);
    group.set_attributes({{"step", 3}, {"data_hash", "x"}, {"user", nlohmann::json::object()}});
    const io::ZarrArray array = io::ZarrArray::create(folder + "/w", {.shape = shape, .chunks = shape});
    array.set_attributes({{"leaves", leaves}});
    io::ZarrArray::create(folder + "/" + other, {.shape = {2}, .chunks = {2}});
    std::vector<io::ManifestFile> files;
    for (const std::string& file : files_below(folder)) files.push_back(io::detail::describe_file(folder, file));
    io::detail::write_manifest(folder, files);
    std::string message = error_of([&] { static_cast<void>(Checkpoint::open(folder)); });
    const std::string where = "'" + folder + "/w/.zattrs': key \"leaves\" ";
    return message.starts_with(where) ? message.substr(where.size()) : message;
  };
  CHECK(leaves_error("layers.*.w", {2, 3}, "v") == "no error");
  for (const nlohmann::json& bad : {nlohmann::json("layers.w"), nlohmann::json("*.*"), nlohmann::json(7)})
    CHECK(leaves_error(bad, {2, 3}, "v") == "must be a name with one star");
  CHECK(leaves_error("layers.*.w", {}, "v") == "needs a first dim of at most 1000000");
  CHECK(leaves_error("layers.*.w", {1'000'001}, "v") == "needs a first dim of at most 1000000");
  const std::string twice = leaves_error("layers.*.w", {2, 3}, "layers.1.w");
  CHECK(twice.ends_with("two arrays hold the leaf 'layers.1.w'; go back to an older checkpoint"));
}

// zarr_oracle.py reads it with python3-zarr.
TEST_CASE("checkpoint: for the oracle", "[.zarr_oracle]") {
  const char* folder = std::getenv("SHARDLIB_ZARR_ORACLE");
  REQUIRE(folder != nullptr);
  on_mesh("d=2,t=2", [&](const DT& mesh) {
    const Weights state = make_state(mesh, 5);
    io::save(mesh, std::string(folder) + "/checkpoint", 12, state, some_meta());
    for_each_leaf(
        [&](std::string_view name, const auto& leaf) {
          const auto host = fetch(leaf);
          std::string file(name);
          std::replace(file.begin(), file.end(), '/', '.');
          if (mesh.device()->rank() == 0)
            put(std::string(folder) + "/" + file + ".raw",
                {reinterpret_cast<const char*>(host.data.data()), host.data.size() * sizeof(host.data[0])});
        },
        state);
  });
}
