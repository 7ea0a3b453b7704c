// A place within a JSON file, for messages that name it, and tokenizer_config.json. For impl/ headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "shardlib/io/file.hpp"
#include "shardlib/io/impl/json.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io::detail {

/// The tokenizer_config.json of this path; without one an empty object.
inline nlohmann::json read_config(const std::string& path) {
  if (!file_exists(path)) return nlohmann::json::object();
  try {
    const Bytes bytes = read_file(path);
    return parse_json(as_text(bytes));
  } catch (const nlohmann::json::exception&) {
    throw Error("'" + path + "' is not JSON: it is damaged; get it again");
  } catch (const DeepJson& error) {
    throw Error("'" + path + "': " + error.what() + ": it is damaged; get it again");
  }
}

/// A value of the file `file` and its key: "model.vocab". Must not outlive the value.
class JsonPlace {
 public:
  JsonPlace(std::string file, const nlohmann::json& value, std::string key = "")
      : file_(std::move(file)), key_(std::move(key)), value_(&value) {}

  [[nodiscard]] const nlohmann::json& value() const { return *value_; }
  [[nodiscard]] const std::string& key() const { return key_; }

  /// Throws UsageError: the file is right, but its value is not one that is computed, which `expected` says.
  [[noreturn]] void refuse(const std::string& expected) const {
    throw UsageError(
        said() + ", but shardlib computes " + expected +
        ": make the ids with another program, and train on them with --tokenizer bytes (docs/tokenizer.md)");
  }
  /// Throws Error: no tokenizer.json has this value.
  [[noreturn]] void damaged(const std::string& expected) const {
    throw Error(said() + ", but a tokenizer.json has " + expected + " there: the file is damaged; get it again");
  }

  /// Whether the object has the key, with another value than null.
  [[nodiscard]] bool has(const std::string& name) const {
    const auto found = object().find(name);
    return found != object().end() && !found->second.is_null();
  }
  [[nodiscard]] JsonPlace at(const std::string& name) const {
    const auto found = object().find(name);
    const JsonPlace place = at(name, found != object().end() ? found->second : nothing());
    if (found == object().end()) place.damaged("a value");
    return place;
  }
  /// The value of a key that has been found.
  [[nodiscard]] JsonPlace at(const std::string& name, const nlohmann::json& value) const {
    return {file_, value, key_.empty() ? name : key_ + "." + name};
  }
  [[nodiscard]] JsonPlace at(std::size_t index) const {
    return {file_, array().at(index), key_ + "[" + std::to_string(index) + "]"};
  }
  /// Throws UsageError for a key of the object that is not among `names`.
  void only(std::initializer_list<std::string_view> names) const {
    for (const auto& [name, value] : object()) {
      bool known = false;
      for (const std::string_view one : names) known = known || one == name;
      if (!known) at(name, value).refuse("no key of this name");
    }
  }

  [[nodiscard]] const nlohmann::json::object_t& object() const {
    if (!value_->is_object()) damaged("an object");
    return value_->get_ref<const nlohmann::json::object_t&>();
  }
  [[nodiscard]] const nlohmann::json::array_t& array() const {
    if (!value_->is_array()) damaged("a list");
    return value_->get_ref<const nlohmann::json::array_t&>();
  }
  [[nodiscard]] const std::string& text() const {
    if (!value_->is_string()) damaged("a text");
    return value_->get_ref<const std::string&>();
  }
  [[nodiscard]] bool flag() const {
    if (!value_->is_boolean()) damaged("true or false");
    return value_->get<bool>();
  }
  [[nodiscard]] bool flag(const std::string& name, bool otherwise) const {
    return has(name) ? at(name).flag() : otherwise;
  }
  /// A whole number from 0 up to what 4 bytes hold.
  [[nodiscard]] std::uint32_t number() const {
    if (!value_->is_number_unsigned() || value_->get<std::uint64_t>() > 0xfffffffeU) damaged("a whole number");
    return value_->get<std::uint32_t>();
  }

 private:
  static const nlohmann::json& nothing() {
    static const nlohmann::json null;
    return null;
  }
  [[nodiscard]] std::string said() const {
    const std::string what = value_ == &nothing() ? "absent" : shardlib::detail::excerpt(value_->dump(), 100);
    return "'" + file_ + "': '" + shardlib::detail::excerpt(key_.empty() ? "the whole" : key_) + "' is " + what;
  }

  std::string file_, key_;
  const nlohmann::json* value_;
};

}  // namespace shardlib::io::detail
