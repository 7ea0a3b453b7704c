// The losses of docs/losses.md, which quotes them, against plain loops in f64, on several meshes.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shardlib/shardlib.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Logits = Tensor<f64, "B/d L V/t">;
using Ids = Tensor<i32, "B/d L">;
using Each = Tensor<f64, "B/d L">;

auto token_loss(const Logits& raw, const Ids& targets) -> Tensor<f64, "+d +t"> {
  const auto logits = tanh(raw / 30.0) * 30.0;               // a soft cap
  const auto counts = cast<f64>(greater_equal(targets, 0));  // targets below 0 do not count
  const auto ids = maximum(targets, 0);
  const auto missed = cross_entropy(logits, ids);  // "B/d L +t"
  const auto target = index_unreduced<"B/d L [V/t], B/d L -> B/d L +t">(logits, ids);
  const auto smoothing = target - mean<"B/d L V/t -> B/d L +t">(logits);
  const auto z = square(logsumexp<"B/d L V/t -> B/d L", over<"t">>(logits));  // "B/d L"
  const auto each = missed + smoothing * 0.1 + to_partial<"B/d L -> B/d L +t">(z) * 1e-4;
  return sum(each * counts) / all_reduce<"+d -> ">(sum(counts));
}

auto contrastive_loss(const Mesh<"d t">& mesh, const Tensor<f64, "B/d E">& images, const Tensor<f64, "B/d E">& texts,
                      const Tensor<f64, "">& log_scale) -> Tensor<f64, "+d +t"> {
  const auto unit = [](const auto& x) { return x / vector_norm<"B/d E -> B/d">(x); };
  const auto all_texts = rename<"B -> C">(all_gather<"B/d E -> B E">(unit(texts)));
  const auto logits = einsum_unreduced<"B/d E, C E -> B/d C">(unit(images), all_texts) * exp(log_scale);
  const auto n = images.size("B");
  const auto of_images = mean<"B/d -> +d">(cross_entropy(logits, iota<"B/d">(mesh, n)));
  const auto of_texts = mean<"C +d -> +d">(cross_entropy(transpose(logits), iota<"C">(mesh, n)));
  return to_partial<"+d -> +d +t">((of_images + of_texts) * 0.5);
}

auto policy_loss(const Logits& logits, const Logits& reference, const Ids& tokens, const Each& old,
                 const Tensor<f64, "B/d">& advantage, const Each& mask) -> Tensor<f64, "+d +t"> {
  const auto log_p = [&](const Logits& x) { return -all_reduce<"B/d L +t -> B/d L">(cross_entropy(x, tokens)); };
  const auto now = log_p(logits);
  const auto ratio = exp(now - old);
  const auto gain = minimum(ratio * advantage, clamp(ratio, 0.8, 1.2) * advantage);
  const auto gap = stop_gradient(log_p(reference)) - now;
  const auto kl = exp(gap) - gap - 1.0;  // the estimate of the KL divergence that has low variance
  const auto logs = log_softmax<"V", over<"t">>(logits);
  const auto minus_entropy = sum<"B/d L V/t -> B/d L +t">(exp(logs) * logs);
  const auto each = to_partial<"B/d L -> B/d L +t">(kl * 0.04 - gain) + minus_entropy * 0.01;
  return sum(each * mask) / all_reduce<"+d -> ">(sum(mask));
}

auto distillation_loss(const Logits& student, const Logits& teacher, double temperature) -> Tensor<f64, "+d +t"> {
  const auto s = log_softmax<"V", over<"t">>(student / temperature);
  const auto t = stop_gradient(log_softmax<"V", over<"t">>(teacher / temperature));
  const auto kl = sum<"B/d L V/t -> B/d L +t">(exp(t) * (t - s));
  return mean<"B/d L +t -> +d +t">(kl) * (temperature * temperature);
}

// ---- the same in plain loops ----

constexpr std::int64_t batch = 4, length = 3, vocabulary = 10, width = 5;
using Row = std::vector<double>;

Row logs_of(const Row& x) {
  double total = 0;
  for (const double v : x) total += std::exp(v);
  Row y = x;
  for (double& v : y) v -= std::log(total);
  return y;
}
std::vector<Row> rows_of(const HostArray<f64>& x, std::int64_t n) {
  std::vector<Row> rows;
  for (auto at = x.data.begin(); at != x.data.end(); at += n) rows.emplace_back(at, at + n);
  return rows;
}
double inner(const Row& a, const Row& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

double plain_token_loss(const std::vector<Row>& raw, const std::vector<i32>& targets) {
  double sum = 0, count = 0;
  for (std::size_t i = 0; i < raw.size(); ++i) {
    if (targets[i] < 0) continue;
    Row x = raw[i];
    for (double& v : x) v = 30 * std::tanh(v / 30);
    const Row logs = logs_of(x);
    double smooth = 0;
    for (const double v : logs) smooth -= v / static_cast<double>(x.size());
    const double z = x[0] - logs[0];
    sum += -0.9 * logs[static_cast<std::size_t>(targets[i])] + 0.1 * smooth + 1e-4 * z * z;
    ++count;
  }
  return sum / count;
}
double plain_contrastive_loss(const std::vector<Row>& images, const std::vector<Row>& texts, double scale) {
  double sum = 0;
  const auto direction = [&](const std::vector<Row>& from, const std::vector<Row>& to) {
    for (std::size_t i = 0; i < from.size(); ++i) {
      Row logits;
      for (const Row& other : to)
        logits.push_back(scale * inner(from[i], other) / std::sqrt(inner(from[i], from[i]) * inner(other, other)));
      sum -= logs_of(logits)[i] / (2 * static_cast<double>(from.size()));
    }
  };
  direction(images, texts);
  direction(texts, images);
  return sum;
}

TEST_CASE("the losses of docs/losses.md", "[ops]") {
  for (const char* sizes_of_mesh : {"d=1,t=1", "d=2,t=2", "d=1,t=4"})
    on_mesh(sizes_of_mesh, [](const Mesh<"d t">& mesh) {
      const Sizes sizes{{"B", batch}, {"L", length}, {"V", vocabulary, 12}, {"E", width}};
      const auto number = [](const auto& loss) { return item(all_reduce<"+d +t -> ">(loss)); };
      const auto near = [](double found, double expected, const char* what) {
        expect(std::abs(found - expected) < 1e-12, std::string(what) + ": " + show(found) + ", not " + show(expected));
      };
      const auto logits = random_normal<f64, "B/d L V/t">(mesh, sizes, {1, 1});
      const auto others = random_normal<f64, "B/d L V/t">(mesh, sizes, {1, 2});
      const auto tokens = cast<i32>(random_uniform<f64, "B/d L">(mesh, sizes, {1, 3}) * 10.0);
      const auto ignored = where(less(tokens, 3), tokens * 0 - 100, tokens);
      const auto x = rows_of(fetch(logits), vocabulary), y = rows_of(fetch(others), vocabulary);
      const std::vector<i32> ids = fetch(tokens).data;
      near(number(token_loss(logits, ignored)), plain_token_loss(x, fetch(ignored).data), "tokens");
      check_gradients(mesh, token_loss, logits, ignored);

      const auto images = random_normal<f64, "B/d E">(mesh, sizes, {2, 1});
      const auto texts = random_normal<f64, "B/d E">(mesh, sizes, {2, 2});
      const auto log_scale = full<f64, "">(mesh, {}, 1.5);
      near(number(contrastive_loss(mesh, images, texts, log_scale)),
           plain_contrastive_loss(rows_of(fetch(images), width), rows_of(fetch(texts), width), std::exp(1.5)), "pairs");
      check_gradients(
          mesh, [&](const auto& scale, const auto& a, const auto& b) { return contrastive_loss(mesh, a, b, scale); },
          log_scale, images, texts);
      check_gradients(
          mesh, [&](const auto& a, const auto& b, const auto& scale) { return contrastive_loss(mesh, a, b, scale); },
          texts, images, log_scale);

      const auto advantage = random_normal<f64, "B/d">(mesh, sizes, {3, 1});
      const auto old = random_uniform<f64, "B/d L">(mesh, sizes, {3, 2}) * -2.0 - 1.0;
      const auto mask = cast<f64>(less(random_uniform<f64, "B/d L">(mesh, sizes, {3, 3}), 0.7));
      const auto gains = fetch(advantage).data, before = fetch(old).data, counts = fetch(mask).data;
      double policy = 0, distilled = 0, counted = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        const Row p = logs_of(x[i]), q = logs_of(y[i]);
        const double now = p[static_cast<std::size_t>(ids[i])], gap = q[static_cast<std::size_t>(ids[i])] - now;
        const double gain = gains[i / length], ratio = std::exp(now - before[i]);
        policy += counts[i] *
                  (-std::min(ratio * gain, std::clamp(ratio, 0.8, 1.2) * gain) + 0.04 * (std::exp(gap) - gap - 1));
        counted += counts[i];
        for (const double v : p) policy += counts[i] * 0.01 * std::exp(v) * v;
        Row s = x[i], t = y[i];
        for (double& v : s) v /= 2;
        for (double& v : t) v /= 2;
        s = logs_of(s), t = logs_of(t);
        for (std::size_t v = 0; v < t.size(); ++v)
          distilled += std::exp(t[v]) * (t[v] - s[v]) * 4 / static_cast<double>(batch * length);
      }
      near(number(policy_loss(logits, others, tokens, old, advantage, mask)), policy / counted, "policy");
      check_gradients(mesh, policy_loss, logits, others, tokens, old, advantage, mask);
      near(number(distillation_loss(logits, others, 2)), distilled, "distillation");
      check_gradients(mesh, distillation_loss, logits, others, 2.0);
    });
}

}  // namespace
