// The definition, in f64.
#include <cmath>
#include <limits>
#include <vector>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/softmax_attention/implementations.h"
#include "flashgla/ops/softmax_attention/probability_mask.h"

namespace flashgla::ops::softmax_attention {

namespace {

// Elements [batch, token, head, channel] of a tensor of rank 4, whatever its strides.
class Heads {
 public:
  explicit Heads(const TensorView& view)
      : elements_(view), tokens_(view ? view.size(1) : 0), heads_(view ? view.size(2) : 0) {}
  double operator()(std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t channel) const {
    return elements_((batch * tokens_ + token) * heads_ + head, channel);
  }
  void set(std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t channel, double value) const {
    elements_.set((batch * tokens_ + token) * heads_ + head, channel, value);
  }

 private:
  Elements elements_;
  std::int64_t tokens_, heads_;
};

// Keys or values of a sequence by position, whether from the cache or from this call.
struct Source {
  Heads now, past;
  std::int64_t rows;  // P; 0 without a past
  double at(const Sequence& s, std::int64_t n, std::int64_t j, std::int64_t head, std::int64_t channel) const {
    return j >= s.position ? now(s.batch, s.begin + j - s.position, head, channel) : past(n, j % rows, head, channel);
  }
};

// What a head of a sequence sees: its keys and values from position `begin` on.
struct Sight {
  std::int64_t begin, key_dim, value_dim;
  std::vector<double> keys, values;

  const double* key(std::int64_t j) const { return keys.data() + (j - begin) * key_dim; }
  const double* value(std::int64_t j) const { return values.data() + (j - begin) * value_dim; }
};

double dot(const double* a, const double* b, std::int64_t count) {
  double sum = 0.0;
  for (std::int64_t c = 0; c < count; ++c) sum += a[c] * b[c];
  return sum;
}

struct Call {
  const Inputs& in;
  Heads q;
  Source k, v;
  std::int64_t rows, heads, group, key_dim, value_dim;
  double scale;
  std::int64_t window;
  std::optional<ProbabilityMask> mask;

  Call(const Inputs& inputs, const Options& options)
      : in(inputs),
        q(inputs.q),
        k{Heads(inputs.k), Heads(inputs.past_k ? inputs.past_k : inputs.k), 0},
        v{Heads(inputs.v), Heads(inputs.past_v ? inputs.past_v : inputs.v), 0},
        rows(inputs.past_k ? inputs.past_k.size(1) : 0),
        heads(inputs.q.size(2)),
        group(inputs.q.size(2) / inputs.k.size(2)),
        key_dim(inputs.q.size(3)),
        value_dim(inputs.v.size(3)),
        scale(options.scale),
        window(options.window),
        mask(ProbabilityMask::of(inputs, options)) {
    k.rows = v.rows = rows;
  }

  // Of head `g` of k and v.
  Sight sight(const Sequence& s, std::int64_t n, std::int64_t g) const {
    Sight seen{first_key(s.position, s.position, rows, window), key_dim, value_dim, {}, {}};
    for (std::int64_t j = seen.begin; j < s.position + s.length; ++j) {
      for (std::int64_t c = 0; c < key_dim; ++c) seen.keys.push_back(k.at(s, n, j, g, c));
      for (std::int64_t c = 0; c < value_dim; ++c) seen.values.push_back(v.at(s, n, j, g, c));
    }
    return seen;
  }

  // Channels of token t of the sequence in q, or in d_o.
  static std::vector<double> row(const Heads& of, const Sequence& s, std::int64_t t, std::int64_t head,
                                 std::int64_t channels) {
    std::vector<double> all;
    for (std::int64_t c = 0; c < channels; ++c) all.push_back(of(s.batch, s.begin + t, head, c));
    return all;
  }

  // Scores of token t of the sequence, whose query is `query`, with all keys that it sees, the first of which is
  // `first`; their ln of the sum of exponentials.
  double scores(const Sequence& s, std::int64_t t, const std::vector<double>& query, const Sight& seen,
                std::int64_t& first, std::vector<double>& all) const {
    const std::int64_t i = s.position + t;
    first = first_key(i, s.position, rows, window);
    all.clear();
    double largest = -std::numeric_limits<double>::infinity();
    for (std::int64_t j = first; j <= i; ++j) {
      all.push_back(scale * dot(query.data(), seen.key(j), key_dim));
      largest = std::max(largest, all.back());
    }
    double sum = 0.0;
    for (const double score : all) sum += std::exp(score - largest);
    return largest + std::log(sum);
  }

  // What dropout multiplies the probabilities of `count` keys from `first` on by.
  std::vector<double> factors(const Sequence& s, std::int64_t t, std::int64_t head, std::int64_t first,
                              std::size_t count) const {
    std::vector<double> all(count, 1.0);
    if (!mask) return all;
    mask->for_each(s, t, head, first, first + static_cast<std::int64_t>(count),
                   [&](std::int64_t j, double factor) { all[static_cast<std::size_t>(j - first)] = factor; });
    return all;
  }
};

void reference_forward(Context& context, const Inputs& inputs, const Outputs& outputs, const Options& options) {
  if (context.planning()) return;
  const Call call(inputs, options);
  const Heads o(outputs.o);
  parallel_for(context, sequences_of(inputs.q, inputs.cu_seqlens) * call.heads, [&](std::int64_t task) {
    const std::int64_t n = task / call.heads, head = task % call.heads;
    const Sequence s = sequence_at(inputs, n);
    const Sight seen = call.sight(s, n, head / call.group);
    std::vector<double> scores;
    for (std::int64_t t = 0; t < s.length; ++t) {
      std::int64_t first = 0;
      const double lse = call.scores(s, t, Call::row(call.q, s, t, head, call.key_dim), seen, first, scores);
      const std::vector<double> factors = call.factors(s, t, head, first, scores.size());
      std::vector<double> sums(static_cast<std::size_t>(call.value_dim));
      for (std::size_t j = 0; j < scores.size(); ++j) {
        const double p = factors[j] * std::exp(scores[j] - lse);
        const double* value = seen.value(first + static_cast<std::int64_t>(j));
        for (std::size_t c = 0; c < sums.size(); ++c) sums[c] += p * value[c];
      }
      for (std::int64_t c = 0; c < call.value_dim; ++c) {
        o.set(s.batch, s.begin + t, head, c, sums[static_cast<std::size_t>(c)]);
      }
      if (outputs.lse) {
        Elements(outputs.lse).set(s.batch * inputs.q.size(1) + s.begin + t, head, lse);
      }
    }
  });
}

void reference_backward(Context& context, const Inputs& inputs, const Outputs&, const TensorView& d_o,
                        const InputGradients& gradients, const Options& options) {
  if (context.planning()) return;
  const Call call(inputs, options);
  const Heads gradient(d_o), dq(gradients.dq), dk(gradients.dk), dv(gradients.dv);
  const std::int64_t groups = inputs.k.size(2);
  parallel_for(context, sequences_of(inputs.q, inputs.cu_seqlens) * groups, [&](std::int64_t task) {
    const std::int64_t n = task / groups, g = task % groups;
    const Sequence s = sequence_at(inputs, n);
    const Sight seen = call.sight(s, n, g);
    std::vector<double> sum_k(static_cast<std::size_t>(s.length * call.key_dim));
    std::vector<double> sum_v(static_cast<std::size_t>(s.length * call.value_dim));
    std::vector<double> scores;
    for (std::int64_t head = g * call.group; head < (g + 1) * call.group; ++head) {
      for (std::int64_t t = 0; t < s.length; ++t) {
        std::int64_t first = 0;
        const std::vector<double> query = Call::row(call.q, s, t, head, call.key_dim);
        const std::vector<double> d_out = Call::row(gradient, s, t, head, call.value_dim);
        const double lse = call.scores(s, t, query, seen, first, scores);
        // dp_ij = f_ij do_i . v_j; ds_ij = p_ij (dp_ij - sum over j of p_ij dp_ij), f dropout's factors
        const std::vector<double> factors = call.factors(s, t, head, first, scores.size());
        std::vector<double> dp(scores.size());
        double mean = 0.0;
        for (std::size_t j = 0; j < scores.size(); ++j) {
          dp[j] = factors[j] * dot(d_out.data(), seen.value(first + static_cast<std::int64_t>(j)), call.value_dim);
          mean += std::exp(scores[j] - lse) * dp[j];
        }
        std::vector<double> row(static_cast<std::size_t>(call.key_dim));
        for (std::size_t j = 0; j < scores.size(); ++j) {
          const std::int64_t key = first + static_cast<std::int64_t>(j);
          const double p = std::exp(scores[j] - lse);
          const double ds = call.scale * p * (dp[j] - mean);
          for (std::size_t c = 0; c < row.size(); ++c) row[c] += ds * seen.key(key)[c];
          if (key < s.position) continue;
          double* own_k = sum_k.data() + (key - s.position) * call.key_dim;
          double* own_v = sum_v.data() + (key - s.position) * call.value_dim;
          for (std::size_t c = 0; c < query.size(); ++c) own_k[c] += ds * query[c];
          for (std::size_t c = 0; c < d_out.size(); ++c) own_v[c] += factors[j] * p * d_out[c];
        }
        for (std::int64_t c = 0; c < call.key_dim; ++c) {
          dq.set(s.batch, s.begin + t, head, c, row[static_cast<std::size_t>(c)]);
        }
      }
    }
    for (std::int64_t t = 0; t < s.length; ++t) {
      for (std::int64_t c = 0; c < call.key_dim; ++c) {
        dk.set(s.batch, s.begin + t, g, c, sum_k[static_cast<std::size_t>(t * call.key_dim + c)]);
      }
      for (std::int64_t c = 0; c < call.value_dim; ++c) {
        dv.set(s.batch, s.begin + t, g, c, sum_v[static_cast<std::size_t>(t * call.value_dim + c)]);
      }
    }
  });
}

void append_one(const Context& context, const TensorView& positions, const TensorView& cu_seqlens,
                const Appended& tensors) {
  // Not a structured binding: clang 14 does not let lambdas have one.
  const auto &x = tensors.x, &before = tensors.before, &cache = tensors.cache;
  const Heads from(x), to(cache), old(before ? before : cache);
  const bool copies = before && before.data != cache.data;
  const std::int64_t rows = cache.size(1), heads = x.size(2), channels = x.size(3);
  parallel_for(context, sequences_of(x, cu_seqlens), [&](std::int64_t n) {
    const Sequence s = sequence_at(x, positions, cu_seqlens, n);
    for (std::int64_t row = 0; row < rows; ++row) {
      // The newest token of this call that has this row.
      const std::int64_t end = s.position + s.length;
      const std::int64_t token = end - 1 - ((end - 1 - row) % rows + rows) % rows;
      const bool own = s.length > 0 && token >= s.position;
      if (!own && !copies) continue;
      for (std::int64_t head = 0; head < heads; ++head) {
        for (std::int64_t c = 0; c < channels; ++c) {
          to.set(n, row, head, c, own ? from(s.batch, s.begin + token - s.position, head, c) : old(n, row, head, c));
        }
      }
    }
  });
}

void reference_append(Context& context, std::span<const Appended> tensors, const TensorView& positions,
                      const TensorView& cu_seqlens) {
  if (context.planning()) return;
  for (const Appended& one : tensors) append_one(context, positions, cu_seqlens, one);
}

void reference_step(Context& context, const TensorView& q, const Token&, const TensorView& k_cache,
                    const TensorView& v_cache, const TensorView& positions, const TensorView& o,
                    const Options& options) {
  if (context.planning()) return;
  const Elements queries(q), outputs(o);
  const Heads k(k_cache), v(v_cache);
  const std::int64_t heads = q.size(1), group = heads / k_cache.size(2), rows = k_cache.size(1);
  parallel_for(context, q.size(0) * heads, [&](std::int64_t task) {
    const std::int64_t n = task / heads, head = task % heads;
    const std::int64_t i = positions.as<std::int32_t>()[n];
    const std::int64_t first = first_key(i, i + 1, rows, options.window);
    std::vector<double> scores;
    double largest = -std::numeric_limits<double>::infinity();
    for (std::int64_t j = first; j <= i; ++j) {
      double score = 0.0;
      for (std::int64_t c = 0; c < q.size(2); ++c) score += queries(task, c) * k(n, j % rows, head / group, c);
      scores.push_back(options.scale * score);
      largest = std::max(largest, scores.back());
    }
    double sum = 0.0;
    for (double& score : scores) sum += score = std::exp(score - largest);
    for (std::int64_t c = 0; c < o.size(2); ++c) {
      double value = 0.0;
      for (std::int64_t j = first; j <= i; ++j) {
        value += scores[static_cast<std::size_t>(j - first)] / sum * v(n, j % rows, head / group, c);
      }
      outputs.set(task, c, value);
    }
  });
}

}  // namespace

const Implementation kReference{
    "reference",       Device::Kind::cpu,  [](const Problem&, const Architecture&) { return Support::yes(); },
    reference_forward, reference_backward, reference_append,
    reference_step};

}  // namespace flashgla::ops::softmax_attention
