// The GPT of examples/gpt_model.hpp a second time, as the test's oracle: forward only, in f64, in plain loops over
// whole arrays, written from the papers' formulas. It includes nothing of shardlib, and nothing is sharded here.
#pragma once

#include <cmath>
#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace gpt_reference {

struct Shape {
  std::size_t B, L, M, Q, K, D, F, V, layers;
};

/// Whole arrays, row-major, by the names of the leaves ("layers/0/w_q"). Without "unembed/0", embed serves for both.
/// With "layers/0/b_q/0" queries, keys and values have biases, with "layers/0/q_norm/0" queries and keys norms.
using Weights = std::map<std::string, std::vector<double>>;

struct Tokens {
  std::vector<int> inputs, targets, segments;  ///< B x L
};

/// x / sqrt(mean(x^2) + 1e-6) * scale, for one row.
inline std::vector<double> normed(const double* x, const std::vector<double>& scale) {
  double squares = 0;
  for (std::size_t m = 0; m < scale.size(); ++m) squares += x[m] * x[m];
  const double inverse_rms = 1 / std::sqrt(squares / static_cast<double>(scale.size()) + 1e-6);
  std::vector<double> y(scale.size());
  for (std::size_t m = 0; m < scale.size(); ++m) y[m] = x[m] * inverse_rms * scale[m];
  return y;
}

/// sum_m x[m] * w[m, j] for all j.
inline std::vector<double> times(const std::vector<double>& x, const std::vector<double>& w) {
  const std::size_t n = w.size() / x.size();
  std::vector<double> y(n, 0.0);
  for (std::size_t m = 0; m < x.size(); ++m)
    for (std::size_t j = 0; j < n; ++j) y[j] += x[m] * w[m * n + j];
  return y;
}

/// Normalizes each head (a run of D numbers).
inline void norm_heads(std::vector<double>& heads, const std::vector<double>& scale) {
  for (std::size_t head = 0; head < heads.size(); head += scale.size()) {
    const auto y = normed(heads.data() + head, scale);
    for (std::size_t d = 0; d < y.size(); ++d) heads[head + d] = y[d];
  }
}

/// Turns each head (a run of D numbers): pair (i, i + D/2) by the angle position / 10000^(2i/D).
inline void apply_rope(std::vector<double>& heads, std::size_t D, std::size_t position) {
  for (std::size_t head = 0; head < heads.size(); head += D)
    for (std::size_t i = 0; i < D / 2; ++i) {
      const double angle =
          static_cast<double>(position) / std::pow(10000.0, 2.0 * static_cast<double>(i) / static_cast<double>(D));
      const double a = heads[head + i], b = heads[head + i + D / 2];
      heads[head + i] = a * std::cos(angle) - b * std::sin(angle);
      heads[head + i + D / 2] = a * std::sin(angle) + b * std::cos(angle);
    }
}

/// Mean cross-entropy of the next token.
inline double loss(const Shape& s, const Weights& w, const Tokens& tokens) {
  const auto& embed = w.at("embed");
  const auto& unembed = w.count("unembed/0") != 0 ? w.at("unembed/0") : embed;
  double total = 0;
  for (std::size_t b = 0; b < s.B; ++b) {
    const int* inputs = tokens.inputs.data() + b * s.L;
    const int* targets = tokens.targets.data() + b * s.L;
    const int* segments = tokens.segments.data() + b * s.L;
    std::vector<std::vector<double>> x;
    for (std::size_t l = 0; l < s.L; ++l) {
      const double* row = embed.data() + static_cast<std::size_t>(inputs[l]) * s.M;
      x.emplace_back(row, row + s.M);
    }
    for (std::size_t layer = 0; layer < s.layers; ++layer) {
      const auto weight = [&](const char* name) -> const std::vector<double>& {
        return w.at("layers/" + std::to_string(layer) + "/" + name);
      };
      const auto has = [&](const char* name) { return w.count("layers/" + std::to_string(layer) + "/" + name) != 0; };
      const auto &w_o = weight("w_o"), &w_down = weight("w_down");
      std::vector<std::vector<double>> q, k, v;
      for (std::size_t l = 0; l < s.L; ++l) {
        const auto y = normed(x[l].data(), weight("norm1"));
        q.push_back(times(y, weight("w_q")));
        k.push_back(times(y, weight("w_k")));
        v.push_back(times(y, weight("w_v")));
        if (has("b_q/0")) {
          // A query head stands at Q, K in w_q, and at K, Q in its bias.
          const auto &b_q = weight("b_q/0"), &b_k = weight("b_k/0"), &b_v = weight("b_v/0");
          for (std::size_t i = 0; i < b_q.size(); ++i)
            q[l][((i / s.D) % s.Q * s.K + i / s.D / s.Q) * s.D + i % s.D] += b_q[i];
          for (std::size_t i = 0; i < b_k.size(); ++i) {
            k[l][i] += b_k[i];
            v[l][i] += b_v[i];
          }
        }
        if (has("q_norm/0")) {
          norm_heads(q[l], weight("q_norm/0"));
          norm_heads(k[l], weight("k_norm/0"));
        }
        apply_rope(q.back(), s.D, l);
        apply_rope(k.back(), s.D, l);
      }
      for (std::size_t l = 0; l < s.L; ++l) {
        for (std::size_t head = 0; head < s.Q * s.K; ++head) {
          const double* query = q[l].data() + head * s.D;
          const std::size_t at = head % s.K * s.D;  // the key-value head that Q query heads share
          std::vector<double> weights(l + 1, 0.0);
          double sum = 0;
          for (std::size_t past = 0; past <= l; ++past) {
            if (segments[past] != segments[l]) continue;
            double product = 0;
            for (std::size_t d = 0; d < s.D; ++d) product += query[d] * k[past][at + d];
            sum += weights[past] = std::exp(product / std::sqrt(static_cast<double>(s.D)));
          }
          for (std::size_t d = 0; d < s.D; ++d) {
            double value = 0;
            for (std::size_t past = 0; past <= l; ++past) value += weights[past] / sum * v[past][at + d];
            for (std::size_t m = 0; m < s.M; ++m) x[l][m] += value * w_o[m * s.Q * s.K * s.D + head * s.D + d];
          }
        }
      }
      for (std::size_t l = 0; l < s.L; ++l) {
        const auto y = normed(x[l].data(), weight("norm2"));
        const auto gate = times(y, weight("w_gate")), up = times(y, weight("w_up"));
        for (std::size_t f = 0; f < s.F; ++f) {
          const double h = gate[f] / (1 + std::exp(-gate[f])) * up[f];
          for (std::size_t m = 0; m < s.M; ++m) x[l][m] += h * w_down[m * s.F + f];
        }
      }
    }
    for (std::size_t l = 0; l < s.L; ++l) {
      const auto y = normed(x[l].data(), w.at("final_norm"));
      double sum = 0, target = 0;
      for (std::size_t t = 0; t < s.V; ++t) {
        double logit = 0;
        for (std::size_t m = 0; m < s.M; ++m) logit += y[m] * unembed[t * s.M + m];
        sum += std::exp(logit);
        if (t == static_cast<std::size_t>(targets[l])) target = logit;
      }
      total += std::log(sum) - target;
    }
  }
  return total / static_cast<double>(s.B * s.L);
}

}  // namespace gpt_reference
