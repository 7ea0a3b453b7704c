// JSON from files that may be damaged or hostile. Heavy (nlohmann/json): for impl/ headers only.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <exception>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>

#include "shardlib/io/file.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io::detail {

/// No file of ours nests deeper. Printing a deeper value would use up the stack.
inline constexpr int deepest_json = 32;

class DeepJson : public std::runtime_error {
 public:
  DeepJson() : std::runtime_error("it nests deeper than " + std::to_string(deepest_json) + " levels") {}
};

/// Parses a JSON text. Throws DeepJson for one that nests deeper than `deepest_json`, nlohmann::json::exception for one
/// that is not JSON; neither names a file. `watch` sees each event, as nlohmann's callbacks do.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, const typename Json::parser_callback_t& watch = nullptr) {
  const typename Json::parser_callback_t limited = [&](int depth, typename Json::parse_event_t event, Json& value) {
    if (depth > deepest_json) throw DeepJson();
    return watch ? watch(depth, event, value) : true;
  };
  return Json::parse(text, limited);
}

/// The member of an object. Throws Error, which ends with `remedy`, if there is none.
template <class Json>
const Json& member(const Json& object, const char* key, std::string_view remedy = "") {
  if (!object.is_object() || !object.contains(key))
    throw Error("it has no \"" + std::string(key) + "\"" + std::string(remedy));
  return object.at(key);
}

/// Parses a JSON text as above. `twice` becomes the first key that the object, or an object in it, has twice: a parser
/// keeps one of the two. If `within` is given, only the inner object of that name counts.
inline nlohmann::json parse_json(std::string_view text, std::string& twice, std::string_view within = {}) {
  using nlohmann::json;
  std::set<std::string> outer, inner;
  bool counts = true;
  return parse_json(text, [&](int depth, json::parse_event_t event, json& parsed) {
    if (event != json::parse_event_t::key || depth > 2) return true;
    const auto key = parsed.get<std::string>();
    if (depth == 1) inner.clear();
    if (depth == 1) counts = within.empty() || key == within;
    const bool is_new = (depth == 1 ? outer : inner).insert(key).second;
    if (!is_new && (depth == 1 || counts) && twice.empty()) twice = key;
    return true;
  });
}

/// The JSON of a file that others write, of up to `largest` megabytes, where no key may be twice. `kind` is what the
/// file must be: "a model's config.json". Throws Error.
inline nlohmann::json read_foreign_json(const std::string& path, std::uint64_t largest, const std::string& kind,
                                        std::string_view within = {}) {
  const auto fail = [&](const std::string& why) { throw Error("'" + path + "': " + why); };
  const InputFile file(path);
  if (file.size() > largest * 1'000'000) fail("it has more than " + std::to_string(largest) + " MB: it is not " + kind);
  Bytes text(file.size());
  file.read(0, text);
  std::string twice;
  nlohmann::json value;
  try {
    value = parse_json(as_text(text), twice, within);
  } catch (const std::exception&) {
    fail("it is not JSON: it is not " + kind + ", or it is damaged");
  }
  if (!twice.empty()) fail("it has '" + shardlib::detail::excerpt(twice) + "' twice");
  return value;
}

}  // namespace shardlib::io::detail
