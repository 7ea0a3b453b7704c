// A fixed-capacity string that both compilers accept in constant expressions, and messages as template arguments.
#pragma once

#include <cstddef>
#include <string_view>

namespace shardlib::detail {

inline constexpr std::size_t npos = std::string_view::npos;

/// The start of the pattern, or npos. (std::string_view::find compares pointers with null. With -fsanitize=undefined,
/// g++ does not accept that as a constant expression if the text is a template argument.)
constexpr std::size_t find(std::string_view s, std::string_view pattern, std::size_t from = 0) {
  for (std::size_t i = from; i + pattern.size() <= s.size(); ++i)
    if (s.substr(i, pattern.size()) == pattern) return i;
  return npos;
}

/// A buffer in which specs and messages are built. A text that is too long ends in "...".
class Text {
 public:
  constexpr Text() = default;
  constexpr Text(std::string_view s) { *this += s; }            // NOLINT(google-explicit-constructor)
  constexpr Text(const char* s) : Text(std::string_view(s)) {}  // NOLINT(google-explicit-constructor)

  constexpr Text& operator+=(std::string_view s) {
    for (char c : s) *this += c;
    return *this;
  }
  constexpr Text& operator+=(char c) {
    if (size_ < capacity)
      chars_[size_++] = c;
    else
      for (std::size_t i = capacity - 3; i < capacity; ++i) chars_[i] = '.';
    return *this;
  }
  constexpr std::string_view view() const { return {chars_, size_}; }
  constexpr operator std::string_view() const { return view(); }  // NOLINT(google-explicit-constructor)
  constexpr bool empty() const { return size_ == 0; }
  constexpr std::size_t size() const { return size_; }
  friend constexpr Text operator+(Text a, std::string_view b) { return a += b; }
  friend constexpr Text operator+(Text a, const char* b) { return a += std::string_view(b); }
  friend constexpr Text operator+(Text a, const Text& b) { return a += b.view(); }
  friend constexpr Text operator+(const char* a, const Text& b) { return Text(a) += b.view(); }
  friend constexpr bool operator==(const Text& a, const Text& b) { return a.view() == b.view(); }

 private:
  static constexpr std::size_t capacity = 1200;
  char chars_[capacity]{};
  std::size_t size_ = 0;
};

constexpr Text number(long long n) {
  if (n < 0) return Text("-") + number(-n);
  Text s;
  if (n >= 10) s = number(n / 10);
  s += static_cast<char>('0' + n % 10);
  return s;
}

/// A part of a message, quoted as in all messages that show specs. The spec of a scalar is shown as `""`.
constexpr Text quoted(std::string_view s) {
  Text text("`");
  text += s.empty() ? "\"\"" : s;
  text += '`';
  return text;
}

/// A message of N characters as a template argument; compilers print it where they print the argument.
template <std::size_t N>
struct MessageText {
  char chars[N + 1]{};  // with a final NUL, so that g++ prints the array as a string
  constexpr explicit MessageText(std::string_view s) {
    for (std::size_t i = 0; i < N; ++i) chars[i] = s[i];
  }
  constexpr const char* data() const { return chars; }
  constexpr std::size_t size() const { return N; }
};

}  // namespace shardlib::detail
