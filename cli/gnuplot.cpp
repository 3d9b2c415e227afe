#include "cli/gnuplot.h"

#include <cstdio>
#include <filesystem>
#include <system_error>

#include "flashgla/base/error.h"

namespace flashgla::cli {

std::string gnuplot_string(const std::string& text) {
  std::string result = "'";
  for (char c : text) result += c == '\'' ? std::string("''") : std::string(1, c);
  return result + "'";
}

void run_gnuplot(const std::string& script) {
  FILE* pipe = ::popen("gnuplot 2>/dev/null", "w");
  if (pipe == nullptr) throw Error("plot: gnuplot cannot be started");
  const bool written = std::fwrite(script.data(), 1, script.size(), pipe) == script.size();
  const int status = ::pclose(pipe);
  if (!written || status != 0) {
    throw Error("plot: gnuplot failed; is it installed (Debian: gnuplot-nox) and the output writable?");
  }
}

std::string gnuplot_png(const std::string& file) {
  return "set terminal pngcairo noenhanced size 1100,700 font 'Sans,12'\nset output " + gnuplot_string(file) +
         "\nset grid lc rgb '#dddddd'\n";
}

void draw_picture(const std::string& out, const std::function<std::string(const std::string&)>& script_into) {
  const std::filesystem::path path(out);
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path());
  const std::string temporary = out + ".tmp";
  try {
    run_gnuplot(script_into(temporary));
    std::filesystem::rename(temporary, path);
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw;
  }
}

}  // namespace flashgla::cli
