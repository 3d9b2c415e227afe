// The terminal that a standard stream goes to.
#pragma once

namespace flashgla::cli {

// Characters of a line; `otherwise` where the stream (STDOUT_FILENO, STDERR_FILENO) goes to no terminal.
int terminal_columns(int stream, int otherwise);

}  // namespace flashgla::cli
