// Token sources: what is written is read, from every format alike; documents; damaged and foreign files.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <shardlib/io/data/loader.hpp>
#include <shardlib/io/data/token_files.hpp>
#include <shardlib/support/crc32c.hpp>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using io::BinTokens;
using io::BinWriter;
using io::EncodedToken;
using io::FlatTokens;
using io::FlatTokensWriter;
using io::MemoryTokens;
using io::open_tokens;
using io::Split;
using io::TokenSource;
using Documents = std::vector<std::vector<std::uint32_t>>;

namespace {

Documents random_documents(unsigned seed, int count, std::uint32_t ids = 50000) {
  std::mt19937 random(seed);
  Documents documents(static_cast<std::size_t>(count));
  for (auto& document : documents) {
    document.resize(random() % 40 + (random() % 20 == 0 ? 30000 : 0));
    for (auto& id : document) id = static_cast<std::uint32_t>(random() % ids);
  }
  documents[0].push_back(3);  // at least one token
  return documents;
}

/// One token a text, its length plus something.
class Lengths final : public io::Tokenizer {
 public:
  explicit Lengths(std::uint32_t more) : Tokenizer("lengths", "lengths", 100, 9), more_(more) {}

 private:
  void append_ids(std::string_view text, std::vector<std::uint32_t>& ids) const override {
    ids.push_back(static_cast<std::uint32_t>(text.size()) + more_);
  }
  void append_text(std::uint32_t, std::string&) const override {}
  std::uint32_t more_;
};

std::vector<EncodedToken> all_tokens(const TokenSource& source) {
  std::vector<EncodedToken> tokens(static_cast<std::size_t>(source.tokens()));
  source.read(0, tokens);
  return tokens;
}

/// A source is what its documents say, read as a whole, in parts and document by document.
void check_source(const TokenSource& source, Documents documents) {
  std::erase_if(documents, [](const auto& document) { return document.empty(); });
  const auto all = all_tokens(source);
  std::vector<EncodedToken> expected;
  REQUIRE(source.documents() == std::ssize(documents));
  for (std::size_t i = 0; i < documents.size(); ++i) {
    const auto range = source.document(static_cast<std::int64_t>(i));
    REQUIRE(range.begin == std::ssize(expected));
    for (const std::uint32_t id : documents[i]) expected.push_back(id << 1);
    expected[static_cast<std::size_t>(range.begin)] |= 1U;
    REQUIRE(range.end == std::ssize(expected));
  }
  REQUIRE(all == expected);
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    const auto begin = static_cast<std::int64_t>(random() % all.size());
    std::vector<EncodedToken> part(
        std::min<std::size_t>(random() % 3000, all.size() - static_cast<std::size_t>(begin)));
    source.read(begin, part);
    REQUIRE(std::equal(part.begin(), part.end(), all.begin() + begin));
  }
  const std::string name = "'" + source.name() + "'", n = std::to_string(source.tokens());
  std::vector<EncodedToken> two(2);
  expect_error([&] { source.read(source.tokens() - 1, two); }, "tokens " + std::to_string(source.tokens() - 1) +
                                                                   " to " + std::to_string(source.tokens() + 1) +
                                                                   " of " + name + " are asked for, but it has " + n);
  expect_error([&] { source.read(-1, two); }, "tokens -1 to 1 of " + name + " are asked for, but it has " + n);
  const std::string count = std::to_string(documents.size());
  for (const std::int64_t index : {std::int64_t{-1}, std::ssize(documents)})
    expect_error([&] { static_cast<void>(source.document(index)); },
                 "document " + std::to_string(index) + " of " + name + " is asked for, but it has " + count);
}

std::string write_flat(const Scratch& folder, const Documents& train, const Documents& validation = {},
                       io::FlatTokensOptions options = {}) {
  const std::string path = folder / "data.zarr";
  FlatTokensWriter writer(path, options);
  for (const auto& document : train) writer.add(Split::train, document);
  for (const auto& document : validation) writer.add(Split::validation, document);
  writer.finish();
  return path;
}

std::string bytes_of(const std::vector<std::uint16_t>& ids) {
  return {reinterpret_cast<const char*>(ids.data()), 2 * ids.size()};
}

std::string bin_header(std::int32_t magic, std::int32_t version, std::int32_t count) {
  std::vector<std::int32_t> header(256);
  header[0] = magic, header[1] = version, header[2] = count;
  std::string bytes(1024, '\0');
  std::memcpy(bytes.data(), header.data(), 1024);
  return bytes;
}

/// Documents as llm.c has them, each begun by the end of text.
Documents marked(Documents documents) {
  std::erase_if(documents, [](const auto& document) { return document.empty(); });
  for (auto& document : documents) document.insert(document.begin(), io::gpt2_end_of_text);
  return documents;
}

}  // namespace

TEST_CASE("token sources: memory, flat-tokens and .bin hold the same", "[data]") {
  const Documents documents = random_documents(1, 400);
  check_source(MemoryTokens("memory", documents), documents);
  for (const auto& [tokens, starts] : {std::pair{1000, 64}, {1 << 20, 1 << 16}}) {
    const Scratch folder;
    const std::string path = write_flat(folder, documents, random_documents(2, 50), {tokens, starts});
    check_source(*open_tokens(path), documents);
    check_source(*open_tokens(path, Split::validation), random_documents(2, 50));
    check_source(FlatTokens(path + "/train", 100), documents);  // a cache for nothing
    CHECK(open_tokens(path)->identity() == MemoryTokens("memory", documents).identity());
  }
  for (const auto& [tokens, starts] : {std::pair{1, 1}, {7, 3}}) {
    const Scratch folder;
    const Documents few = {{1, 2, 3}, {}, {4}, {5, 6, 7, 8, 9, 10, 11, 12, 13, 14}, {15}, {}};
    check_source(*open_tokens(write_flat(folder, few, {}, {tokens, starts})), few);
  }

  const Scratch folder;
  BinWriter writer(folder / "tokens");
  for (const auto& document : documents) writer.add(document);
  CHECK(writer.tokens() == std::ssize(all_tokens(MemoryTokens("", marked(documents)))));
  CHECK(!std::filesystem::exists(folder / "tokens"));
  writer.finish();
  check_source(*open_tokens(folder / "tokens"), marked(documents));
  expect_error([&] { writer.add(documents[0]); },
               "BinWriter: '" + folder / "tokens" + "' is finished; nothing can be added");
}

TEST_CASE("token sources: shards of .bin are one source, documents run over their ends", "[data]") {
  const Documents documents = marked(random_documents(3, 300));
  std::vector<std::uint16_t> ids;
  for (const auto& document : documents) ids.insert(ids.end(), document.begin(), document.end());
  const Scratch folder;
  std::vector<std::string> paths;
  const auto shard = [&](const std::string& name, std::size_t begin, std::size_t end) {
    paths.push_back(folder / name);
    put(paths.back(), bin_header(20240520, 1, static_cast<std::int32_t>(end - begin)) +
                          bytes_of({ids.begin() + static_cast<std::ptrdiff_t>(begin),
                                    ids.begin() + static_cast<std::ptrdiff_t>(end)}));
  };
  const std::size_t a = ids.size() / 3, b = a + 1, c = ids.size();
  shard("x_train_000000.bin", 0, a);
  shard("x_train_000001.bin", a, b);
  shard("x_train_000002.bin", b, b);
  shard("x_train_000003.bin", b, c);
  check_source(BinTokens(paths), documents);
  check_source(*open_tokens(folder.path()), documents);
  check_source(*open_tokens(folder / "x_train_*.bin"), documents);
  shard("x_val_000000.bin", 0, documents[0].size());
  check_source(*open_tokens(folder.path(), Split::validation), {documents[0]});
  check_source(*open_tokens(folder.path()), documents);
}

TEST_CASE("token sources: nanoGPT's .bin ends documents with the end of text", "[data]") {
  const Scratch folder;
  Documents documents = random_documents(4, 300);
  std::vector<std::uint16_t> ids;
  for (auto& document : documents) document.push_back(io::gpt2_end_of_text);
  documents.push_back({1, 2, 3});  // the last one may be cut off
  for (const auto& document : documents) ids.insert(ids.end(), document.begin(), document.end());
  put(folder / "train.bin", bytes_of(ids));
  check_source(*open_tokens(folder / "train.bin"), documents);
  check_source(*open_tokens(folder.path()), documents);
  put(folder / "val.bin", bytes_of({65, 66, 67}));
  check_source(*open_tokens(folder.path(), Split::validation), {{65, 66, 67}});
}

TEST_CASE("token sources: a note next to .bin files says who made them, and what ends a document", "[data]") {
  const Scratch folder;
  const Documents documents = {{1, 2, 3}, {50256, 4}};
  BinWriter writer(folder / "train.bin", 7);
  for (const auto& document : documents) writer.add(document);
  writer.finish();
  CHECK(!io::made_by(folder.path()));
  CHECK(open_tokens(folder.path())->documents() == 2);  // 50256 is taken for GPT-2's end of text
  const std::string path = folder / "tokens.json";
  put(path, R"({"format": "shardlib-tokens", "tokenizer": "small", "tokenizer_fingerprint": "abc", "end_of_text": 7})");
  for (const std::string& name : {folder.path(), folder / "train.bin", folder / "*.bin"}) {
    check_source(*open_tokens(name), {{7, 1, 2, 3}, {7, 50256, 4}});
    const auto maker = io::made_by(name);
    REQUIRE(maker);
    CHECK(maker->name == "small");
    CHECK(maker->fingerprint == "abc");
    CHECK(maker->end_of_text == 7);
  }
  CHECK(!io::made_by(folder / "text.txt"));
  io::write_tokens_note(folder.path(), io::ByteTokenizer());
  CHECK(io::made_by(folder.path())->fingerprint == "bytes");
  CHECK(io::made_by(folder.path())->end_of_text == 0);
  for (const char* damaged : {"{}", R"({"format": "shardlib-tokens", "tokenizer": "small"})",
                              R"({"format": "shardlib-tokens", "tokenizer": "small", "tokenizer_fingerprint": "abc",
                                  "end_of_text": 65536})"}) {
    put(path, damaged);
    expect_error([&] { static_cast<void>(open_tokens(folder.path())); },
                 "'" + path + "' does not say which tokenizer made the .bin files beside it: it is damaged; " +
                     "copy it again, or remove it to read them as GPT-2's");
  }
}

TEST_CASE("token sources: a text becomes tokens through any tokenizer", "[data]") {
  const Scratch folder;
  put(folder / "text", "ab<|endoftext|>\n \n<|endoftext|>c<|endof");
  check_source(*open_tokens(folder / "text"), {{'a', 'b'}, {'c', '<', '|', 'e', 'n', 'd', 'o', 'f'}});
  const auto lengths = std::make_shared<Lengths>(0), wide = std::make_shared<Lengths>(1U << 31);
  check_source(*open_tokens(folder / "text", Split::train, {lengths, false}), {{2}, {8}});
  check_source(*open_tokens(folder / "text", Split::train, {lengths, true}), {{2, 9}, {8, 9}});
  expect_error<UsageError>(
      [&] {
        static_cast<void>(open_tokens(folder / "text", Split::train, {wide, false}));
      },
      "token 0 of '" + folder / "text" + "' has the id 2147483650: ids must be below 2^31; check the tokenizer");
}

TEST_CASE("token sources: what a path holds is found out, or said", "[data]") {
  const Scratch folder;
  const auto fails = [&](const std::string& path, const std::string& message, Split split = Split::train) {
    expect_error<UsageError>([&] { static_cast<void>(open_tokens(path, split)); }, message);
  };
  const std::string here = folder.path();
  fails(here + "/none", "cannot read '" + here + "/none': there is no such file, folder or glob; check the path");
  fails(here + "/*.bin", "cannot read '" + here + "/*.bin': there is no such file, folder or glob; check the path");
  fails(here, "the folder '" + here +
                  "' holds neither flat-tokens (a .zgroup) nor *train*.bin files: tokenize its texts first, or train "
                  "straight from them with --stream");
  fails(here,
        "the folder '" + here +
            "' holds neither flat-tokens (a .zgroup) nor *val*.bin files: tokenize the texts again with a larger "
            "--validation-fraction, give --validation-data, or leave out --validate-every",
        Split::validation);
  put(here + "/text.bin", "all letters");
  fails(here + "/text.bin", "'" + here +
                                "/text.bin' is named as a token file, but has neither llm.c's header nor, as 2-byte "
                                "ids have, any zero byte in its first 64 KiB: rename it to .txt if it is a text");
  put(here + "/text.txt", "their size is even");  // which 2-byte ids have, too
  fails(here + "/*.txt", "'" + here + "/*.txt' names '" + here +
                             "/text.txt', which is not a .bin file, and a glob stands for those alone: tokenize texts "
                             "first, or train straight from their folder with --stream");
  put(here + "/binary.txt", std::string("a\0b\0", 4));
  fails(here + "/binary.txt", "'" + here +
                                  "/binary.txt' is not a text file (it has zero bytes), and not a token file of llm.c: "
                                  "rename it to .bin if it holds bare 2-byte ids (nanoGPT)");
  for (const auto& [bytes, by] :
       {std::pair{"\x1f\x8b", "gzip"}, {"\x28\xb5\x2f\xfd.", "zstd"}, {"\x53\x2a\x4d\x18.", "zstd"}}) {
    put(here + "/text.txt.gz", bytes);
    fails(here + "/text.txt.gz", "'" + here + "/text.txt.gz' is compressed by " + by +
                                     ", which training does not read: `tokenize` makes a data set of it");
  }
  put(here + "/ids.bin", std::string("\x1f\x8b\x01\x00", 4));
  CHECK(io::open_tokens(here + "/ids.bin", Split::train, {})->tokens() == 2);  // ids may be any numbers
  put(here + "/text.jsonl.zst", "a");
  fails(here + "/text.jsonl.zst", "'" + here +
                                      "/text.jsonl.zst' holds JSON lines by its name, and training would read their "
                                      "keys and escapes as text: `tokenize --field text` makes a data set of them");
  put(here + "/blank.txt", " \n");
  fails(here + "/blank.txt", "'" + here + "/blank.txt' has no tokens: choose another --data");
  put(here + "/empty.bin", "");
  fails(here + "/empty.bin", "'" + here + "/empty.bin' has no tokens: choose another --data");
  const std::string flat = write_flat(folder, {{1, 2}});
  fails(flat,
        "'" + flat +
            "/validation' has no tokens: tokenize the texts again with a larger --validation-fraction, give "
            "--validation-data, or leave out --validate-every",
        Split::validation);
  fails(flat + "/validation", "'" + flat + "/validation' has no tokens: choose another --data");
  std::filesystem::remove_all(flat);
  put(here + "/good.txt", "text");
  fails(
      here + "/good.txt",
      "'" + here + "/good.txt' has no validation split: give the validation data a path of its own (--validation-data)",
      Split::validation);
  expect_error<UsageError>([] { BinTokens({}); }, "no token files: name at least one .bin");

  FlatTokensWriter unfinished(here + "/data.zarr");
  fails(here + "/data.zarr", "cannot read '" + here + "/data.zarr': there is no such file, folder or glob, only an " +
                                 "unfinished '" + here + "/data.zarr.partial'; check the path");
}

TEST_CASE("token sources: damaged .bin files", "[data]") {
  const Scratch folder;
  const std::string path = folder / "a.bin", other = folder / "b.bin";
  const auto fails = [&](const std::string& bytes, const std::string& message) {
    put(path, bytes);
    expect_error([&] { static_cast<void>(open_tokens(path)); }, "'" + path + "' " + message);
  };
  const std::string good = bin_header(20240520, 1, 3) + bytes_of({50256, 2, 3});
  put(path, good);
  check_source(*open_tokens(path), {{50256, 2, 3}});
  fails(good.substr(0, 1028),
        "should hold 3 tokens of 2 bytes by its header, but has 4 bytes after it: it was truncated or damaged; copy it "
        "again");
  fails(good + "x",
        "should hold 3 tokens of 2 bytes by its header, but has 7 bytes after it: it was truncated or damaged; copy it "
        "again");
  fails(bin_header(20240520, 1, -1),
        "should hold -1 tokens of 2 bytes by its header, but has 0 bytes after it: it was truncated or damaged; copy "
        "it again");
  fails(good.substr(0, 1000),
        "begins as an llm.c token file, but ends within the header, at byte 1000 of 1024: it was truncated; copy it "
        "again");
  fails(bin_header(20240520, 2, 3),
        "is an llm.c token file of version 2, but only version 1 is supported: write it again with GPT-2's tokenizer");
  fails(bytes_of({1, 2, 3}) + "x",
        "has 7 bytes, an odd number, but a token has 2: it was truncated or is not a token file");
  put(path, good);
  put(other, bytes_of({1, 2}));
  expect_error<UsageError>(
      [&] {
        BinTokens({path, other});
      },
      "'" + path + "' and '" + other +
          "' are token files of different kinds (llm.c and nanoGPT): use those of one kind");

  // A file that shrinks while it is read.
  const BinTokens source({path});
  put(path, good.substr(0, 1026));
  expect_error([&] { static_cast<void>(all_tokens(source)); },
               "cannot read '" + path + "': it ends at byte 1026, but 4 more are needed: it was truncated");

  // An id that the model does not have is found when it is read.
  put(path, bin_header(20240520, 1, 5) + bytes_of({50256, 2, 300, 4, 5}));
  const io::Loader loader(open_tokens(path), {.batch = 1, .length = 8, .shuffle = false, .vocabulary = 50256});
  expect_error<UsageError>(
      [&] { static_cast<void>(loader.batch(0)); },
      "token 0 of '" + path +
          "' has the id 50256, but the vocabulary has 50256 tokens: choose a larger vocabulary "
          "(--vocabulary of the trainers; that of a loaded model is fixed), or data made with the model's tokenizer");
}

TEST_CASE("token sources: the writers refuse what does not fit", "[data]") {
  const Scratch folder;
  const std::string path = folder / "a.bin";
  const std::vector<std::uint32_t> wide{1, 65536}, wider{1U << 31};
  {
    BinWriter writer(path);
    expect_error<UsageError>(
        [&] { writer.add(wide); },
        "a document for '" + path +
            "' has the token id 65536, which does not fit the 2 bytes of a .bin: write flat-tokens instead");
    expect_error<UsageError>([&] { writer.finish(); }, "nothing to write to '" + path + "': no document has tokens");
  }
  CHECK(std::filesystem::is_empty(folder.path()));
  expect_error<UsageError>([&] { BinWriter(path, 65536); }, "the end of text 65536 does not fit the 2 bytes of a .bin");
  put(path, "mine");
  expect_error<UsageError>([&] { BinWriter writer(path); },
                           "'" + path + "' already exists: remove it first, or write elsewhere");
  expect_error<UsageError>([&] { FlatTokensWriter writer(path); },
                           "'" + path + "' already exists: remove it first, or write elsewhere");
  CHECK(contents(path) == "mine");
  expect_error<UsageError>([&] { BinWriter(folder / "no/a.bin"); },
                           "cannot write '" + folder / "no/a.bin.partial" + "': No such file or directory");

  FlatTokensWriter writer(folder / "z");
  expect_error<UsageError>(
      [&] { writer.add(Split::train, wider); },
      "document 0 for '" + folder / "z" + "' has the token id 2147483648: ids must be below 2^31; check the tokenizer");
  expect_error<UsageError>([&] { writer.finish(); },
                           "nothing to write to '" + folder / "z" + "': no document for training has tokens");
}

TEST_CASE("token sources: a flipped bit of a .bin is an error where checksums stand beside it", "[data]") {
  const Scratch folder;
  const std::string path = folder / "x_train_0.bin", sums = path + ".crc32c";
  const Documents documents = marked(random_documents(6, 300));
  {
    BinWriter writer(path);
    for (const auto& document : random_documents(6, 300)) writer.add(document);
    writer.finish();
  }
  const std::string whole = contents(path), whole_sums = contents(sums);
  REQUIRE(whole.size() > 1024 + 3 * 65536);
  check_source(*open_tokens(path), documents);
  check_source(*open_tokens(folder / "x_train_*"), documents);  // which names the checksums too
  const auto read = [&](std::int64_t first, std::size_t count) {
    std::vector<EncodedToken> tokens(count);
    open_tokens(path)->read(first, tokens);
  };
  const auto last = static_cast<std::int64_t>((whole.size() - 1024) / 2 - 1);
  for (const std::size_t at :
       {std::size_t{1024}, std::size_t{1024 + 65536}, std::size_t{1024 + 2 * 65536 - 1}, whole.size() - 1}) {
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    put(path, bytes);
    const std::size_t chunk = (at - 1024) / 65536, first = 1024 + chunk * 65536;
    const auto touched = static_cast<std::int64_t>(chunk * 32768);
    CHECK_THROWS_WITH(
        read(std::min(touched + 7, last), 1),  // another token of the chunk
        Catch::Matchers::StartsWith(
            "'" + path + "': chunk " + std::to_string(chunk) + ", bytes " + std::to_string(first) + " to " +
            std::to_string(std::min(first + 65536, whole.size()) - 1) + ", has the checksum ") &&
            Catch::Matchers::EndsWith(
                ": it is damaged; copy the file again, or make the data again; if it was changed on purpose, remove '" +
                sums + "'"));
    if (chunk > 0) CHECK_THROWS_AS(read(touched - 5, 10), Error);  // across its beginning
    if (chunk > 0) read(touched - 5, 5);
  }
  put(path, whole);
  const auto refused = [&](const std::string& text, const std::string& why) {
    put(sums, text);
    expect_error([&] { read(0, 1); },
                 "'" + sums + "' " + why +
                     ": one of the two files is damaged or was replaced; copy both again, or remove '" + sums +
                     "' to read without checksums");
  };
  refused("{}", "holds no checksums of version 1");
  refused(R"({"format": "shardlib-bin-checksums", "version": 1})", "has no list of them");
  const std::string head = R"({"format": "shardlib-bin-checksums", "version": 1, "chunk_bytes": 65536, "begin": )";
  refused(head + "0, \"crc32c\": []}",
          "says that the tokens of '" + path + "' begin at byte 0, but they begin at byte 1024");
  refused(head + "1024, \"crc32c\": [\"0g000000\"]}", "has \"0g000000\" in place of a checksum");
  refused(
      head + "1024, \"crc32c\": [\"00000000\"]}",
      "has 1 checksums, but '" + path + "' has " + std::to_string((whole.size() - 1024 + 65535) / 65536) + " chunks");
  // One chunk for all, as large as can be.
  put(sums, R"({"format": "shardlib-bin-checksums", "version": 1, "chunk_bytes": 18446744073709551615, "begin": 1024,
                "crc32c": [")" +
                io::hex(io::crc32c(io::as_bytes(whole).subspan(1024))) + "\"]}");
  read(last, 1);
  std::filesystem::remove(sums);
  put(path, whole.substr(0, whole.size() - 1) + "x");
  read(last, 1);  // as before
}

TEST_CASE("token sources: many threads read one source", "[data]") {
  const Scratch folder;
  const Documents documents = random_documents(5, 200);
  std::vector<std::shared_ptr<const TokenSource>> sources{
      open_tokens(write_flat(folder, documents, {}, {512, 16})),
      std::make_shared<FlatTokens>(folder / "data.zarr/train", 4096)};
  BinWriter writer(folder / "b.bin");
  for (const auto& document : documents) writer.add(document);
  writer.finish();
  sources.push_back(open_tokens(folder / "b.bin"));
  for (const auto& source : sources) {
    for (const io::Rows rows : {io::Rows::packed, io::Rows::padded}) {
      const io::LoaderOptions options{.batch = 4, .length = 32, .rows = rows};
      std::vector<std::vector<std::int32_t>> expected, got(4);
      for (int r = 0; r < 4; ++r) {
        expected.emplace_back();
        const io::Loader loader(
            std::make_shared<MemoryTokens>("", source == sources[2] ? marked(documents) : documents), options);
        for (int step = 0; step < 50; ++step) {
          const auto targets = loader.rows(step, r, 1).targets;
          expected.back().insert(expected.back().end(), targets.begin(), targets.end());
        }
      }
      const io::Loader shared(source, options);
      std::vector<std::thread> threads;
      for (int r = 0; r < 4; ++r)
        threads.emplace_back([&, r] {
          for (int step = 0; step < 50; ++step) {
            const auto targets = shared.rows(step, r, 1).targets;
            auto& mine = got[static_cast<std::size_t>(r)];
            mine.insert(mine.end(), targets.begin(), targets.end());
          }
        });
      for (auto& thread : threads) thread.join();
      REQUIRE(got == expected);
    }
  }
}
