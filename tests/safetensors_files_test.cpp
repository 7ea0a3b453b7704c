// Hugging Face's folders: shards and their index, what of them is refused, trees from them; config.json and its keys.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <shardlib/io/agree.hpp>
#include <shardlib/io/formats/safetensors_tree.hpp>
#include <shardlib/run/hugging_face.hpp>
#include <shardlib/run/rope_options.hpp>
#include <shardlib/shardlib.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using io::Bytes;
using io::SafetensorsFiles;
using io::SafetensorsTensor;

namespace {

SafetensorsTensor tensor_of(const std::string& name, io::Index shape, float first) {
  const std::int64_t n = io::volume(shape);
  return {name, "F32", std::move(shape), [n, first] {
            std::vector<float> values;
            for (std::int64_t i = 0; i < n; ++i) values.push_back(first + static_cast<float>(i));
            const auto bytes = std::as_bytes(std::span(values));
            return Bytes(bytes.begin(), bytes.end());
          }};
}
/// Of 24, 8, 40 and 4 bytes.
std::vector<SafetensorsTensor> tensors() {
  return {tensor_of("d", {2, 3}, 1), tensor_of("a", {2}, 10), tensor_of("c", {10}, 20), tensor_of("b", {}, 40)};
}
float first_of(const SafetensorsFiles& files, const std::string& name) {
  const auto [file, entry] = files.find(name);
  std::vector<float> values(static_cast<std::size_t>(io::volume(entry->shape)));
  file->read_f32(*entry, io::Index(entry->shape.size(), 0), entry->shape, values);
  return values.front();
}
/// The files hold these tensors, byte for byte.
void expect_stored(const SafetensorsFiles& files, const std::vector<SafetensorsTensor>& stored) {
  for (const auto& tensor : stored) {
    const auto [file, entry] = files.find(tensor.name);
    expect(entry != nullptr && entry->shape == tensor.shape, tensor.name);
    Bytes bytes(entry->end - entry->begin);
    file->read_bytes(*entry, 0, bytes);
    expect(bytes == tensor.bytes(), tensor.name);
  }
}
void expect_whole(const std::string& folder) {
  const SafetensorsFiles files(folder);
  CHECK(files.is_folder());
  CHECK(std::vector<float>{first_of(files, "a"), first_of(files, "b"), first_of(files, "c"), first_of(files, "d")} ==
        std::vector<float>{10, 40, 20, 1});
  CHECK(files.find("e").entry == nullptr);
}

}  // namespace

TEST_CASE("safetensors folders: one file, or shards of the size asked for; nothing of an earlier model stays",
          "[safetensors]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const std::string folder = scratch / "new/model";
  const auto shards = [](int n) {
    std::vector<std::string> names;
    for (int i = 1; i <= n; ++i)
      names.push_back("model-0000" + std::to_string(i) + "-of-0000" + std::to_string(n) + ".safetensors");
    names.emplace_back("model.safetensors.index.json");
    return names;
  };
  const auto one = std::vector<std::string>{"model.safetensors"};
  // In the order of names: 8 + 4, 40, 24 bytes; a tensor that is longer than a shard may be is one alone.
  for (const auto& [most, expected] : std::vector<std::pair<std::uint64_t, std::vector<std::string>>>{
           {76, one}, {75, shards(2)}, {24, shards(3)}, {1, shards(4)}, {36, shards(3)}, {1000, one}}) {
    INFO(most);
    io::write_safetensors_folder(folder, tensors(), {{"format", "pt"}}, most);
    CHECK(files_below(folder) == expected);
    expect_whole(folder);
    CHECK(SafetensorsFiles(folder).files().front().metadata().at("format") == "pt");
  }
  put(folder + "/tokenizer.json", "{}");  // what is not a part of a model stays
  io::write_safetensors_folder(folder, tensors(), {}, 24);
  CHECK(files_below(folder).back() == "tokenizer.json");
  CHECK(SafetensorsFiles(folder).describe() !=
        SafetensorsFiles(folder + "/model-00001-of-00003.safetensors").describe());
  CHECK(SafetensorsFiles(folder + "/model-00002-of-00003.safetensors").describe().find(", 1 tensor, crc32c ") !=
        std::string::npos);
  // As after a kill: an earlier model of equally many shards is whole until the new one is, and the next one again.
  for (const char* shard : {"model-new-00001-of-00003.safetensors", "model-00001-of-00003.safetensors"}) {
    auto broken = tensors();
    broken.front().bytes = [] { return io::Bytes(); };  // the last of the names
    CHECK_THROWS_AS(io::write_safetensors_folder(folder, broken, {}, 24), Error);
    CHECK(std::filesystem::exists(folder + "/" + shard));
    expect_whole(folder);
    io::write_safetensors_folder(folder, tensors(), {}, 24);
    CHECK(files_below(folder).size() == 5);
    CHECK(files_below(folder).front() == shard);
    expect_whole(folder);
  }
  put(scratch / "file", "");
  expect_error<UsageError>(
      [&] { io::write_safetensors_folder(scratch / "file", tensors()); },
      "cannot write a model into '" + scratch.path() + "/file': it is not a folder; choose another path");
}

TEST_CASE("safetensors folders: what is missing or does not fit the index is named", "[safetensors]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const std::string& folder = scratch.path();
  const std::string index = folder + "/model.safetensors.index.json",
                    first = folder + "/model-00001-of-00002.safetensors";
  const auto refused = [&](const std::string& why) { ERROR_IS(why, SafetensorsFiles(folder)); };
  refused("the folder '" + folder + "' has neither model.safetensors nor model.safetensors.index.json");
  put(folder + "/pytorch_model.bin", "");
  refused("the folder '" + folder +
          "' has neither model.safetensors nor model.safetensors.index.json, but pytorch_model.bin, which is not read: "
          "save the model as safetensors");
  io::write_safetensors_folder(folder, tensors(), {}, 75);  // a, b, c and d
  const std::string good = contents(index);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    put(index, text);
  };
  const std::string remedy = ": index and files are not of the same model; fetch them again";
  with("\"c\": \"model-00001", "\"c\": \"model-00002");
  refused("'" + index + "' has the tensor 'c' in 'model-00002-of-00002.safetensors', which does not have it" + remedy);
  with("\"c\"", "\"x\"");
  refused("'" + index + "' has the tensor 'x' in 'model-00001-of-00002.safetensors', which does not have it" + remedy);
  with("\"c\": \"model-00001-of-00002.safetensors\",", "");
  refused("'" + first + "' has the tensor 'c', which '" + index + "' does not name" + remedy);
  with("\"a\": \"model-00001-of-00002", "\"a\": \"model-00003-of-00003");
  refused("'" + index +
          "' names the file 'model-00003-of-00003.safetensors', which is not in the folder: fetch it too");
  with("\"a\": \"model-00001-of-00002", "\"a\": \"../other/model");
  refused("'" + index +
          "': tensor 'a': \"../other/model.safetensors\" is not the name of a .safetensors file of this folder");
  with("\"a\"", "\"b\"");
  refused("'" + index + "': it has 'b' twice");
  put(index, "{\"weight_map\": {}}");
  refused("'" + index + "': its 'weight_map' names no tensor");
  put(index, "{\"weight_map\": 3}");
  refused("'" + index + "': it must be a JSON object with the object 'weight_map', from tensors to files");
  put(index, good + "}");
  refused("'" + index + "': it is not JSON: it is not an index of safetensors files, or it is damaged");
  put(index, good);
  expect_whole(folder);
  io::write_safetensors(
      first, {tensor_of("a", {2}, 10), tensor_of("b", {}, 40), tensor_of("c", {10}, 20), tensor_of("d", {2, 3}, 1)});
  refused("the tensor 'd' is in '" + first + "' and in '" + folder +
          "/model-00002-of-00002.safetensors' too: the folder has parts of two models");
}

namespace {

using Grid = Mesh<"d t">;
struct Layer {
  Tensor<f32, "M/d H/t"> w;
};
struct Model {
  Tensor<f32, "V/d M"> embed;
  Array<"layers", Layer> layers;
};
struct State {
  Model weights;
  Tensor<f32, "V"> mu;
};

Model zero_model(const Grid& mesh) {
  const std::int64_t n = mesh.size();
  const Sizes sizes{{"V", 5, round_up(5, n)}, {"M", 2, round_up(2, n)}, {"H", 3, round_up(3, n)}};
  Model m;
  m.layers.resize(11);
  for_each_leaf([&]<class T, Spec S>(std::string_view, Tensor<T, S>& leaf) { leaf = zeros<T, S>(mesh, sizes); }, m);
  return m;
}

}  // namespace

TEST_CASE("safetensors folders: a tree loads from shards by a table with *, and exports to the same", "[safetensors]") {
  std::vector<SafetensorsTensor> stored{tensor_of("wte.weight", {5, 2}, 100)};
  for (int i = 0; i < 11; ++i)
    stored.push_back(tensor_of("h." + std::to_string(i) + ".w.weight", {3, 2}, static_cast<float>(10 * i)));
  const io::StoredTable table = io::table_of({{"embed", {"wte.weight"}}, {"layers.*.w", {"h.*.w.weight", {1, 0}}}});
  for (const std::string axes : {"d=1,t=1", "d=2,t=2"}) {
    const Scratch scratch = Scratch::shared(under_mpi(), world_rank());
    INFO(axes);
    if (world_rank() == 0) io::write_safetensors_folder(scratch / "in", stored, {}, 100);
    on_mesh(axes, [&](const Grid& mesh) {
      io::together(*mesh.device(), "", [] {});  // the files are there
      State state{zero_model(mesh), zeros<f32, "V">(mesh, {{"V", 5}})};
      io::load_safetensors(mesh, scratch / "in", state.weights, table);
      for (int i = 0; i < 11; ++i) {
        const auto w = fetch(state.weights.layers[static_cast<std::size_t>(i)].w);
        for (int m = 0; m < 2; ++m)
          for (int h = 0; h < 3; ++h)
            expect(w.data[static_cast<std::size_t>(m * 3 + h)] == static_cast<float>(10 * i + h * 2 + m), "transposed");
      }
      io::save(mesh, scratch / "checkpoints", 3, state, {});
      if (mesh.device()->rank() == 0) {
        const auto checkpoint = io::Checkpoint::open(scratch / "checkpoints/step-00000003");
        io::export_safetensors_folder(checkpoint, scratch / "out", table, 100);
        const SafetensorsFiles in(scratch / "in"), out(scratch / "out");
        expect(in.files().size() == out.files().size() && in.files().size() > 2, "as many files");
        expect_stored(out, stored);
      }
      Model other = zero_model(mesh);
      other.layers.resize(12, other.layers[0]);
      const io::StoredTable wrong =
          io::table_of({{"embed", {"wte.weight", {1, 0}}}, {"layers.*.w", {"h.*.w.weight", {1, 0}}}});
      expect_error<UsageError>([&] { io::load_safetensors(mesh, scratch / "in", other, wrong); },
                               "the folder '" + scratch.path() +
                                   "/in' does not fit this program:\n  'wte.weight' (leaf 'embed') is [5, 2] in '" +
                                   scratch.path() +
                                   "/in/model-00004-of-00004.safetensors', but [2, 5] in the program\n" +
                                   "  'h.11.w.weight' (leaf 'layers.11.w') is not in the folder");
    });
  }
}

namespace {
struct Mixture {
  Tensor<f32, "X/d M/t F"> experts;
};
}  // namespace

// 3 experts over 2 devices: the last one has padding.
TEST_CASE("safetensors folders: a leaf whose first dim has a tensor for each index", "[safetensors]") {
  std::vector<SafetensorsTensor> stored;
  for (int x = 0; x < 3; ++x)
    stored.push_back(tensor_of("e." + std::to_string(x) + ".w", {2, 5}, static_cast<float>(100 * x)));
  const io::StoredTable table = io::table_of({{"experts", {"e.*.w", {1, 0}}}});
  for (const std::string axes : {"d=1,t=1", "d=2,t=2"}) {
    const Scratch scratch = Scratch::shared(under_mpi(), world_rank());
    if (world_rank() == 0) io::write_safetensors_folder(scratch / "in", stored);
    on_mesh(axes, [&](const Grid& mesh) {
      io::together(*mesh.device(), "", [] {});  // the files are there
      const auto zero = [&](std::int64_t experts) {
        const Sizes sizes{{"X", experts, round_up(experts, 2)}, {"M", 5, 6}, {"F", 2}};
        return Mixture{full<f32, "X/d M/t F">(mesh, sizes, 7)};
      };
      Mixture m = zero(3);
      io::load_safetensors(mesh, scratch / "in", m, table);
      const auto w = fetch(m.experts);
      for (int x = 0; x < 3; ++x)
        for (int i = 0; i < 10; ++i)
          expect(w.data[static_cast<std::size_t>(10 * x + i)] == static_cast<float>(100 * x + i % 2 * 5 + i / 2), "w");
      io::save(mesh, scratch / "checkpoints", 3, m, {});
      if (mesh.device()->rank() == 0) {
        const auto checkpoint = io::Checkpoint::open(scratch / "checkpoints/step-00000003");
        io::export_safetensors_folder(checkpoint, scratch / "out", table);
        const SafetensorsFiles out(scratch / "out");
        expect(out.files()[0].entries().size() == 3, "as many tensors");
        expect_stored(out, stored);
      }
      const auto refused = [&](std::int64_t experts, const std::string& why) {
        Mixture other = zero(experts);
        expect_error<UsageError>([&] { io::load_safetensors(mesh, scratch / "in", other, table); },
                                 "the folder '" + scratch.path() + "/in' does not fit this program:\n  " + why);
      };
      refused(4, "'e.3.w' (leaf 'experts') is not in the folder");
      refused(2, "'e.2.w' is in the folder, but not in the program");
    });
  }
}

TEST_CASE("config.json: its keys, used or not", "[run]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const std::string path = scratch / "config.json";
  const auto with = [&](const std::string& text) {
    put(path, text);
    return run::HuggingFaceConfig(scratch.path());
  };
  auto config = with(R"({"layers": 3, "act": "silu", "eps": 1e-5, "odd": -1, "nothing": null,
                         "rope_scaling": {"factor": 8.0, "type": null}, "empty": {}, "labels": {"0": 1}, "8": 8})");
  CHECK(config.path() == path);
  CHECK(config.integer("layers") == 3);
  CHECK(config.integer("absent", 7) == 7);
  CHECK(config.value("act") == "\"silu\"");
  CHECK_FALSE(config.has("nothing"));
  CHECK_FALSE(config.has("rope_scaling.type"));
  CHECK(config.is_null("nothing"));
  CHECK(config.is_null("rope_scaling.type"));
  CHECK_FALSE(config.is_null("absent"));
  CHECK_FALSE(config.is_null("layers"));
  CHECK(config.json("nothing", "1") == "null");
  CHECK(config.json("absent", "1") == "1");
  CHECK(config.json("layers", "1") == "3");
  CHECK(config.first_of({"absent", "8", "rope_scaling.factor"}) == "8");
  CHECK(config.first_of({"absent", "nothing"}) == "absent");
  CHECK(config.has("rope_scaling.factor"));
  config.require("act", {"\"gelu\"", "\"silu\""});
  config.require("absent", {"1"});
  const auto refused = [&](const std::function<void()>& f, const std::string& why) {
    expect_error<UsageError>(f, "'" + path + "'" + why);
  };
  refused(
      [&] {
        config.require("act", {"\"gelu\"", "\"relu\""});
      },
      ": 'act' is \"silu\", but this program computes models where it is \"gelu\" or \"relu\"");
  refused([&] { static_cast<void>(config.value("absent")); }, " has no 'absent', which the model needs");
  refused([&] { static_cast<void>(config.integer("odd")); },
          ": 'odd' is -1, but this program computes models where it is a whole number");
  refused([&] { static_cast<void>(config.integer("rope_scaling.factor")); },
          ": 'rope_scaling.factor' is 8.0, but this program computes models where it is a whole number");
  refused(
      [&] {
        static_cast<void>(config.first_of({"layers", "8"}));
      },
      ": '8' is 8, but this program computes models where it is 3, as 'layers'");
  refused([&] { config.refuse("nothing", "3"); },
          ": 'nothing' is null, but this program computes models where it is 3");
  refused(
      [&] {
        config.finish({"eps", "labels"});
      },
      " has 'empty' ({}), and this program does not know whether that changes what the model computes: remove what "
      "does not");
  refused(
      [&] {
        config.finish({"eps", "empty", "label"});
      },
      " has 'labels.0' (1), and this program does not know whether that changes what the model computes: remove what "
      "does not");
  config.finish({"eps", "empty", "labels"});
  const auto bad = [&](const std::string& text, const std::string& why) {
    ERROR_IS("'" + path + "': " + why, with(text));
  };
  bad("[]", "it must be a JSON object");
  bad("{", "it is not JSON: it is not a model's config.json, or it is damaged");
  bad(R"({"a": 1, "a": 2})", "it has 'a' twice");
  bad(R"({"b": {"a": 1, "a": 2}})", "it has 'a' twice");
  CHECK_THROWS_AS(run::HuggingFaceConfig(scratch / "nowhere"), UsageError);
  std::filesystem::create_directory(scratch / "step-00000001");
  put(scratch / "step-00000001/manifest.json", "{}");
  expect_error<UsageError>([&] { static_cast<void>(run::HuggingFaceConfig(scratch / "step-00000001")); },
                           "'" + scratch.path() +
                               "/step-00000001' is a checkpoint of a run, not a model of Hugging Face: a run resumes "
                               "from its checkpoints with --run; only --export writes such a model");
}

TEST_CASE("options take what config.json implies, unless another value was given", "[run]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  put(scratch / "config.json", R"({"n": 12, "tied": true, "theta": 500000.0, "much": 1e99})");
  run::HuggingFaceConfig config(scratch.path());
  std::int64_t layers = 4;
  bool tied = false;
  std::string load;
  RopeAngles rope;
  run::Options options("test", "Tests.");
  options.add("--layers", layers, "layers", run::size()).flag("--tied", tied, "tied").add("--load", load, "weights");
  run::declare(options, rope);
  const char* const arguments[] = {"test", "--tied", "--rope-factor=8", "--rope-low=4", "--load=folder"};
  CHECK(options.parse(5, arguments));
  config.imply(options, "--layers", "n");
  config.imply(options, "--tied", "tied");
  config.imply(options, "--rope-base", "theta");
  config.imply(options, "--rope-context", "absent", "8192");
  CHECK(layers == 12);
  CHECK(tied);
  CHECK(rope == RopeAngles{.base = 500000, .factor = 8, .low_freq_factor = 4, .context = 8192});
  CHECK(options.to_toml().find("layers = 12") != std::string::npos);
  const std::string file = "'" + scratch.path() + "/config.json': ";
  CHECK(options.describe().find("--layers               12  (" + file + "n)") != std::string::npos);
  CHECK(options.describe().find("--tied                 true  (command line)") != std::string::npos);
  expect_error<UsageError>([&] { config.imply(options, "--rope-factor", "n"); },
                           "--rope-factor is 8.0 (command line), but " + file + "n is 12.0: leave the option out");
  expect_error<UsageError>([&] { config.imply(options, "--layers", "much"); },
                           file + "much: '1e+99' is not a whole number from 1 to 16777216");
  expect_error<UsageError>([&] { run::check_rope(rope, 64); },
                           "--rope-low 4 is not below --rope-high 4: choose a smaller one");
  expect_error<UsageError>([&] { run::check_rope({.factor = 4, .context = 9, .beta_slow = 32}, 64); },
                           "--rope-beta-slow 32 is not below --rope-beta-fast 32: choose a smaller one");
  expect_error<UsageError>([&] { run::check_rope({.factor = 4, .yarn = true}, 64); },
                           "--rope-yarn needs the length of texts before stretching: give --rope-context N too");
  expect_error<UsageError>([&] { run::check_rope({}, 63); },
                           "--d-head 63: rotary positions rotate pairs; choose a multiple of 2");
}
