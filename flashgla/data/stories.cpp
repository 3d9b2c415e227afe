#include "flashgla/data/stories.h"

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"

namespace flashgla::data {
namespace {

std::vector<std::string> compounds(const std::vector<std::string>& beginnings, const std::vector<std::string>& ends,
                                   const std::string& more_forms = "") {
  std::vector<std::string> words;
  for (const std::string& beginning : beginnings) {
    for (const std::string& end : ends) words.push_back(beginning + end + more_forms);
  }
  return words;
}

void add_sets(Grammar& grammar) {
  // So many names that they must be copied from where they were told, not guessed.
  const std::vector<std::string> syllables = {"Ba", "Be", "Da", "Do", "Fa", "Fi", "Ka", "Ki", "La", "Li", "Ma",
                                              "Mo", "Na", "Ne", "Ra", "Ro", "Sa", "Se", "Ta", "To", "Va", "Vi"};
  std::vector<std::string> names =
      compounds(syllables, {"bina", "lia", "mira", "nessa", "rika", "tula"}, "|she|her|her|hers");
  const std::vector<std::string> more =
      compounds(syllables, {"bor", "dric", "lan", "mund", "ros", "vik"}, "|he|him|his|his");
  names.insert(names.end(), more.begin(), more.end());
  grammar.add_set("name", "name|they|them|their|theirs", names);
  grammar.add_set("town", "town",
                  compounds({"Alder", "Brack", "Cold", "Dun", "Elm", "Fox", "Grey", "Harrow", "Mill", "North"},
                            {"bridge", "ford", "ham", "mere", "moor", "stead", "wick", "wood"}));
  grammar.add_set(
      "pet", "pet",
      {"cat", "dog", "goat", "crow", "fox", "hare", "mule", "pony", "toad", "wolfhound", "magpie", "hedgehog"});
  grammar.add_set(
      "petname", "petname",
      {"Button", "Cinder", "Duke", "Fidget", "Juniper", "Nettle", "Pepper", "Sorrel", "Thimble", "Whistle"});
  grammar.add_set("color", "color",
                  {"red", "blue", "green", "golden", "silver", "black", "white", "yellow", "copper", "brown"});
  grammar.add_set("thing", "thing",
                  {"lamp", "kettle", "drum", "kite", "ring", "bell", "map", "flute", "mirror", "hammer", "basket",
                   "blanket", "compass", "locket", "violin", "top hat"});
  grammar.add_set("giver", "giver|the",
                  {"a passing sailor|the sailor", "a retired soldier|the soldier", "a kind miller|the miller",
                   "a lost pilgrim|the pilgrim", "a blind fiddler|the fiddler", "a merry tinker|the tinker",
                   "a quiet beekeeper|the beekeeper", "a travelling weaver|the weaver"});
  grammar.add_set("spot", "spot",
                  {"under the old bridge", "behind the mill", "beside the well", "on the windowsill",
                   "in the hollow oak", "below the stone stairs", "near the beehives", "inside the boathouse",
                   "at the foot of the tower", "between the two pines", "among the reeds", "by the orchard wall"});
  grammar.add_set("goods", "goods",
                  {"apples", "buttons", "marbles", "walnuts", "shells", "candles", "feathers", "pebbles"});
  grammar.add_set("number", "number|less|more",
                  {"three|two|four", "four|three|five", "five|four|six", "six|five|seven", "seven|six|eight",
                   "eight|seven|nine", "nine|eight|ten"});
  grammar.add_set("food", "food",
                  {"bread and butter", "plum cake", "onion soup", "honey biscuits", "goat cheese", "roasted chestnuts",
                   "porridge", "mushroom pie"});
  grammar.add_set("craft", "craft|tool",
                  {"baker|dough", "carpenter|planks", "potter|clay", "smith|iron", "tailor|thread", "gardener|roses",
                   "fisher|nets", "shepherd|lambs"});
}

// clang-format off
void add_rules(Grammar& grammar) {
  grammar.add_rule("story", {{1,
      "<opening>[hero=name], a {young|clever|stubborn|cheerful|shy|patient|gloomy|tall|proud|hungry|lucky|forgetful} "
      "[craft=craft] of [town=town]. <home> <treasure> <friend> <loss><event>"}});
  grammar.add_rule("opening", {
      {5, "Once upon a time there lived "},
      {3, "Long ago, when the {woods|roads|rivers|winters|nights} were {wilder|longer|darker|colder}, there lived "},
      {1, "They still tell the story of "},
      {1, "This is the story of "}});
  grammar.add_rule("home", {
      {3, "Home was a {small|crooked|sunny|draughty|narrow|leaning|yellow|nameless} house, shared with a [pet=pet] called "
          "[petname=petname]."},
      {2, "With a [pet=pet] named [petname=petname], [hero.they] lived {above the bakery|next to the church|"
          "at the edge of the forest|by the harbour|over the stables|behind the market|on the hill}."}});
  grammar.add_rule("treasure", {{1,
      "Of all [hero.their] things [hero.they] {loved|cherished|guarded|polished|praised} most a [color=color] [thing=thing] "
      "that [giver=giver] had given [hero.them] {one rainy autumn|at the winter fair|in return for a song|"
      "on a summer night|for luck|at a wedding|without a word}."}});
  grammar.add_rule("friend", {
      {3, "A {good|true|dear|faithful|noisy|rich|sleepy|curious} friend of [hero.theirs] was [friend=name!hero], "
          "{who lived across the square|who knew every bird|who was afraid of the dark|"
          "who could not keep a secret|who laughed at everything|who owned two boats|who sang off key}."},
      {2, "Every {week|Sunday|evening|month} [hero.they] went to see [friend=name!hero], "
          "{who told the best riddles|who was often ill|who kept bees|who wrote letters to the king|who built clocks}."}});
  grammar.add_rule("loss", {
      {3, "One {warm|cold|misty|windy|bright|dull|quiet|stormy} {morning|afternoon|evening|night}, "
          "{on the way to market|tired from work|in a great hurry|singing to the birds|chasing a goose|"
          "looking for mushrooms|with a heavy cold|lost in thought}, [hero.name] left the [thing] [spot=spot]."},
      {1, "Because {thieves|soldiers|wolves|strangers} were {about|in town|on the road}, [hero.name] hid the [thing] "
          "[spot=spot]."}});

  // What happens in between, in any number; then the end.
  grammar.add_rule("event", {
      {3, " On market day [hero.name] bought [number=number] [goods=goods] and gave one to [friend.name], so that "
          "[number.less] [goods] were left.<event>"},
      {2, " Once a {merchant|child|monk|farmer|thief|dancer} who had [number=number] [goods=goods] {found|was given|won|stole} "
          "one more and went home with [number.more] [goods].<event>"},
      {3, " That night {it snowed|the wind howled|it rained|there was thunder|the moon was full|owls called}, and "
          "[petname] the [pet] {hid under the bed|would not come in|slept by the stove|sat at the window|"
          "dreamed of mice|ate the candles}.<event>"},
      {2, " In the evening [friend.name] came by with [food=food], and after the [food] {they played cards|"
          "they sang old songs|they told ghost stories|they fell asleep|they quarrelled|they danced}.<event>"},
      {2, " \"Who gave you the [color] [thing]?\" asked {the mayor|a neighbour|the priest|a boy|the old widow|the judge}. "
          "\"It was [giver.the],\" {said|answered|replied} [hero.name].<event>"},
      {2, " Not {long|a week|a month|an hour} after, [hero.name] {fetched|took} the [thing] and put it "
          "[spot=spot!spot] instead.<event>"},
      {2, " Meanwhile [hero.name] worked hard, for a [craft] must see to the [craft.tool] in "
          "{spring|summer|autumn|winter}.<event>"},
      {2, " Then a stranger asked the way to [other=town!town]. \"You are in [town],\" {said|answered|explained} "
          "[hero.name], \"and [other] lies {beyond the hills|across the river|a day to the north|past the marsh}.\"<event>"},
      {3, " In a shop window stood a [colora=color] [thinga=thing!thing], a [colorb=color] [thingb=thing!thing!thinga] and "
          "a [colorc=color] [thingc=thing!thing!thinga!thingb]; [hero.they] {wanted|bought|sketched|sold} the "
          "{first|last}.<event>"},
      {3, " A letter came from [writer=name!hero!friend] of [other=town!town]: \"Send me [number=number] [goods=goods].\" "
          "So [hero.name] sent [number.more] [goods] to [other], and [writer.name] was {glad|angry|puzzled|rich}.<event>"},
      {3, " For supper there was [food=food], then [foodb=food!food], and [petname] got the [food].<event>"},
      {6, "\n<ending>\n"}});

  grammar.add_rule("ending", {{1,
      "At last [friend.name] asked, \"Where is your [color] [thing]?\" "
      "{And|Blushing,|With a sigh|Quietly|Yawning,|After a while|Proudly} [hero.name] said, \"I left it [spot].\" "
      "So [hero.name] and [friend.name] went to look, and there it was, [spot], {wet with dew|covered in leaves|"
      "as good as new|shining in the sun|with a mouse inside|half buried|cold as ice}. <moral>"}});
  grammar.add_rule("moral", {
      {3, "Even [petname] the [pet] was glad, and so was all of [town]."},
      {2, "In the end [hero.they] gave it to [friend.name], who keeps it to this day."},
      {2, "From then on [hero.name] never let the [thing] out of [hero.their] sight."},
      {2, "Whoever passes through [town] may still hear of [hero.name], [friend.name] and the [color] [thing]."},
      {1, "When [giver.the] heard of it, there was {dancing|a feast|laughter|music} in [town] for "
          "[number=number] days."}});
}
// clang-format on

}  // namespace

const Grammar& story_grammar() {
  static const Grammar grammar = [] {
    Grammar made;
    add_sets(made);
    add_rules(made);
    made.finish("story");
    return made;
  }();
  return grammar;
}

StoriesReport write_stories(const StoriesOptions& options) {
  if (!options.out.ends_with(".jsonl"))
    throw Error("stories", "out", "is '" + options.out + "'", "a file that ends in .jsonl");
  if (!(options.megabytes > 0.0 && options.megabytes <= 1e6)) {
    throw Error("stories", "megabytes", "is " + nlohmann::json(options.megabytes).dump(), "above 0, at most 1000000");
  }
  const Grammar& grammar = story_grammar();
  const auto total = static_cast<std::int64_t>(std::ceil(options.megabytes * 1e6));
  StoriesReport report;
  report.entropy_bits_per_byte = grammar.entropy_bits_per_byte();
  make_folder(std::filesystem::path(options.out).parent_path().string());
  AtomicFile file(options.out);
  std::string block;
  double bits = 0.0, squares = 0.0;
  while (report.text_bytes < total) {
    const auto story = static_cast<std::uint64_t>(report.documents++);
    const Grammar::Told told = grammar.tell(options.seed, story);
    report.text_bytes += static_cast<std::int64_t>(told.text.size());
    bits += told.bits;
    const double deviation = told.bits - report.entropy_bits_per_byte * static_cast<double>(told.text.size());
    squares += deviation * deviation;
    block += nlohmann::ordered_json{{"text", told.text}, {"bits", told.bits}}.dump() + "\n";
    if (block.size() >= (1u << 20) || report.text_bytes >= total) {
      file.write(block);
      block.clear();
      if (options.progress) options.progress(std::min(report.text_bytes, total), total);
    }
  }
  const auto bytes = static_cast<double>(report.text_bytes);
  report.realised_bits_per_byte = bits / bytes;
  report.standard_error = std::sqrt(squares) / bytes;
  report.figures_file = std::filesystem::path(options.out).replace_extension(".json").string();

  const nlohmann::ordered_json figures = {{"seed", options.seed},
                                          {"documents", report.documents},
                                          {"text_bytes", report.text_bytes},
                                          {"entropy_bits_per_byte", report.entropy_bits_per_byte},
                                          {"realised_bits_per_byte", report.realised_bits_per_byte},
                                          {"standard_error", report.standard_error},
                                          {"expected_bits_per_story", grammar.expected_bits()},
                                          {"expected_bytes_per_story", grammar.expected_bytes()}};
  file.finish();
  write_file(report.figures_file, figures.dump(2) + "\n");
  return report;
}

}  // namespace flashgla::data
