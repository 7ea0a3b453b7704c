// Every reader of the library, as a function of bytes that may be anything: it returns, or throws an Error whose text
// is short and printable. fuzz.cpp drives it with libFuzzer, fuzz_corpus_test.cpp with the files of corpus/.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "shardlib/io/checkpoint/folder.hpp"
#include "shardlib/io/data/token_files.hpp"
#include "shardlib/io/formats/safetensors.hpp"
#include "shardlib/io/formats/safetensors_files.hpp"
#include "shardlib/io/formats/zarr.hpp"
#include "shardlib/io/tokenizer/bpe.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/pipeline/schedule.hpp"
#include "shardlib/run/hugging_face.hpp"
#include "shardlib/run/metrics.hpp"
#include "shardlib/run/options.hpp"
#include "shardlib/spec/spec.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::fuzz {

/// What a target must not do: an error of the library's own, but a bad one.
struct Defect : std::logic_error {
  using std::logic_error::logic_error;
};
inline void require(bool holds, const std::string& what) {
  if (!holds) throw Defect(what);
}

/// A folder in memory for the files of this process.
class Folder {
 public:
  Folder() : path_(fmt::format("/dev/shm/shardlib_fuzz_{}", ::getpid())) { std::filesystem::create_directories(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  /// Writes the file, and gives its path.
  std::string put(const std::string& name, std::string_view bytes) const {
    const std::filesystem::path path = std::filesystem::path(path_) / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return path.string();
  }
  void remove(const std::string& name) const {
    std::error_code ignored;
    std::filesystem::remove_all(path_ + "/" + name, ignored);
  }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// The input at the first line that is "---": two files in one.
inline std::array<std::string_view, 2> halves(std::string_view input) {
  const std::size_t at = input.find("\n---\n");
  if (at == std::string_view::npos) return {input, {}};
  return {input.substr(0, at), input.substr(at + 5)};
}

inline constexpr std::size_t most_elements = 1 << 16;

inline void safetensors(const Folder& folder, std::string_view input) {
  const io::SafetensorsFile file(folder.put("file.safetensors", input));
  for (const io::SafetensorsEntry& entry : file.entries()) {
    require(file.find(entry.name) != nullptr, "an entry is found by its name");
    std::vector<std::byte> bytes(static_cast<std::size_t>(entry.end - entry.begin));
    require(bytes.size() <= input.size(), "a tensor is no longer than its file");
    file.read_bytes(entry, 0, bytes);
    std::vector<float> values(static_cast<std::size_t>(io::volume(entry.shape)));
    if (entry.dtype == "F32" || entry.dtype == "F16" || entry.dtype == "BF16")
      file.read_f32(entry, io::Index(entry.shape.size(), 0), entry.shape, values);
  }
}

/// The index of a folder with one shard, which holds the tensor `a`.
inline void safetensors_index(const Folder& folder, std::string_view input) {
  const std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  folder.put("model/model-00001-of-00001.safetensors",
             std::string(1, static_cast<char>(header.size())) + std::string(7, '\0') + header + std::string(8, '\1'));
  folder.put("model/model.safetensors.index.json", input);
  const io::SafetensorsFiles files(folder / "model");
  require(files.find("a").entry != nullptr, "the shard's tensor is found");
  require(!files.describe().empty(), "the tensors have a checksum");
}

/// A config.json.
inline void hugging_face(const Folder& folder, std::string_view input) {
  folder.put("config/config.json", input);
  run::HuggingFaceConfig config(folder / "config");
  static_cast<void>(config.integer("layers", 1));
  config.require("act", {"\"silu\""});
  if (config.has("rope_scaling.factor")) require(!config.value("rope_scaling.factor").empty(), "a value has a text");
  config.finish({"harmless"});
}

/// `.zarray` or, where it has a "node_type", `zarr.json`, and behind "---" the file of the first chunk, with others or
/// alone.
inline void zarr(const Folder& folder, std::string_view input) {
  const auto [metadata, chunk] = halves(input);
  folder.remove("array");
  folder.put(metadata.find("node_type") == std::string_view::npos ? "array/.zarray" : "array/zarr.json", metadata);
  const io::ZarrArray array = io::ZarrArray::open(folder / "array");
  const io::Index first(array.info().shape.size(), 0);
  if (!chunk.empty()) folder.put("array/" + array.chunk_key(first), chunk);
  const io::Index& shape = array.info().shape;
  if (static_cast<std::size_t>(array.chunk_size()) > most_elements) return;
  const auto read = [&](const io::Index& box) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(io::volume(box)) * array.item_bytes());
    array.read_bytes(first, box, bytes);
  };
  io::Index chunk_of_array = array.info().chunks;
  for (std::size_t i = 0; i < shape.size(); ++i) chunk_of_array[i] = std::min(chunk_of_array[i], shape[i]);
  read(chunk_of_array);
  if (static_cast<std::size_t>(array.size()) <= most_elements) read(shape);
}

/// A folder of flat tokens: attributes of the group, and behind "---" those of its array.
inline void flat_tokens(const Folder& folder, std::string_view input) {
  const auto [attributes, array] = halves(input);
  folder.remove("tokens");
  folder.put("tokens/.zgroup", R"({"zarr_format": 2})");
  folder.put("tokens/train/.zgroup", R"({"zarr_format": 2})");
  folder.put("tokens/train/.zattrs", attributes);
  const std::string_view whole = R"({"zarr_format": 2, "shape": [8], "chunks": [8], "dtype": "<u4", "compressor": null,
                                     "fill_value": 0, "order": "C", "filters": null})";
  folder.put("tokens/train/encoded_tokens/.zarray", array.empty() ? whole : array);
  std::string tokens(32, '\0');
  for (std::size_t i = 0; i < tokens.size(); i += 4) tokens[i] = i == 0 ? '\3' : '\2';  // the first begins a document
  folder.put("tokens/train/encoded_tokens/0", tokens);
  folder.put("tokens/train/seq_starts/.zarray", R"({"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "<u8",
                             "compressor": null, "fill_value": 0, "order": "C", "filters": null})");
  folder.put("tokens/train/seq_starts/0", std::string(8, '\0') + '\10' + std::string(7, '\0'));
  const auto source = io::open_tokens(folder / "tokens");
  require(source->tokens() < 1 << 30, "as many tokens as the array has");
}

/// A .bin file of llm.c or nanoGPT.
inline void token_file(const Folder& folder, std::string_view input) {
  const auto source = io::open_tokens(folder.put("tokens.bin", input));
  require(source->tokens() <= std::ssize(input), "no more tokens than bytes");
}

inline void bpe(const Folder& folder, std::string_view input) {
  const auto tokenizer = io::load_tokenizer(folder.put("ranks.tiktoken", input));
  const std::string text = "the theory\xff \xe2\x82\xac 12";
  require(tokenizer->decode(tokenizer->encode(text)) == text, "decoding undoes encoding");
}

/// vocab.bpe, and behind "---" encoder.json.
inline void bpe_folder(const Folder& folder, std::string_view input) {
  const auto [merges, encoder] = halves(input);
  folder.remove("vocabulary");
  folder.put("vocabulary/vocab.bpe", merges);
  if (!encoder.empty()) folder.put("vocabulary/encoder.json", encoder);
  static_cast<void>(io::load_tokenizer(folder / "vocabulary"));
}

/// A tokenizer.json.
inline void tokenizer_json(const Folder& folder, std::string_view input) {
  const auto tokenizer = io::load_tokenizer(folder.put("tokenizer.json", input));
  const std::string text = "<s> the theory\xff \u20ac 12</s>\n\n a\u0301<mask> x";
  for (const io::Special special : {io::Special::as_text, io::Special::allowed})
    for (const std::uint32_t id : tokenizer->encode(text, special))
      require(id < tokenizer->vocabulary_size(), "an id is in the vocabulary");
  static_cast<void>(tokenizer->decode(tokenizer->encode(text)));
}

/// Any text, with small tokenizers of each kind: those of tokenizer.json that change no text give it back.
inline void tokenizer_text(const Folder& folder, std::string_view input) {
  const auto small = [&](const char* name, const std::string& model, const std::string& steps) {
    std::string vocabulary;
    const bool bytes = steps.find("ByteLevel") != std::string::npos;
    for (int byte = 0, next = 256; byte < 256; ++byte) {
      const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      vocabulary += bytes ? fmt::format("\"\\u{:04x}\": {}, ", printable ? byte : next++, byte)
                          : fmt::format("\"<0x{:02X}>\": {}, ", byte, byte);
    }
    const std::string words = R"("t": 256, "h": 257, "th": 258, "\u2581": 259, "\u2581\u2581": 260)";
    const std::string pairs = R"(["t h", "\u2581 \u2581"])";
    return io::load_tokenizer(folder.put(
        name, fmt::format(R"({{"version": "1.0", "added_tokens": [{{"id": {0}, "content": "</s>", "special": true,
"single_word": false, "lstrip": false, "rstrip": false, "normalized": false}}, {{"id": {1}, "content": "  ",
"special": false, "single_word": false, "lstrip": false, "rstrip": false, "normalized": true}}],
"model": {{"type": "BPE", {2} "vocab": {{{3} {4}}}, "merges": {5}}}, {6}}})",
                          bytes ? 257 : 261, bytes ? 258 : 262, model, vocabulary, bytes ? R"("th": 256)" : words,
                          bytes ? R"(["t h"])" : pairs, steps)));
  };
  const char* const regex =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*)"
      R"(|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+)";
  static const auto llama3 =
      small("llama3.json", "",
            fmt::format(R"("pre_tokenizer": {{"type": "Sequence", "pretokenizers": [{{"type": "Split", "pattern":
{{"Regex": "{}"}}, "behavior": "Isolated", "invert": false}}, {{"type": "ByteLevel", "add_prefix_space": false,
"trim_offsets": true, "use_regex": false}}]}}, "decoder": {{"type": "ByteLevel"}})",
                        regex));
  static const auto llama2 = small("llama2.json", R"("byte_fallback": true,)",
                                   R"("normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend",
"prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}, "decoder": {"type":
"Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type":
"ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})");
  static const auto nfkc = small("nfkc.json", R"("ignore_merges": true,)",
                                 R"("normalizer": {"type": "NFKC"}, "pre_tokenizer": {"type": "Sequence",
"pretokenizers": [{"type": "Digits", "individual_digits": true}, {"type": "ByteLevel", "add_prefix_space": true,
"trim_offsets": true}]}, "decoder": {"type": "ByteLevel"})");
  const std::string whole(input);
  require(llama3->decode(llama3->encode(whole)) == whole, "decoding undoes encoding");
  // The sign of spaces within a text is a space afterwards, as in Hugging Face's.
  if (whole.find("\u2581") == std::string::npos)
    require(llama2->decode(llama2->encode(whole)) == whole, "decoding undoes encoding with bytes for characters");
  for (const io::Special special : {io::Special::as_text, io::Special::allowed})
    for (const auto& tokenizer : {llama3, llama2, nfkc})
      static_cast<void>(tokenizer->decode(tokenizer->encode(whole, special)));
}

/// Any text, with a small vocabulary of every byte and some pairs.
inline void text(const Folder&, std::string_view input) {
  static const io::BpeTokenizer tokenizer = [] {
    std::vector<std::string> tokens;
    for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
    for (const char* pair : {"th", "he", "the", " t", " the", "  ", "\xc3\xa9", "12", "'s", "\r\n"})
      tokens.emplace_back(pair);
    return io::BpeTokenizer(tokens);
  }();
  const std::string whole(input);
  require(tokenizer.decode(tokenizer.encode(whole)) == whole, "decoding undoes encoding");
}

inline void config(const Folder& folder, std::string_view input) {
  const std::string path = folder.put("config.toml", input);
  std::int64_t steps = 1;
  std::uint64_t seed = 0;
  double rate = 1;
  bool tied = false;
  std::string dtype = "f32";
  std::vector<std::string> names;
  run::Options options("fuzz", "Reads a file.");
  options.add("--steps", steps, "steps", run::size(0)).add("--seed", seed, "seed");
  options.group("model").add("--rate", rate, "rate", run::above(0)).flag("--tied", tied, "tied");
  options.add("--dtype", dtype, "dtype", run::one_of({"f32", "bf16"})).add("--names", names, "names");
  options.preset("small", {{"steps", "2"}}, "a small one");
  const char* const arguments[] = {"fuzz", "--config", path.c_str()};
  static_cast<void>(run::config_entries(input, "fuzz"));
  if (!options.parse(3, arguments)) return;
  // What was read and is written again says the same.
  const std::string written = options.to_toml();
  const auto entries = run::config_entries(written, "written");
  require(std::ranges::any_of(entries, [&](const auto& e) { return e.key == "seed"; }), "a setting is written");
}

inline void schedule(const Folder&, std::string_view input) {
  const pipeline::Schedule schedule = pipeline::parse_csv(input, "fuzz");
  require(schedule.num_stages() > 0, "a schedule has stages");
}

inline void spec(const Folder&, std::string_view input) {
  const ParsedTensor tensor = parse_tensor(input);
  if (tensor.error.empty()) {
    const auto printed = to_string(tensor.spec);
    const ParsedTensor again = parse_tensor(std::string_view(printed));
    require(again.error.empty() && again.spec == tensor.spec, "a printed spec is the same spec");
  }
  require(tensor.error.size() < 2000, "a short error");
  static_cast<void>(parse_op(input));
}

/// A checkpoint's manifest behind its checksum, and behind "---" the attributes of its group.
inline void checkpoint(const Folder& folder, std::string_view input) {
  const auto [files, attributes] = halves(input);
  folder.remove("step");
  folder.put("step/.zgroup", R"({"zarr_format": 2})");
  if (!attributes.empty()) folder.put("step/.zattrs", attributes);
  folder.put("step/manifest.json",
             fmt::format("{{\"crc32c\": \"{:08x}\",\n{}",
                         io::crc32c(std::as_bytes(std::span(files.data(), files.size()))), files));
  const io::Checkpoint found = io::Checkpoint::open(folder / "step");
  static_cast<void>(found.damages());
}

inline void records(const Folder& folder, std::string_view input) {
  const std::string path = folder.put("metrics.jsonl", input);
  for (const run::Record& record : run::read_records(path)) static_cast<void>(run::to_json(record));
  static_cast<void>(run::read_samples(path));
}

struct Target {
  const char* name;
  void (*run)(const Folder&, std::string_view);
};
inline constexpr Target targets[] = {
    {"safetensors", safetensors},
    {"safetensors_index", safetensors_index},
    {"hugging_face", hugging_face},
    {"zarr", zarr},
    {"flat_tokens", flat_tokens},
    {"token_file", token_file},
    {"bpe", bpe},
    {"bpe_folder", bpe_folder},
    {"tokenizer_json", tokenizer_json},
    {"tokenizer_text", tokenizer_text},
    {"text", text},
    {"config", config},
    {"schedule", schedule},
    {"spec", spec},
    {"checkpoint", checkpoint},
    {"records", records},
};

/// Calls the target. Throws Defect for an error that is not the library's, too long to read, or not printable.
inline void run_target(const Target& target, const Folder& folder, std::string_view input) {
  std::string message;
  try {
    return target.run(folder, input);
  } catch (const Defect&) {
    throw;
  } catch (const Error& error) {
    message = error.what();
  } catch (const std::exception& error) {
    throw Defect(std::string("an error of another library: ") + error.what());
  }
  require(!message.empty() && message.size() < 1500,
          fmt::format("a message of {} characters: {}", message.size(), message.substr(0, 300)));
}

}  // namespace shardlib::fuzz
