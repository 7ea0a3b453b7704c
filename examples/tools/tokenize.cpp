// tokenize: text files to a data set of tokens, flat-tokens (docs/data.md) or llm.c's .bin, on several threads. It may
// be killed and started again: the data set has its name only when it is whole.
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <shardlib/support/error.hpp>
#include <shardlib/io/data/flat_tokens.hpp>
#include <shardlib/support/sha256.hpp>
#include <shardlib/io/data/token_files.hpp>
#include <shardlib/io/tokenizer/tokenizer.hpp>
#include <shardlib/run/options.hpp>
#include <shardlib/run/progress.hpp>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

using namespace shardlib;

namespace {

struct Options {
  std::vector<std::string> inputs;
  std::string out, tokenizer = "bytes", to = "flat-tokens";
  double validation_fraction = 0.01;
  bool document_per_file = false, end_of_text = true;
  std::int64_t jobs = std::max(1U, std::thread::hardware_concurrency());
  double commit_seconds = 10;
};

// ---- reading --------------------------------------------------------------------------------------------------------

struct TextFile {
  std::string path;
  std::uint64_t size;
  std::int64_t changed;
};

/// The files in the order given, those of a folder in the order of their names; names that begin with a dot are passed
/// over.
std::vector<TextFile> find_files(const std::vector<std::string>& inputs) {
  namespace fs = std::filesystem;
  std::vector<TextFile> files;
  const auto add = [&](const std::string& path) {
    std::error_code error;
    const auto changed = fs::last_write_time(path, error).time_since_epoch().count();
    files.push_back({path, io::InputFile(path).size(), static_cast<std::int64_t>(changed)});
  };
  for (const std::string& input : inputs) {
    std::error_code error;
    if (!fs::is_directory(input, error)) {
      add(input);
      continue;
    }
    std::vector<std::string> found;
    for (fs::recursive_directory_iterator it(input, error), end; !error && it != end; it.increment(error)) {
      const bool hidden = it->path().filename().string().starts_with('.');
      std::error_code gone;
      if (hidden && it->is_directory(gone)) it.disable_recursion_pending();
      if (!hidden && it->is_regular_file(gone)) found.push_back(it->path().string());
    }
    if (error) throw Error("cannot list the folder '" + input + "': " + error.message());
    if (found.empty()) throw UsageError("the folder '" + input + "' holds no files");
    std::sort(found.begin(), found.end());
    for (const std::string& path : found) add(path);
  }
  return files;
}

/// Where a document begins.
struct TextPlace {
  std::size_t file = 0;
  std::uint64_t offset = 0;
};

/// Documents that are encoded together, and where the next one begins.
struct Batch {
  std::vector<std::string> documents;
  TextPlace next;
  std::uint64_t bytes_read;  ///< of all files, up to there
};

/// Reads the documents in order, a few at a time.
class Reader {
 public:
  Reader(const std::vector<TextFile>& files, bool document_per_file, TextPlace begin)
      : files_(files), document_per_file_(document_per_file), at_(begin) {
    for (std::size_t i = 0; i < at_.file; ++i) bytes_before_ += files_[i].size;
  }

  /// Documents of at least `batch_bytes`, fewer at the end; none after it.
  Batch next() {
    Batch batch{};
    for (std::size_t bytes = 0; bytes < batch_bytes && at_.file < files_.size();) {
      std::string document = read_document();
      // A document is more than white space, as in io::for_each_document.
      if (document.find_first_not_of(" \t\n\v\f\r") == std::string::npos) continue;
      bytes += document.size();
      batch.documents.push_back(std::move(document));
    }
    batch.next = at_;
    batch.bytes_read = bytes_before_ + at_.offset;
    return batch;
  }

 private:
  static constexpr std::size_t batch_bytes = std::size_t{1} << 20;

  std::string read_document() {
    const TextFile& file = files_[at_.file];
    if (!file_) file_ = std::make_unique<io::InputFile>(file.path);
    std::size_t searched = 0;
    for (;;) {
      const std::size_t mark = document_per_file_ ? std::string::npos : buffer_.find(io::end_of_text_mark, searched);
      const std::uint64_t end = at_.offset + buffer_.size();
      if (mark != std::string::npos) {
        std::string document = buffer_.substr(0, mark);
        buffer_.erase(0, mark + io::end_of_text_mark.size());
        at_.offset += mark + io::end_of_text_mark.size();
        return document;
      }
      if (end == file.size) {
        bytes_before_ += file.size;
        at_ = {at_.file + 1, 0};
        file_.reset();
        return std::exchange(buffer_, {});
      }
      // A mark may lie across the end of what has been read.
      searched = buffer_.size() - std::min(buffer_.size(), io::end_of_text_mark.size() - 1);
      read_more(file, end);
    }
  }

  void read_more(const TextFile& file, std::uint64_t end) {
    const std::size_t old = buffer_.size();
    buffer_.resize(old + static_cast<std::size_t>(std::min<std::uint64_t>(file.size - end, batch_bytes)));
    file_->read(end, std::as_writable_bytes(std::span(buffer_).subspan(old)));
    if (const std::size_t zero = buffer_.find('\0', old); zero != std::string::npos)
      throw UsageError(
          fmt::format("'{}' is no text: byte {} is zero; leave the file out", file.path, at_.offset + zero));
  }

  const std::vector<TextFile>& files_;
  bool document_per_file_;
  TextPlace at_;
  std::uint64_t bytes_before_ = 0;  // of the files before
  std::unique_ptr<io::InputFile> file_;
  std::string buffer_;  // read of the file from at_.offset on
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

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// One line on standard error that is drawn over, on a terminal; nothing elsewhere.
class Bar {
 public:
  Bar(std::uint64_t begin, std::uint64_t end) : begin_(begin), end_(end) {}
  Bar(const Bar&) = delete;
  Bar& operator=(const Bar&) = delete;
  ~Bar() {
    if (drawn_ > 0) fmt::print(stderr, "\r\x1b[K");
  }

  void show(std::uint64_t bytes, std::int64_t tokens) {
    const double now = seconds(), past = now - start_;
    if (!terminal_.live || now - drawn_ < 0.1) return;
    drawn_ = now;
    const double part = static_cast<double>(bytes) / static_cast<double>(end_);
    const double speed = static_cast<double>(bytes - begin_) / past;
    const auto full = static_cast<std::size_t>(part * 20);
    fmt::print(stderr, "\r[{:#<{}}{:.<{}}] {:3.0f} %  {:.1f} M tokens  {:.1f} MB/s  {} left\x1b[K", "", full, "",
               20 - full, 100 * part, static_cast<double>(tokens) / 1e6, speed / 1e6,
               run::duration_text(static_cast<double>(end_ - bytes) / speed));
  }

 private:
  std::uint64_t begin_, end_;
  run::Terminal terminal_ = run::terminal_of(STDERR_FILENO);
  double start_ = seconds(), drawn_ = 0;
};

// ---- writing --------------------------------------------------------------------------------------------------------

struct Totals {
  std::int64_t documents[2]{}, tokens[2]{};  ///< of each io::Split
};

/// Reads and encodes ahead on `jobs` threads; `write` gets the batches in order and returns the tokens so far.
void for_each_batch(const std::vector<TextFile>& files, const io::Tokenizer& tokenizer, const Options& o,
                    TextPlace begin,
                    const std::function<std::int64_t(const std::vector<Document>&, const Batch&)>& write) {
  std::uint64_t total = 0, before = begin.offset;
  for (std::size_t i = 0; i < files.size(); ++i) {
    total += files[i].size;
    if (i < begin.file) before += files[i].size;
  }
  Bar bar(before, total);
  Reader reader(files, o.document_per_file, begin);
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

/// What the tokens depend on besides the place: an unfinished data set goes on only where this is the same.
std::string settings(const std::vector<TextFile>& files, const io::Tokenizer& tokenizer, const Options& o) {
  std::string text =
      fmt::format("{} {} {} {}\n", tokenizer.fingerprint(), o.validation_fraction, o.document_per_file, o.end_of_text);
  for (const TextFile& file : files) text += fmt::format("{} {} {}\n", file.size, file.changed, file.path);
  return io::hex(io::sha256(text));
}

TextPlace resume_place(const std::string& note, const std::string& expected, const std::string& out) {
  if (note.empty()) return {};
  TextPlace place;
  char digest[65] = "";
  if (std::sscanf(note.c_str(), "%64s %zu %lu", digest, &place.file, &place.offset) != 3 || digest != expected)
    throw UsageError("'" + out + ".partial' was begun with other files or options: give the same again, or remove it");
  return place;
}

Totals write_flat_tokens(const std::vector<TextFile>& files, const io::Tokenizer& tokenizer, const Options& o) {
  io::FlatTokensWriter writer(o.out);
  const std::string same = settings(files, tokenizer, o);
  const TextPlace begin = resume_place(writer.note(), same, o.out);
  const auto progress = [&](io::Split split) -> const io::FlatTokensProgress& { return writer.progress(split); };
  if (!writer.note().empty())
    fmt::print("going on after {} documents\n",
               progress(io::Split::train).documents + progress(io::Split::validation).documents);
  Totals totals;
  double committed = seconds();
  for_each_batch(files, tokenizer, o, begin, [&](const std::vector<Document>& documents, const Batch& batch) {
    for (const Document& document : documents) writer.add(document.split, document.ids);
    if (seconds() - committed >= o.commit_seconds) {
      writer.commit(fmt::format("{} {} {}", same, batch.next.file, batch.next.offset));
      committed = seconds();
    }
    return progress(io::Split::train).tokens + progress(io::Split::validation).tokens;
  });
  for (const io::Split split : {io::Split::train, io::Split::validation}) {
    totals.documents[static_cast<std::size_t>(split)] = progress(split).documents;
    totals.tokens[static_cast<std::size_t>(split)] = progress(split).tokens;
  }
  // With these a reader can tell which tokenizer decodes the ids.
  io::ZarrGroup::open(o.out + ".partial")
      .set_attributes({{"tokenizer", tokenizer.name()}, {"tokenizer_fingerprint", tokenizer.fingerprint()}});
  io::sync_path(o.out + ".partial/.zattrs");
  writer.finish();
  return totals;
}

/// A folder with train.bin and val.bin. An interrupted one is written anew.
Totals write_llmc(const std::vector<TextFile>& files, const io::Tokenizer& tokenizer, const Options& o) {
  const std::string partial = o.out + ".partial";
  if (io::file_exists(o.out)) throw UsageError("'" + o.out + "' exists already: remove it first, or write elsewhere");
  for (const auto& entry : io::file_exists(partial) ? std::filesystem::directory_iterator(partial)
                                                    : std::filesystem::directory_iterator()) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("train.bin") && !name.starts_with("val.bin"))
      throw UsageError("'" + partial + "' is not from an interrupted run, as it has '" + name +
                       "': remove it, or write elsewhere");
  }
  io::remove_folder(partial);
  io::make_folders(partial);
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
    train.finish();
    if (totals.documents[1] > 0) validation.finish();
  }
  io::rename_path(partial, o.out);
  return totals;
}

int tool(int argc, char** argv) {
  Options o;
  run::Options options(
      "tokenize",
      "Turns text into tokens for training: all documents of all files, in order, each in the train or\nthe "
      "validation split. Started again after an interruption it goes on (flat-tokens) or begins anew (llmc).");
  options.arguments("INPUT", o.inputs, "text files, and folders of them");
  options.add("--out", o.out, "the data set to make, a folder", run::required() | run::value_name("DIR"));
  options.add("--tokenizer", o.tokenizer, "\"bytes\", a .tiktoken file, or a folder with vocab.bpe and encoder.json",
              run::value_name("FILE"));
  options.add("--to", o.to, "flat-tokens (zarr), or llmc: train.bin and val.bin of 2-byte ids",
              run::one_of({"flat-tokens", "llmc"}));
  options.add("--validation-fraction", o.validation_fraction,
              "about this part of the documents, chosen by their SHA-256, is for validation", run::between(0, 1));
  options.flag("--document-per-file", o.document_per_file,
               "a file is one document (otherwise documents are separated by <|endoftext|>)");
  options.flag("--end-of-text", o.end_of_text, "flat-tokens: end each document with the end of text");
  options.add("--jobs", o.jobs, "threads that encode", run::between(1, 1024));
  options.add("--commit-seconds", o.commit_seconds, "flat-tokens: an interruption costs at most this much work",
              run::at_least(0));
  if (!options.parse(argc, argv)) {
    fmt::print("{}", options.answer());
    return 0;
  }
  while (o.out.size() > 1 && o.out.back() == '/') o.out.pop_back();
  const auto tokenizer = io::load_tokenizer(o.tokenizer);
  const std::vector<TextFile> files = find_files(o.inputs);
  const double start = seconds();
  const Totals totals = o.to == "llmc" ? write_llmc(files, *tokenizer, o) : write_flat_tokens(files, *tokenizer, o);
  std::uint64_t bytes = 0;
  for (const TextFile& file : files) bytes += file.size;
  fmt::print("{}: train {} documents, {} tokens; validation {} documents, {} tokens\n", o.out, totals.documents[0],
             totals.tokens[0], totals.documents[1], totals.tokens[1]);
  fmt::print("tokenizer {} ({} ids), {} files, {:.1f} MB in {:.1f} s\n", tokenizer->name(),
             tokenizer->vocabulary_size(), files.size(), static_cast<double>(bytes) / 1e6, seconds() - start);
  if (totals.documents[1] == 0 && o.validation_fraction > 0)
    fmt::print("no document fell to validation: raise --validation-fraction, or give more documents\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return tool(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return dynamic_cast<const UsageError*>(&error) != nullptr ? 2 : 1;
  }
}
