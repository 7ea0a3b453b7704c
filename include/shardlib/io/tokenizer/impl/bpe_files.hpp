// Definitions of bpe.hpp: the files of a vocabulary.
#pragma once

#include "shardlib/io/tokenizer/bpe.hpp"

#include <utf8proc.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "shardlib/io/file.hpp"
#include "shardlib/io/impl/json.hpp"
#include "shardlib/io/impl/temporary.hpp"
#include "shardlib/io/tokenizer/impl/json_place.hpp"
#include "shardlib/io/tokenizer/impl/vocabulary.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/sha256.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io {
namespace detail {

[[noreturn]] inline void fail_vocabulary(const std::string& path, std::size_t line, const std::string& why) {
  throw Error("'" + path + "', line " + std::to_string(line) + ": " + shardlib::detail::excerpt(why, 400) +
              ": the file is damaged or is not a vocabulary; get it again (scripts/vocabulary.sh)");
}

/// Calls f(line, number from 1) for each. Throws Error where the last line has no end: the file is cut short.
template <class F>
void for_each_line(const std::string& path, std::string_view text, F&& f) {
  std::size_t number = 0;
  while (!text.empty()) {
    ++number;
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) fail_vocabulary(path, number, "the line has no end, the file was cut short");
    f(text.substr(0, end), number);
    text.remove_prefix(end + 1);
  }
}

/// Empty where `text` is not base64 of at least one byte.
inline std::string from_base64(std::string_view text) {
  std::string bytes;
  std::uint32_t word = 0;
  std::size_t digits = 0;
  for (const char c : text.substr(0, std::min(text.size(), text.find('=')))) {
    const int value = c >= 'A' && c <= 'Z'   ? c - 'A'
                      : c >= 'a' && c <= 'z' ? c - 'a' + 26
                      : c >= '0' && c <= '9' ? c - '0' + 52
                      : c == '+'             ? 62
                      : c == '/'             ? 63
                                             : -1;
    if (value < 0) return {};
    word = word << 6 | static_cast<std::uint32_t>(value);
    if (++digits % 4 != 1) bytes += static_cast<char>(word >> (6 - 2 * ((digits - 1) % 4)));
  }
  // The text must be the base64 of these bytes exactly, or it is damaged.
  return base64(bytes) == text ? bytes : std::string();
}

/// The keys of a flat JSON object and their integers.
inline std::unordered_map<std::string, std::uint32_t> read_ids(const std::string& path) {
  const Bytes bytes = read_file(path);
  std::unordered_map<std::string, std::uint32_t> ids;
  try {
    const auto all = parse_json(as_text(bytes));
    for (const auto& [token, id] : all.get_ref<const nlohmann::json::object_t&>()) {
      if (!id.is_number_unsigned() || id.get<std::uint64_t>() >= no_token)
        throw Error("'" + path + "': \"" + token + "\" has " + id.dump().substr(0, 60) + " instead of an id");
      ids.emplace(token, id.get<std::uint32_t>());
    }
  } catch (const nlohmann::json::exception& error) {
    throw Error("'" + path + "' is not a JSON object of ids: it is damaged; get it again (" + error.what() + ")");
  } catch (const DeepJson& error) {
    throw Error("'" + path + "' is not a JSON object of ids: " + error.what() + ": it is damaged; get it again");
  }
  return ids;
}

}  // namespace detail

SHARDLIB_INLINE std::vector<std::string> read_tiktoken(const std::string& path) {
  const Bytes file = read_file(path);
  const std::string digest = hex(sha256(as_text(file)));
  std::vector<std::string> tokens;
  detail::for_each_line(path, as_text(file), [&](std::string_view line, std::size_t number) {
    const std::size_t space = line.find(' ');
    if (space == std::string_view::npos) detail::fail_vocabulary(path, number, "there is no \"base64 rank\"");
    std::string token = detail::from_base64(line.substr(0, space));
    if (token.empty())
      detail::fail_vocabulary(path, number, "\"" + std::string(line.substr(0, space)) + "\" is not base64");
    if (line.substr(space + 1) != std::to_string(tokens.size()))
      detail::fail_vocabulary(
          path, number,
          "the rank is \"" + std::string(line.substr(space + 1)) + "\" instead of " + std::to_string(tokens.size()));
    tokens.push_back(std::move(token));
  });
  if (digest != detail::gpt2_digest && std::filesystem::path(path).filename() == "r50k_base.tiktoken")
    throw Error("'" + path + "' is not the file of this name, or not all of it: its SHA-256 is " + digest +
                " instead of " + std::string(detail::gpt2_digest) + "; get it again (scripts/vocabulary.sh)");
  return tokens;
}

SHARDLIB_INLINE std::vector<std::string> read_merges(const std::string& merges_path, const std::string& ids_path) {
  const detail::ByteAlphabet alphabet;
  std::vector<std::string> tokens;
  const auto ids = detail::read_ids(ids_path);
  const auto add = [&](const std::string& spelled, std::string bytes, const std::string& place) {
    const auto entry = ids.find(spelled);
    if (entry == ids.end() || entry->second != tokens.size())
      throw Error(place + ": the token \"" + spelled + "\" has the rank " + std::to_string(tokens.size()) + ", but '" +
                  ids_path + "' has " +
                  (entry == ids.end() ? "no id for it" : "the id " + std::to_string(entry->second)) +
                  ": the files are damaged or do not belong together");
    tokens.push_back(std::move(bytes));
  };
  for (const char byte : alphabet.order) {
    std::string spelled;
    for (const auto& [code, b] : alphabet.bytes) {
      if (b != byte) continue;
      utf8proc_uint8_t utf8[4];
      spelled.assign(reinterpret_cast<const char*>(utf8), static_cast<std::size_t>(utf8proc_encode_char(code, utf8)));
    }
    add(spelled, {byte}, "'" + ids_path + "'");
  }
  const Bytes file = read_file(merges_path);
  detail::for_each_line(merges_path, as_text(file), [&](std::string_view line, std::size_t number) {
    if (number == 1 && line.starts_with("#version")) return;
    const std::size_t space = std::min(line.find(' '), line.size());
    const std::string left = alphabet.decode(line.substr(0, space));
    const std::string right = alphabet.decode(space < line.size() ? line.substr(space + 1) : "");
    if (left.empty() || right.empty())
      detail::fail_vocabulary(merges_path, number, "\"" + std::string(line) + "\" is not a pair of tokens");
    std::string spelled(line);
    spelled.erase(space, 1);
    add(spelled, left + right, "'" + merges_path + "', line " + std::to_string(number));
  });
  const auto end = ids.find(std::string(end_of_text_mark));
  const std::size_t expected = tokens.size() + (end != ids.end() ? 1 : 0);
  if (ids.size() != expected || (end != ids.end() && end->second != tokens.size()))
    throw Error("'" + ids_path + "' has " + std::to_string(ids.size()) + " tokens, but '" + merges_path + "' makes " +
                std::to_string(tokens.size()) + ", to which only the end of text may be added, as the last: " +
                "the files are damaged or do not belong together");
  return tokens;
}

namespace detail {

/// Where a tokenizer's vocabulary is: one of the three kinds of files.
struct TokenizerFiles {
  std::string json = {}, tiktoken = {}, merges = {}, ids = {};  ///< their paths; empty: another kind
};

/// The files of a tokenizer that is not "bytes".
inline TokenizerFiles find_tokenizer(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    if (file_exists(path) && !path.ends_with(".json") && !path.ends_with(".tiktoken"))
      throw UsageError("'" + path +
                       "' is not the name of a tokenizer: give a file that ends in .json or .tiktoken, or a folder");
    if (!file_exists(path))
      throw UsageError(
          "no tokenizer '" + path +
          "': it is \"bytes\", a tokenizer.json, a .tiktoken file, or a folder with tokenizer.json or with "
          "vocab.bpe and encoder.json (scripts/vocabulary.sh gets GPT-2's)");
    TokenizerFiles files;
    (path.ends_with(".json") ? files.json : files.tiktoken) = path;
    return files;
  }
  if (const std::string json = path + "/tokenizer.json"; file_exists(json)) return {.json = json};
  for (const auto& [merges, ids] : {std::pair{"/vocab.bpe", "/encoder.json"}, {"/merges.txt", "/vocab.json"}})
    if (file_exists(path + merges) && file_exists(path + ids)) return {.merges = path + merges, .ids = path + ids};
  TokenizerFiles files;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() != ".tiktoken") continue;
    if (!files.tiktoken.empty())
      throw UsageError("the folder '" + path + "' holds more than one .tiktoken file: give the path of one of them");
    files.tiktoken = it->path().string();
  }
  if (!files.tiktoken.empty()) return files;
  throw UsageError(
      "the folder '" + path +
      "' holds no vocabulary: neither tokenizer.json, nor vocab.bpe and encoder.json, nor merges.txt and " +
      "vocab.json, nor a .tiktoken file");
}

}  // namespace detail

SHARDLIB_INLINE std::shared_ptr<const Tokenizer> load_tokenizer(const std::string& name_or_path) {
  if (name_or_path == "bytes") return std::make_shared<ByteTokenizer>();
  const detail::TokenizerFiles files = detail::find_tokenizer(name_or_path);
  if (!files.json.empty()) return read_tokenizer_json(files.json);
  if (!files.tiktoken.empty())
    return std::make_shared<BpeTokenizer>(read_tiktoken(files.tiktoken), "'" + files.tiktoken + "'");
  const std::string config_path =
      std::filesystem::path(files.merges).replace_filename("tokenizer_config.json").string();
  const nlohmann::json config_json = detail::read_config(config_path);
  const detail::JsonPlace config(config_path, config_json);
  if (config.flag("add_prefix_space", false))
    config.at("add_prefix_space")
        .refuse("false without a tokenizer.json, which save_pretrained of transformers writes");
  return std::make_shared<BpeTokenizer>(read_merges(files.merges, files.ids), "'" + files.merges + "'");
}

namespace detail {
/// The files that a copy of the tokenizer takes, and their names there.
inline std::vector<std::pair<std::string, std::string>> files_to_copy(const std::string& name_or_path) {
  const TokenizerFiles files = find_tokenizer(name_or_path);
  std::vector<std::pair<std::string, std::string>> copied;
  if (!files.json.empty()) {
    copied.emplace_back(files.json, "tokenizer.json");
    // It says which token ends a text, and how added tokens are found.
    const std::string config = (std::filesystem::path(files.json).parent_path() / "tokenizer_config.json").string();
    if (file_exists(config)) copied.emplace_back(config, "tokenizer_config.json");
  }
  for (const std::string& path : {files.tiktoken, files.merges, files.ids})
    if (!path.empty()) copied.emplace_back(path, std::filesystem::path(path).filename().string());
  return copied;
}
}  // namespace detail

SHARDLIB_INLINE void copy_tokenizer(const std::string& name_or_path, const std::string& folder) {
  if (name_or_path == "bytes") throw UsageError("the tokenizer \"bytes\" has no files to copy");
  const auto files = detail::files_to_copy(name_or_path);
  const std::string partial = detail::temporary_name(folder);
  make_new_folder(partial);
  const detail::TemporaryFolder removed(partial);  // a full disk needs the space
  for (const auto& [from, name] : files) replace_file(partial + "/" + name, read_file(from), true);
  replace_folder(partial, folder);
}

SHARDLIB_INLINE bool is_tokenizer_copy(const std::string& name_or_path, const std::string& folder) {
  if (name_or_path == "bytes") return false;
  const auto files = detail::files_to_copy(name_or_path);
  std::error_code ignored;
  const std::filesystem::directory_iterator there(folder, ignored);  // of nothing if it is not a folder
  return std::distance(there, {}) == std::ssize(files) && std::ranges::all_of(files, [&](const auto& file) {
           const std::string copy = folder + "/" + file.second;
           return file_exists(copy) && read_file(copy) == read_file(file.first);
         });
}

}  // namespace shardlib::io
