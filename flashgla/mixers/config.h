// What configures a mixer: the fields that its layer shares with the model around it, and its own, one struct a mixer.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "flashgla/base/error.h"

namespace flashgla::mixers {

class Mixer;

// What every layer reads of its model's configuration.
struct Common {
  std::int64_t hidden_size = 2048;
  std::int64_t num_hidden_layers = 24;
  double norm_eps = 1e-6;
  double initializer_range = 0.02;
};

// Tokens that a sequence can have, and of what: "positions that ... (field)". No end by default.
struct MostTokens {
  std::int64_t count = std::numeric_limits<std::int64_t>::max();
  const char* what = "";
};

// One field of a configuration: its key in config.json and where its value lies.
struct Field {
  using Value = std::variant<bool*, std::int64_t*, double*, std::string*, std::optional<std::int64_t>*,
                             std::optional<double>*, std::optional<std::string>*>;
  const char* name;
  Value value;
};

// A mixer's own configuration. A new one derives from ConfigOf<itself>.
class Config {
 public:
  virtual ~Config() = default;
  virtual std::unique_ptr<Config> clone() const = 0;

  // All fields, in the order of config.json: reading, writing, printing and the fuzzed tests follow from it.
  virtual std::vector<Field> fields() = 0;

  // Gives optional fields the value that they stand for when absent, where libraries want one; before writing.
  virtual void settle(const Common&) {}

  // Throws Error naming the field when the mixer cannot do what is asked.
  virtual void validate(const Common& common) const = 0;

  virtual MostTokens most_tokens() const { return {}; }

  // The mixer of one layer; its parameters are named "model.layers.<layer>.attn.<...>". The config must be valid.
  virtual std::unique_ptr<Mixer> create(const Common& common, std::int64_t layer) const = 0;

  // A mixer that brings what stands in the MLP's place behind it (RWKV's channel mix): its width where the model's
  // configuration says none, and the part itself, with parameters named "model.layers.<layer>.mlp.<...>". 0: the MLP is
  // the model's.
  virtual std::int64_t own_mlp_width(const Common&) const { return 0; }
  virtual std::unique_ptr<Mixer> create_mlp(const Common& common, std::int64_t layer, std::int64_t width) const;
};

template <class Derived>
class ConfigOf : public Config {
 public:
  std::unique_ptr<Config> clone() const override {
    return std::make_unique<Derived>(static_cast<const Derived&>(*this));
  }
};

// A Config as a value: copied with whoever holds it.
class AnyConfig {
 public:
  AnyConfig(std::unique_ptr<Config> config) : config_(std::move(config)) {}  // never null
  AnyConfig(const AnyConfig& other) : config_(other.config_->clone()) {}
  AnyConfig(AnyConfig&&) = default;
  AnyConfig& operator=(AnyConfig other) {
    config_ = std::move(other.config_);
    return *this;
  }
  Config* operator->() const { return config_.get(); }

 private:
  std::unique_ptr<Config> config_;
};

// Throws Error("config: <field> is <actual>; expected <expected>") unless ok.
inline void require(bool ok, const char* field, const std::string& actual, const std::string& expected) {
  if (!ok) throw Error("config", field, "is " + actual, expected);
}
// A size that must be 1 to `largest`.
inline void require_size(const char* field, std::int64_t value, std::int64_t largest) {
  require(value > 0 && value <= largest, field, std::to_string(value), "1 to " + std::to_string(largest));
}
// Heads of keys and values, absent: as many as of queries.
inline void require_kv_heads(const std::optional<std::int64_t>& num_kv_heads, std::int64_t num_heads) {
  if (!num_kv_heads) return;
  require_size("num_kv_heads", *num_kv_heads, num_heads);
  require(num_heads % *num_kv_heads == 0, "num_kv_heads", std::to_string(*num_kv_heads),
          "a divisor of num_heads " + std::to_string(num_heads));
}
// Tokens that a short convolution reads.
inline void require_width(const char* field, std::int64_t width) {
  require(width >= 2 && width <= 4, field, std::to_string(width), "2, 3 or 4");
}
inline std::string layer_prefix(std::int64_t layer) { return "model.layers." + std::to_string(layer); }

}  // namespace flashgla::mixers
