// Text in HTML and SVG.
#pragma once

#include <string>

#include "shardlib/support/utf8.hpp"

namespace shardlib::detail {

/// Escapes the text for HTML and SVG, in elements and in quoted attributes.
inline std::string markup_escape(const std::string& text) {
  std::string out;
  for (const char c : as_utf8(text)) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (c == '\'') {
      out += "&#39;";
    } else {
      // HTML and SVG allow no control characters, but a sampled text may contain them.
      const bool control = static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t';
      out += control || c == 0x7f ? ' ' : c;
    }
  }
  return out;
}

}  // namespace shardlib::detail
