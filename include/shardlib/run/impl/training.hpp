// Definitions of training.hpp: the mesh and the data.
#pragma once

#include "shardlib/run/training.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <iostream>
#include <sstream>
#include <system_error>

#include "shardlib/io/data/text_stream.hpp"
#include "shardlib/io/data/token_files.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/memory/system.hpp"
#include "shardlib/rules/all.hpp"
#include "shardlib/run/console.hpp"
#include "shardlib/run/impl/training_checks.hpp"
#include "shardlib/run/mesh_option.hpp"
#include "shardlib/run/prediction.hpp"
#include "shardlib/run/run_directory.hpp"
#include "shardlib/run/validator.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

#if defined(SHARDLIB_WITH_MPI)
#include "shardlib/comm/mpi/process.hpp"
#endif

namespace shardlib::run {

namespace detail {

SHARDLIB_INLINE std::vector<std::string> batch_axes(const std::vector<AxisSize>& mesh, const Training& t) {
  std::vector<std::string> axes;
  std::istringstream words(t.batch_axes);
  for (std::string axis; words >> axis;) {
    std::string names;
    bool there = false;
    for (const AxisSize& a : mesh) {
      there = there || a.name == axis;
      names += (names.empty() ? "" : " ") + a.name;
    }
    if (!there)
      throw UsageError(
          fmt::format("the batch is sharded over `{}`, says run::Training::batch_axes, but the program's mesh "
                      "has the axes `{}`: name those of them that shard the batch",
                      t.batch_axes, names));
    axes.push_back(axis);
  }
  if (axes.empty())
    throw UsageError("run::Training::batch_axes is empty: name the axes of the mesh that shard the batch");
  return axes;
}

}  // namespace detail

SHARDLIB_INLINE std::vector<AxisSize> chosen_mesh(Training& training, std::string_view axes,
                                                  std::string_view optional) {
  const auto may_lack = rules::mesh_axes(optional);
  std::vector<AxisSize> every;
  for (const auto name : rules::mesh_axes(axes)) every.push_back({std::string(name), 1});
  const std::vector<std::string> batch = detail::batch_axes(every, training);
  const auto kept = std::ranges::find_if(batch, [&](const std::string& axis) { return !may_lack.contains(axis); });
  if (training.mesh.empty())
    training.mesh = fmt::format("{}={}", kept == batch.end() ? batch.front() : *kept, world_size());
  const std::vector<AxisSize> mesh = mesh_of(training.mesh, axes, optional);
  training.mesh = to_string(mesh);
  training.batch_axes.clear();
  for (const std::string& axis : batch)
    if (std::ranges::find(mesh, axis, &AxisSize::name) != mesh.end())
      training.batch_axes += (training.batch_axes.empty() ? "" : " ") + axis;
  return mesh;
}

SHARDLIB_INLINE void announce(const Options& options, const Training& t) {
  if (t.plan || !t.graph.empty() || world_rank() != 0) return;
  detail::note_threads(t);
  if (t.directory.empty() || t.sample_only) return;
  print_console(
      fmt::format("non-default settings (all of them go into {}/config.toml):\n{}", t.directory, options.describe()));
}

SHARDLIB_INLINE void require_output(const Training& t, const std::string& path, const std::string& option) {
  require_no_run_file(path, option, t.directory);
  std::error_code ignored;  // the run says so itself
  std::filesystem::create_directories(t.directory, ignored);
  io::require_writable(path, option);
}

SHARDLIB_INLINE void note_padding(const std::vector<AxisSize>& mesh, const Sizes& sizes,
                                  const std::map<std::string, std::string>& options) {
  std::string dims;
  for (const NamedSize& dim : sizes)
    if (const auto option = options.find(dim.name); option != options.end() && dim.padded > dim.size + dim.size / 20)
      dims += fmt::format("{}{} {} -> {}", dims.empty() ? "" : ", ", option->second, dim.size, dim.padded);
  if (dims.empty() || world_rank() != 0) return;
  print_console(
      fmt::format("note: padded with zeros, to sizes that mesh {} divides: {}; that costs memory, bytes and time\n",
                  to_string(mesh), dims));
}

namespace detail {

/// --prompt -: the whole standard input, without a newline at its end. mpirun gives it to the first rank, which sends
/// it to the others: all call it.
inline std::string read_prompt() {
  constexpr std::size_t most = std::size_t{1} << 30, block = std::size_t{1} << 16;
  std::string text;
  if (world_rank() == 0) {
    while (text.size() <= most && std::cin) {
      const std::size_t before = text.size();
      text.resize(before + block);
      std::cin.read(text.data() + before, static_cast<std::streamsize>(block));
      text.resize(before + static_cast<std::size_t>(std::cin.gcount()));
    }
  }
#if defined(SHARDLIB_WITH_MPI)
  namespace mpi = shardlib::detail::mpi;
  if (under_mpi()) {
    std::uint64_t size = text.size();
    mpi::check(MPI_Bcast(&size, 1, MPI_UINT64_T, 0, mpi::process.control), "sharing the prompt", sizeof size);
    text.resize(size);
    if (size <= most)
      mpi::check(MPI_Bcast(text.data(), static_cast<int>(size), MPI_BYTE, 0, mpi::process.control),
                 "sharing the prompt", size);
  }
#endif
  if (text.size() > most) throw UsageError("--prompt -: the standard input is longer than 1 GiB");
  if (text.ends_with('\n')) text.pop_back();
  if (shardlib::detail::as_utf8(text) != text) throw UsageError("--prompt -: the standard input is not valid UTF-8");
  return text;
}

inline io::LoaderOptions row_options(const Training& t, const Data& data) {
  io::LoaderOptions rows;
  rows.batch = t.batch;
  rows.length = t.seq;
  rows.seed = t.seed;
  rows.vocabulary = static_cast<std::uint32_t>(data.vocabulary);
  rows.shuffle = t.shuffle == "yes";
  rows.begin = static_cast<std::int32_t>(t.row_begin);
  rows.rows = t.rows == "packed" ? io::Rows::packed : t.rows == "padded" ? io::Rows::padded : io::Rows::stories;
  return rows;
}

inline io::TextOptions text_options(const Training& t, const Data& data) {
  // A model of whole documents has to learn where they end, or its samples never do.
  return {data.tokenizer, t.rows != "packed"};
}

inline auto open_tokens(const char* option, const std::string& path, io::Split split, const Training& t,
                        const Data& data) {
  return naming_option(option, [&] {
    auto source = io::open_tokens(path, split, text_options(t, data));
    check_tokenizer(path, t.tokenizer, *data.tokenizer);
    return source;
  });
}

inline void open_training_data(Training& t, Data& data, const io::LoaderOptions& rows) {
  if (t.text_stream.empty()) {
    data.train = std::make_shared<io::Loader>(open_tokens("--data", t.data, io::Split::train, t, data), rows);
    if (rows.rows == io::Rows::packed && data.train->source().tokens() < t.seq)
      throw UsageError(
          fmt::format("--data: '{}' has {}, fewer than a row of --seq {}: choose a longer text or shorter rows", t.data,
                      shardlib::detail::counted(data.train->source().tokens(), "token"), t.seq));
    if (t.epochs <= 0) return;
    t.steps = data.train->steps_for(t.epochs);
    if (t.steps > largest_size)  // a configuration with more could not be read again
      throw UsageError(fmt::format("--epochs {} are {} steps, but a run has {} at most: choose fewer epochs", t.epochs,
                                   t.steps, largest_size));
    return;
  }
  if (rows.rows != io::Rows::packed)
    throw UsageError("--stream has packed rows only: give --data for --rows " + t.rows);
  if (t.epochs > 0 || !rows.shuffle)
    throw UsageError(
        fmt::format("--stream reads texts as they come, so {} has no meaning: give --data, or leave it out",
                    t.epochs > 0 ? "--epochs" : "--shuffle no"));
  // Devices open it in the first step, which is too late to find that it has no text.
  naming_option("--stream", [&] {
    static_cast<void>(
        io::TextStream(t.text_stream, {t.batch / t.microbatches, t.seq, t.seed, text_options(t, data)}, 0, 0));
  });
}

inline void open_validation_data(const Training& t, Data& data, io::LoaderOptions rows) {
  // A file that is not there is an error in any case.
  if (t.validate_every <= 0 && t.validation_data.empty()) return;
  if (t.validation_data.empty() && t.data.empty())
    throw UsageError("--validate-every needs --validation-data where training streams texts");
  rows.shuffle = rows.repeat = false;
  const bool own = t.validation_data.empty();
  const std::string& path = own ? t.data : t.validation_data;
  const auto source = open_tokens(own ? "--data" : "--validation-data", path,
                                  own || io::has_validation(path) ? io::Split::validation : io::Split::train, t, data);
  if (t.validate_every == 0)
    throw UsageError("--validation-data measures nothing without --validate-every N: give it too");
  data.validation = std::make_shared<io::Loader>(source, rows);
}

}  // namespace detail

SHARDLIB_INLINE Data open_data(Training& t, std::int64_t vocabulary) {
  const bool dry = t.plan || !t.graph.empty();
  const bool none = t.sample_only || (t.data.empty() && t.text_stream.empty());
  if (!dry && (none ? t.steps > 0 && !t.sample_only : !t.data.empty() && !t.text_stream.empty()))
    throw UsageError(none ? detail::no_data(t)
                          : "--data and --stream are two sources of training data: give one of them");
  detail::check_settings(t);
  if (t.prompt == "-" && !dry) t.prompt = detail::read_prompt();
  Data data;
  // A run keeps a copy of its tokenizer in its folder, which may have been moved to another machine.
  const std::string tokenizer =
      t.sample_only ? RunDirectory(t.directory, "", Resume::automatic, false).tokenizer_of(t.tokenizer) : t.tokenizer;
  data.tokenizer = naming_option("--tokenizer", [&] { return io::load_tokenizer(tokenizer); });
  data.vocabulary = vocabulary > 0 ? vocabulary : static_cast<std::int64_t>(data.tokenizer->vocabulary_size());
  if (dry) return data;
  if (!t.evaluate.empty()) data.questions = naming_option("--evaluate", [&] { return read_questions(t.evaluate); });
  detail::check_questions(t, data);
  detail::check_prompt(t, data);
  if (none) return data;
  const io::LoaderOptions rows = detail::row_options(t, data);
  detail::open_training_data(t, data, rows);
  detail::open_validation_data(t, data, rows);
  return data;
}

SHARDLIB_INLINE void batch_must_divide(const std::vector<AxisSize>& mesh, const Training& t) {
  if (t.sample_only) return;  // samples and the rows of --evaluate come one by one
  std::int64_t parts = 1;
  std::string axes;
  for (const std::string& name : detail::batch_axes(mesh, t)) {
    for (const AxisSize& axis : mesh)
      if (axis.name == name) parts *= axis.size;
    axes += (axes.empty() ? "" : " * ") + name;
  }
  const std::int64_t least = t.microbatches * parts;  // both checks name it: what passes the first passes the second
  if (t.batch % t.microbatches != 0)
    throw UsageError(fmt::format("--batch {} does not divide into --microbatches {}{}: choose a multiple of {}",
                                 t.batch, t.microbatches,
                                 parts == 1 ? "" : fmt::format(", each over {} = {}", axes, parts), least));
  // Four numbers for each token, for this step and the next. It is not known which processes share a machine, so this
  // counts one process alone.
  const double rows = 2.0 * 16.0 * static_cast<double>(t.batch) * static_cast<double>(t.seq) +
                      512.0 * static_cast<double>(t.microbatches);
  const double mine = rows / (under_mpi() || t.plan ? static_cast<double>(parts) : 1.0);
  if (const auto left = static_cast<double>(shardlib::detail::left_bytes()); mine > left)
    throw UsageError(
        fmt::format("--batch {} of --seq {} in --microbatches {}: the rows of a step take {:.1f} GB of host "
                    "memory, but {:.1f} are left: choose smaller ones",
                    t.batch, t.seq, t.microbatches, mine * 1e-9, left * 1e-9));
  const std::int64_t size = t.batch / t.microbatches;
  if (size % parts == 0) return;
  std::int64_t fewer = parts - 1;
  while (size % fewer != 0) --fewer;
  const std::string given =
      t.microbatches == 1 ? "--batch" : fmt::format("--batch {} / --microbatches {} =", t.batch, t.microbatches);
  throw UsageError(fmt::format(
      "{} {} does not divide over {} = {} (mesh {}): choose {} of {}, or a mesh of {} = {}", given, size, axes, parts,
      to_string(mesh), t.microbatches == 1 ? "a multiple" : "a --batch that is a multiple", least, axes, fewer));
}

}  // namespace shardlib::run
