// tokenize: text files to a data set of tokens, flat-tokens (docs/data.md) or llm.c's .bin, on several threads. It may
// be killed and started again: the data set has its name only when it is whole.
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <shardlib/io/data/flat_tokens.hpp>
#include <shardlib/io/data/token_files.hpp>
#include <shardlib/io/tokenizer/tokenizer.hpp>
#include <shardlib/run/options.hpp>
#include <shardlib/run/progress.hpp>
#include <shardlib/support/error.hpp>
#include <shardlib/support/sha256.hpp>
#include <shardlib/support/stopwatch.hpp>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <functional>
#include <future>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "run_tool.hpp"
#include "text_reader.hpp"

using namespace shardlib;
using shardlib::detail::counted;
using shardlib::detail::steady_seconds;
using tokenize::Batch;
using tokenize::TextFile;
using tokenize::TextPlace;

namespace {

struct Options {
  std::vector<std::string> inputs;
  std::string out, tokenizer = "bytes", to = "flat-tokens", field;
  double validation_fraction = 0.01;
  bool document_per_file = false, end_of_text = true;
  std::int64_t jobs = std::max(1U, std::thread::hardware_concurrency());
  double commit_seconds = 10;
};

// ---- encoding -------------------------------------------------------------------------------------------------------

struct Document {
  io::Split split;
  std::vector<std::uint32_t> ids;
};

/// By the document alone: the first 8 bytes of its SHA-256 as a big-endian fraction of 2^64. The same text is never in
/// both splits, whatever order or files it comes in.
io::Split split_of(std::string_view document, double validation_fraction) {
  if (validation_fraction <= 0) return io::Split::train;
  const io::Sha256 digest = io::sha256(document);
  std::uint64_t head = 0;
  for (std::size_t i = 0; i < 8; ++i) head = head << 8 | digest[i];
  return std::ldexp(static_cast<double>(head), -64) < validation_fraction ? io::Split::validation : io::Split::train;
}

std::vector<Document> encode(const std::vector<std::string>& documents, const io::Tokenizer& tokenizer,
                             const Options& o) {
  std::vector<Document> encoded;
  for (const std::string& text : documents) {
    encoded.push_back({split_of(text, o.validation_fraction), {}});
    std::vector<std::uint32_t>& ids = encoded.back().ids;
    ids.reserve(text.size() / 3);
    tokenizer.encode(text, ids);
    // A .bin has one before each document instead.
    if (o.to == "flat-tokens" && o.end_of_text) ids.push_back(tokenizer.end_of_text());
  }
  return encoded;
}

// ---- progress -------------------------------------------------------------------------------------------------------

/// One line on standard error that is drawn over, on a terminal; nothing elsewhere.
class Bar {
 public:
  explicit Bar(std::uint64_t end) : end_(end) {}
  Bar(const Bar&) = delete;
  Bar& operator=(const Bar&) = delete;
  ~Bar() {
    if (drawn_ > 0) fmt::print(stderr, "\r\x1b[K");
  }

  /// The speed is that since the first call: before it, the place in a compressed file is not known.
  void show(std::uint64_t bytes, std::int64_t tokens) {
    const double now = steady_seconds();
    if (start_ == 0) start_ = now, begin_ = bytes;
    if (!terminal_.live || bytes == begin_ || now - drawn_ < 0.1) return;
    drawn_ = now;
    const double part = static_cast<double>(bytes) / static_cast<double>(end_);
    const double speed = static_cast<double>(bytes - begin_) / (now - start_);
    const auto full = static_cast<std::size_t>(part * 20);
    fmt::print(stderr, "\r[{:#<{}}{:.<{}}] {:3.0f} %  {:.1f} M tokens  {:.1f} MB/s  {} left\x1b[K", "", full, "",
               20 - full, 100 * part, static_cast<double>(tokens) / 1e6, speed / 1e6,
               run::duration_text(static_cast<double>(end_ - bytes) / speed));
  }

 private:
  std::uint64_t begin_ = 0, end_;
  run::Terminal terminal_ = run::terminal_of(STDERR_FILENO);
  double start_ = 0, drawn_ = 0;
};

// ---- writing --------------------------------------------------------------------------------------------------------

struct Totals {
  std::int64_t documents[2]{}, tokens[2]{};  ///< of each io::Split
};

/// Reads and encodes ahead on `jobs` threads; `write` gets the batches in order and returns the tokens so far.
void for_each_batch(const std::vector<TextFile>& files, const io::Tokenizer& tokenizer, const Options& o,
                    TextPlace begin,
                    const std::function<std::int64_t(const std::vector<Document>&, const Batch&)>& write) {
  std::uint64_t total = 0;
  for (const TextFile& file : files) total += file.size;
  Bar bar(total);
  const tokenize::Layout layout = !o.field.empty()      ? tokenize::Layout::lines
                                  : o.document_per_file ? tokenize::Layout::file
                                                        : tokenize::Layout::marks;
  tokenize::Reader reader(files, layout, o.field, begin);
  std::deque<std::pair<Batch, std::future<std::vector<Document>>>> ahead;
  const auto finish_one = [&] {
    const std::vector<Document> documents = ahead.front().second.get();
    bar.show(ahead.front().first.bytes_read, write(documents, ahead.front().first));
    ahead.pop_front();
  };
  for (;;) {
    Batch batch = reader.next();
    if (batch.documents.empty()) break;
    ahead.emplace_back(std::move(batch), std::future<std::vector<Document>>());
    auto& [queued, result] = ahead.back();
    result = std::async(std::launch::async, [&o, &tokenizer, documents = std::move(queued.documents)] {
      return encode(documents, tokenizer, o);
    });
    if (std::ssize(ahead) > o.jobs) finish_one();
  }
  while (!ahead.empty()) finish_one();
}

/// Hashes all that decides the tokens besides the place. An unfinished data set continues only if the hash is the same.
std::string settings(const std::vector<TextFile>& files, const io::Tokenizer& tokenizer, const Options& o) {
  std::string text =
      fmt::format("{} {} {} {}\n", tokenizer.fingerprint(), o.validation_fraction, o.document_per_file, o.end_of_text);
  if (!o.field.empty()) text += "field " + o.field + "\n";
  for (const TextFile& file : files) text += fmt::format("{} {} {}\n", file.size, file.changed, file.path);
  return io::hex(io::sha256(text));
}

/// `documents` have been written, perhaps by another program.
TextPlace resume_place(std::int64_t documents, const std::string& note, const std::string& expected,
                       const std::string& out) {
  if (documents == 0 && note.empty()) return {};
  TextPlace place;
  char digest[65] = "";
  if (std::sscanf(note.c_str(), "%64s %zu %lu", digest, &place.file, &place.offset) != 3 || digest != expected)
    throw UsageError("'" + out + ".partial' was begun with other files or options: give the same again, or remove it");
  return place;
}

/// Throws UsageError if a data set would have no document to train on.
void require_tokens(const Totals& totals, const Options& o) {
  if (totals.tokens[static_cast<std::size_t>(io::Split::train)] == 0)
    throw UsageError(fmt::format(
        "'{}'{}: no document for training has tokens: give files with text, or a smaller --validation-fraction than {}",
        o.inputs[0], o.inputs.size() == 1 ? "" : fmt::format(" and {} more", o.inputs.size() - 1),
        o.validation_fraction));
}

Totals write_flat_tokens(const std::vector<TextFile>& files, const io::Tokenizer& tokenizer, const Options& o) {
  io::FlatTokensWriter writer(o.out);
  const std::string same = settings(files, tokenizer, o);
  const auto progress = [&](io::Split split) -> const io::FlatTokensProgress& { return writer.progress(split); };
  const std::int64_t written = progress(io::Split::train).documents + progress(io::Split::validation).documents;
  const TextPlace begin = resume_place(written, writer.note(), same, o.out);
  if (!writer.note().empty()) fmt::print("resuming after {}\n", counted(written, "document"));
  Totals totals;
  double committed = steady_seconds();
  for_each_batch(files, tokenizer, o, begin, [&](const std::vector<Document>& documents, const Batch& batch) {
    for (const Document& document : documents) writer.add(document.split, document.ids);
    if (steady_seconds() - committed >= o.commit_seconds) {
      writer.commit(fmt::format("{} {} {}", same, batch.next.file, batch.next.offset));
      committed = steady_seconds();
    }
    return progress(io::Split::train).tokens + progress(io::Split::validation).tokens;
  });
  for (const io::Split split : {io::Split::train, io::Split::validation}) {
    totals.documents[static_cast<std::size_t>(split)] = progress(split).documents;
    totals.tokens[static_cast<std::size_t>(split)] = progress(split).tokens;
  }
  require_tokens(totals, o);
  // With these a reader can tell which tokenizer decodes the ids.
  io::ZarrGroup::open(o.out + ".partial")
      .set_attributes({{"tokenizer", tokenizer.name()}, {"tokenizer_fingerprint", tokenizer.fingerprint()}});
  io::sync_path(o.out + ".partial/.zattrs");
  writer.finish();
  return totals;
}

/// A folder with train.bin and val.bin. An interrupted one is written again from the start.
Totals write_llmc(const std::vector<TextFile>& files, const io::Tokenizer& tokenizer, const Options& o) {
  const std::string partial = o.out + ".partial";
  if (io::file_exists(o.out)) throw UsageError("'" + o.out + "' already exists: remove it first, or write elsewhere");
  const auto lock = io::begin_folder(partial, [&](bool /*begun*/) {
    if (!io::file_exists(partial)) return;
    for (const auto& entry : std::filesystem::directory_iterator(partial)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with("train.bin") && !name.starts_with("val.bin") && name != io::tokens_note && name != ".lock")
        throw UsageError("'" + partial + "' is not from an interrupted run, as it has '" + name +
                         "': remove it, or write elsewhere");
    }
  });
  for (const auto& entry : std::filesystem::directory_iterator(partial))
    if (entry.path().filename() != ".lock") io::remove_folder(entry.path().string());
  Totals totals;
  {
    io::BinWriter train(partial + "/train.bin", tokenizer.end_of_text());
    io::BinWriter validation(partial + "/val.bin", tokenizer.end_of_text());
    for_each_batch(files, tokenizer, o, {}, [&](const std::vector<Document>& documents, const Batch&) {
      for (const Document& document : documents) {
        (document.split == io::Split::train ? train : validation).add(document.ids);
        ++totals.documents[static_cast<std::size_t>(document.split)];
      }
      return train.tokens() + validation.tokens();
    });
    totals.tokens[0] = train.tokens();
    totals.tokens[1] = validation.tokens();
    require_tokens(totals, o);
    train.finish();
    if (totals.documents[1] > 0) validation.finish();
  }
  io::write_tokens_note(partial, tokenizer);
  io::rename_path(partial, o.out);
  std::filesystem::remove(o.out + "/.lock");  // now that nobody else may begin the folder
  return totals;
}

int tool(int argc, char** argv) {
  Options o;
  run::Options options(
      "tokenize",
      "Turns text into tokens for training: all documents of all files, in order, each in the train or the "
      "validation split. After an interruption, the same command continues (flat-tokens) or begins again (llmc).");
  options.arguments("INPUT", o.inputs,
                    "text files, or JSON lines with --field, also as .gz or .zst, or folders of such files");
  options.add("--out", o.out, "folder of the new data set", run::required() | run::value_name("DIR"));
  options.add("--tokenizer", o.tokenizer, std::string(io::tokenizer_help), run::value_name("FILE"));
  options.add("--to", o.to, "flat-tokens (zarr), or llmc: train.bin and val.bin of 2-byte ids",
              run::one_of({"flat-tokens", "llmc"}));
  options.add("--validation-fraction", o.validation_fraction,
              "fraction of documents for validation, chosen by their SHA-256", run::between(0, 1));
  options.add("--field", o.field,
              "the inputs are JSON lines (JSONL): each line is a document, whose text is the value of this key",
              run::value_name("KEY"));
  options.flag("--document-per-file", o.document_per_file,
               "a file is one document (otherwise documents are separated by <|endoftext|>)");
  options.flag("--end-of-text", o.end_of_text, "flat-tokens: end each document with the end of text");
  options.add("--jobs", o.jobs, "number of threads that encode", run::between(1, 1024));
  options.add("--commit-seconds", o.commit_seconds, "flat-tokens: an interruption costs at most this much work",
              run::at_least(0));
  options.without_effect({"--end-of-text", "--commit-seconds"}, [&o](const run::Options&) {
    return o.to == "llmc" ? "with --to llmc: leave it out, or choose --to flat-tokens" : "";
  });
  if (!options.parse(argc, argv)) return 0;
  while (o.out.size() > 1 && o.out.back() == '/') o.out.pop_back();
  if (!o.field.empty() && o.document_per_file)
    throw UsageError(
        "--field takes a document from each line, and --document-per-file one from each file: leave one out");
  const auto tokenizer = io::load_tokenizer(o.tokenizer);
  const std::vector<TextFile> files = tokenize::find_files(o.inputs);
  const double start = steady_seconds();
  const Totals totals = o.to == "llmc" ? write_llmc(files, *tokenizer, o) : write_flat_tokens(files, *tokenizer, o);
  std::uint64_t bytes = 0;
  for (const TextFile& file : files) bytes += file.size;
  fmt::print("{}: train {}, {}; validation {}, {}\n", o.out, counted(totals.documents[0], "document"),
             counted(totals.tokens[0], "token"), counted(totals.documents[1], "document"),
             counted(totals.tokens[1], "token"));
  fmt::print("tokenizer {} ({} ids), {}, {:.1f} MB in {:.1f} s\n", tokenizer->name(), tokenizer->vocabulary_size(),
             counted(files.size(), "file"), static_cast<double>(bytes) / 1e6, steady_seconds() - start);
  if (totals.documents[1] == 0 && o.validation_fraction > 0)
    fmt::print("no document is in the validation split: raise --validation-fraction, or give more documents\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_tool(argc, argv, tool);
}
