// The flat-tokens format: seqax's own data, damage, and a writer that may be killed at any time.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <shardlib/io/data/loader.hpp>
#include <shardlib/io/data/token_files.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using io::EncodedToken;
using io::FlatTokens;
using io::FlatTokensWriter;
using io::open_tokens;
using io::Split;
using io::ZarrArray;
using Ids = std::vector<std::uint32_t>;

namespace {

constexpr io::FlatTokensOptions small_chunks{16, 4};

/// Document i of an endless data set; some are empty.
Ids document(int i) {
  Ids ids(static_cast<std::size_t>(i * 7 % 13));
  for (std::size_t k = 0; k < ids.size(); ++k)
    ids[k] = static_cast<std::uint32_t>(i * 100) + static_cast<std::uint32_t>(k);
  return ids;
}
Split split_of(int i) {
  return i % 5 == 4 ? Split::validation : Split::train;
}

/// Writes documents [from, to), committing after every third.
void write_documents(FlatTokensWriter& writer, int from, int to) {
  for (int i = from; i < to; ++i) {
    writer.add(split_of(i), document(i));
    if (i % 3 == 2) writer.commit(std::to_string(i + 1));
  }
}

/// Files and their bytes, to compare folders.
std::vector<std::pair<std::string, std::string>> everything(const std::string& folder) {
  std::vector<std::pair<std::string, std::string>> all;
  for (const std::string& name : files_below(folder)) all.emplace_back(name, contents(folder + "/" + name));
  // A writer that is killed right after giving a data set its name leaves these.
  std::erase_if(all, [](const auto& file) { return file.first == ".progress" || file.first == ".lock"; });
  return all;
}

/// A data set of arrays as given, whatever they say.
std::string make_group(const Scratch& folder, const std::vector<EncodedToken>& tokens,
                       const std::vector<std::uint64_t>& starts, std::int64_t max_token_id = 1000) {
  const std::string path = folder / "data.zarr";
  std::filesystem::remove_all(path);
  io::ZarrGroup::create(path);
  io::ZarrGroup::create(path + "/train");
  put(path + "/train/.zattrs", "{\"max_token_id\": " + std::to_string(max_token_id) + "}");
  ZarrArray::create(path + "/train/encoded_tokens", {{std::ssize(tokens)}, {3}, "<u4"}).write_all<EncodedToken>(tokens);
  ZarrArray::create(path + "/train/seq_starts", {{std::ssize(starts)}, {3}, "<u8"}).write_all<std::uint64_t>(starts);
  return path;
}

}  // namespace

TEST_CASE("flat-tokens: the same files however often the writer is stopped", "[data]") {
  const Scratch folder;
  FlatTokensWriter straight(folder / "straight", small_chunks);
  write_documents(straight, 0, 100);
  straight.finish();
  CHECK(!std::filesystem::exists(folder / "straight/.progress"));
  CHECK(!std::filesystem::exists(folder / "straight/.lock"));
  ERROR_IS("FlatTokensWriter: '" + folder / "straight" + "' is finished; nothing can be added",
           straight.add(Split::train, document(1)));

  int attempts = 0;
  bool taken = false;
  for (bool finished = false; !finished; ++attempts) {
    CHECK(!std::filesystem::exists(folder / "stopped"));
    FlatTokensWriter writer(folder / "stopped/", small_chunks);
    const int from = writer.note().empty() ? 0 : std::stoi(writer.note());
    const int to = std::min(from + 3 + attempts * 5 % 11, 100);
    std::int64_t tokens = 0;
    for (int i = 0; i < from; ++i) tokens += split_of(i) == Split::train ? std::ssize(document(i)) : 0;
    CHECK(writer.progress(Split::train).tokens == tokens);
    write_documents(writer, from, to);
    if (to == 100 && !std::exchange(taken, true)) {  // document 99 is not committed, and is added again
      std::filesystem::create_directory(folder / "stopped");
      expect_error<UsageError>([&] { writer.finish(); },
                               "'" + folder / "stopped" + "' has appeared meanwhile: move it away and start again");
      std::filesystem::remove(folder / "stopped");
      continue;
    }
    if (to == 100) writer.finish();
    finished = to == 100;
  }
  CHECK(attempts > 8);
  CHECK(everything(folder / "stopped") == everything(folder / "straight"));
  CHECK(!std::filesystem::exists(folder / "stopped.partial"));
}

TEST_CASE("flat-tokens: a writer that is killed at any time goes on from its last commit", "[data]") {
  const Scratch folder;
  FlatTokensWriter straight(folder / "straight", small_chunks);
  write_documents(straight, 0, 62);
  straight.finish();
  int killed = 0;
  for (int attempt = 0; !std::filesystem::exists(folder / "killed"); ++attempt) {
    REQUIRE(attempt < 1000);
    const pid_t child = fork();
    if (child == 0) {
      // The alarm's default action ends the process, wherever it is.
      const auto microseconds = static_cast<useconds_t>(500 + attempt * 400);
      signal(SIGALRM, SIG_DFL);
      ualarm(microseconds, 0);
      try {
        FlatTokensWriter writer(folder / "killed", small_chunks);
        write_documents(writer, writer.note().empty() ? 0 : std::stoi(writer.note()), 62);
        writer.finish();
      } catch (...) {
        _exit(3);
      }
      _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    if (WIFEXITED(status)) REQUIRE(WEXITSTATUS(status) == 0);
    killed += WIFSIGNALED(status) ? 1 : 0;
    // What has the name is whole.
    if (std::filesystem::exists(folder / "killed"))
      CHECK(everything(folder / "killed") == everything(folder / "straight"));
  }
  CHECK(killed > 0);
}

TEST_CASE("flat-tokens: one writer, the same chunks, nobody else's folder", "[data]") {
  const Scratch folder;
  const std::string path = folder / "data.zarr";
  {
    FlatTokensWriter writer(path, small_chunks);
    expect_error<UsageError>([&] { FlatTokensWriter other(path, small_chunks); },
                             "another process is writing '" + path + ".partial': wait for it, or write elsewhere");
  }
  expect_error<UsageError>(
      [&] { FlatTokensWriter writer(path); },
      "'" + path + ".partial' was begun with other sizes of chunks: choose the same, or remove it");
  put(path + ".partial/.progress", "{\"note\": 3");
  ERROR_IS("'" + path + ".partial/.progress' is not JSON (at byte 11): it is damaged",
           FlatTokensWriter(path, small_chunks));
  put(path + ".partial/.progress", R"({"chunk_tokens": 16, "chunk_documents": 4})");
  ERROR_IS("'" + path + ".partial/.progress' is damaged: remove '" + path + ".partial' and begin again",
           FlatTokensWriter(path, small_chunks));
  std::filesystem::create_directories(folder / "mine.partial/precious");
  expect_error<UsageError>(
      [&] { FlatTokensWriter writer(folder / "mine"); },
      "'" + folder / "mine.partial" + "' is not an unfinished data set: remove it, or write elsewhere");
  std::filesystem::create_directories(folder / "bins.partial");  // of `tokenize --to llmc`, killed
  put(folder / "bins.partial/.lock", "");
  put(folder / "bins.partial/train.bin.partial", "tokens");
  expect_error<UsageError>(
      [&] { FlatTokensWriter writer(folder / "bins"); },
      "'" + folder / "bins.partial" + "' is not an unfinished data set: remove it, or write elsewhere");
  const auto lock = io::lock_folder(folder / "bins.partial");  // as while it runs
  expect_error<UsageError>(
      [&] { FlatTokensWriter writer(folder / "bins"); },
      "another process is writing '" + folder / "bins.partial" + "': wait for it, or write elsewhere");
  expect_error<UsageError>(
      [&] {
        FlatTokensWriter writer(folder / "x", {0, 1});
      },
      "FlatTokensWriter: a chunk has at least one token, or document");
}

TEST_CASE("flat-tokens: damage is named", "[data]") {
  const Scratch folder;
  const std::vector<EncodedToken> tokens{3, 4, 7, 8, 10, 13, 14, 16};
  const std::vector<std::uint64_t> starts{0, 2, 5, 8};
  std::string path = make_group(folder, tokens, starts, 8);
  const std::string split = path + "/train";
  const auto source = open_tokens(path);
  CHECK(source->max_token_id() == 8);
  // The specification's example.
  const auto batch = io::Loader(source, {.batch = 1, .length = 8, .shuffle = false}).batch(0);
  CHECK(batch.inputs == std::vector<std::int32_t>{0, 1, 0, 3, 4, 0, 6, 7});
  CHECK(batch.targets == std::vector<std::int32_t>{1, 2, 3, 4, 5, 6, 7, 8});

  const std::string end = ": the data are damaged or were not written to the end; make them again";
  const auto fails = [&](const std::string& message) {
    ERROR_IS("'" + split + "': " + message + end, open_tokens(path));
  };
  make_group(folder, tokens, {0, 2, 5, 7});
  fails("'seq_starts' ends with 7, but there are 8 tokens");
  make_group(folder, tokens, {1, 2, 5, 8});
  fails("'seq_starts' begins with 1 instead of 0");
  make_group(folder, tokens, {});
  fails("'seq_starts' is empty");
  make_group(folder, {2, 4}, {0, 2});
  fails("the first token is not marked as a document's first");
  make_group(folder, tokens, starts, -1);
  ERROR_IS("'" + split + "': max_token_id is -1, which is not a token id (0 to 2^31 - 1)", open_tokens(path));
  make_group(folder, {}, {0});
  expect_error<UsageError>([&] { static_cast<void>(open_tokens(path)); },
                           "'" + split + "' has no tokens: choose another --data");

  make_group(folder, tokens, starts, 7);
  ERROR_IS("token 7 of '" + split + "' has the id 8, but max_token_id is 7: the data are damaged; make them again",
           open_tokens(path)->identity());
  make_group(folder, tokens, {0, 6, 5, 8});
  ERROR_IS("'" + split +
               "': entry 2 of 'seq_starts' is 5, after 6 and in 8 tokens: the data are damaged; make them "
               "again",
           open_tokens(path)->documents());
  make_group(folder, tokens, {0, 3, 5, 8});
  const io::Loader padded(open_tokens(path), {.batch = 3, .length = 4, .rows = io::Rows::padded, .shuffle = false});
  ERROR_IS("document 0 of '" + split +
               "' begins at token 0, but the mark on token 2 says otherwise: the data are damaged; make "
               "them again",
           padded.batch(0));

  make_group(folder, tokens, starts);
  std::filesystem::remove(split + "/encoded_tokens/1");
  ERROR_IS("zarr chunk '" + split + "/encoded_tokens/1' is missing", open_tokens(path)->identity());
  std::filesystem::remove_all(split + "/seq_starts");
  expect_error<UsageError>([&] { static_cast<void>(open_tokens(path)); },
                           "'" + split + "' is not a flat-tokens array: it has no 'seq_starts' (docs/data.md)");
  ZarrArray::create(split + "/seq_starts", {{4}, {3}, "<f8"});
  expect_error<UsageError>([&] { static_cast<void>(open_tokens(path)); },
                           "'" + split +
                               "' is not a flat-tokens array: 'seq_starts' has 1 dims of type \"<f8\" instead of 1 of "
                               "type \"<u8\" (docs/data.md)");
  expect_error<UsageError>([&] { static_cast<void>(open_tokens(path, Split::validation)); },
                           "'" + path +
                               "' is a zarr group without 'validation': a flat-tokens data set has train and "
                               "validation (docs/data.md)");
  make_group(folder, tokens, starts);
  CHECK(open_tokens(split)->tokens() == 8);
  expect_error<UsageError>([&] { static_cast<void>(open_tokens(split, Split::validation)); },
                           "'" + split + "' is one split of a flat-tokens data set: name the data set instead");
}

TEST_CASE("flat-tokens: a flipped bit of the writer's files is an error when its chunk is first read", "[data]") {
  const Scratch folder;
  const std::string path = folder / "data.zarr", split = path + "/train";
  {
    FlatTokensWriter writer(path, {1 << 16, 64});
    Ids ids(1000);
    for (int i = 0; i < 200; ++i) {
      for (std::size_t k = 0; k < ids.size(); ++k)
        ids[k] = static_cast<std::uint32_t>(i * 31 + static_cast<int>(k * k % 997));
      writer.add(Split::train, ids);
    }
    writer.finish();
  }
  const auto read = [&](std::int64_t first) {  // a row of the second chunk, of which a block is decoded
    std::vector<EncodedToken> row(500);
    FlatTokens(split).read(first, row);
  };
  const auto flipped = [&](const std::string& name, std::size_t at, const auto& reads) {
    const std::string file = split + "/" + name, whole = contents(file);
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ 4);
    put(file, bytes);
    CHECK_THROWS_WITH(reads(), Catch::Matchers::StartsWith("zarr chunk '" + file + "': its bytes have the checksum ") &&
                                   Catch::Matchers::EndsWith(" was written with them: it is damaged; copy the file "
                                                             "again, or make the data again"));
    put(file, whole);
    reads();
  };
  const std::size_t size = contents(split + "/encoded_tokens/1").size();
  for (const std::size_t at : {std::size_t{0}, std::size_t{5}, size / 3, size - 1}) {
    flipped("encoded_tokens/1", at, [&] { read(70'000); });
    flipped("encoded_tokens/1", at, [&] { read(65'400); });  // across the beginning of the chunk
  }
  flipped("seq_starts/1", 40, [&] { static_cast<void>(FlatTokens(split).documents()); });
  flipped("encoded_tokens/0", 100, [&] { static_cast<void>(FlatTokens(split)); });
}

TEST_CASE("flat-tokens: empty documents of other writers are left out", "[data]") {
  const Scratch folder;
  const auto source = open_tokens(make_group(folder, {3, 4, 7, 8, 10, 13}, {0, 0, 0, 2, 2, 5, 5, 5, 6, 6}));
  REQUIRE(source->documents() == 3);
  const std::vector<std::pair<std::int64_t, std::int64_t>> expected{{0, 2}, {2, 5}, {5, 6}};
  for (std::int64_t i = 0; i < 3; ++i) {
    const auto range = source->document(i);
    CHECK(std::pair(range.begin, range.end) == expected[static_cast<std::size_t>(i)]);
  }
}

TEST_CASE("flat-tokens: a data set of zarr v3 opens as one of v2 does", "[data]") {
  const Scratch folder;
  const std::string path = folder / "data.zarr";
  const auto group = [&](const std::string& name, const std::string& attributes) {
    std::filesystem::create_directories(path + name);
    put(path + name + "/zarr.json", R"({"zarr_format": 3, "node_type": "group", "attributes": {)" + attributes + "}}");
  };
  const auto array = [&]<class T>(const std::string& name, const std::string& type, const std::vector<T>& values) {
    const std::string size = std::to_string(values.size());
    std::filesystem::create_directories(path + name + "/c");
    put(path + name + "/c/0", {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)});
    put(path + name + "/zarr.json",
        R"({"zarr_format": 3, "node_type": "array", "shape": [)" + size + R"(], "data_type": ")" + type +
            R"(", "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [)" + size +
            R"(]}}, "chunk_key_encoding": {"name": "default"}, "fill_value": 0,
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]})");
  };
  group("", R"("tokenizer": "small", "tokenizer_fingerprint": "abc")");
  for (const std::string split : {"/train", "/validation"}) {
    group(split, R"("max_token_id": 8)");
    array(split + "/encoded_tokens", "uint32", std::vector<EncodedToken>{3, 4, 7, 8, 10, 13, 14, 16});
    array(split + "/seq_starts", "uint64", std::vector<std::uint64_t>{0, 2, 5, 8});
  }
  CHECK(io::has_validation(path));
  CHECK(open_tokens(path, Split::validation)->documents() == 3);
  for (const std::string& name : {path, path + "/train"}) {
    CHECK(open_tokens(name)->tokens() == 8);
    CHECK(io::made_by(name)->fingerprint == "abc");
  }
}

// flat_tokens_oracle.py: `cases` names data sets, batches and files of what they must be; `ours` is what it will read.
TEST_CASE("flat-tokens: the oracle's half", "[.flat_tokens_oracle]") {
  const char* folder = std::getenv("SHARDLIB_FLAT_TOKENS_ORACLE");
  REQUIRE(folder != nullptr);
  const std::string root = folder;
  std::istringstream cases(contents(root + "/cases"));
  std::string path, split, rows, expected;
  io::LoaderOptions options{.shuffle = false};
  std::int64_t steps = 0;
  int compared = 0;
  while (cases >> path >> split >> rows >> options.batch >> options.length >> options.repeat >> steps >> expected) {
    INFO(expected);
    options.rows = rows == "packed" ? io::Rows::packed : io::Rows::padded;
    const io::Loader loader(open_tokens(path, split == "train" ? Split::train : Split::validation), options);
    std::vector<std::int32_t> inputs, targets, segments, weights;
    for (std::int64_t step = 0; step < steps; ++step) {
      const io::TokenBatch batch = loader.batch(step);
      inputs.insert(inputs.end(), batch.inputs.begin(), batch.inputs.end());
      targets.insert(targets.end(), batch.targets.begin(), batch.targets.end());
      segments.insert(segments.end(), batch.segments.begin(), batch.segments.end());
      for (const float weight : batch.weights) weights.push_back(static_cast<std::int32_t>(weight));
    }
    for (const auto* more : {&targets, &segments, &weights}) inputs.insert(inputs.end(), more->begin(), more->end());
    const std::string bytes = contents(root + "/" + expected);
    REQUIRE(bytes.size() == inputs.size() * sizeof(std::int32_t));
    CHECK(std::memcmp(bytes.data(), inputs.data(), bytes.size()) == 0);
    ++compared;
  }
  CHECK(compared >= 10);

  FlatTokensWriter writer(root + "/ours.zarr", {700, 50});
  io::BinWriter bin(root + "/ours.bin");
  for (const Split part : {Split::train, Split::validation}) {
    const auto source = open_tokens(root + "/made.zarr", part);
    for (std::int64_t i = 0; i < source->documents(); ++i) {
      const auto range = source->document(i);
      Ids ids(static_cast<std::size_t>(range.end - range.begin));
      source->read(range.begin, ids);
      for (auto& id : ids) id >>= 1;
      writer.add(part, ids);
      if (part == Split::train) bin.add(ids);
    }
  }
  writer.finish();
  bin.finish();
}
