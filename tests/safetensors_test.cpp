// safetensors: what is written reads back, wrong headers are refused, trees load from files of another layout on every
// mesh, and a checkpoint's export has that layout again.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <shardlib/io/agree.hpp>
#include <shardlib/io/formats/safetensors_tree.hpp>
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
using io::Index;
using io::SafetensorsFile;
using io::StoredLeaf;

namespace {

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}
template <class T>
io::SafetensorsTensor tensor_of(const std::string& name, const std::string& dtype, Index shape, std::vector<T> values) {
  return {name, dtype, std::move(shape), [values] { return bytes_of(values); }};
}
std::vector<float> counting(std::int64_t n) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < n; ++i) values.push_back(static_cast<float>(i) + 0.5F);
  return values;
}
/// A file with this header and so many bytes of data.
std::string file_of(const std::string& header, std::size_t bytes) {
  const std::uint64_t length = header.size();
  std::string text(sizeof length, '\0');
  std::memcpy(text.data(), &length, sizeof length);
  return text + header + std::string(bytes, '\1');
}

}  // namespace

TEST_CASE("safetensors: written files read back, aligned, with their metadata", "[safetensors]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const std::string path = scratch / "a.safetensors";
  io::write_safetensors(path,
                        {tensor_of<std::uint8_t>("bytes", "U8", {3}, {1, 2, 3}),
                         tensor_of("m", "F32", {2, 3}, counting(6)), tensor_of<std::int64_t>("wide", "I64", {1}, {-1}),
                         tensor_of<float>("none", "F32", {0, 4}, {}), tensor_of<float>("scalar", "F32", {}, {9}),
                         tensor_of<std::uint16_t>("half", "F16", {4}, {0x3c00, 0xc000, 0x0001, 0x7c00}),
                         tensor_of<std::uint16_t>("brain", "BF16", {2}, {0x3f80, 0xbfc0})},
                        {{"format", "pt"}, {"note", "ü \"quoted\""}});
  const SafetensorsFile file(path);
  CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}, {"note", "ü \"quoted\""}});
  CHECK(file.entries().size() == 7);
  std::uint64_t length = 0;
  std::memcpy(&length, contents(path).data(), 8);
  CHECK(length % 8 == 0);
  for (const auto& entry : file.entries()) CHECK(entry.begin % io::detail::safetensors_item(entry.dtype) == 0);
  std::vector<float> part(4), scalar(1), half(4), brain(2);
  file.read_f32(*file.find("m"), {0, 1}, {2, 2}, part);
  CHECK(part == std::vector<float>{1.5, 2.5, 4.5, 5.5});
  file.read_f32(*file.find("scalar"), {}, {}, scalar);
  CHECK(scalar[0] == 9);
  file.read_f32(*file.find("half"), {0}, {4}, half);
  CHECK(half == std::vector<float>{1, -2, 0x1p-24F, std::numeric_limits<float>::infinity()});
  file.read_f32(*file.find("brain"), {0}, {2}, brain);
  CHECK(brain == std::vector<float>{1, -1.5});
  Bytes wide(8);
  file.read_bytes(*file.find("wide"), 0, wide);
  CHECK(wide == Bytes(8, std::byte{0xff}));
  CHECK(file.find("nothing") == nullptr);
  CHECK(error_of([&] { file.read_f32(*file.find("wide"), {0}, {1}, scalar); }) ==
        "'" + path + "': tensor 'wide' is of dtype I64, but F32, F16 or BF16 is needed");
  CHECK(error_of([&] {
          file.read_f32(*file.find("m"), {1, 0}, {2, 2}, part);
        }) == "'" + path + "': tensor 'm': the box to be read lies outside, or does not fit the memory");
  CHECK(error_of([&] { io::write_safetensors(path, {tensor_of<float>("a", "F32", {2}, {1})}); }) ==
        "cannot write '" + path + "': tensor 'a' has 4 bytes instead of 8");
  CHECK(error_of([&] {
          io::write_safetensors(path, {tensor_of<float>("a", "F32", {1}, {1}), tensor_of<float>("a", "F32", {1}, {1})});
        }) == "cannot write '" + path + "': tensor 'a' has a name that is taken");
  for (const std::string& other : {scratch.path(), std::string("/dev/null")})
    expect_error<UsageError>(
        [&] { io::write_safetensors(other, {tensor_of<float>("a", "F32", {1}, {1})}); },
        "cannot write '" + other + "': it is not a regular file; move it away, or choose another path");
  CHECK(SafetensorsFile(path).entries().size() == 7);  // failed writes change nothing
  CHECK(test::files_below(scratch.path()) == std::vector<std::string>{"a.safetensors"});
}

TEST_CASE("safetensors: a file of another format is not replaced", "[safetensors]") {
  const Scratch scratch;
  const auto write = [&](const std::string& path) {
    io::write_safetensors(path, {tensor_of<float>("a", "F32", {1}, {1})});
  };
  for (const std::string other : {"a word", "a longer text", "12345678{"}) {
    const std::string path = scratch / "notes.txt";
    put(path, other);
    expect_error<UsageError>([&] { write(path); },
                             "cannot write '" + path +
                                 "': the file is not a safetensors file, and its contents would be "
                                 "lost; choose another path, or move it away");
    CHECK(contents(path) == other);
  }
  const std::string path = scratch / "a.safetensors";
  put(path, "");
  write(path);
  write(path);
  CHECK(SafetensorsFile(path).entries().size() == 1);
}

TEST_CASE("safetensors: half precision, all 65536", "[safetensors]") {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const double sign = bits >= 0x8000 ? -1 : 1;
    const int exponent = static_cast<int>((bits >> 10) & 31U), fraction = static_cast<int>(bits & 1023U);
    const float value = io::half_to_float(static_cast<std::uint16_t>(bits));
    const bool right = exponent == 31  ? (fraction != 0 ? std::isnan(value) : value == sign * HUGE_VAL)
                       : exponent == 0 ? value == sign * std::ldexp(fraction, -24)
                                       : value == sign * std::ldexp(1024 + fraction, exponent - 25);
    if (!right || std::signbit(value) != (bits >= 0x8000)) FAIL(bits << " gives " << value);
  }
}

TEST_CASE("safetensors: wrong headers are refused by name", "[safetensors]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const std::string path = scratch / "a";
  const auto expect_bad = [&](const std::string& bytes, const std::string& message) {
    put(path, bytes);
    CHECK(error_of([&] { SafetensorsFile file(path); }) == "'" + path + "': " + message);
  };
  const std::string a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})",
                    damaged = ": it is not a safetensors file, or it is damaged";
  put(path, file_of("{" + a + "}  ", 8));
  CHECK(SafetensorsFile(path).entries().size() == 1);
  put(path, file_of("{}", 0));
  CHECK(SafetensorsFile(path).entries().empty());
  expect_bad("1234567", "it has less than 8 bytes" + damaged);
  expect_bad(file_of("{" + a + "}", 8).substr(0, 30),
             "its header would have 54 bytes, of 30 in the file and at most 100 MB" + damaged);
  expect_bad(std::string(16, '\xff'),
             "its header would have 18446744073709551615 bytes, of 16 in the file and at most 100 MB" + damaged);
  expect_bad(file_of("{" + a + "}", 7), "its tensors have 8 bytes, but 7 follow the header: the file is damaged");
  expect_bad(file_of("{" + a + "}", 9), "its tensors have 8 bytes, but 9 follow the header: the file is damaged");
  expect_bad(file_of("{" + a, 8), "its header is not JSON" + damaged);
  expect_bad(file_of("[1]", 0), "its header is not a JSON object" + damaged);
  expect_bad(file_of(" {" + a + "}", 8), "its header is not a JSON object" + damaged);
  expect_bad(file_of("{" + a + "," + a + "}", 8), "the header has 'a' twice");
  expect_bad(file_of(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8),
             "the header has 'dtype' twice");
  const auto one = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"("b":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
  };
  const auto b = [&](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return file_of("{" + a + "," + one(dtype, shape, offsets) + "}", 16);
  };
  const std::string f32 = "\"F32\"";
  expect_bad(b(f32, "[2]", "[4,12]"),
             "tensor 'b' begins at byte 4 of the data, but the one before it ends at 8: the file is damaged");
  expect_bad(b(f32, "[1]", "[12,16]"),
             "tensor 'b' begins at byte 12 of the data, but the one before it ends at 8: the file is damaged");
  expect_bad(b(f32, "[1]", "[8,16]"), "tensor 'b': its data_offsets [8,16] do not hold the 4 bytes of F32 [1]");
  expect_bad(b(f32, "[2]", "[16,8]"), "tensor 'b': its data_offsets [16,8] do not hold the 8 bytes of F32 [2]");
  expect_bad(b(f32, "[-2]", "[8,16]"), "tensor 'b': its shape must be a list of sizes");
  expect_bad(b(f32, "[2.0]", "[8,16]"), "tensor 'b': its shape must be a list of sizes");
  for (const char* shape : {"[4611686018427387903,4]", "[0,4611686018427387903,4]"})
    expect_bad(b(f32, shape, "[8,8]"), "tensor 'b': its shape is too large");
  expect_bad(b(f32, "[2]", "[8]"), "tensor 'b': its data_offsets must be two sizes");
  expect_bad(b("\"F8\"", "[8]", "[8,16]"), "tensor 'b': the dtype F8 is not supported");
  expect_bad(b("3", "[8]", "[8,16]"), "tensor 'b': its dtype must be a text");
  expect_bad(file_of("{\"b\":3}", 0),
             "tensor 'b': its entry must have dtype, shape and data_offsets, and nothing else");
  expect_bad(file_of("{\"__metadata__\":{\"x\":1}}", 0),
             "its __metadata__ must be an object of strings, but 'x' is not a string");
  CHECK_THROWS_AS(SafetensorsFile(scratch / "nowhere"), UsageError);
}

TEST_CASE("safetensors: damaged headers never crash", "[safetensors]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const std::string path = scratch / "a";
  io::write_safetensors(
      path, {tensor_of("m", "F32", {2, 3}, counting(6)), tensor_of<std::uint8_t>("n", "U8", {5}, {1, 2, 3, 4, 5})},
      {{"format", "pt"}});
  const std::string whole = contents(path);
  std::mt19937 random(5);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string bytes = whole;
    for (int flips = 0; flips <= i % 3; ++flips)
      bytes[random() % (whole.size() - 29)] ^= static_cast<char>(1 << random() % 8);
    if (i % 10 == 0) bytes.resize(random() % whole.size());
    put(path, bytes);
    try {
      const SafetensorsFile file(path);
      for (const auto& entry : file.entries()) {
        Bytes all(entry.end - entry.begin);
        file.read_bytes(entry, 0, all);
      }
    } catch (const Error&) {
      ++refused;
    }
  }
  CHECK(refused > 2000);
}

namespace {

using Grid = Mesh<"d t">;

/// GPT-2's attention and embedding, a Llama projection, and a leaf that no file has.
struct Model {
  Tensor<f32, "V/t M/d"> embed;
  Tensor<f32, "M/d H/t D"> w_q, w_k, w_v;
  Tensor<f32, "H/t D/d"> b_q, b_k, b_v;
  Tensor<f32, "H/t D M/d"> w_o;
  Tensor<f32, "M/t H/d D"> transposed;
  Tensor<i32, "V/d"> ids;
  Tensor<f32, "V"> own;
};
constexpr std::int64_t V = 5, M = 4, H = 2, D = 3;

Model empty_model(const Grid& mesh) {
  const std::int64_t n = mesh.size();
  const Sizes sizes{
      {"V", V, round_up(V, n)}, {"M", M, round_up(M, n)}, {"H", H, round_up(H, n)}, {"D", D, round_up(D, n)}};
  Model m;
  for_each_leaf([&]<class T, Spec S>(std::string_view, Tensor<T, S>& leaf) { leaf = full<T, S>(mesh, sizes, 7); }, m);
  return m;
}
StoredLeaf place_in_file(const std::string& leaf) {
  const int part = leaf[2] == 'q' ? 0 : leaf[2] == 'k' ? 1 : 2;
  if (leaf == "embed") return {"wte.weight"};
  if (leaf == "w_o") return {"c_proj.weight", {}, {2, 1}};
  if (leaf == "transposed") return {"q_proj.weight", {1, 2, 0}, {2, 1}};
  if (leaf == "ids") return {"ids"};
  if (leaf == "own") return {};
  return leaf[0] == 'w' ? StoredLeaf{"c_attn.weight", {}, {1, 2}, 1, part, 3}
                        : StoredLeaf{"c_attn.bias", {}, {2}, 0, part, 3};
}
std::vector<io::SafetensorsTensor> stored_tensors() {
  return {tensor_of("wte.weight", "F32", {V, M}, counting(V * M)),
          tensor_of("c_attn.weight", "F32", {M, 3 * H * D}, counting(M * 3 * H * D)),
          tensor_of("c_attn.bias", "F32", {3 * H * D}, counting(3 * H * D)),
          tensor_of("c_proj.weight", "F32", {H * D, M}, counting(H * D * M)),
          tensor_of("q_proj.weight", "F32", {H * D, M}, counting(H * D * M)),
          tensor_of<std::int32_t>("ids", "I32", {V}, {9, 8, 7, 6, 5})};
}

}  // namespace

TEST_CASE("safetensors: a tree loads from another layout on every mesh; its checkpoint exports to the same file",
          "[safetensors]") {
  for (const std::string axes : {"d=1,t=1", "d=2,t=1", "d=1,t=2", "d=2,t=2", "d=1,t=3"}) {
    const Scratch scratch = Scratch::shared(under_mpi(), world_rank());
    const std::string path = scratch / "in.safetensors";
    if (world_rank() == 0) io::write_safetensors(path, stored_tensors());
    INFO(axes);
    on_mesh(axes, [&](const Grid& mesh) {
      io::together(*mesh.device(), "", [] {});  // the file is there
      Model m = empty_model(mesh);
      io::load_safetensors(mesh, path, m, place_in_file);
      const auto at = [](const auto& host, std::int64_t i) { return host.data[static_cast<std::size_t>(i)]; };
      const auto value = [](std::int64_t i) { return static_cast<float>(i) + 0.5F; };
      const auto embed = fetch(m.embed);
      for (std::int64_t i = 0; i < V * M; ++i) expect(at(embed, i) == value(i), "embed");
      const std::vector<HostArray<f32>> weights{fetch(m.w_q), fetch(m.w_k), fetch(m.w_v)},
          biases{fetch(m.b_q), fetch(m.b_k), fetch(m.b_v)};
      const auto w_o = fetch(m.w_o), transposed = fetch(m.transposed), own = fetch(m.own);
      for (std::int64_t part = 0; part < 3; ++part)
        for (std::int64_t h = 0; h < H; ++h)
          for (std::int64_t d = 0; d < D; ++d) {
            const std::int64_t column = h * D + d, p = part * H * D + column;
            expect(at(biases[static_cast<std::size_t>(part)], column) == value(p), "bias");
            for (std::int64_t i = 0; i < M; ++i) {
              expect(at(weights[static_cast<std::size_t>(part)], i * H * D + column) == value(i * 3 * H * D + p),
                     "q, k, v");
              expect(at(w_o, column * M + i) == value(column * M + i), "w_o");
              expect(at(transposed, i * H * D + column) == value(column * M + i), "transposed");
            }
          }
      expect(fetch(m.ids).data == std::vector<i32>{9, 8, 7, 6, 5}, "ids");
      expect(own.data == std::vector<f32>(5, 7), "a leaf that the file does not have stays");

      // Padding is zero after loading as before: the checkpoint holds the true sizes.
      io::save(mesh, scratch / "checkpoints", 3, m, {.data_hash = "h"});
      if (mesh.device()->rank() == 0) {
        const auto checkpoint = io::Checkpoint::open(scratch / "checkpoints/step-00000003");
        io::export_safetensors(checkpoint, scratch / "out.safetensors", place_in_file);
        const SafetensorsFile in(path), out(scratch / "out.safetensors");
        expect(out.entries().size() == in.entries().size(), "tensors");
        expect(out.metadata().at("step") == "3", "metadata");
        for (const auto& entry : in.entries()) {
          const auto* same = out.find(entry.name);
          expect(same != nullptr && same->shape == entry.shape && same->dtype == entry.dtype, entry.name);
          Bytes a(entry.end - entry.begin), b(a.size());
          in.read_bytes(entry, 0, a);
          out.read_bytes(*same, 0, b);
          expect(a == b, entry.name + " differs");
        }
      }
    });
  }
}

TEST_CASE("safetensors: what does not fit the tree is one error on all devices", "[safetensors]") {
  const Scratch scratch = Scratch::shared(under_mpi(), world_rank());
  const std::string path = scratch / "in.safetensors";
  auto tensors = stored_tensors();
  tensors[0].name = "wte.weigth";
  tensors[1] = tensor_of("c_attn.weight", "F32", {M, 3}, counting(M * 3));
  tensors[5] = tensor_of<float>("ids", "F32", {V}, counting(V));
  if (world_rank() == 0) io::write_safetensors(path, tensors);
  on_mesh("d=2,t=1", [&](const Grid& mesh) {
    io::together(*mesh.device(), "", [] {});  // the file is there
    Model m = empty_model(mesh);
    const std::string shapes = " is [4, 3] in the file, but [4, 18] in the program\n";
    expect_error<UsageError>([&] { io::load_safetensors(mesh, path, m, place_in_file); },
                             "the file '" + path +
                                 "' does not fit this program:\n"
                                 "  'wte.weight' (leaf 'embed') is not in the file (nearest there: 'wte.weigth')\n"
                                 "  'c_attn.weight' (leaf 'w_q')" +
                                 shapes + "  'c_attn.weight' (leaf 'w_k')" + shapes + "  'c_attn.weight' (leaf 'w_v')" +
                                 shapes +
                                 "  'ids' (leaf 'ids') is F32 in the file, but i32 in the program\n"
                                 "  'wte.weigth' is in the file, but not in the program");
    const auto bad = [&](const StoredLeaf& stored, const std::string& why) {
      expect_error<UsageError>(
          [&] {
            io::load_safetensors(mesh, path, m,
                                 [&](const std::string& leaf) { return leaf == "w_q" ? stored : StoredLeaf{}; });
          },
          "the table's entry for the leaf 'w_q' of [4, 2, 3]: " + why);
    };
    bad({"x", {0, 1}}, "`order` must name each dim once");
    bad({"x", {0, 1, 1}}, "`order` must name each dim once");
    bad({"x", {}, {2, 2}}, "`merge` must share out all dims");
    bad({"x", {}, {2, 1, 0}}, "`merge` must share out all dims");
    bad({"x.*", {0, 1, 2}}, "`order` must name each dim once");
    bad({"x", {}, {}, 3, 0, 2}, "there is no part 0 of 2 along dim 3");
    bad({"x", {}, {}, 0, 2, 2}, "there is no part 2 of 2 along dim 0");
    io::load_safetensors(mesh, path, m,
                         [](const std::string& leaf) { return leaf == "w_o" ? place_in_file(leaf) : StoredLeaf{}; },
                         {.may_be_left = [](const std::string&) { return true; }});
  });
}
