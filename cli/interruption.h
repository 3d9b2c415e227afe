// Ctrl-C (SIGINT), SIGTERM and SIGHUP (a terminal that was closed): the first asks the work to come to a good end, the
// second ends the program at once.
#pragma once

#include <signal.h>

namespace flashgla::cli {

// Counts signals while it lives; afterwards the handlers are those of before. One at a time.
class InterruptionScope {
 public:
  struct Options {
    const char* first = "";   // written to standard error at the first signal,
    const char* second = "";  // and at the second
    bool terminate = true;    // SIGTERM and SIGHUP count, too
    bool restart = true;      // a wait for input goes on after a signal
  };
  InterruptionScope() : InterruptionScope(Options()) {}
  explicit InterruptionScope(const Options& options);
  ~InterruptionScope();
  InterruptionScope(const InterruptionScope&) = delete;
  InterruptionScope& operator=(const InterruptionScope&) = delete;

 private:
  bool terminate_;
  struct sigaction interrupt_before_ {};
  struct sigaction terminate_before_ {};
  struct sigaction hang_up_before_ {};
};

// The exit code of a program that was ended by Ctrl-C, so that a script does not go on.
constexpr int kInterruptedCode = 130;

bool interrupted();
void forget_interruptions();

}  // namespace flashgla::cli
