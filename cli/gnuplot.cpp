#include "cli/gnuplot.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "flashgla/base/error.h"
#include "flashgla/base/file.h"

namespace flashgla::cli {

namespace {

// A script that draws into a file.
void run_gnuplot(const std::string& script) {
  // A shell that does not find it would end this program, too, by a broken pipe.
  if (!has_gnuplot()) throw Error("plot: there is no gnuplot on PATH; install it (Debian: gnuplot-nox)");
  FILE* pipe = ::popen("gnuplot 2>/dev/null", "w");
  if (pipe == nullptr) throw Error("plot: gnuplot cannot be started");
  const bool written = std::fwrite(script.data(), 1, script.size(), pipe) == script.size();
  const int status = ::pclose(pipe);
  if (!written || status != 0) {
    throw Error("plot: gnuplot failed; is the folder for temporary files (TMPDIR or /tmp) full?");
  }
}

}  // namespace

std::string gnuplot_string(const std::string& text) {
  std::string result = "'";
  for (char c : text) result += c == '\'' ? std::string("''") : std::string(1, c);
  return result + "'";
}

bool has_gnuplot() {
  const char* path = std::getenv("PATH");
  if (path == nullptr) return false;
  const std::string folders = path;
  for (std::size_t begin = 0; begin <= folders.size();) {
    const std::size_t end = std::min(folders.find(':', begin), folders.size());
    if (access((std::filesystem::path(folders.substr(begin, end - begin)) / "gnuplot").c_str(), X_OK) == 0) return true;
    begin = end + 1;
  }
  return false;
}

std::string gnuplot_png(const std::string& file) {
  return "set terminal pngcairo noenhanced size 1100,700 font 'Sans,12'\nset output " + gnuplot_string(file) +
         "\nset grid lc rgb '#dddddd'\n";
}

void require_drawable(const std::string& out) {
  if (!has_gnuplot()) throw Error("plot: there is no gnuplot on PATH; install it (Debian: gnuplot-nox)");
  make_folder(std::filesystem::path(out).parent_path().string());
  require_writable(out);
}

std::string drawn(const std::function<std::string(const std::string&)>& script_into) {
  std::error_code failure;
  std::string temporary = (std::filesystem::temp_directory_path(failure) / "flashgla-XXXXXX").string();
  if (failure) throw Error("plot: there is no folder for temporary files: TMPDIR or /tmp: " + failure.message());
  const int descriptor = ::mkstemp(temporary.data());
  if (descriptor < 0) throw Error("plot: no temporary file can be made in " + temporary);
  ::close(descriptor);
  try {
    run_gnuplot(script_into(temporary));
    std::string picture = read_file(temporary);
    std::filesystem::remove(temporary);
    return picture;
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw;
  }
}

void draw_picture(const std::string& out, const std::function<std::string(const std::string&)>& script_into) {
  require_drawable(out);
  write_file(out, drawn(script_into));
}

}  // namespace flashgla::cli
