// JSON from files that may be damaged or hostile. Heavy (nlohmann/json): for impl/ headers only.
#pragma once

#include <nlohmann/json.hpp>

#include <stdexcept>
#include <string>
#include <string_view>

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

}  // namespace shardlib::io::detail
