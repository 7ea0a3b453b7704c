// Trains the GPT of gpt_model.hpp: fully sharded data parallel over mesh axis d, tensor parallel over mesh axis t.
//
//   gpt_fsdp --data text.txt --mesh d=4,t=2     eight devices as threads of this process
//   mpirun -n 2 gpt_fsdp --data text.txt        two devices as MPI ranks
//
// With gpt_model.hpp this is the whole training step; there is no tokenizer (bytes are tokens) and no checkpoint.
#include <shardlib/io/text_batches.hpp>
#include <shardlib/shardlib.hpp>

#include <CLI/CLI.hpp>

#include <charconv>
#include <chrono>
#include <fstream>

#include "gpt_model.hpp"

using namespace shardlib;
using GptMesh = Mesh<"d t">;

struct Options {
  std::string data, metrics, mesh;
  std::int64_t steps = 300, warmup = 20, batch = 16, seq = 128;
  std::int64_t layers = 4, d_model = 256, n_q_per_kv = 2, n_kv = 2, d_head = 64, d_ff = 768;
  bool tied = false, library_loss = false, report = false;
  double learning_rate = 3e-3, weight_decay = 0.1, clip = 1.0, beta1 = 0.9, beta2 = 0.95;
  std::uint64_t seed = 0;
  std::string prompt = "And God said";
  std::int64_t sample = 200;
  double temperature = 0.7;
};

constexpr std::int64_t vocabulary = 256;

// ---- weights --------------------------------------------------------------------------------------------------------

// Truncated normal numbers of standard deviation 1/sqrt(fan in); gains 1. The same on every mesh.
gpt::Model initial_weights(const GptMesh& mesh, const Options& o) {
  std::uint64_t stream = 0;
  const Sizes sizes{{"V", vocabulary}, {"M", o.d_model}, {"Q", o.n_q_per_kv},
                    {"K", o.n_kv},     {"D", o.d_head},  {"F", o.d_ff}};
  const auto init = [&]<class D, Spec S>(Tensor<D, S>& w, std::int64_t fan_in) {
    w = random_truncated_normal<D, S>(mesh, sizes, {o.seed, stream++}) / std::sqrt(static_cast<double>(fan_in));
  };
  const auto gain = [&](auto& w) { w = ones<f32, "M/t/d">(mesh, sizes); };
  // Two branches a layer add to the residual stream: their outputs are scaled down (GPT-2).
  const std::int64_t branches = 2 * o.layers;

  gpt::Model w;
  init(w.embed, o.d_model);
  if (!o.tied) init(w.unembed.emplace_back(), o.d_model);
  for (std::int64_t i = 0; i < o.layers; ++i) {
    gpt::Layer& layer = w.layers.emplace_back();
    gain(layer.norm1);
    gain(layer.norm2);
    init(layer.w_q, o.d_model);
    init(layer.w_k, o.d_model);
    init(layer.w_v, o.d_model);
    init(layer.w_o, o.n_q_per_kv * o.n_kv * o.d_head * branches);
    init(layer.w_gate, o.d_model);
    init(layer.w_up, o.d_model);
    init(layer.w_down, o.d_ff * branches);
  }
  gain(w.final_norm);
  return w;
}

// ---- AdamW ----------------------------------------------------------------------------------------------------------

struct Training {
  gpt::Model weights, mean, variance;
};

gpt::Model zeros_like(const gpt::Model& w) {
  return map_tree([](const auto& x) { return x * 0.0; }, w);
}

struct StepResult {
  double loss = 0, grad_norm = 0;
};

// One step: loss, gradients (of the weights' own types, since all are fully sharded), clipping by the global norm,
// AdamW (Loshchilov and Hutter 2017). The metric is reduced outside the differentiated function.
StepResult train_step(const GptMesh& mesh, Training& state, const gpt::Batch& batch, const Options& o,
                      std::int64_t step) {
  const auto causal = causal_mask<"Qlen Klen">(mesh, o.seq, o.seq);
  const auto [loss, grads] = value_and_grad(mesh, gpt::loss, state.weights, batch, causal, o.library_loss);

  Tensor<f32, "+d +t"> squares;
  for_each_leaf(
      [&](std::string_view, const auto& g) {
        const Tensor<f32, "+d +t"> s = sum(square(g));
        squares = squares ? squares + s : s;
      },
      grads);
  const double norm = std::sqrt(item(all_reduce<"+d +t -> ">(squares)));
  const StepResult result{item(all_reduce<"+d +t -> ">(loss)), norm};
  if (!std::isfinite(result.loss) || !std::isfinite(norm))
    throw Error(fmt::format("step {}: loss {} and gradient norm {} are not finite; lower --learning-rate", step,
                            result.loss, norm));

  const auto f = [](double x) { return static_cast<float>(x); };
  const float clip = f(norm > o.clip ? o.clip / norm : 1.0);
  const float rate = f(warmup_cosine(step, o.steps, o.warmup, o.learning_rate));
  const float beta1 = f(o.beta1), beta2 = f(o.beta2), decay = f(o.weight_decay);
  const float correct1 = f(1 / (1 - std::pow(o.beta1, static_cast<double>(step + 1))));
  const float correct2 = f(1 / (1 - std::pow(o.beta2, static_cast<double>(step + 1))));

  const auto update_mean = [=](auto m, auto g) { return beta1 * m + (1 - beta1) * clip * g; };
  const auto update_variance = [=](auto v, auto g) { return beta2 * v + (1 - beta2) * clip * clip * g * g; };
  const auto update_weight = [=](auto p, auto m, auto v) {
    return p - rate * (m * correct1 / (sqrt(v * correct2) + 1e-8F) + decay * p);
  };
  const auto each = [](auto f) { return [f](const auto&... leaves) { return map(f, leaves...); }; };
  state.mean = map_tree(each(update_mean), state.mean, grads);
  state.variance = map_tree(each(update_variance), state.variance, grads);
  state.weights = map_tree(each(update_weight), state.weights, state.mean, state.variance);
  return result;
}

// ---- data and sampling ----------------------------------------------------------------------------------------------

// This device's rows of a batch.
gpt::Batch next_batch(const GptMesh& mesh, const io::TextBatches& text, const Options& o, std::int64_t step) {
  const std::int64_t rows = o.batch / mesh.size("d");
  auto host = std::make_shared<io::TextBatch>(text.rows(step, mesh.coordinate("d") * rows, rows));
  const auto tensor = [&](std::vector<i32>& values) {
    return from_memory<i32, "B/d L">(mesh, {{"B", o.batch}, {"L", o.seq}}, std::span<const i32>(values), host);
  };
  return {tensor(host->inputs), tensor(host->targets), tensor(host->segments)};
}

// Continues the prompt byte by byte, from the last --seq bytes; there is no cache: each byte costs a whole forward
// pass. Every device of d runs the same row, so that one prompt is a batch of d.
std::string sample(const GptMesh& mesh, const gpt::Model& w, const Options& o) {
  const std::int64_t rows = mesh.size("d");
  const Sizes sizes{{"B", rows}, {"L", o.seq}};
  const auto segments = zeros<i32, "B/d L">(mesh, sizes);
  const auto mask = gpt::segment_mask(segments, causal_mask<"Qlen Klen">(mesh, o.seq, o.seq));
  std::string text = o.prompt;
  for (std::int64_t i = 0; i < o.sample; ++i) {
    const auto length = static_cast<std::int64_t>(text.size());
    const std::int64_t begin = std::max<std::int64_t>(0, length - (o.seq - 1));
    auto window = std::make_shared<std::vector<i32>>(static_cast<std::size_t>(o.seq), 0);
    for (std::int64_t k = begin; k < length; ++k)
      (*window)[static_cast<std::size_t>(k - begin + 1)] =
          static_cast<unsigned char>(text[static_cast<std::size_t>(k)]);
    const auto inputs = from_memory<i32, "B/d L">(mesh, sizes, std::span<const i32>(*window), window);
    const auto last = full<i32, "B/d">(mesh, {{"B", rows}}, static_cast<double>(length - begin));
    const auto logits = all_gather<"B/d V/t -> B/d V">(
        index_unreduced<"B/d [L] V/t, B/d -> B/d V/t">(gpt::logits(w, inputs, mask), last));
    // Gumbel noise keyed by the step makes argmax a draw from the softmax, the same draw on every device.
    const auto noise = random_uniform<f32, "V">(mesh, {{"V", vocabulary}}, {o.seed + 1, static_cast<std::uint64_t>(i)});
    const auto heat = static_cast<float>(o.temperature);
    const auto drawn =
        argmax<"B/d V -> B/d">(map([=](auto x, auto u) { return x - heat * log(-log(u + 1e-10F)); }, logits, noise));
    text.push_back(static_cast<char>(drawn.span()[0]));
  }
  return text;
}

// ---- the program ----------------------------------------------------------------------------------------------------

void check_options(const Options& o, const std::vector<AxisSize>& mesh) {
  if (mesh.size() != 2 || mesh[0].name != "d" || mesh[1].name != "t")
    throw UsageError("--mesh " + to_string(mesh) + ": this program's mesh has the axes d and t, as in --mesh d=4,t=2");
  const std::int64_t d = mesh[0].size, t = mesh[1].size;
  const auto divides = [&](const char* option, std::int64_t size, std::int64_t parts, const char* axes) {
    if (size % parts != 0)
      throw UsageError(fmt::format("{} {} does not divide over {} = {} (mesh {}): choose a multiple of {}", option,
                                   size, axes, parts, to_string(mesh), parts));
  };
  divides("--batch", o.batch, d, "d");
  divides("--d-model", o.d_model, d * t, "d*t");
  divides("--n-kv", o.n_kv, t, "t");
  divides("--d-ff", o.d_ff, t, "t");
  if (o.d_head % 2 != 0)
    throw UsageError(fmt::format("--d-head {}: rotary positions turn pairs; choose a multiple of 2", o.d_head));
  if (vocabulary % t != 0)
    throw UsageError(fmt::format("--mesh {}: t = {} does not divide the vocabulary of {}; choose a power of 2",
                                 to_string(mesh), t, vocabulary));
}

void train(const GptMesh& mesh, const io::TextBatches& text, const Options& o) {
  Training state{initial_weights(mesh, o), {}, {}};
  state.mean = zeros_like(state.weights);
  state.variance = zeros_like(state.weights);
  const bool speaks = mesh.index() == 0;
  std::ofstream metrics;
  if (speaks && !o.metrics.empty()) metrics.open(o.metrics);
  if (speaks)
    fmt::print("{} parameters, mesh {}, {} bytes of text, {} tokens a step\n", parameter_count(state.weights), mesh,
               text.bytes(), o.batch * o.seq);
  if (o.report) {
    const auto kept = kept_for_backward(gpt::loss, state.weights, next_batch(mesh, text, o, 0),
                                        causal_mask<"Qlen Klen">(mesh, o.seq, o.seq), o.library_loss);
    for (const Kept& k : kept)
      if (speaks) fmt::print("  kept for backward: {:>12} bytes  [{}]  {}\n", k.bytes, k.spec, k.what);
  }
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto seconds = [](auto duration) { return std::chrono::duration<double>(duration).count(); };
  for (std::int64_t step = 0; step < o.steps; ++step) {
    const auto begin = Clock::now();
    const StepResult result = train_step(mesh, state, next_batch(mesh, text, o, step), o, step);
    const double took = seconds(Clock::now() - begin), elapsed = seconds(Clock::now() - start);
    if (!speaks) continue;
    const double rate = warmup_cosine(step, o.steps, o.warmup, o.learning_rate);
    const double speed = static_cast<double>(o.batch * o.seq) / took;
    if (metrics.is_open())
      metrics << fmt::format(R"({{"step": {}, "loss": {}, "learning_rate": {}, "grad_norm": {}, )"
                             R"("tokens_per_second": {}, "step_seconds": {}}})",
                             step, result.loss, rate, result.grad_norm, speed, took)
              << std::endl;
    if (metrics.is_open() && !metrics) throw Error("cannot write to the file '" + o.metrics + "' (--metrics)");
    if (step % 10 == 0 || step + 1 == o.steps)
      fmt::print("step {:>5}/{}  loss {:.4f}  lr {:.2e}  grad norm {:6.3f}  {:>7.0f} tokens/s  {:>4.0f} s left\n",
                 step + 1, o.steps, result.loss, rate, result.grad_norm, speed,
                 elapsed / static_cast<double>(step + 1) * static_cast<double>(o.steps - step - 1));
    std::fflush(stdout);
  }
  if (o.sample > 0) {
    const std::string drawn = sample(mesh, state.weights, o);
    if (speaks) fmt::print("\nA sample (temperature {}):\n\n{}\n", o.temperature, drawn);
  }
}

// Options' own checks: CLI11's let NaN through, and take a number that overflows for the largest one.
CLI::Validator whole_number(std::int64_t least) {
  return CLI::Range(least, std::int64_t{1} << 24);
}
CLI::Validator number(bool may_be_zero) {
  return CLI::Validator(
      [=](const std::string& text) -> std::string {
        double x = 0;
        const char* const end = text.data() + text.size();
        const auto [rest, error] = std::from_chars(text.data(), end, x);
        if (error == std::errc() && rest == end && std::isfinite(x) && (x > 0 || (may_be_zero && x == 0))) return "";
        return text + " is no finite number " + (may_be_zero ? "of at least 0" : "above 0");
      },
      "FLOAT");
}

int program(int argc, char** argv) {
  Options o;
  CLI::App app{"Trains a GPT on the bytes of a text file, sharded over a mesh of devices."};
  app.option_defaults()->always_capture_default();
  app.add_option("--data", o.data, "text file; documents may be separated by <|endoftext|>")->required();
  app.add_option("--mesh", o.mesh,
                 "devices: d data parallel (FSDP), t tensor parallel, as in d=4,t=2; threads of this process, or MPI "
                 "ranks under mpirun (default: all ranks on d)");
  app.add_option("--steps", o.steps, "training steps")->check(whole_number(1));
  app.add_option("--batch", o.batch, "sequences a step, over all devices")->check(whole_number(1));
  app.add_option("--seq", o.seq, "tokens a sequence")->check(whole_number(1));
  app.add_option("--layers", o.layers, "layers")->check(whole_number(1));
  app.add_option("--d-model", o.d_model, "width of the residual stream")->check(whole_number(1));
  app.add_option("--n-q-per-kv", o.n_q_per_kv, "query heads per key-value head")->check(whole_number(1));
  app.add_option("--n-kv", o.n_kv, "key-value heads")->check(whole_number(1));
  app.add_option("--d-head", o.d_head, "width of a head")->check(whole_number(1));
  app.add_option("--d-ff", o.d_ff, "width of the feed-forward layer")->check(whole_number(1));
  app.add_flag("--tied", o.tied, "use the embedding as the unembedding too");
  app.add_option("--learning-rate", o.learning_rate, "peak learning rate")->check(number(false));
  app.add_option("--warmup", o.warmup, "steps of linear warmup; a cosine decay to a tenth follows")
      ->check(whole_number(0));
  app.add_option("--weight-decay", o.weight_decay, "AdamW's decay")->check(number(true));
  app.add_option("--clip", o.clip, "largest global gradient norm")->check(number(false));
  app.add_option("--seed", o.seed, "of the weights, the order of the data and the sample")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--metrics", o.metrics, "file for one JSON object a step");
  app.add_option("--sample", o.sample, "bytes of text to sample at the end")->check(whole_number(0));
  app.add_option("--prompt", o.prompt, "what the sample continues");
  app.add_option("--temperature", o.temperature, "of the sample; 0 takes the likeliest byte")->check(number(true));
  app.add_flag("--library-loss", o.library_loss,
               "use the library's cross_entropy instead of the one spelled in gpt_model.hpp");
  app.add_flag("--report", o.report, "print what is kept for the backward pass");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    if (world_rank() == 0) fmt::print("{}", app.help());
    return 0;
  } catch (const CLI::ParseError& error) {
    throw UsageError(std::string(error.what()) + " (see --help)");
  }
  const auto mesh = parse_mesh(o.mesh.empty() ? fmt::format("d={},t=1", world_size()) : o.mesh);
  check_options(o, mesh);
  const io::TextBatches text(o.data, o.batch, o.seq, o.seed);
  if (!o.metrics.empty() && world_rank() == 0 && !std::ofstream(o.metrics))
    throw UsageError("cannot write the file '" + o.metrics + "': check --metrics");
  launch(mesh, [&](const std::shared_ptr<Device>& device) { train(GptMesh(device), text, o); });
  return 0;
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] { return program(argc, argv); });
}
