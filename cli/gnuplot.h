// Pictures drawn by gnuplot, which is run as a program.
#pragma once

#include <functional>
#include <string>

namespace flashgla::cli {

// As a string of gnuplot's.
std::string gnuplot_string(const std::string& text);

bool has_gnuplot();

// The beginning of a script that draws into `file`.
std::string gnuplot_png(const std::string& file);

// Throws Error when no picture could be drawn into `out`; makes its folder. For pictures at the end of long work.
void require_drawable(const std::string& out);

// What the script draws into the file it is given, a temporary one. Throws Error naming what may be missing.
std::string drawn(const std::function<std::string(const std::string&)>& script_into);

// Writes that to `out`; makes its folder.
void draw_picture(const std::string& out, const std::function<std::string(const std::string&)>& script_into);

}  // namespace flashgla::cli
