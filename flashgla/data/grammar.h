// A probabilistic grammar with memory, of which everything is known: it tells texts, gives the exact probability of any
// text, and the exact expected information and length.
//
// A rule has weighted alternatives; a template mixes literal text with
//   <rule>            an expansion of a rule (recursion is allowed as long as it ends with probability 1)
//   {a|b|c}           one of several templates, equally likely
//   [slot=set]        draws a value of the set, uniformly, remembers it and says its first form
//   [slot=set!a!b]    the same, but not the values of the slots a and b
//   [slot] [slot.f]   says what the slot holds, in its first form or in form f
// It is refused unless a reader can always tell which way the text went from the next bytes alone: alternatives begin
// with literal text, and neither those beginnings nor the values of a set are prefixes of one another. So a text
// determines every choice, and -log2 of its probability is the sum over its choices.
//
// Expectations use that weights never depend on values: by symmetry a slot is uniform over its set wherever it is said.
// For that, slots excluded together must hold different values (checked when telling).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace flashgla::data {

class Grammar {
 public:
  // Forms are separated by '|': forms "name|they|their", values "Mira|she|her". Throws Error on values of another
  // number of forms and on a first form that is a prefix of another's.
  void add_set(const std::string& name, const std::string& forms, const std::vector<std::string>& values);

  struct Choice {
    std::uint32_t weight;
    std::string text;  // template
  };
  void add_rule(const std::string& name, const std::vector<Choice>& alternatives);

  // To be called once when all is added: resolves names, checks, and computes the expectations. Throws Error that names
  // the rule. Telling begins with rule `start`.
  void finish(const std::string& start);

  struct Told {
    std::string text;
    double bits = 0.0;  // -log2 of the text's probability
  };
  // Equal seeds give equal texts.
  Told tell(std::uint64_t seed, std::uint64_t story = 0) const;

  struct Read {
    bool complete = false;     // the text is one that the grammar tells, from beginning to end
    std::size_t bytes = 0;     // how far the text is a beginning of one
    double bits = 0.0;         // -log2 of the probability of the choices recognised
    std::vector<int> choices;  // alternatives and values, in order
  };
  Read read(std::string_view text) const;

  double expected_bits() const { return expected_[start_].bits; }
  double expected_bytes() const { return expected_[start_].bytes; }
  double entropy_bits_per_byte() const { return expected_bits() / expected_bytes(); }

 private:
  struct Item {
    enum class Kind { literal, rule, bind, refer } kind;
    std::string text;  // literal
    int rule = -1;
    int slot = -1;
    int form = 0;               // refer
    std::vector<int> excluded;  // bind: slots
  };
  struct Alternative {
    std::uint32_t weight;
    std::vector<Item> items;
  };
  struct Rule {
    std::string name;
    std::vector<Alternative> alternatives;
    std::uint64_t total = 0;
  };
  struct Set {
    std::string name;
    std::vector<std::string> forms;
    std::vector<std::vector<std::string>> values;
  };
  struct Expected {
    double bits = 0.0, bytes = 0.0;
  };

  std::vector<Item> parse(const std::string& rule, std::string_view text);
  Item parse_slot(const std::string& rule, std::string_view text);
  int rule_index(const std::string& name);
  int slot_index(const std::string& name);
  void check(const Rule& rule) const;
  void compute_expectations();
  template <class Driver>
  void run(Driver& driver) const;

  std::vector<Rule> rules_;
  std::map<std::string, int> rule_names_;
  std::vector<Set> sets_;
  std::map<std::string, int> set_names_;
  std::map<std::string, int> slot_names_;
  std::vector<int> slot_sets_;  // by slot; -1: nothing binds it
  std::vector<Expected> expected_;
  std::size_t start_ = 0;
};

}  // namespace flashgla::data
