// zarr: what is written reads back, in every dtype, layout and codec; what is damaged is named; v3's shards are read;
// python3-zarr agrees (zarr_oracle.py starts the hidden test).
#include <zstd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <shardlib/io/formats/zarr.hpp>
#include <shardlib/support/crc32c.hpp>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using io::Index;
using io::ZarrArray;
using io::ZarrCompressor;
using io::ZarrDelta;
using io::ZarrGroup;
using io::ZarrInfo;

namespace {

/// 0, 1, 2, ... with the wide types' upper bits in use.
template <class T>
std::vector<T> counting(std::int64_t n) {
  std::vector<T> values;
  for (std::int64_t i = 0; i < n; ++i) {
    T value = static_cast<T>(i * (sizeof(T) == 8 ? 1234567890123 : sizeof(T) == 4 ? 65537 : 1));
    if (i % 3 == 1) value = static_cast<T>(T{} - value);
    values.push_back(value);
  }
  return values;
}

/// Writes an array, reads it whole and in random boxes, and compares with plain indexing.
template <class T>
void round_trip(const Index& shape, const Index& chunks, ZarrInfo info = {}) {
  const Scratch scratch;
  info.shape = shape;
  info.chunks = chunks;
  info.dtype = io::zarr_dtype<T>();
  INFO(info.dtype << " " << info.compressor.id << " " << info.compressor.codec << " " << info.compressor.shuffle << " "
                  << (info.delta ? info.delta->stored : "") << " rank " << shape.size());
  const std::vector<T> values = counting<T>(io::volume(shape));
  ZarrArray::create(scratch / "a", info).write_all<T>(values);
  const ZarrArray array = ZarrArray::open(scratch / "a", {true, 1000});
  CHECK(array.info().shape == shape);
  CHECK(array.read_all<T>() == values);
  std::mt19937 random(1);
  const Index strides = io::row_major_strides(shape);
  for (int repeat = 0; repeat < 20 && !values.empty(); ++repeat) {
    Index offset, box;
    for (const auto size : shape) {
      offset.push_back(static_cast<std::int64_t>(random()) % size);
      box.push_back(static_cast<std::int64_t>(random()) % (size - offset.back() + 1));
    }
    std::vector<T> part(static_cast<std::size_t>(io::volume(box))), expected;
    array.read<T>(offset, box, part);
    Index place(box.size(), 0);
    if (!part.empty()) do {
        std::int64_t at = 0;
        for (std::size_t i = 0; i < place.size(); ++i) at += (offset[i] + place[i]) * strides[i];
        expected.push_back(values[static_cast<std::size_t>(at)]);
      } while (io::next_place(place, box));
    CHECK(part == expected);
  }
}

ZarrInfo with(ZarrCompressor compressor, std::optional<ZarrDelta> delta = std::nullopt) {
  ZarrInfo info;
  info.compressor = std::move(compressor);
  info.delta = std::move(delta);
  return info;
}

}  // namespace

TEST_CASE("zarr: every dtype, rank, grid and separator reads back", "[zarr]") {
  if (world_rank() != 0) return;
  round_trip<float>({5, 7}, {2, 3});
  round_trip<double>({5, 7}, {5, 7});
  round_trip<std::int8_t>({9}, {4});
  round_trip<std::int16_t>({9}, {100});
  round_trip<std::int32_t>({3, 1, 4}, {2, 1, 3});
  round_trip<std::int64_t>({2, 3, 4, 5}, {1, 2, 3, 4});
  round_trip<std::uint8_t>({31, 2}, {7, 1});
  round_trip<std::uint16_t>({6, 6}, {6, 1});
  round_trip<std::uint32_t>({6, 6}, {1, 6});
  round_trip<std::uint64_t>({}, {});
  round_trip<float>({0}, {1});
  round_trip<float>({3, 0, 2}, {2, 1, 2});
  ZarrInfo nested;
  nested.separator = "/";
  round_trip<float>({5, 7}, {2, 3}, nested);
  round_trip<float>({40, 20000}, {30, 20000});  // runs long enough to be read on their own
}

TEST_CASE("zarr: compressors and the delta filter", "[zarr]") {
  if (world_rank() != 0) return;
  for (const char* codec : {"lz4", "lz4hc", "zstd", "zlib", "blosclz"})
    for (const int shuffle : {0, 1, 2}) {
      round_trip<std::uint32_t>({50, 7}, {20, 3}, with({"blosc", codec, 5, shuffle}));
      round_trip<std::uint8_t>({50}, {20}, with({"blosc", codec, 9, shuffle}));
    }
  round_trip<double>({50, 7}, {20, 3}, with({"zlib", "", 6, 0}));
  round_trip<float>({50, 7}, {20, 3}, with({"blosc", "lz4", 0, 1}));
  for (const int level : {-5, 0, 5, 22}) round_trip<std::int64_t>({50, 7}, {20, 3}, with({"zstd", "", level}));
  round_trip<std::uint64_t>({100}, {33}, with({"blosc"}, ZarrDelta{"<i8", "<i8"}));
  round_trip<std::int64_t>({100}, {33}, with({}, ZarrDelta{"<i8", "<i8"}));
  for (const char* id : {"zlib", "zstd"}) round_trip<std::uint32_t>({100}, {33}, with({id}, ZarrDelta{"<u4", "<u4"}));
  round_trip<std::int16_t>({100}, {33}, with({}, ZarrDelta{"<i2", "<i2"}));
  round_trip<std::uint8_t>({100}, {33}, with({}, ZarrDelta{"|u1", "|i1"}));
  for (ZarrInfo info :
       {with({}), with({"zlib"}), with({"zstd"}), with({"blosc"}), with({"blosc"}, ZarrDelta{"<u4", "<u4"})}) {
    info.checksum = true;
    round_trip<std::uint32_t>({100}, {33}, info);
    if (!info.delta) round_trip<float>({50, 7}, {20, 3}, info);
  }

  // A narrower astype, where the differences fit; where they do not, the writer says so.
  const Scratch scratch;
  ZarrInfo info = with({}, ZarrDelta{"<i4", "|i1"});
  info.shape = info.chunks = {4};
  info.dtype = "<i4";
  const ZarrArray narrow = ZarrArray::create(scratch / "a", info);
  const std::vector<std::int32_t> slow{100, 50, 170, 60}, fast{100, 50, 300, 60};
  narrow.write_all<std::int32_t>(slow);
  CHECK(std::filesystem::file_size(scratch / "a/0") == 4);
  CHECK(narrow.read_all<std::int32_t>() == slow);
  expect_error<UsageError>(
      [&] { narrow.write_all<std::int32_t>(fast); },
      "zarr chunk '" + scratch.path() +
          "/a/0': a difference does not fit the delta filter's astype \"|i1\": choose a wider one");
}

TEST_CASE("zarr: a chunk that is missing is fill_value, or an error", "[zarr]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const auto array = [&](const std::string& fill, const std::string& dtype) {
    static int n = 0;
    const std::string path = scratch / std::to_string(n++);
    return ZarrArray::create(path, {.shape = {5}, .chunks = {2}, .dtype = dtype, .fill_value = fill});
  };
  const ZarrArray some = array("-1.5", "<f4");
  const std::vector<float> two{3, 4};
  some.write_chunk<float>({1}, two);
  CHECK(some.read_all<float>() == std::vector<float>{-1.5, -1.5, 3, 4, -1.5});
  some.write_chunk<float>({2}, std::vector<float>{9});  // at the edge: padded with fill_value
  ZarrArray(some).resize({6});
  CHECK(ZarrArray::open(some.path()).read_all<float>() == std::vector<float>{-1.5, -1.5, 3, 4, 9, -1.5});
  ERROR_IS("zarr chunk '" + some.path() + "/0' is missing",
           ZarrArray::open(some.path(), {.missing_is_error = true}).read_all<float>());
  const ZarrArray null = array("null", "<f4");
  ERROR_IS("zarr chunk '" + null.path() + "/0' is missing, and the array has no fill_value to stand for it",
           null.read_all<float>());
  CHECK(std::isnan(array("\"NaN\"", "<f4").read_all<float>()[0]));
  CHECK(array("\"-Infinity\"", "<f8").read_all<double>()[4] == -std::numeric_limits<double>::infinity());
  CHECK(array("18446744073709551615", "<u8").read_all<std::uint64_t>()[4] == ~std::uint64_t{0});
  CHECK(array("-128", "|i1").read_all<std::int8_t>()[4] == -128);
  io::Bytes whole(5);
  array("true", "|b1").read_bytes({0}, {5}, whole);
  CHECK(whole == io::Bytes(5, std::byte{1}));
  for (const auto& [fill, dtype] : {std::pair{"-129", "|i1"},
                                    {"256", "|u1"},
                                    {"-1", "<u8"},
                                    {"1.5", "<i4"},
                                    {"\"x\"", "<f4"},
                                    {"true", "<f4"},
                                    {"2", "|b1"},
                                    {"{", "<f4"}})
    CHECK_THROWS_AS(array(fill, dtype), Error);
}

TEST_CASE("zarr: groups and attributes", "[zarr]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const ZarrGroup root = ZarrGroup::create(scratch / "root");
  ZarrGroup::create(scratch / "root/b").set_attributes({{"max_token_id", 7}, {"name", "x"}});
  ZarrGroup::create(scratch / "root/a");
  ZarrArray array = ZarrArray::create(scratch / "root/c", {.shape = {4}, .chunks = {2}});
  CHECK(root.arrays() == std::vector<std::string>{"c"});
  CHECK(root.has_array("c"));
  CHECK_FALSE(root.has_array("a"));
  CHECK(ZarrGroup::open(scratch / "root/b").integer_attribute("max_token_id") == 7);
  CHECK(root.attributes() == nlohmann::json::object());
  array.set_attributes({{"unit", "m"}});
  CHECK(root.array("c").attributes().at("unit") == "m");
  array.resize({3});
  CHECK(root.array("c").info().shape == Index{3});
  const std::string p = scratch.path();
  ERROR_IS("zarr group '" + p + "/root/a': its .zattrs has no \"n\"",
           ZarrGroup::open(p + "/root/a").integer_attribute("n"));
  ERROR_IS("zarr group '" + p + "/root/b': .zattrs: \"name\" must be a whole number, not \"x\"",
           ZarrGroup::open(p + "/root/b").integer_attribute("name"));
  expect_error<UsageError>([&] { static_cast<void>(ZarrGroup::open(p + "/root/c")); },
                           "'" + p + "/root/c' is not a zarr group: it is an array");
  expect_error<UsageError>([&] { static_cast<void>(root.array("a")); },
                           "'" + p + "/root/a' is not a zarr array: it is a group");
  expect_error<UsageError>([&] { static_cast<void>(root.array("z")); },
                           "'" + p + "/root/z' is not a zarr array: there is no such folder");
  expect_error<UsageError>([&] { ZarrArray::create(p + "/root/c", {.shape = {4}, .chunks = {2}}); },
                           "'" + p + "/root/c' already is a zarr array: remove it first, or write elsewhere");
}

TEST_CASE("zarr: wrong requests and metadata get a message that names file and key", "[zarr]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const std::string p = scratch / "a", file = p + "/.zarray";
  const ZarrArray array = ZarrArray::create(p, {.shape = {4, 6}, .chunks = {2, 3}});
  array.write_all<float>(std::vector<float>(24, 1.0F));
  ERROR_IS("zarr array '" + p + "' holds \"<f4\", but \"<f8\" is asked for", array.read_all<double>());
  std::vector<float> four(4);
  ERROR_IS("zarr array '" + p + "': reading [2, 2] at [3, 0] of [4, 6]: it reaches outside",
           array.read<float>({3, 0}, {2, 2}, four));
  ERROR_IS("zarr array '" + p + "': reading [2, 3] at [0, 0] of [4, 6]: the memory has 16 bytes instead of 24",
           array.read<float>({0, 0}, {2, 3}, four));
  ERROR_IS("zarr chunk '" + p + "/2.0' is outside the grid [2, 2]", array.write_chunk<float>({2, 0}, four));
  ERROR_IS("zarr chunk '" + p + "/0.0': it has 24 bytes, but 16 were given", array.write_chunk<float>({0, 0}, four));

  const auto good = nlohmann::json::parse(contents(file));
  const auto expect_bad = [&](const std::string& key, const nlohmann::json& value, const std::string& message) {
    auto bad = good;
    if (value.is_discarded())
      bad.erase(key);
    else
      bad[key] = value;
    put(file, bad.dump());
    CHECK(error_of([&] { static_cast<void>(ZarrArray::open(p)); }) == "'" + file + "': " + message);
  };
  const nlohmann::json none(nlohmann::json::value_t::discarded);
  expect_bad("shape", none, "key \"shape\": is missing");
  expect_bad("shape", {4, -6}, "key \"shape\": must be a list of sizes of at least 0, not [4,-6]");
  expect_bad("chunks", {0, 6}, "key \"chunks\": must be a list of sizes of at least 1, not [0,6]");
  expect_bad("shape", {4}, "the shape [4] and the chunks [2, 3] differ in the number of dims");
  expect_bad("shape", {1ULL << 40, 1ULL << 40}, "[1099511627776, 1099511627776] are not sizes of an array");
  expect_bad("zarr_format", 3, "key \"zarr_format\": is 3, but only version 2 is supported");
  expect_bad("order", "F", "key \"order\": is \"F\", but only C order is supported: rewrite the array with order='C'");
  expect_bad(
      "dtype", "<f2",
      "key \"dtype\": the dtype \"<f2\" is not supported: f4, f8, i1 to i8, u1 to u8 and b1 are, each after <, > or |");
  expect_bad("dtype", nlohmann::json::array({nlohmann::json::array({"x", "<f4"})}),
             "key \"dtype\": [[\"x\",\"<f4\"]] is not supported: no records");
  expect_bad("compressor", {{"id", "bz2"}, {"level", 1}},
             "the compressor \"bz2\" is not supported: none, blosc, zlib, gzip and zstd are; rewrite the array");
  expect_bad("compressor", {{"id", std::string(5000, 'z')}},
             "the compressor \"" + std::string(80, 'z') +
                 "...\" is not supported: none, blosc, zlib, gzip and zstd are; rewrite the array");
  expect_bad("filters", nlohmann::json::array({{{"id", "shuffle"}}}),
             "key \"filters\": \"shuffle\" is not supported: at most one \"delta\" is; rewrite the array");
  expect_bad("filters", nlohmann::json::array({{{"id", "delta"}, {"dtype", "<f4"}}}),
             "the delta filter is supported for integers only");
  expect_bad("dimension_separator", "-", "key \"dimension_separator\": \"-\" is neither . nor /");
  expect_bad("dimension_separator", std::string(5000, '-'),
             "key \"dimension_separator\": \"" + std::string(80, '-') + "...\" is neither . nor /");
  expect_bad("fill_value", "x", "key \"fill_value\": \"x\" is not a value of this dtype");
  put(file, "{\"shape\": [");
  ERROR_IS("'" + file + "' is not JSON (at byte 12): it is damaged", ZarrArray::open(p));
  put(file, "{\"shape\": " + std::string(100'000, '['));
  ERROR_IS("'" + file + "': it nests deeper than 32 levels: it is damaged", ZarrArray::open(p));
  put(file, R"({"shape": [1e999]})");
  ERROR_IS("'" + file + "' has a number that is too large: it is damaged", ZarrArray::open(p));
}

TEST_CASE("zarr: damaged files never crash", "[zarr]") {
  if (world_rank() != 0) return;
  const std::vector<ZarrInfo> codecs{with({}),
                                     with({"blosc", "lz4", 5, 2}),
                                     with({"blosc", "zstd", 5, 1}),
                                     with({"zlib"}),
                                     with({"zstd"}),
                                     with({"blosc"}, ZarrDelta{"<u4", "<u4"})};
  std::mt19937 random(7);
  for (ZarrInfo info : codecs) {
    const Scratch scratch;
    const std::string p = scratch / "a";
    info.shape = {3000};
    info.chunks = {2000};
    info.dtype = "<u4";
    ZarrArray::create(p, info).write_all<std::uint32_t>(counting<std::uint32_t>(3000));
    for (const std::string name : {"0", "1", ".zarray"}) {
      const std::string whole = contents(p + "/" + name);
      for (int i = 0; i < 150; ++i) {
        std::string bytes = whole;
        if (i % 3 == 0)
          bytes.resize(random() % bytes.size());
        else
          for (int flips = 0; flips <= i % 4; ++flips)
            bytes[random() % std::min<std::size_t>(bytes.size(), i % 2 == 0 ? 40 : bytes.size())] ^=
                static_cast<char>(1 << random() % 8);
        put(p + "/" + name, bytes);
        try {
          const ZarrArray array = ZarrArray::open(p);
          if (array.size() < 100000) static_cast<void>(array.read_all<std::uint32_t>());
          if (i % 3 == 0 && name != ".zarray") CHECK(name == "a truncated chunk was read");
        } catch (const Error&) {
        }
      }
      put(p + "/" + name, whole);
    }
  }
}

TEST_CASE("zarr: a chunk with a checksum shows every flipped bit, read whole or in part", "[zarr]") {
  if (world_rank() != 0) return;
  std::mt19937 random(11);
  const std::vector<std::uint32_t> values = counting<std::uint32_t>(40'000);
  for (ZarrInfo info : {with({}), with({"zlib"}), with({"zstd"}), with({"blosc", "lz4", 5, 2, 1 << 12}),
                        with({"blosc"}, ZarrDelta{"<u4", "<u4"})}) {
    INFO(info.compressor.id << (info.delta ? ", delta" : ""));
    const Scratch scratch;
    info.shape = {40'000};
    info.chunks = {20'000};
    info.dtype = "<u4";
    info.checksum = true;
    ZarrArray::create(scratch / "a", info).write_all<std::uint32_t>(values);
    const std::string whole = contents(scratch / "a/1"), where = "zarr chunk '" + scratch.path() + "/a/1': ";
    const auto error_of = [&](std::int64_t begin, std::int64_t count) {
      std::vector<std::uint32_t> part(static_cast<std::size_t>(count));
      try {
        ZarrArray::open(scratch / "a").read<std::uint32_t>({begin}, {count}, part);
      } catch (const Error& error) {
        return std::string(error.what());
      }
      CHECK(std::equal(part.begin(), part.end(), values.begin() + begin));
      return std::string();
    };
    CHECK(error_of(0, 40'000).empty());
    for (int i = 0; i < 60; ++i) {
      std::string bytes = whole;
      bytes[i < 20 ? static_cast<std::size_t>(i) : random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
      put(scratch / "a/1", bytes);
      for (const auto& [begin, count] : {std::pair<std::int64_t, std::int64_t>{20'000, 20'000}, {25'000, 3}}) {
        const std::string said = error_of(begin, count);
        CAPTURE(said);
        CHECK(said.starts_with(where + "its bytes have the checksum "));
        CHECK(said.ends_with(" was written with them: it is damaged; copy the file again, or make the data again"));
      }
      CHECK(error_of(3, 15'000).empty());  // the other chunk
    }
    put(scratch / "a/1", whole.substr(0, 3));
    CHECK(error_of(39'999, 1) ==
          where +
              "it has 3 bytes, too few for its checksum: it is damaged; copy the file again, or make the data again");
    auto damaged = nlohmann::json::parse(contents(scratch / "a/.zarray"));
    damaged["shape"] = {std::int64_t{1} << 60};
    put(scratch / "a/.zarray", damaged.dump());
    CHECK(error_of(3, 1).empty());
  }
}

TEST_CASE("zarr: a part of a chunk is decoded alone", "[zarr]") {
  if (world_rank() != 0) return;
  std::mt19937 random(3);
  std::vector<std::uint32_t> regular = counting<std::uint32_t>(100'000), noise(regular.size());
  for (auto& value : noise) value = static_cast<std::uint32_t>(random());
  for (const ZarrCompressor& compressor :
       {ZarrCompressor{"blosc", "lz4", 5, 2, 1 << 14}, ZarrCompressor{"blosc", "zstd", 3, 1, 10'000},
        ZarrCompressor{"blosc", "lz4", 0, 0, 1 << 14}, ZarrCompressor{"blosc"}})
    for (const auto& values : {regular, noise})  // noise does not compress: blosc stores it as it is
      for (const char* dtype : {"<u4", ">u4"})
        for (const std::size_t cache : {std::size_t{0}, std::size_t{100'000}, std::size_t{10'000'000}}) {
          const Scratch scratch;
          ZarrInfo info = with(compressor);
          info.checksum = cache == 100'000;  // decoding knows where it stands
          info.shape = {100'000};
          info.chunks = {60'000};
          info.dtype = "<u4";
          ZarrArray::create(scratch / "a", info);
          std::vector<std::uint32_t> stored = values;
          if (dtype[0] == '>')
            for (auto& value : stored) value = __builtin_bswap32(value);
          ZarrArray::open(scratch / "a").write_all<std::uint32_t>(stored);
          auto text = contents(scratch / "a/.zarray");
          text.replace(text.find("<u4"), 3, dtype);
          put(scratch / "a/.zarray", text);
          const ZarrArray array = ZarrArray::open(scratch / "a", {.cache_bytes = cache});
          for (int i = 0; i < 60; ++i) {
            const std::size_t size = i % 20 == 0 ? 40'000 : 1 + random() % (i % 3 == 0 ? 20'000 : 3'000);
            const std::size_t at = random() % (values.size() - size + 1);
            std::vector<std::uint32_t> part(size);
            array.read<std::uint32_t>({static_cast<std::int64_t>(at)}, {static_cast<std::int64_t>(size)}, part);
            if (!std::equal(part.begin(), part.end(), values.begin() + static_cast<std::ptrdiff_t>(at)))
              FAIL_CHECK(compressor.codec << " " << dtype << ": wrong at " << at << " of " << size);
          }
        }
  SUCCEED();

  // Damage is found where it is read; what lies in another block can be read on.
  const Scratch scratch;
  ZarrInfo info = with({"blosc", "lz4", 5, 2, 1 << 14});
  info.shape = info.chunks = {100'000};
  info.dtype = "<u4";
  ZarrArray::create(scratch / "a", info).write_all<std::uint32_t>(regular);
  const std::string whole = contents(scratch / "a/0");
  const auto first_of = [&](std::int64_t at) {
    std::uint32_t value = 0;
    ZarrArray::open(scratch / "a").read<std::uint32_t>({at}, {1}, {&value, 1});
    return value;
  };
  const auto expect_damaged = [&](std::string bytes, std::int64_t at, const std::string& why) {
    put(scratch / "a/0", bytes);
    try {
      first_of(at);
      FAIL_CHECK("was read: " << why);
    } catch (const Error& error) {
      const std::string said = error.what();
      CAPTURE(said, why);
      CHECK(said.find("a/0'") != std::string::npos);
      CHECK(said.find(why) != std::string::npos);
      CHECK(said.find("damaged") != std::string::npos);
    }
  };
  // 400 KB in blocks of 64: the places of 7 blocks stand after the header, 16 bytes.
  std::string moved = whole;
  moved[16 + 4 * 6 + 3] = 0x7f;
  expect_damaged(moved, 99'999, "a block lies outside");
  CHECK(first_of(5) == regular[5]);
  moved[16 + 4 * 6 + 3] = static_cast<char>(0xff);
  expect_damaged(moved, 99'999, "a block lies outside");
  expect_damaged(whole.substr(0, whole.size() - 1), 5, "no valid blosc data");
  expect_damaged(whole.substr(0, 20), 5, "no valid blosc data");
  std::string shorter = whole;
  shorter[4] = static_cast<char>(shorter[4] ^ 4);  // the number of decompressed bytes
  expect_damaged(shorter, 5, "instead of 400000");
  // Any bytes: an error or other numbers, but no crash.
  for (int i = 0; i < 600; ++i) {
    std::string bytes = whole;
    for (int flips = 0; flips <= i % 4; ++flips)
      bytes[random() % std::min<std::size_t>(bytes.size(), i % 2 == 0 ? 60 : bytes.size())] ^=
          static_cast<char>(1 << random() % 8);
    put(scratch / "a/0", bytes);
    try {
      first_of(static_cast<std::int64_t>(random() % 100'000));
    } catch (const Error&) {
    }
  }
}

namespace {

/// A frame of zstd, with or without the length and the checksum of its content.
std::string zstd_frame(const std::string& content, bool has_length, bool has_checksum) {
  ZSTD_CCtx* const context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, has_length ? 1 : 0);
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, has_checksum ? 1 : 0);
  std::string frame(ZSTD_compressBound(content.size()), '\0');
  frame.resize(ZSTD_compress2(context, frame.data(), frame.size(), content.data(), content.size()));
  ZSTD_freeCCtx(context);
  return frame;
}

}  // namespace

TEST_CASE("zarr: frames of zstd, as other writers make them, and bytes that are not of a chunk", "[zarr]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const std::string p = scratch / "a";
  ZarrInfo info = with({"zstd"});
  info.shape = info.chunks = {1000};
  info.dtype = "<u4";
  ZarrArray::create(p, info);
  const auto values = counting<std::uint32_t>(1000);
  const std::string content(reinterpret_cast<const char*>(values.data()), 4000);
  const auto read = [&](const std::string& file) {
    put(p + "/0", file);
    auto found = values;
    const std::string said = error_of([&] { found = ZarrArray::open(p).read_all<std::uint32_t>(); });
    CHECK(found == values);
    return said;
  };
  const std::string skipped("\x50\x2a\x4d\x18\x02\0\0\0ab", 10),
      where = "zarr chunk '" + p + "/0': ", damaged = ": it is damaged";
  for (const bool has_length : {true, false})
    for (const bool has_checksum : {true, false}) {
      INFO(has_length << has_checksum);
      const auto frame = [&](const std::string& of) { return zstd_frame(of, has_length, has_checksum); };
      const std::string whole = frame(content);
      CHECK(read(whole) == "no error");
      // Several frames are one content, whatever stands between them to be skipped.
      CHECK(read(frame(content.substr(0, 1500)) + skipped + frame(content.substr(1500)) + frame("")) == "no error");
      CHECK(read(frame(content.substr(1))) == where + "it decompresses to 3999 bytes instead of 4000" + damaged);
      const std::string longer = has_length ? "4001 bytes instead of 4000" : "more than 4000 bytes";
      CHECK(read(frame(content + "x")) == where + "it decompresses to " + longer + damaged);
      CHECK(read(whole + frame("x")) == where + "it decompresses to " + longer + damaged);
      const std::string not_whole = where + "it does not consist of whole frames of zstd (";
      for (const std::string& file :
           {whole.substr(0, whole.size() - 1), whole.substr(0, 3), whole + "x", whole + content})
        CHECK(read(file).starts_with(not_whole));
      CHECK(read(skipped) == where + "it decompresses to 0 bytes instead of 4000" + damaged);
      CHECK(read("") == where + "it decompresses to 0 bytes instead of 4000" + damaged);
      if (!has_checksum) continue;
      std::string flipped = whole;
      flipped.back() = static_cast<char>(flipped.back() ^ 1);
      CHECK(read(flipped) == where + "zstd cannot decompress it (Restored data doesn't match checksum)" + damaged);
    }

  // A gigabyte of zeros in 32 KB, and a chunk that its file cannot hold: neither takes memory.
  std::string bomb("\x28\xb5\x2f\xfd\0\x58", 6);
  for (int block = 0; block < 1 << 13; ++block) bomb += std::string("\x02\0\x10\0", 4);  // 128 KiB of one byte
  bomb += std::string("\x01\0\0", 3);                                                    // the last, empty
  CHECK(read(bomb) == where + "it decompresses to more than 4000 bytes" + damaged);
  auto metadata = nlohmann::json::parse(contents(p + "/.zarray"));
  metadata["chunks"] = {std::int64_t{1} << 40};
  put(p + "/.zarray", metadata.dump());
  CHECK(read(zstd_frame(content, true, false)) ==
        where + "it decompresses to 4000 bytes instead of 4398046511104" + damaged);
  const std::string streamed = zstd_frame(content, false, false);
  CHECK(read(streamed) ==
        where + std::to_string(streamed.size()) + " bytes cannot hold a chunk of 4398046511104" + damaged);

  // The metadata of today's zarr-python, which takes zstd by itself.
  metadata["chunks"] = {1000};
  metadata["compressor"] = {{"id", "zstd"}, {"level", 0}, {"checksum", false}};
  put(p + "/.zarray", metadata.dump());
  CHECK(read(zstd_frame(content, true, false)) == "no error");
  info.compressor.level = 23;
  expect_error<UsageError>([&] { ZarrArray::create(scratch / "b", info); },
                           "'" + scratch.path() + "/b/.zarray': the compressor's level is " +
                               std::to_string(ZSTD_minCLevel()) + " to 22, its shuffle 0 to 2, its block at least 0");
}

TEST_CASE("zarr: many threads read one array", "[zarr]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  ZarrInfo info = with({"blosc"});
  info.shape = {10000};
  info.chunks = {64};
  info.dtype = "<u4";
  const auto values = counting<std::uint32_t>(10000);
  ZarrArray::create(scratch / "a", info).write_all<std::uint32_t>(values);
  const ZarrArray array = ZarrArray::open(scratch / "a", {.cache_bytes = 2000});
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      std::vector<std::uint32_t> part(100);
      for (int i = 0; i < 500; ++i) {
        const std::size_t at = random() % 9900;
        array.read<std::uint32_t>({static_cast<std::int64_t>(at)}, {100}, part);
        if (!std::equal(part.begin(), part.end(), values.begin() + static_cast<std::ptrdiff_t>(at))) ++wrong[t];
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(4));
}

namespace {

/// A number as bytes, little-endian.
template <class T>
std::string bytes_of(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
/// Text with its CRC-32C behind it.
std::string sealed(const std::string& text, bool really = true) {
  return really ? text + bytes_of(io::crc32c(io::as_bytes(text))) : text;
}
/// The file of chunks, in reverse order; those that are empty are not there.
std::string shard_of(const std::vector<std::string>& chunks, bool at_start, bool sums) {
  const std::size_t length = 16 * chunks.size() + (sums ? 4 : 0);
  std::string data, index;
  std::vector<std::uint64_t> begins(chunks.size(), ~std::uint64_t{0});
  for (std::size_t i = chunks.size(); i-- > 0;) {
    if (chunks[i].empty()) continue;
    begins[i] = data.size() + (at_start ? length : 0);
    data += chunks[i];
  }
  for (std::size_t i = 0; i < chunks.size(); ++i)
    index += bytes_of(begins[i]) + bytes_of(chunks[i].empty() ? ~std::uint64_t{0} : std::uint64_t{chunks[i].size()});
  return at_start ? sealed(index, sums) + data : data + sealed(index, sums);
}

/// The array of v2 at `from`, chunk for chunk, as one of v3 at `to`: `each` chunks share a file.
void shard_array(const std::string& from, const std::string& to, const Index& each, bool at_start, bool sums) {
  const ZarrArray array = ZarrArray::open(from);
  const Index grid = array.grid();
  Index shards, outer;
  for (std::size_t i = 0; i < grid.size(); ++i) {
    shards.push_back((grid[i] + each[i] - 1) / each[i]);
    outer.push_back(array.info().chunks[i] * each[i]);
  }
  Index shard(grid.size(), 0);
  do {
    std::vector<std::string> chunks;
    Index inner(grid.size(), 0);
    do {
      Index at;
      for (std::size_t i = 0; i < grid.size(); ++i) at.push_back(shard[i] * each[i] + inner[i]);
      bool inside = true;
      for (std::size_t i = 0; i < grid.size(); ++i) inside = inside && at[i] < grid[i];
      const std::string file = from + "/" + array.chunk_key(at);
      chunks.push_back(inside && io::file_exists(file) ? sealed(contents(file), sums) : "");
    } while (io::next_place(inner, each));
    std::string file = to + "/c";
    for (const auto i : shard) file += "/" + std::to_string(i);
    std::filesystem::create_directories(std::filesystem::path(file).parent_path());
    put(file, shard_of(chunks, at_start, sums));
  } while (io::next_place(shard, shards));
  using nlohmann::json;
  const json sum = {{"name", "crc32c"}}, little = {{"name", "bytes"}, {"configuration", {{"endian", "little"}}}};
  json codecs = json::array({little}), index_codecs = json::array({little});
  const std::string id = array.info().compressor.id;
  if (!id.empty()) codecs.push_back({{"name", id == "zlib" ? "numcodecs.zlib" : id}});
  if (sums) codecs.push_back(sum);
  if (sums) index_codecs.push_back(sum);
  json sharding = {{"chunk_shape", array.info().chunks}, {"codecs", codecs}, {"index_codecs", index_codecs}};
  if (at_start) sharding["index_location"] = "start";
  put(to + "/zarr.json", json{{"zarr_format", 3},
                              {"node_type", "array"},
                              {"shape", array.info().shape},
                              {"data_type", "uint32"},
                              {"chunk_grid", {{"name", "regular"}, {"configuration", {{"chunk_shape", outer}}}}},
                              {"chunk_key_encoding", {{"name", "default"}}},
                              {"fill_value", 9},
                              {"attributes", {{"unit", "m"}}},
                              {"codecs", json::array({{{"name", "sharding_indexed"}, {"configuration", sharding}}})}}
                             .dump());
}

}  // namespace

TEST_CASE("zarr: chunks that share files, as v3 has them, are read one by one", "[zarr]") {
  if (world_rank() != 0) return;
  std::mt19937 random(5);
  for (const char* compressor : {"", "blosc", "zlib", "zstd"})
    for (const bool sums : {false, true})
      for (const bool at_start : {false, true}) {
        INFO(compressor << " " << sums << " " << at_start);
        const Scratch scratch;
        ZarrInfo info = with({compressor});
        info.shape = {23, 17};
        info.chunks = {5, 3};
        info.dtype = "<u4";
        const auto values = counting<std::uint32_t>(23 * 17);
        ZarrArray::create(scratch / "v2", info).write_all<std::uint32_t>(values);
        std::filesystem::remove(scratch / "v2/1.4");
        shard_array(scratch / "v2", scratch / "v3", {2, 4}, at_start, sums);
        const ZarrArray array = ZarrArray::open(scratch / "v3", {.cache_bytes = 200});
        CHECK(array.grid() == Index{5, 6});
        CHECK(array.chunk_key({3, 4}) == "c/1/1");
        CHECK(array.attributes().at("unit") == "m");
        auto expected = values;
        for (std::size_t i = 5; i < 10; ++i)
          for (std::size_t j = 12; j < 15; ++j) expected[i * 17 + j] = 9;
        CHECK(array.read_all<std::uint32_t>() == expected);
        for (int i = 0; i < 50; ++i) {
          const auto row = static_cast<std::int64_t>(random() % 23), column = static_cast<std::int64_t>(random() % 17);
          std::uint32_t one = 0;
          array.read<std::uint32_t>({row, column}, {1, 1}, {&one, 1});
          CHECK(one == expected[static_cast<std::size_t>(row * 17 + column)]);
        }
        ERROR_IS("zarr chunk [1, 4] in '" + scratch.path() + "/v3/c/0/1' is missing",
                 ZarrArray::open(scratch / "v3", {true}).read_all<std::uint32_t>());
      }

  // A part of a chunk, and damage that is found where it is read and nowhere else.
  for (const bool sums : {false, true}) {
    const Scratch scratch;
    ZarrInfo info = with({"blosc", "lz4", 5, 2, 1 << 12});
    info.shape = {40'000};
    info.chunks = {10'000};
    info.dtype = "<u4";
    const auto values = counting<std::uint32_t>(40'000);
    ZarrArray::create(scratch / "v2", info).write_all<std::uint32_t>(values);
    shard_array(scratch / "v2", scratch / "v3", {3}, false, sums);
    const auto read = [&](std::int64_t at) {
      std::vector<std::uint32_t> part(5);
      ZarrArray::open(scratch / "v3").read<std::uint32_t>({at}, {5}, part);
      return std::equal(part.begin(), part.end(), values.begin() + at);
    };
    for (const std::int64_t at : {0, 9'998, 10'000, 25'000, 39'995}) CHECK(read(at));
    std::string bytes = contents(scratch / "v3/c/0");
    const std::size_t third = std::filesystem::file_size(scratch / "v2/2");  // the last chunk is the first in the file
    for (std::size_t i = 0; i < third; i += 7) bytes[i] = 'x';
    put(scratch / "v3/c/0", bytes);
    CHECK(read(10'000));
    std::string said;
    try {
      read(25'000);
    } catch (const Error& error) {
      said = error.what();
    }
    CHECK(said.starts_with("zarr chunk [2] in '" + scratch.path() + "/v3/c/0': "));
    CHECK(said.find("damaged") != std::string::npos);
  }
}

TEST_CASE("zarr: wrong shards and metadata of v3 get a message that names file, place and remedy", "[zarr]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  ZarrInfo info = with({});
  info.shape = {6};
  info.chunks = {2};
  info.dtype = "<u4";
  ZarrArray::create(scratch / "v2", info).write_all<std::uint32_t>(counting<std::uint32_t>(6));
  shard_array(scratch / "v2", scratch / "v3", {4}, false, true);
  const std::string p = scratch / "v3", shard = p + "/c/0", whole = contents(shard);
  const auto error = [&] { return error_of([&] { static_cast<void>(ZarrArray::open(p).read_all<std::uint32_t>()); }); };
  CHECK(error() == "no error");
  const std::string where = "zarr shard '" + shard + "': ",
                    remedy = ": it is damaged; copy the file again, or make the data again";
  put(shard, whole.substr(0, 60));
  CHECK(error() == where + "it has 60 bytes, too few for the index of its 4 chunks" + remedy);
  std::string bytes = whole;
  bytes[bytes.size() - 10] ^= 1;
  put(shard, bytes);
  CHECK(error().starts_with(where + "its index has the checksum "));
  CHECK(error().ends_with(" was written with it" + remedy));
  std::vector<std::string> chunks(4, sealed(std::string(8, 'x')));
  bytes = shard_of(chunks, false, false);
  bytes[48 + 16] = 41;  // 48 bytes of chunks, and then the index: of chunk 1 the begin
  bytes[48 + 16 + 8] = 100;
  put(shard, sealed(bytes.substr(0, 48)).substr(0, 48) + sealed(bytes.substr(48)));
  CHECK(error() == where + "its index has chunk 1 at byte 41 with 100 bytes, but it has 116" + remedy);
  put(shard, shard_of(std::vector<std::string>(4, sealed("short")), false, true));
  CHECK(error() == "zarr chunk [0] in '" + shard + "': it has 5 bytes instead of 8: it is damaged");
  put(shard, shard_of(std::vector<std::string>(4, std::string(12, 'x')), false, true));
  CHECK(error().starts_with("zarr chunk [0] in '" + shard + "': its bytes have the checksum "));
  put(shard, whole);

  const std::string file = p + "/zarr.json", good = contents(file);
  using nlohmann::json;
  const auto expect_bad = [&](const char* pointer, const json& value, const std::string& message) {
    json bad = json::parse(good);
    bad[json::json_pointer(pointer)] = value;
    put(file, bad.dump());
    CHECK(error() == "'" + file + "': " + message);
  };
  const std::string sharding = "/codecs/0/configuration";
  const std::string only =
      ": \"bytes\", then at most one of \"blosc\", \"gzip\", \"zstd\" and \"numcodecs.zlib\", then at most one "
      "\"crc32c\"; rewrite the array";
  expect_bad("/zarr_format", 4, "key \"zarr_format\": is 4, but a zarr.json has version 3");
  expect_bad("/data_type", "float16",
             "key \"data_type\": \"float16\" is not supported: bool, int8 to int64, uint8 to uint64, float32 and "
             "float64 are; rewrite the array");
  expect_bad("/surprise", {{"name", "x"}},
             "key \"surprise\": is not known, and must be understood: rewrite the array without it");
  expect_bad("/chunk_grid/name", "odd", "key \"chunk_grid\": \"odd\" is not supported: \"regular\" is");
  expect_bad("/chunk_key_encoding/name", "odd",
             "key \"chunk_key_encoding\": \"odd\" is not supported: \"default\" and \"v2\" are");
  expect_bad("/storage_transformers", json::array({1}),
             "key \"storage_transformers\": are not supported; rewrite the array without them");
  expect_bad((sharding + "/chunk_shape").c_str(), {3}, "the chunks [3] do not divide the files' [8]");
  expect_bad((sharding + "/chunk_shape").c_str(), {2, 2},
             "the shape [6] and the chunks [2, 2] differ in the number of dims");
  expect_bad((sharding + "/index_location").c_str(), "middle",
             "key \"codecs\": \"sharding_indexed\" has the index_location \"middle\", which is neither start nor end");
  expect_bad((sharding + "/codecs/1").c_str(), {{"name", "bz2"}}, "key \"codecs\": \"bz2\" is not supported" + only);
  expect_bad((sharding + "/codecs/0").c_str(), {{"name", "transpose"}},
             "key \"codecs\": \"transpose\" is not supported at this place" + only);
  expect_bad((sharding + "/codecs/0").c_str(), {{"name", "bytes"}},
             "key \"codecs\": \"bytes\" has the endian \"(missing)\", which is neither little nor big");
  expect_bad((sharding + "/index_codecs/0/configuration/endian").c_str(), "big",
             "key \"codecs\": an index that is compressed or big-endian is not supported; rewrite the array");
  expect_bad("/codecs/1", {{"name", "gzip"}},
             "key \"codecs\": codecs behind \"sharding_indexed\" are not supported; rewrite the array");
  expect_bad("/codecs", json::array(), "key \"codecs\": must be a list of codecs, not []");
  put(file, good);
  const ZarrArray array = ZarrArray::open(p);
  const std::string read_only = "zarr array '" + p + "' is of version 3, which is read only: write version 2";
  expect_error<UsageError>([&] { array.write_all<std::uint32_t>(std::vector<std::uint32_t>(6)); }, read_only);
  expect_error<UsageError>([&] { array.set_attributes({}); }, read_only);
  info.v3 = true;
  expect_error<UsageError>(
      [&] { ZarrArray::create(scratch / "new", info); },
      "'" + scratch.path() + "/new/zarr.json': arrays of zarr version 3 are read only: write version 2");

  // Any bytes: an error or other numbers, but no crash.
  std::mt19937 random(13);
  for (int i = 0; i < 1500; ++i) {
    const std::string& name = i % 2 == 0 ? shard : file;
    bytes = i % 2 == 0 ? whole : good;
    if (i % 6 > 3)
      bytes.resize(random() % bytes.size());
    else
      for (int flips = 0; flips <= i % 4; ++flips)
        bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
    put(name, bytes);
    try {
      const ZarrArray damaged = ZarrArray::open(p);
      if (damaged.size() < 100'000) static_cast<void>(damaged.read_all<std::uint32_t>());
    } catch (const Error&) {
    }
    put(name, i % 2 == 0 ? whole : good);
  }
}

TEST_CASE("zarr: groups of v3 are read", "[zarr]") {
  if (world_rank() != 0) return;
  const Scratch scratch;
  const std::string p = scratch.path();
  put(p + "/zarr.json", R"({"zarr_format": 3, "node_type": "group", "attributes": {"n": 5}})");
  for (const char* name : {"/group", "/array"}) std::filesystem::create_directories(p + name);
  put(p + "/group/zarr.json", R"({"zarr_format": 3, "node_type": "group"})");
  put(p + "/array/zarr.json", R"({"zarr_format": 3, "node_type": "array", "shape": [], "data_type": "float32",
      "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": []}}, "chunk_key_encoding": {"name": "v2"},
      "fill_value": "0x7fc00000", "codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]})");
  const ZarrGroup group = ZarrGroup::open(p);
  CHECK(group.arrays() == std::vector<std::string>{"array"});
  CHECK(group.has_array("array"));
  CHECK_FALSE(group.has_array("group"));
  CHECK(group.integer_attribute("n") == 5);
  CHECK(ZarrGroup::open(p + "/group").attributes() == nlohmann::json::object());
  CHECK(std::isnan(group.array("array").read_all<float>()[0]));
  put(p + "/array/0", std::string("\x3f\xc0\0\0", 4));
  CHECK(group.array("array").read_all<float>()[0] == 1.5F);
  expect_error<UsageError>([&] { static_cast<void>(group.array("group")); },
                           "'" + p + "/group' is not a zarr array: its zarr.json is not that of an array");
  expect_error<UsageError>([&] { static_cast<void>(ZarrGroup::open(p + "/array")); },
                           "'" + p + "/array' is not a zarr group: its zarr.json is not that of a group");
  expect_error<UsageError>([&] { ZarrGroup::create(p); },
                           "'" + p + "' is of zarr version 3, which is read only: write elsewhere");
  expect_error<UsageError>([&] { group.set_attributes({}); },
                           "zarr group '" + p + "' is of version 3, which is read only: write version 2");
}

// zarr_oracle.py: `foreign` holds arrays of python3-zarr with their bytes beside them; `ours` is what it will read.
TEST_CASE("zarr: the oracle's half", "[.zarr_oracle]") {
  const char* folder = std::getenv("SHARDLIB_ZARR_ORACLE");
  REQUIRE(folder != nullptr);
  const std::string root = folder;
  int arrays = 0, arrays_of_v3 = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root + "/foreign")) {
    const bool v3 = entry.path().filename() == "zarr.json";
    if (entry.path().filename() != ".zarray" && !v3) continue;
    const std::string path = entry.path().parent_path().string();
    INFO(path);
    const ZarrArray array = ZarrArray::open(path);
    if (v3) CHECK(array.attributes() == nlohmann::json{{"unit", "m"}});
    arrays_of_v3 += v3 ? 1 : 0;
    std::string all(static_cast<std::size_t>(array.size()) * array.item_bytes(), '\0');
    array.read_bytes(Index(array.info().shape.size(), 0), array.info().shape, std::as_writable_bytes(std::span(all)));
    CHECK(all == contents(path + "/expected.raw"));
    ++arrays;
  }
  CHECK(arrays - arrays_of_v3 > 20);
  CHECK(arrays_of_v3 > 200);

  const ZarrGroup ours = ZarrGroup::create(root + "/ours");
  ours.set_attributes({{"who", "shardlib"}, {"list", {1, 2}}});
  const auto write = [&]<class T>(const std::string& name, T, ZarrInfo info) {
    info.shape = {37, 11};
    info.chunks = {10, 4};
    info.dtype = io::zarr_dtype<T>();
    std::vector<T> values;
    for (int i = 0; i < 37 * 11; ++i) values.push_back(static_cast<T>(i % 100));
    ZarrArray::create(root + "/ours/" + name, info).write_all<T>(values);
  };
  write("f4", float{}, {});
  write("f8", double{}, with({"zlib"}));
  write("i1", std::int8_t{}, with({"blosc", "lz4", 5, 2}));
  write("i8", std::int64_t{}, with({"blosc", "zstd", 3, 1}));
  write("i2", std::int16_t{}, with({"zstd", "", 22}));
  write("u2", std::uint16_t{}, with({"blosc", "blosclz", 9, 0}));
  write("u4", std::uint32_t{}, with({"blosc"}, ZarrDelta{"<u4", "<u4"}));
  write("u8", std::uint64_t{}, with({}, ZarrDelta{"<i8", "<i8"}));
  ZarrInfo nested;
  nested.separator = "/";
  nested.fill_value = "\"NaN\"";
  write("nested", float{}, nested);
  for (auto [name, info] : {std::pair{"raw_sum", with({})},
                            {"blosc_sum", with({"blosc"}, ZarrDelta{"<u2", "<u2"})},
                            {"zstd_sum", with({"zstd"})}}) {
    info.checksum = true;
    write(name, std::uint16_t{}, info);
  }
  const ZarrArray holes = ZarrArray::create(root + "/ours/holes", {.shape = {6}, .chunks = {2}, .fill_value = "7"});
  holes.write_chunk<float>({1}, std::vector<float>{1, 2});
}
