// Commands that the user is told to go on with.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace flashgla::cli {

// The program as it was called, "flashgla" or a path to it; until main says it "flashgla".
void set_program(std::string_view name);

// The program and these words as a shell takes them: quoted where it would take one apart.
std::string command(std::initializer_list<std::string_view> words);

}  // namespace flashgla::cli
