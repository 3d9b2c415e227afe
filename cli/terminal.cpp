#include "cli/terminal.h"

#include <sys/ioctl.h>

namespace flashgla::cli {

int terminal_columns(int stream, int otherwise) {
  winsize size{};
  return ::ioctl(stream, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : otherwise;
}

}  // namespace flashgla::cli
