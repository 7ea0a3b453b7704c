// Tokenizers: pieces and joining against references written here, files good and damaged. tokenizer_oracle.py compares
// GPT-2's vocabulary with other encoders; where SHARDLIB_VOCABULARY names its file, the last case uses it too.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <shardlib/io/tokenizer/bpe.hpp>
#include <shardlib/io/tokenizer/impl/pieces.hpp>
#include <shardlib/io/tokenizer/tokenizer.hpp>
#include <shardlib/support/sha256.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using io::BpeTokenizer;
using io::ByteTokenizer;
using io::Special;
using Ids = std::vector<std::uint32_t>;

namespace {

struct Random {
  std::uint64_t state = 1;
  std::uint64_t below(std::uint64_t n) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (state >> 33) % n;
  }
};

std::vector<std::string> all_bytes() {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, static_cast<char>(b));
  return tokens;
}

/// The bytes and some words, each joined from two tokens before it.
std::vector<std::string> small_vocabulary() {
  std::vector<std::string> tokens = all_bytes();
  for (const char* word :
       {" t", "he", "th", "the", " the", "aa", "in", " in", "ab", "ba", "aab", "aaaa", "ing", "\xc3\xa4"})
    tokens.emplace_back(word);
  return tokens;
}

/// Joins the leftmost pair of the lowest rank, one at a time, by looking at all of them.
Ids joined_slowly(const std::vector<std::string>& tokens, std::string_view piece) {
  const auto rank = [&](const std::string& bytes) {
    std::size_t id = 0;
    while (id < tokens.size() && tokens[id] != bytes) ++id;
    return id;
  };
  std::vector<std::string> parts;
  for (const char c : piece) parts.emplace_back(1, c);
  for (;;) {
    std::size_t best = tokens.size(), at = 0;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i)
      if (const std::size_t r = rank(parts[i] + parts[i + 1]); r < best) best = r, at = i;
    if (best == tokens.size()) break;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
  Ids ids;
  for (const std::string& part : parts) ids.push_back(static_cast<std::uint32_t>(rank(part)));
  return ids;
}

using Pieces = std::vector<std::string>;
Pieces pieces(std::string_view text) {
  Pieces found;
  const char *p = text.data(), *const end = p + text.size();
  while (p < end) {
    const char* const next = io::detail::piece_end(p, end);
    found.emplace_back(p, next);
    p = next;
  }
  return found;
}

std::string base64(std::string_view bytes) {
  std::string text, bits;
  for (const char c : bytes)
    for (int bit = 7; bit >= 0; --bit) bits += static_cast<char>('0' + ((static_cast<unsigned char>(c) >> bit) & 1));
  while (bits.size() % 6 != 0) bits += '0';
  for (std::size_t i = 0; i < bits.size(); i += 6)
    text +=
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"[std::stoi(bits.substr(i, 6), nullptr, 2)];
  while (text.size() % 4 != 0) text += '=';
  return text;
}

std::string tiktoken_lines(const std::vector<std::string>& tokens) {
  std::string text;
  for (std::size_t id = 0; id < tokens.size(); ++id) text += base64(tokens[id]) + " " + std::to_string(id) + "\n";
  return text;
}

std::string utf8(int code) {
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xc0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3f))};
}

/// GPT-2's spelling of a byte, and the bytes in its order.
std::string spelled(int byte) {
  const auto printable = [](int b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174; };
  if (printable(byte)) return utf8(byte);
  int before = 0;
  for (int b = 0; b < byte; ++b) before += printable(b) ? 0 : 1;
  return utf8(256 + before);
}
std::vector<int> gpt2_order() {
  std::vector<int> printable, others;
  for (int b = 0; b < 256; ++b) (spelled(b) == utf8(b) ? printable : others).push_back(b);
  printable.insert(printable.end(), others.begin(), others.end());
  return printable;
}

/// encoder.json of the bytes and some further tokens, as spelled.
std::string encoder_json(const std::vector<std::string>& more) {
  std::string text = "{";
  int id = 0;
  const auto add = [&](const std::string& token) {
    text += (id == 0 ? "\"" : ", \"") + (token == "\"" || token == "\\" ? "\\" + token : token) +
            "\": " + std::to_string(id);
    ++id;
  };
  for (const int b : gpt2_order()) add(spelled(b));
  for (const std::string& token : more) add(token);
  return text + "}";
}

}  // namespace

TEST_CASE("sha256: the standard's examples, and every length of a tail", "[tokenizer]") {
  CHECK(io::hex(io::sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(io::hex(io::sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(io::hex(io::sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(io::hex(io::sha256(std::string(1000000, 'a'))) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  // hashlib.sha256(b"".join(hashlib.sha256(b"x" * n).digest() for n in range(200))).hexdigest()
  std::string digests;
  for (std::size_t n = 0; n < 200; ++n) {
    const io::Sha256 digest = io::sha256(std::string(n, 'x'));
    digests.append(digest.begin(), digest.end());
  }
  CHECK(io::hex(io::sha256(digests)) == "f5e61141898898cdabae3590cb32e1901b40bdc59952302926213a44c105c129");
}

TEST_CASE("byte tokenizer: ids are bytes, the end of text is 0", "[tokenizer]") {
  const auto tokenizer = io::load_tokenizer("bytes");
  CHECK(tokenizer->name() == "bytes");
  CHECK(tokenizer->vocabulary_size() == 256);
  CHECK(tokenizer->end_of_text() == 0);
  CHECK(tokenizer->encode("a\xff<|") == Ids{97, 255, 60, 124});
  CHECK(tokenizer->encode("a<|endoftext|>b").size() == 15);
  CHECK(tokenizer->encode("<|endoftext|>a<|endoftext|><|endoftext|>b", Special::allowed) == Ids{0, 97, 0, 0, 98});
  Ids ids{7};
  tokenizer->encode("xy", ids);
  CHECK(ids == Ids{7, 120, 121});
  std::string every;
  for (int b = 0; b < 256; ++b) every += static_cast<char>(b);
  CHECK(tokenizer->decode(tokenizer->encode(every)) == every);
  expect_error<UsageError>(
      [&] {
        static_cast<void>(tokenizer->decode(Ids{255, 256}));
      },
      "the token id 256 is not in the vocabulary of 'bytes', which has 256 ids: was the text encoded with another "
      "tokenizer?");
}

TEST_CASE("pieces: GPT-2's rule", "[tokenizer]") {
  CHECK(pieces("").empty());
  CHECK(pieces("Hello, world! It's 2024.") == Pieces{"Hello", ",", " world", "!", " It", "'s", " 2024", "."});
  // Each contraction, in lower case only, and only where the apostrophe begins a piece.
  CHECK(pieces("a's't're've'm'll'd") == Pieces{"a", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d"});
  CHECK(pieces("I'S 'l 'v 'rx") == Pieces{"I", "'", "S", " '", "l", " '", "v", " '", "rx"});
  CHECK(pieces("!'s '") == Pieces{"!'", "s", " '"});
  CHECK(pieces("'sa 'd") == Pieces{"'s", "a", " '", "d"});
  // White space leaves its last character to what follows; only a plain space joins it.
  CHECK(pieces("  two  spaces\n\n\tx ") == Pieces{" ", " two", " ", " spaces", "\n\n", "\t", "x", " "});
  CHECK(pieces("a \n b\r\n\r\nc\n") == Pieces{"a", " \n", " b", "\r\n\r", "\n", "c", "\n"});
  CHECK(pieces(" \u00a0 x\u3000y\u2003\u2003z\u0085\u1680") ==
        Pieces{" \u00a0", " x", "\u3000", "y", "\u2003", "\u2003", "z", "\u0085\u1680"});
  CHECK(pieces("\x1c\ufeff\u180e\u200b") == Pieces{"\x1c\ufeff\u180e\u200b"});  // no White_Space
  // Letters and numbers of every script; marks and signs are others.
  CHECK(pieces("Straße東京ﬁ١٢²½Ⅷ〇🙂e\u0301x") ==
        Pieces{"Straße東京ﬁ", "١٢²½Ⅷ〇", "🙂", "e", "\u0301", "x"});
}

TEST_CASE("pieces: bytes that are not UTF-8 are characters of no class", "[tokenizer]") {
  // A text, and the same with the replacement character instead: their pieces end at the same places.
  const std::vector<std::pair<std::string, std::string>> atoms = {{"a", "a"},
                                                                  {"é", "é"},
                                                                  {"7", "7"},
                                                                  {" ", " "},
                                                                  {"\n", "\n"},
                                                                  {"\u2003", "\u2003"},
                                                                  {"'", "'"},
                                                                  {"s", "s"},
                                                                  {".", "."},
                                                                  {"\xff", "\ufffd"},
                                                                  {"\xc0\xaf", "\ufffd\ufffd"},
                                                                  {"\xed\xa0\x80", "\ufffd\ufffd\ufffd"},
                                                                  {"\xc3", "\ufffd"},
                                                                  {"\xf0\x9f\x99", "\ufffd"},
                                                                  {"\xf4\x90\x80\x80", "\ufffd"},
                                                                  {"🙂", "🙂"}};
  Random random;
  for (int round = 0; round < 2000; ++round) {
    std::string raw, replaced;
    std::vector<std::size_t> raw_ends, replaced_ends;
    for (std::uint64_t n = random.below(20); n > 0; --n) {
      const auto& [bytes, characters] = atoms[random.below(atoms.size())];
      raw += bytes;
      replaced += characters;
      raw_ends.push_back(raw.size());
      replaced_ends.push_back(replaced.size());
    }
    const auto ends = [](std::string_view text, const std::vector<std::size_t>& atom_ends) {
      std::vector<std::size_t> found;
      std::size_t at = 0;
      for (const std::string& piece : pieces(text)) {
        at += piece.size();
        std::size_t atom = 0;
        while (atom < atom_ends.size() && atom_ends[atom] != at) ++atom;
        found.push_back(atom);
      }
      return found;
    };
    INFO(raw);
    REQUIRE(ends(raw, raw_ends) == ends(replaced, replaced_ends));
  }
}

TEST_CASE("byte pairs: the same as joining slowly, and back to the same bytes", "[tokenizer]") {
  const std::vector<std::string> tokens = small_vocabulary();
  const BpeTokenizer tokenizer(tokens);
  CHECK(tokenizer.vocabulary_size() == 271);
  CHECK(tokenizer.end_of_text() == 270);
  CHECK(tokenizer.encode("the thing in") == Ids{259, 256, 'h', 268, 263});
  CHECK(tokenizer.encode("aaaaaaa") == Ids{267, 261, 'a'});
  Random random;
  for (int round = 0; round < 3000; ++round) {
    std::string text;
    for (std::uint64_t n = random.below(30); n > 0; --n)
      text += round % 3 == 0 ? static_cast<char>(random.below(256)) : "aabthein g\n\xc3\xa4"[random.below(12)];
    Ids expected;
    for (const std::string& piece : pieces(text)) {
      const Ids ids = joined_slowly(tokens, piece);
      expected.insert(expected.end(), ids.begin(), ids.end());
    }
    const Ids ids = tokenizer.encode(text);
    INFO(text);
    REQUIRE(ids == expected);
    REQUIRE(tokenizer.decode(ids) == text);
  }
}

TEST_CASE("byte pairs: the end of text is a token only where it is allowed", "[tokenizer]") {
  const BpeTokenizer tokenizer(small_vocabulary());
  const std::string text = "in<|endoftext|> the";
  CHECK(tokenizer.encode(text) == tokenizer.encode(text, Special::as_text));
  CHECK(tokenizer.encode(text).size() == 1 + 13 + 1);
  CHECK(tokenizer.encode(text, Special::allowed) == Ids{262, 270, 260});
  CHECK(tokenizer.decode(Ids{262, 270, 260}) == text);
  // Text before and after is cut into pieces apart: the spaces end a text, and keep together.
  CHECK(tokenizer.encode("  <|endoftext|>", Special::allowed) == Ids{' ', ' ', 270});
  CHECK(tokenizer.encode("<|endoftext|", Special::allowed).size() == 12);
}

TEST_CASE("byte pairs: both kinds of files give the same tokenizer, known by its digest", "[tokenizer]") {
  const test::Scratch folder;
  std::vector<std::string> tokens;
  for (const int b : gpt2_order()) tokens.emplace_back(1, static_cast<char>(b));
  for (const char* word : {" t", "he", " the"}) tokens.emplace_back(word);
  const std::string lines = tiktoken_lines(tokens), space = spelled(' ');
  test::put(folder / "small.tiktoken", lines);
  test::put(folder / "vocab.bpe", "#version: 0.2\n" + space + " t\nh e\n" + space + "t he\n");
  test::put(folder / "encoder.json", encoder_json({space + "t", "he", space + "the", "<|endoftext|>"}));
  const auto tiktoken = io::load_tokenizer(folder / "small.tiktoken"), merges = io::load_tokenizer(folder.path());
  CHECK(tiktoken->fingerprint() == io::hex(io::sha256(lines)));
  CHECK(merges->fingerprint() == tiktoken->fingerprint());
  CHECK(tiktoken->name() == "bpe-" + tiktoken->fingerprint().substr(0, 12));
  CHECK(merges->vocabulary_size() == 260);
  CHECK(merges->encode(" the tea") == tiktoken->encode(" the tea"));
  CHECK(merges->encode(" the tea").front() == 258);
  // Hugging Face's names for the same files; the end of text may be left out of the ids.
  const std::string hugging = folder / "hf";
  std::filesystem::create_directory(hugging);
  test::put(hugging + "/merges.txt", test::contents(folder / "vocab.bpe"));
  test::put(hugging + "/vocab.json", encoder_json({space + "t", "he", space + "the"}));
  CHECK(io::load_tokenizer(hugging)->fingerprint() == tiktoken->fingerprint());
  test::put(hugging + "/tokenizer_config.json", R"({"add_prefix_space": true})");
  CHECK_THROWS_WITH(io::load_tokenizer(hugging),
                    Catch::Matchers::StartsWith("'" + hugging +
                                                "/tokenizer_config.json': 'add_prefix_space' is true, "
                                                "but shardlib computes false without a tokenizer.json"));
  test::put(hugging + "/tokenizer_config.json", R"({"add_prefix_space": false})");
  CHECK(io::load_tokenizer(hugging)->fingerprint() == tiktoken->fingerprint());
  // A copy of any of them encodes alike, and replaces what was there.
  for (const std::string& from : {folder / "small.tiktoken", folder.path(), hugging}) {
    io::copy_tokenizer(from, folder / "copy");
    CHECK(io::load_tokenizer(folder / "copy")->fingerprint() == tiktoken->fingerprint());
    CHECK(io::is_tokenizer_copy(from, folder / "copy"));
  }
  CHECK_FALSE(io::is_tokenizer_copy(folder / "small.tiktoken", folder / "copy"));  // other files
  CHECK_FALSE(io::is_tokenizer_copy(hugging, folder / "nowhere"));
  CHECK_FALSE(io::is_tokenizer_copy("bytes", folder / "copy"));
  CHECK(test::files_below(folder / "copy").size() == 2);
  test::put(folder / "copy/vocab.json", "{}");
  CHECK_FALSE(io::is_tokenizer_copy(hugging, folder / "copy"));
}

TEST_CASE("vocabularies: errors", "[tokenizer]") {
  const test::Scratch folder;
  expect_error<UsageError>(
      [&] { static_cast<void>(io::load_tokenizer(folder / "none")); },
      "no tokenizer '" + folder / "none" +
          "': it is \"bytes\", a tokenizer.json, a .tiktoken file, or a folder with tokenizer.json or with vocab.bpe "
          "and encoder.json (scripts/vocabulary.sh gets GPT-2's)");
  expect_error<UsageError>([&] { static_cast<void>(io::load_tokenizer(folder.path())); },
                           "the folder '" + folder.path() +
                               "' holds no vocabulary: neither tokenizer.json, nor vocab.bpe and encoder.json, nor "
                               "merges.txt and vocab.json, nor a .tiktoken file");
  test::put(folder / "text.txt", "In the beginning\n");
  CHECK_THROWS_AS(static_cast<void>(io::load_tokenizer(folder / "text.txt")), UsageError);  // status 2, not damage
  const std::string path = folder / "v.tiktoken", good = tiktoken_lines(small_vocabulary());
  const auto fails = [&](const std::string& text, const std::string& message) {
    test::put(path, text);
    expect_error([&] { static_cast<void>(io::load_tokenizer(path)); }, "'" + path + "'" + message);
  };
  const std::string again = ": the file is damaged or is not a vocabulary; get it again (scripts/vocabulary.sh)";
  fails(good.substr(0, good.size() - 1), ", line 270: the line has no end, the file was cut short" + again);
  fails("AA==0\n", ", line 1: there is no \"base64 rank\"" + again);
  fails("AA== 0\nA?== 1\n", ", line 2: \"A?==\" is not base64" + again);
  for (const std::string wrong : {"AA=", "AA", "AB==", "A", "=", "", "AA=A"})
    fails(wrong + " 0\n", ", line 1: \"" + wrong + "\" is not base64" + again);
  fails("AA== 0\nAQ== 2\n", ", line 2: the rank is \"2\" instead of 1" + again);
  fails("AA== 0\nAQ== 1\r\n", ", line 2: the rank is \"1 \" instead of 1" + again);
  fails("", " has no token for the byte 0, so not every text can be encoded");
  std::vector<std::string> tokens = small_vocabulary();
  tokens.push_back("the");
  fails(tiktoken_lines(tokens), ": token 270 has the same bytes as token 259");
  tokens.back() = "xyz";
  fails(tiktoken_lines(tokens), ": token 270 cannot be joined from two other tokens");
  // Later models have tokens that GPT-2's pieces cut. Parts of characters may belong to letters.
  tokens.back() = "(t";
  test::put(path, tiktoken_lines(tokens));
  expect_error<UsageError>([&] { static_cast<void>(io::load_tokenizer(path)); },
                           "'" + path +
                               "': token 270, \"(t\", is one that GPT-2's rule cuts, so this is the vocabulary of a "
                               "model that splits texts differently (cl100k_base, Qwen): give that model's "
                               "tokenizer.json");
  for (const char* part : {"\xa4n", "\xc3\xa4\xc3"}) {
    tokens.back() = part;
    test::put(path, tiktoken_lines(tokens));
    CHECK(io::load_tokenizer(path)->vocabulary_size() == 272);
  }
  // Half of GPT-2's file is a whole vocabulary by itself: only the name and the digest tell.
  const std::string half = folder / "r50k_base.tiktoken";
  test::put(half, good);
  expect_error([&] { static_cast<void>(io::load_tokenizer(half)); },
               "'" + half + "' is not the file of this name, or not all of it: its SHA-256 is " +
                   io::hex(io::sha256(good)) +
                   " instead of 306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930; get it again "
                   "(scripts/vocabulary.sh)");

  const std::string merges = folder / "vocab.bpe", ids = folder / "encoder.json";
  const auto pairs_fail = [&](const std::string& pairs, const std::string& json, const std::string& message) {
    test::put(merges, pairs);
    test::put(ids, json);
    expect_error([&] { static_cast<void>(io::load_tokenizer(folder.path())); }, message);
  };
  const std::string together = ": the files are damaged or do not belong together";
  pairs_fail(
      "h e\n", encoder_json({"eh"}),
      "'" + merges + "', line 1: the token \"he\" has the rank 256, but '" + ids + "' has no id for it" + together);
  pairs_fail(
      "h e\nt h\n", encoder_json({"th", "he"}),
      "'" + merges + "', line 1: the token \"he\" has the rank 256, but '" + ids + "' has the id 257" + together);
  pairs_fail("h e\n", encoder_json({"he", "th", "<|endoftext|>"}),
             "'" + ids + "' has 259 tokens, but '" + merges +
                 "' makes 257, to which only the end of text may be added, as the last" + together);
  pairs_fail("h e\nthe\n", encoder_json({"he"}), "'" + merges + "', line 2: \"the\" is not a pair of tokens" + again);
  pairs_fail("h e\nt\x80 h\n", encoder_json({"he"}),
             "'" + merges + "', line 2: \"t\x80 h\" is not a pair of tokens" + again);
  pairs_fail("h e\nt h", encoder_json({"he", "th"}),
             "'" + merges + "', line 2: the line has no end, the file was cut short" + again);
  pairs_fail("", "{}", "'" + ids + "': the token \"!\" has the rank 0, but '" + ids + "' has no id for it" + together);
  pairs_fail("", "{\"!\": -1}", "'" + ids + "': \"!\" has -1 instead of an id");
  test::put(ids, "{\"!\": 0, ");
  CHECK(error_of([&] {
          static_cast<void>(io::load_tokenizer(folder.path()));
        }).starts_with("'" + ids + "' is not a JSON object of ids: it is damaged; get it again"));
}

TEST_CASE("GPT-2's vocabulary: ids that other encoders give", "[tokenizer]") {
  const char* const path = std::getenv("SHARDLIB_VOCABULARY");
  if (path == nullptr) return;  // tokenizer_oracle.py needs it in any case
  const auto tokenizer = io::load_tokenizer(path);
  CHECK(tokenizer->name() == "gpt2");
  CHECK(tokenizer->vocabulary_size() == 50257);
  CHECK(tokenizer->end_of_text() == 50256);
  const std::vector<std::pair<std::string, Ids>> known = {
      {"Hello world", {15496, 995}},
      {"Hello, world! It's 2024.", {15496, 11, 995, 0, 632, 338, 48609, 13}},
      {"  two  spaces\n\n\tx ", {220, 734, 220, 9029, 628, 197, 87, 220}},
      {"don't we'll I'D", {9099, 470, 356, 1183, 314, 6, 35}},
      {"ſt Straße 東京 ١٢٣ 👩‍👩‍👦",
       {129, 123, 83, 15195, 39683, 68,  10545, 251,   109, 12859, 105, 18923, 94, 149,
        95,  149, 96, 50169, 102,   447, 235,   41840, 102, 447,   235, 41840, 99}},
      {"<|endoftext|>", {27, 91, 437, 1659, 5239, 91, 29}},
      {"a\u0085b\u00a0c", {64, 126, 227, 65, 1849, 66}},
      {"𝟎½x²", {47728, 253, 236, 23141, 87, 31185}}};
  for (const auto& [text, ids] : known) {
    INFO(text);
    CHECK(tokenizer->encode(text) == ids);
    CHECK(tokenizer->decode(ids) == text);
  }
  CHECK(tokenizer->encode("a<|endoftext|> b", Special::allowed) == Ids{64, 50256, 275});
  Random random;
  for (int round = 0; round < 1000; ++round) {
    std::string text;
    for (std::uint64_t n = random.below(200); n > 0; --n) text += static_cast<char>(random.below(256));
    REQUIRE(tokenizer->decode(tokenizer->encode(text)) == text);
  }
  expect_error<UsageError>([&] { static_cast<void>(tokenizer->decode(Ids{50257})); },
                           "the token id 50257 is not in the vocabulary of 'gpt2', which has 50257 ids: was the text "
                           "encoded with another tokenizer?");
}
