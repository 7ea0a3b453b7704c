// tokenizer.json: the ids of Hugging Face's tokenizers on small files of each style (tokenizer_styles.py), and what is
// refused. tokenizer_oracle.py compares the same files on long texts.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <shardlib/io/tokenizer/bpe.hpp>
#include <shardlib/io/tokenizer/tokenizer.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using io::Special;
using nlohmann::json;
using Ids = std::vector<std::uint32_t>;

namespace {

const std::string styles = SHARDLIB_TEST_DATA "/tokenizers/";

json style(const std::string& name) {
  return json::parse(test::contents(styles + name + ".json"));
}

std::shared_ptr<const io::Tokenizer> load(const test::Scratch& folder, const json& tokenizer) {
  test::put(folder / "tokenizer.json", tokenizer.dump());
  return io::load_tokenizer(folder / "tokenizer.json");
}

TEST_CASE("tokenizer.json: the ids and texts of Hugging Face's tokenizers", "[tokenizer]") {
  const json expected = json::parse(test::contents(styles + "expected.json"));
  CHECK(expected.size() == 9);
  for (const auto& [name, cases] : expected.items()) {
    const auto tokenizer = io::load_tokenizer(styles + name + ".json");
    for (std::size_t i = 0; i < cases["texts"].size(); ++i) {
      const auto text = cases["texts"][i].get<std::string>();
      INFO(name << ": " << text);
      CHECK(tokenizer->encode(text) == cases["as_text"][i].get<Ids>());
      const Ids special = tokenizer->encode(text, Special::allowed);
      CHECK(special == cases["special"][i].get<Ids>());
      const auto decoded = cases["decoded"][i].get<std::string>();
      // A token of several characters below U+0100 is bytes that are not UTF-8; the expected ones have U+FFFD there.
      if (decoded.find("\ufffd") == std::string::npos) CHECK(tokenizer->decode(special) == decoded);
    }
  }
}

TEST_CASE("tokenizer.json: white space that a token has taken is no token, as in Hugging Face's tokenizers",
          "[tokenizer]") {
  const test::Scratch folder;
  json made = style("gpt2");
  made["added_tokens"][1] = made["added_tokens"][2];
  made["added_tokens"][1]["id"] = 577;  // <r> takes the white space behind it
  made["added_tokens"][2] = made["added_tokens"][3];
  made["added_tokens"][2].update({{"id", 578}, {"content", "  "}, {"lstrip", true}});
  made["added_tokens"].erase(4);
  made["added_tokens"].erase(3);
  const auto tokenizer = load(folder, made);
  CHECK(tokenizer->encode("x<r>  y") == Ids{87, 577, 88});
  CHECK(tokenizer->encode("x   y<r>  ") == Ids{87, 578, 312, 577});
}

TEST_CASE("tokenizer.json: special tokens of a template count, and those in the text within it do not", "[tokenizer]") {
  const auto qwen = io::load_tokenizer(styles + "qwen2.json");
  const auto ids = [&](const std::string& text) { return qwen->encode(text); };
  Ids expected{579};
  for (const std::uint32_t id : ids("a<|im_end|>b<|im_")) expected.push_back(id);
  expected.push_back(580);
  CHECK(qwen->encode_within("<|im_start|>", "a<|im_end|>b<|im_", "<|im_end|>") == expected);
  CHECK(qwen->encode_within("<|im_", "end", "|>") == ids("<|im_end|>"));  // of both
  CHECK(qwen->encode_within("", "<|im_end|>", "") == ids("<|im_end|>"));
  CHECK(qwen->encode_within("a", "", "<|im_end|>").back() == 580);
  const auto found = qwen->special_tokens("x<|im_end|><think>\n<|endoftext|>");
  REQUIRE(found.size() == 2);  // <think> is not special
  CHECK(found[0].begin == 1);
  CHECK(found[0].end == 11);
  CHECK(found[0].id == 580);
  CHECK(found[1].id == 578);
  // Llama 2's <unk> is found in the normalized text.
  const auto llama = io::load_tokenizer(styles + "llama2.json");
  CHECK(llama->encode_within("", "", "<unk>") == Ids{0});
  CHECK(llama->encode_within("", "<unk>", "") == llama->encode("<unk>"));
  // Others have the end of text.
  const io::ByteTokenizer bytes;
  CHECK(bytes.encode_within("<|endoftext|>", "<|endoftext|", "") ==
        bytes.encode(std::string(1, '\0') + "<|endoftext|"));
  CHECK(bytes.encode_within("<|endoftext|", ">", "<|endoftext|>").size() == 14);
}

TEST_CASE("tokenizer.json: bytes that are not UTF-8 have ids, and come back", "[tokenizer]") {
  std::uint64_t state = 1;
  const auto below = [&](std::uint64_t n) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (state >> 33) % n;
  };
  for (const char* name : {"gpt2", "llama3", "llama2", "gemma"}) {
    const auto tokenizer = io::load_tokenizer(styles + name + ".json");
    for (int round = 0; round < 500; ++round) {
      std::string text = "x";  // gpt2's <mask> takes white space before it
      for (std::uint64_t n = below(40); n > 0; --n)
        text += round % 2 == 0 ? static_cast<char>(below(256)) : "a b\xc3\xa4\xff\n\xe2\x96\xf0\x9f"[below(12)];
      INFO(name);
      REQUIRE(tokenizer->decode(tokenizer->encode(text)) == text);
    }
  }
  // Normal forms leave such bytes alone, and join nothing across them.
  const auto normal = io::load_tokenizer(styles + "qwen2.json");
  CHECK(normal->decode(normal->encode("a\u0301\xff\u0301"
                                      "e\xcc")) ==
        "\u00e1\xff\u0301"
        "e\xcc");
}

TEST_CASE("tokenizer.json: a space before the first token belongs to the beginning of a text", "[tokenizer]") {
  const auto tokenizer = io::load_tokenizer(styles + "llama2.json");
  const Ids ids = tokenizer->encode("God said");
  CHECK(tokenizer->decode(ids) == "God said");
  std::string text = "And";
  for (const std::uint32_t id : ids) tokenizer->append_decoded(id, text);
  CHECK(text == "And God said");
  expect_error<UsageError>([&] { tokenizer->append_decoded(99999, text); },
                           "the token id 99999 is not in the vocabulary of '" + tokenizer->name() + "', which has " +
                               std::to_string(tokenizer->vocabulary_size()) +
                               " ids: was the text encoded with another tokenizer?");
}

TEST_CASE("tokenizer.json: the fingerprint is that of the encoding", "[tokenizer]") {
  const test::Scratch folder;
  const json made = style("llama2");
  const auto before = load(folder, made);
  CHECK(before->name() == "bpe-" + before->fingerprint().substr(0, 12));
  json pairs = made;
  for (json& merge : pairs["model"]["merges"]) {
    const auto text = merge.get<std::string>();
    merge = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
  }
  CHECK(load(folder, pairs)->fingerprint() == before->fingerprint());
  json other = made;
  std::swap(other["model"]["merges"][0], other["model"]["merges"][1]);
  CHECK(load(folder, other)->fingerprint() != before->fingerprint());
  other = made;
  other["added_tokens"][1]["rstrip"] = true;
  CHECK(load(folder, other)->fingerprint() != before->fingerprint());
  other = made;
  other["normalizer"]["normalizers"].erase(0);
  CHECK(load(folder, other)->fingerprint() != before->fingerprint());
}

TEST_CASE("tokenizer.json: which token ends a text", "[tokenizer]") {
  const test::Scratch folder;
  const json made = style("llama3");
  CHECK(load(folder, made)->end_of_text() == made["added_tokens"][1]["id"]);
  test::put(folder / "tokenizer_config.json", R"({"eos_token": {"content": "<|eot_id|>"}, "bos_token": null})");
  CHECK(load(folder, made)->end_of_text() == made["added_tokens"][3]["id"]);
  CHECK(io::load_tokenizer(folder.path())->end_of_text() == made["added_tokens"][3]["id"]);
  test::put(folder / "tokenizer_config.json", R"({"eos_token": "<end>"})");
  expect_error<UsageError>([&] { load(folder, made); },
                           "'" + folder / "tokenizer.json" +
                               "' has no token \"<end>\", which the tokenizer_config.json beside it has as its "
                               "eos_token: the files do not belong together; get both again");
  test::put(folder / "tokenizer_config.json", R"({"eos_token": null})");
  CHECK(load(folder, made)->end_of_text() == made["added_tokens"][1]["id"]);
  std::filesystem::remove(folder / "tokenizer_config.json");
  const auto unsaid = [&](json changed, const std::string& count) {
    expect_error<UsageError>([&] { load(folder, changed); },
                             "'" + folder / "tokenizer.json" + "' does not say which token ends a text, and has " +
                                 count + " of the usual names (<|endoftext|>, </s>): put the tokenizer_config.json " +
                                 "that belongs to it beside it, with its eos_token");
  };
  json changed = made;
  changed["added_tokens"][1]["content"] = "<stop>";
  unsaid(changed, "none");
  changed = made;
  changed["added_tokens"][2]["content"] = "</s>";
  unsaid(changed, "more than one");
}

TEST_CASE("tokenizer.json: settings of the tokenizer_config.json count, as in transformers", "[tokenizer]") {
  const test::Scratch folder;
  const json made = style("gpt2");
  const auto token = [](const std::string& content, bool special, bool left) {
    return json{{"content", content}, {"special", special},     {"lstrip", left},
                {"rstrip", false},    {"normalized", !special}, {"single_word", false}};
  };
  const auto configure = [&](const json& config) { test::put(folder / "tokenizer_config.json", config.dump()); };
  const auto before = load(folder, made);
  configure({{"add_prefix_space", false}, {"added_tokens_decoder", {{"577", token("<mask>", true, true)}}}});
  CHECK(load(folder, made)->fingerprint() == before->fingerprint());
  configure({{"added_tokens_decoder", {{"577", token("<mask>", true, false)}, {"578", token("<r>", false, true)}}}});
  const auto tokenizer = load(folder, made);
  CHECK(tokenizer->fingerprint() != before->fingerprint());
  CHECK(tokenizer->encode("x  <mask>  y <r>  z", Special::allowed) == Ids{87, 550, 577, 220, 312, 578, 220, 220, 89});
  const std::string ending =
      ": make the ids with another program, and train on them with --tokenizer bytes (docs/tokenizer.md)";
  const auto refuses = [&](const json& config, const std::string& message) {
    configure(config);
    expect_error<UsageError>([&] { load(folder, made); },
                             "'" + folder / "tokenizer_config.json" + "': " + message + ending);
  };
  refuses({{"add_prefix_space", true}},
          "'add_prefix_space' is true, but shardlib computes false, as the tokenizer.json says");
  json other = token("<mask>", true, false);
  other["single_word"] = true;
  refuses({{"added_tokens_decoder", {{"577", other}}}},
          "'added_tokens_decoder.577.single_word' is true, but shardlib computes false");
  refuses({{"added_tokens_decoder", {{"999", {{"content", "<new>"}}}}}},
          "'added_tokens_decoder.999' is {\"content\":\"<new>\"}, but shardlib computes the tokens of the "
          "tokenizer.json");
}

TEST_CASE("tokenizer.json: what is not computed is refused by its key", "[tokenizer]") {
  const test::Scratch folder;
  const std::string file = "'" + folder / "tokenizer.json" + "': ";
  const auto refuses = [&](const std::string& name, const std::function<void(json&)>& change,
                           const std::string& message) {
    json made = style(name);
    change(made);
    INFO(message);
    expect_error<UsageError>(
        [&] { load(folder, made); },
        file + message +
            ": make the ids with another program, and train on them with --tokenizer bytes (docs/tokenizer.md)");
  };
  const auto set = [](const std::string& pointer, const json& value) {
    return [=](json& made) { made[json::json_pointer(pointer)] = value; };
  };
  refuses("gpt2", set("/version", "2.0"), "'version' is \"2.0\", but shardlib computes 1.0");
  refuses("gpt2", set("/extra", 1), "'extra' is 1, but shardlib computes no key of this name");
  refuses("gpt2", set("/model/type", "WordPiece"), "'model.type' is \"WordPiece\", but shardlib computes BPE");
  refuses("gpt2", set("/model/dropout", 0.1), "'model.dropout' is 0.1, but shardlib computes null");
  refuses("gpt2", set("/model/end_of_word_suffix", "</w>"),
          "'model.end_of_word_suffix' is \"</w>\", but shardlib computes null");
  refuses("llama2", set("/model/byte_fallback", false),
          "'model.byte_fallback' is false, but shardlib computes true, or a pre_tokenizer that ends with ByteLevel, so "
          "that all texts have ids");
  refuses("gpt2", set("/pre_tokenizer", {{"type", "WhitespaceSplit"}}),
          "'pre_tokenizer.type' is \"WhitespaceSplit\", but shardlib computes ByteLevel, Split, Digits, Metaspace and "
          "Sequence");
  refuses("llama3", set("/pre_tokenizer/pretokenizers/0/pattern/Regex", "\\p{L}+"),
          "'pre_tokenizer.pretokenizers[0].pattern.Regex' is \"\\\\p{L}+\", but shardlib computes the regular "
          "expressions of GPT-2, Llama 3 and Qwen 2");
  refuses("llama3", set("/pre_tokenizer/pretokenizers/0/behavior", "MergedWithNext"),
          "'pre_tokenizer.pretokenizers[0].behavior' is \"MergedWithNext\", but shardlib computes Isolated, or Removed "
          "and inverted, with this Regex");
  refuses(
      "qwen2", set("/normalizer/type", "Lowercase"),
      "'normalizer.type' is \"Lowercase\", but shardlib computes NFC, NFD, NFKC, NFKD, Prepend, Replace and Sequence");
  refuses("gemma", set("/normalizer/pattern", {{"Regex", " +"}}),
          "'normalizer.pattern' is {\"Regex\":\" +\"}, but shardlib computes a String");
  refuses("llama2", set("/decoder/decoders/3/start", 2),
          "'decoder.decoders[3].start' is 2, but shardlib computes 0 or 1");
  refuses("gpt2", set("/decoder", nullptr), "'decoder' is null, but shardlib computes a decoder");
  refuses(
      "metaspace_always",
      [](json& made) {
        made["model"]["vocab"]["x\u2581"] = made["model"]["vocab"]["\u2581"];
        made["model"]["vocab"].erase("\u2581");
        made["model"]["merges"] = json::array();
      },
      "'decoder.decoders[1].type' is \"Metaspace\", but shardlib computes ByteFallback only as a later step, where the "
      "vocabulary has no \"\u2581\"");
  refuses("gpt2", set("/added_tokens/1/single_word", true),
          "'added_tokens[1].single_word' is true, but shardlib computes false");
  refuses("gpt2", set("/added_tokens/2/id", 999),
          "'added_tokens[2].id' is 999, but shardlib computes the ids that the model's tokens have, or the next ones, "
          "here 578");
  refuses("gpt2", set("/added_tokens/2/content", "<mask>"),
          "'added_tokens[2].content' is \"<mask>\", but shardlib computes added tokens that differ");
  refuses("metaspace_first", set("/pre_tokenizer/add_prefix_space", false),
          "'pre_tokenizer.add_prefix_space' is false, but shardlib computes true where 'prepend_scheme' is not never");
  // Where a piece stands in the original text: a Replace moves its beginning, and what is prepended has it too.
  const json metaspace = style("metaspace_first")["pre_tokenizer"], digits = {{"type", "Digits"}},
             replace = {{"type", "Replace"}, {"pattern", {{"String", "``"}}}, {"content", "x"}};
  refuses(
      "metaspace_first", set("/normalizer", replace),
      "'pre_tokenizer.prepend_scheme' is \"first\", but shardlib computes first as the first step, without a Replace "
      "of several characters before it");
  for (const json& normalizer : {json{{"type", "NFKC"}}, json{{"type", "Prepend"}, {"prepend", "a"}}})
    refuses(
        "metaspace_first",
        [&](json& made) {
          made["normalizer"] = normalizer;
          made["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {digits, metaspace}}};
        },
        "'pre_tokenizer.pretokenizers[1].prepend_scheme' is \"first\", but shardlib computes first as the first step, "
        "without a Replace of several characters before it");
  json plain = style("metaspace_first");
  plain["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {digits, metaspace}}};
  CHECK(load(folder, plain)->encode("1a") == load(folder, style("metaspace_first"))->encode("1a"));
}

TEST_CASE("tokenizer.json: damaged files", "[tokenizer]") {
  const test::Scratch folder;
  const std::string file = "'" + folder / "tokenizer.json" + "': ";
  const auto damaged = [&](const std::function<void(json&)>& change, const std::string& message) {
    json made = style("gpt2");
    change(made);
    expect_error([&] { load(folder, made); }, file + message + " there: the file is damaged; get it again");
  };
  damaged([](json& made) { made.erase("model"); }, "'model' is absent, but a tokenizer.json has a value");
  damaged([](json& made) { made["model"]["vocab"] = 3; }, "'model.vocab' is 3, but a tokenizer.json has an object");
  damaged([](json& made) { made["model"]["vocab"]["!"] = -1; },
          "'model.vocab.!' is -1, but a tokenizer.json has a whole number");
  damaged([](json& made) { made["model"]["vocab"]["!"] = 1; },
          "'model.vocab.\"' is 1, but a tokenizer.json has one token, with a spelling, for an id");
  damaged([](json& made) { made["model"]["merges"][2] = "one"; },
          "'model.merges[2]' is \"one\", but a tokenizer.json has two tokens with a space between them");
  damaged([](json& made) { made["model"]["merges"][2] = "q zzz"; },
          "'model.merges[2]' is \"q zzz\", but a tokenizer.json has tokens of 'model.vocab', which has no \"zzz\",");
  damaged([](json& made) { made["added_tokens"][0].erase("special"); },
          "'added_tokens[0].special' is absent, but a tokenizer.json has a value");
  test::put(folder / "tokenizer.json", "{\"version\": ");
  CHECK(error_of([&] { static_cast<void>(io::read_tokenizer_json(folder / "tokenizer.json")); })
            .starts_with("'" + folder / "tokenizer.json" +
                         "' is not JSON: it is not a tokenizer.json, or it is damaged; get it again ("));
  json made = style("gpt2");
  made["model"]["vocab"].erase("!");
  test::put(folder / "tokenizer.json", made.dump());
  const std::string message =
      error_of<UsageError>([&] { static_cast<void>(io::read_tokenizer_json(folder / "tokenizer.json")); });
  CHECK(message.starts_with(file + "'model.vocab' is {"));
  CHECK(
      message.ends_with("but shardlib computes vocabularies with a token for each byte, and there is none for 33: make "
                        "the ids with another program, and train on them with --tokenizer bytes (docs/tokenizer.md)"));
}

TEST_CASE("tokenizer.json: GPT-2's own is the tokenizer of its vocabulary", "[tokenizer]") {
  const char* const path = std::getenv("SHARDLIB_VOCABULARY");
  if (path == nullptr) return;
  const test::Scratch folder;
  const std::vector<std::string> tokens = io::read_tiktoken(path);
  json made = style("gpt2");
  // The spelling of each byte.
  std::vector<std::string> spelled(256);
  const auto printable = [](int b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174; };
  int next = 256;
  for (int b = 0; b < 256; ++b) {
    const int code = printable(b) ? b : next++;
    spelled[static_cast<std::size_t>(b)] =
        code < 0x80 ? std::string(1, static_cast<char>(code))
                    : std::string{static_cast<char>(0xc0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3f))};
  }
  const auto spell = [&](std::string_view bytes) {
    std::string text;
    for (const char c : bytes) text += spelled[static_cast<unsigned char>(c)];
    return text;
  };
  json vocabulary = json::object(), merges = json::array();
  for (const std::string& token : tokens) {
    for (std::size_t cut = 1; cut < token.size() && vocabulary.size() >= 256; ++cut) {
      const std::string left = spell(token.substr(0, cut)), right = spell(token.substr(cut));
      if (!vocabulary.contains(left) || !vocabulary.contains(right)) continue;
      merges.push_back(left + " " + right);
      break;
    }
    vocabulary[spell(token)] = vocabulary.size();
  }
  vocabulary["<|endoftext|>"] = tokens.size();
  made["model"]["vocab"] = vocabulary;
  made["model"]["merges"] = merges;
  made["added_tokens"] = json::array({made["added_tokens"][0]});
  made["added_tokens"][0]["id"] = tokens.size();
  const auto tokenizer = load(folder, made);
  CHECK(tokenizer->name() == "gpt2");
  CHECK(tokenizer->fingerprint() == io::load_tokenizer(path)->fingerprint());
  CHECK(tokenizer->encode("Hello world") == Ids{15496, 995});
  // Another end, or another added token, is another tokenizer.
  made["pre_tokenizer"]["add_prefix_space"] = true;
  CHECK(load(folder, made)->name() != "gpt2");
}

}  // namespace
