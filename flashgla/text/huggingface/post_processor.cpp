#include "flashgla/text/huggingface/post_processor.h"

#include <nlohmann/json.hpp>

namespace flashgla::text::huggingface {
namespace {

std::int32_t id_of(const Part& part, const nlohmann::json& id) {
  if (!id.is_number_integer() || id.get<std::int64_t>() < 0 || id.get<std::int64_t>() > (1 << 30)) {
    part.refuse("an id is not a number");
  }
  return id.get<std::int32_t>();
}

void read_template(const Part& part, Frame& frame) {
  bool after = false;
  for (const Part& piece : part.elements("single")) {
    if (piece.has("Sequence")) {
      if (after || piece.at("Sequence").text("id") != "A") piece.refuse("expected one sequence, A");
      after = true;
      continue;
    }
    const std::string name = piece.at("SpecialToken").text("id");
    const Part ids = part.at("special_tokens").at(name.c_str()).at("ids");
    if (!ids.is_array()) ids.refuse("expected a list");
    for (const nlohmann::json& id : ids.json()) (after ? frame.after : frame.before).push_back(id_of(ids, id));
  }
  if (!after) part.refuse("the template has no sequence A");
}

}  // namespace

void read_post_processor(const Part& part, Frame& frame) {
  const std::string type = part.type();
  if (type == "Sequence") {
    for (const Part& member : part.elements("processors")) read_post_processor(member, frame);
  } else if (type == "TemplateProcessing") {
    read_template(part, frame);
    frame.given = true;
  } else if (type == "BertProcessing" || type == "RobertaProcessing") {
    for (const char* key : {"cls", "sep"}) {
      const Part token = part.at(key);
      if (!token.is_array() || token.json().size() != 2) token.refuse("expected a token and its id");
      (key[0] == 'c' ? frame.before : frame.after).push_back(id_of(token, token.json()[1]));
    }
    frame.given = true;
  } else if (type != "ByteLevel") {  // which only trims offsets
    part.refuse("the post-processor " + type + " is not supported");
  }
}

}  // namespace flashgla::text::huggingface
