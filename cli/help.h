// How help is laid out: broken to the terminal's width, and of each verb one sentence where all are listed.
#pragma once

#include <memory>

namespace CLI {
class Formatter;
}

namespace flashgla::cli {

std::shared_ptr<CLI::Formatter> help_formatter();

}  // namespace flashgla::cli
