#include "flashgla/data/grammar.h"

#include <algorithm>
#include <cmath>

#include "flashgla/base/error.h"
#include "flashgla/base/random.h"

namespace flashgla::data {
namespace {

std::vector<std::string> split_text(std::string_view text, char at) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == at) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

}  // namespace

void Grammar::add_set(const std::string& name, const std::string& forms, const std::vector<std::string>& values) {
  Set set{name, split_text(forms, '|'), {}};
  if (values.empty()) throw Error("grammar: set " + name + " is empty");
  for (const std::string& value : values) {
    set.values.push_back(split_text(value, '|'));
    if (set.values.back().size() != set.forms.size()) {
      throw Error("grammar: set " + name + ": \"" + value + "\" does not have the forms " + forms);
    }
  }
  for (const auto& a : set.values) {
    for (const auto& b : set.values) {
      if (&a != &b && b[0].starts_with(a[0])) {
        throw Error("grammar: set " + name + ": \"" + a[0] + "\" begins \"" + b[0] + "\"");
      }
    }
  }
  if (!set_names_.emplace(name, static_cast<int>(sets_.size())).second) throw Error("grammar: two sets " + name);
  sets_.push_back(std::move(set));
}

int Grammar::rule_index(const std::string& name) {
  const auto [place, is_new] = rule_names_.emplace(name, static_cast<int>(rules_.size()));
  if (is_new) rules_.push_back({name, {}, 0});
  return place->second;
}

int Grammar::slot_index(const std::string& name) {
  const auto [place, is_new] = slot_names_.emplace(name, static_cast<int>(slot_sets_.size()));
  if (is_new) slot_sets_.push_back(-1);
  return place->second;
}

void Grammar::add_rule(const std::string& name, const std::vector<Choice>& alternatives) {
  const int index = rule_index(name);
  if (!rules_[index].alternatives.empty()) throw Error("grammar: two rules " + name);
  std::vector<Alternative> parsed;
  std::uint64_t total = 0;
  for (const Choice& choice : alternatives) {
    if (choice.weight == 0) throw Error("grammar: rule " + name + " has an alternative of weight 0");
    parsed.push_back({choice.weight, parse(name, choice.text)});
    total += choice.weight;
  }
  rules_[index].alternatives = std::move(parsed);  // parse() may have moved the rules
  rules_[index].total = total;
}

std::vector<Grammar::Item> Grammar::parse(const std::string& rule, std::string_view text) {
  std::vector<Item> items;
  const auto fail = [&](const std::string& what) {
    throw Error("grammar: rule " + rule + ": " + what + " in \"" + std::string(text) + "\"");
  };
  for (std::size_t at = 0; at < text.size();) {
    const char c = text[at];
    if (c == '<' || c == '[') {
      const std::size_t end = text.find(c == '<' ? '>' : ']', at);
      if (end == std::string_view::npos) fail("an open bracket");
      const std::string_view inside = text.substr(at + 1, end - at - 1);
      if (c == '<') {
        items.push_back({Item::Kind::rule});
        items.back().rule = rule_index(std::string(inside));
      } else {
        items.push_back(parse_slot(rule, inside));
      }
      at = end + 1;
    } else if (c == '{') {
      // Up to the matching brace; alternatives are separated by '|' at this depth.
      std::vector<Choice> choices = {{1, ""}};
      int depth = 1;
      std::size_t end = at + 1;
      for (; end < text.size(); ++end) {
        if (text[end] == '{') ++depth;
        if (text[end] == '}' && --depth == 0) break;
        if (text[end] == '|' && depth == 1) {
          choices.push_back({1, ""});
        } else {
          choices.back().text += text[end];
        }
      }
      if (end == text.size()) fail("an open brace");
      const std::string name = rule + "/" + std::to_string(rules_.size());
      add_rule(name, choices);
      items.push_back({Item::Kind::rule});
      items.back().rule = rule_index(name);
      at = end + 1;
    } else {
      const std::size_t end = std::min(text.size(), text.find_first_of("<[{", at));
      items.push_back({Item::Kind::literal, std::string(text.substr(at, end - at))});
      if (items.back().text.find_first_of(">]}") != std::string::npos) fail("a closing bracket");
      at = end;
    }
  }
  return items;
}

Grammar::Item Grammar::parse_slot(const std::string& rule, std::string_view text) {
  const auto fail = [&](const std::string& what) {
    throw Error("grammar: rule " + rule + ": [" + std::string(text) + "]: " + what);
  };
  const std::size_t equals = text.find('=');
  if (equals != std::string_view::npos) {
    const std::vector<std::string> names = split_text(text.substr(equals + 1), '!');
    const auto set = set_names_.find(names[0]);
    if (set == set_names_.end()) fail("no set " + names[0]);
    Item item{Item::Kind::bind};
    item.slot = slot_index(std::string(text.substr(0, equals)));
    if (slot_sets_[item.slot] >= 0 && slot_sets_[item.slot] != set->second) fail("bound to two sets");
    slot_sets_[item.slot] = set->second;
    for (std::size_t i = 1; i < names.size(); ++i) item.excluded.push_back(slot_index(names[i]));
    return item;
  }
  const std::size_t dot = text.find('.');
  Item item{Item::Kind::refer};
  item.slot = slot_index(std::string(text.substr(0, dot)));
  // The form's number is known when the slot's set is: see finish().
  if (dot != std::string_view::npos) item.text = std::string(text.substr(dot + 1));
  return item;
}

void Grammar::finish(const std::string& start) {
  start_ = static_cast<std::size_t>(rule_index(start));
  for (Rule& rule : rules_) {
    for (Alternative& alternative : rule.alternatives) {
      for (Item& item : alternative.items) {
        if (item.kind == Item::Kind::literal || item.kind == Item::Kind::rule) continue;
        const int set_index = slot_sets_[item.slot];
        if (set_index < 0) throw Error("grammar: rule " + rule.name + " uses a slot that nothing binds");
        const Set& set = sets_[set_index];
        if (item.kind == Item::Kind::bind) {
          for (const int other : item.excluded) {
            if (slot_sets_[other] != set_index)
              throw Error("grammar: rule " + rule.name + " excludes a slot of another set");
          }
          if (item.excluded.size() >= set.values.size()) throw Error("grammar: rule " + rule.name + " leaves no value");
        } else if (!item.text.empty()) {
          const auto form = std::find(set.forms.begin(), set.forms.end(), item.text);
          if (form == set.forms.end()) {
            throw Error("grammar: rule " + rule.name + ": set " + set.name + " has no form " + item.text);
          }
          item.form = static_cast<int>(form - set.forms.begin());
        }
      }
    }
    check(rule);
  }
  compute_expectations();
}

void Grammar::check(const Rule& rule) const {
  if (rule.alternatives.empty()) throw Error("grammar: rule " + rule.name + " is used but not given");
  if (rule.alternatives.size() == 1) return;
  for (const Alternative& a : rule.alternatives) {
    if (a.items.empty() || a.items[0].kind != Item::Kind::literal) {
      throw Error("grammar: an alternative of rule " + rule.name + " does not begin with literal text");
    }
    for (const Alternative& b : rule.alternatives) {
      if (&a != &b && b.items[0].text.starts_with(a.items[0].text)) {
        throw Error("grammar: rule " + rule.name + ": the beginning \"" + a.items[0].text + "\" begins \"" +
                    b.items[0].text + "\"");
      }
    }
  }
}

// Expectations of all rules solve a linear system; iterating it converges geometrically when recursion ends.
void Grammar::compute_expectations() {
  expected_.assign(rules_.size(), {});
  for (int iteration = 0; iteration < 100000; ++iteration) {
    double change = 0.0;
    for (std::size_t r = 0; r < rules_.size(); ++r) {
      Expected sum;
      for (const Alternative& alternative : rules_[r].alternatives) {
        const double p = static_cast<double>(alternative.weight) / static_cast<double>(rules_[r].total);
        Expected path = {-std::log2(p), 0.0};
        for (const Item& item : alternative.items) {
          if (item.kind == Item::Kind::literal) {
            path.bytes += static_cast<double>(item.text.size());
          } else if (item.kind == Item::Kind::rule) {
            path.bits += expected_[item.rule].bits;
            path.bytes += expected_[item.rule].bytes;
          } else {
            const Set& set = sets_[slot_sets_[item.slot]];
            double length = 0.0;
            for (const auto& value : set.values) length += static_cast<double>(value[item.form].size());
            path.bytes += length / static_cast<double>(set.values.size());
            if (item.kind == Item::Kind::bind) {
              path.bits += std::log2(static_cast<double>(set.values.size() - item.excluded.size()));
            }
          }
        }
        sum.bits += p * path.bits;
        sum.bytes += p * path.bytes;
      }
      change = std::max(change, std::abs(sum.bytes - expected_[r].bytes) + std::abs(sum.bits - expected_[r].bits));
      expected_[r] = sum;
    }
    if (change == 0.0) return;
    if (!std::isfinite(change) || change > 1e12) break;
    if (change < 1e-12 * expected_[start_].bytes) return;
  }
  throw Error("grammar: the recursion does not end with probability 1");
}

// Walks the grammar. The driver answers choose_alternative(rule) and choose_value(set, excluded) with an index, or -1
// to stop, and takes say(text), which returns false to stop.
template <class Driver>
void Grammar::run(Driver& driver) const {
  struct Frame {
    const std::vector<Item>* items;
    std::size_t next;
  };
  std::vector<int> slots(slot_sets_.size(), -1);
  std::vector<Frame> stack;
  const auto enter = [&](std::size_t rule) {
    const int choice = driver.choose_alternative(rules_[rule]);
    if (choice < 0) return false;
    stack.push_back({&rules_[rule].alternatives[static_cast<std::size_t>(choice)].items, 0});
    return true;
  };
  if (!enter(start_)) return;
  std::vector<int> excluded;
  while (!stack.empty()) {
    Frame& frame = stack.back();
    if (frame.next == frame.items->size()) {
      stack.pop_back();
      continue;
    }
    const Item& item = (*frame.items)[frame.next++];
    if (item.kind == Item::Kind::literal) {
      if (!driver.say(item.text)) return;
    } else if (item.kind == Item::Kind::rule) {
      if (frame.next == frame.items->size()) stack.pop_back();  // right recursion needs no depth
      if (!enter(static_cast<std::size_t>(item.rule))) return;
    } else {
      const Set& set = sets_[slot_sets_[item.slot]];
      if (item.kind == Item::Kind::bind) {
        excluded.clear();
        for (const int slot : item.excluded) {
          const int value = slots[slot];
          if (value < 0 || std::find(excluded.begin(), excluded.end(), value) != excluded.end()) {
            throw Error("grammar: a draw from set " + set.name + " excludes slots that are unbound or equal");
          }
          excluded.push_back(value);
        }
        slots[item.slot] = driver.choose_value(set, excluded);
        if (slots[item.slot] < 0) return;
      }
      if (slots[item.slot] < 0) throw Error("grammar: a value of set " + set.name + " is said before it is drawn");
      if (!driver.say(set.values[slots[item.slot]][item.form])) return;
    }
  }
  driver.done = true;
}

Grammar::Told Grammar::tell(std::uint64_t seed, std::uint64_t story) const {
  struct Driver {
    random::Stream stream;
    Told told;
    bool done = false;
    std::uint64_t draws = 0;

    int choose_alternative(const Rule& rule) {
      std::uint64_t draw = stream.below(draws++, rule.total);
      int choice = 0;
      while (draw >= rule.alternatives[static_cast<std::size_t>(choice)].weight) {
        draw -= rule.alternatives[static_cast<std::size_t>(choice++)].weight;
      }
      const std::uint32_t weight = rule.alternatives[static_cast<std::size_t>(choice)].weight;
      told.bits += std::log2(static_cast<double>(rule.total) / weight);
      return choice;
    }
    int choose_value(const Set& set, const std::vector<int>& excluded) {
      const std::size_t count = set.values.size() - excluded.size();
      told.bits += std::log2(static_cast<double>(count));
      auto draw = static_cast<int>(stream.below(draws++, count));
      std::vector<int> sorted = excluded;
      std::sort(sorted.begin(), sorted.end());
      for (const int value : sorted) draw += draw >= value;
      return draw;
    }
    bool say(const std::string& text) {
      told.text += text;
      return true;
    }
  };
  Driver driver{random::Stream(seed, random::Use::stories, story), {}};
  run(driver);
  return std::move(driver.told);
}

Grammar::Read Grammar::read(std::string_view text) const {
  struct Driver {
    std::string_view rest;
    Read read;
    bool done = false;

    int choose_alternative(const Rule& rule) {
      if (rule.alternatives.size() == 1) return 0;
      for (std::size_t i = 0; i < rule.alternatives.size(); ++i) {
        if (!rest.starts_with(rule.alternatives[i].items[0].text)) continue;
        read.bits += std::log2(static_cast<double>(rule.total) / rule.alternatives[i].weight);
        read.choices.push_back(static_cast<int>(i));
        return static_cast<int>(i);
      }
      return -1;
    }
    int choose_value(const Set& set, const std::vector<int>& excluded) {
      for (std::size_t i = 0; i < set.values.size(); ++i) {
        if (!rest.starts_with(set.values[i][0])) continue;
        if (std::find(excluded.begin(), excluded.end(), static_cast<int>(i)) != excluded.end()) return -1;
        read.bits += std::log2(static_cast<double>(set.values.size() - excluded.size()));
        read.choices.push_back(static_cast<int>(i));
        return static_cast<int>(i);
      }
      return -1;
    }
    bool say(const std::string& said) {
      if (!rest.starts_with(said)) return false;
      rest.remove_prefix(said.size());
      return true;
    }
  };
  Driver driver{text, {}};
  run(driver);
  driver.read.complete = driver.done && driver.rest.empty();
  driver.read.bytes = text.size() - driver.rest.size();
  return std::move(driver.read);
}

}  // namespace flashgla::data
